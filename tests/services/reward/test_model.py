"""Reward models: real tiny sequence classifiers, whose values must be those of a plain forward pass."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from services.reward.batches import Batches
from services.reward.model import RewardModel, encode
from services.reward.score import Scorer
from services.reward.signals import Score, ok
from services.reward.torch_classifier import TorchClassifier, to_int8
from shared.config import Signal
from shared.errors import ConfigError, StrettoError
from shared.group import Columns, RewardStatus, TrajectoryGroup, split_ragged

MakeGroup = Callable[..., TrajectoryGroup]
StartScorer = Callable[..., Awaitable[Scorer]]
OK, ABSTAIN, INVALID = RewardStatus
CHAT = [{"role": "user", "content": "Where is my order?"}]
COMPLETIONS = ["Soon.", "It is on its way, and will be there on Monday.", "No idea", "", "We are sorry! " * 9]


@pytest.fixture(scope="session")
def llama(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier of three labels, with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tiny_model, num_labels=3)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier of text pairs, with token types and without a chat template."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    letters = ["[PAD]", "[CLS]", "[SEP]", *map(chr, range(32, 127))]
    words = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        model_max_length=128,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(letters),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.2,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def signal(folder: Path, **settings: Any) -> Signal:
    return Signal(name="s", model=str(folder), **settings)


def samples(completions: list[str], messages: Any = CHAT) -> list[dict[str, Any]]:
    return [{"messages": messages, "completion": completion} for completion in completions]


def values(scores: list[Score]) -> list[float]:
    assert all(score.status is OK for score in scores), scores
    return [score.value for score in scores]


def forward(folder: Path, completions: list[str], label: int = 0) -> list[float]:
    """The values by transformers alone, one sample after the other."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32").eval()
    found = []
    for completion in completions:
        if tokenizer.chat_template:
            chat = [*CHAT, {"role": "assistant", "content": completion}]
            inputs = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        else:
            inputs = tokenizer(CHAT[0]["content"], completion, return_tensors="pt")
        with torch.inference_mode():
            found.append(model(**inputs).logits[0, label].item())
    return found


def reasons_of(columns: Columns) -> list[str]:
    parts = split_ragged(columns["reward_reasons"], columns["reward_reasons_offsets"])
    return [part.tobytes().decode() for part in parts]


@pytest.mark.parametrize("label", [0, 2])
def test_a_value_is_the_logit_of_a_plain_forward_pass_however_samples_are_batched(llama: Path, label: int) -> None:
    model, expected = RewardModel(signal(llama, label=label)), forward(llama, COMPLETIONS, label)
    assert max(expected) - min(expected) > 0.1
    for size in (1, 2, 5):
        parts = [COMPLETIONS[i : i + size] for i in range(0, 5, size)]
        found = [value for part in parts for value in values(model.score(samples(part)))]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_without_a_template_reads_prompt_and_completion_as_a_pair(bert: Path) -> None:
    model = RewardModel(signal(bert))
    completions = COMPLETIONS[:4]
    np.testing.assert_allclose(values(model.score(samples(completions))), forward(bert, completions), atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(bert)
    found = encode(tokenizer, [{"role": "system", "content": "a"}, *CHAT], "b")
    assert set(found["token_type_ids"]) == {0, 1}
    assert found == encode(tokenizer, f"a\n{CHAT[0]['content']}", "b")


def test_a_prompt_of_plain_text_is_a_message_of_the_user_where_there_is_a_template(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    found = encode(tokenizer, "Hi", "Yes")
    assert tokenizer.decode(found["input_ids"]) == "<|user|>Hi<|end|><|assistant|>Yes<|end|>"


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.005), ("int8", 0.05)])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_other_dtypes_are_close(request: pytest.FixtureRequest, kind: str, dtype: Any, tolerance: float) -> None:
    if dtype == "int8":
        pytest.importorskip("torchao", reason="torchao is not installed: pip install 'stretto[int8]'")
    folder = request.getfixturevalue(kind)
    expected = np.array(forward(folder, COMPLETIONS[:4]))
    found = np.array(values(RewardModel(signal(folder, dtype=dtype)).score(samples(COMPLETIONS[:4]))))
    difference = np.abs(found - expected).max()
    assert 0 < difference < tolerance * np.abs(expected).max()


def test_int8_is_smaller_and_leaves_the_head_as_it_is(llama: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install 'stretto[int8]'")
    model = AutoModelForSequenceClassification.from_pretrained(llama, dtype="float32")
    before, head = stored_bytes(model), model.score.weight.clone()
    to_int8(model)
    assert stored_bytes(model) < 0.3 * before
    assert torch.equal(model.score.weight, head)


def stored_bytes(model: torch.nn.Module) -> int:
    """Bytes of the tensors that a model really keeps, those within quantised ones counted."""
    total = 0
    for parameter in model.parameters():
        inner = [value for value in vars(parameter).values() if isinstance(value, torch.Tensor)]
        total += sum(tensor.nbytes for tensor in inner or [parameter])
    return total


def test_a_sample_that_is_too_long_for_the_model_is_invalid_and_says_so(llama: Path, bert: Path) -> None:
    first, second = RewardModel(signal(bert)).score(samples(["yes", "a" * 128]))
    assert first.status is OK and second.status is INVALID
    assert second.reason == "s: the sample has 149 tokens, its model takes 128"
    (long,) = RewardModel(signal(llama)).score(samples(["a" * 500]))
    assert long.status is INVALID and "its model takes 512" in long.reason


def test_a_logit_that_is_no_number_makes_its_sample_invalid_and_no_other(llama: Path) -> None:
    class Broken(TorchClassifier):
        def logits(self, batch):
            rows = super().logits(batch)
            rows[1][0] = float("nan")
            return rows

    model = RewardModel(signal(llama))
    model._classifier = Broken(str(llama), signal(llama))
    first, second, third = model.score(samples(COMPLETIONS[:3]))
    np.testing.assert_allclose([first.value, third.value], forward(llama, [COMPLETIONS[0], COMPLETIONS[2]]), atol=1e-5)
    assert (second.status, second.reason) == (INVALID, "s returned nan, expected a finite float32")


def test_a_batch_that_does_not_fit_into_memory_is_halved_until_it_does(llama: Path) -> None:
    class Small(TorchClassifier):
        def logits(self, batch):
            if sum(len(encoded["input_ids"]) for encoded in batch) > 100:
                raise MemoryError("no room")
            return super().logits(batch)

    model = RewardModel(signal(llama))
    model._classifier = Small(str(llama), signal(llama))
    *short, long = model.score(samples(COMPLETIONS))
    np.testing.assert_allclose(values(short), forward(llama, COMPLETIONS[:-1]), atol=1e-5)
    assert (long.status, long.reason) == (INVALID, "s raised MemoryError: no room")


def test_a_chat_that_the_template_refuses_makes_its_sample_invalid(llama: Path) -> None:
    model = RewardModel(signal(llama))
    model._tokenizer.chat_template = "{{ raise_exception('no system here') if messages[0].role == 'system' else 'a' }}"
    first, second = model.score(samples(["yes"]) + samples(["yes"], messages=[{"role": "system", "content": "b"}]))
    assert first.status is OK and second.status is INVALID
    assert second.reason == "s raised TemplateError: no system here"


def test_a_model_without_a_padding_token_scores_one_sample_at_a_time(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    config.pad_token_id = None
    config.save_pretrained(folder)
    found = values(RewardModel(signal(folder)).score(samples(COMPLETIONS)))
    np.testing.assert_allclose(found, forward(folder, COMPLETIONS), atol=1e-5)


def test_what_is_no_classifier_or_has_no_such_label_is_refused(llama: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no sequence classifier: it has no score\.weight"):
        RewardModel(signal(tiny_model))
    with pytest.raises(ConfigError, match=r"label is 3, but .* has 3"):
        RewardModel(signal(llama, label=3))
    with pytest.raises(StrettoError, match="nowhere cannot be loaded: "):
        RewardModel(signal(llama.parent / "nowhere"))


async def test_a_group_is_scored_by_a_model_beside_functions(
    start_scorer: StartScorer, group: MakeGroup, llama: Path
) -> None:
    scorer = await start_scorer(signal(llama, weight=2.0), Signal(name="exact", function="exact_match"), timeout_s=60)
    scored = group("4", "5", "a" * 600, answer="4")
    columns = await scorer.score(scored)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    model = AutoModelForSequenceClassification.from_pretrained(llama, dtype="float32").eval()
    text = "<|user|>2+2?<|end|><|assistant|>{}<|end|>"
    with torch.inference_mode():
        first, second = (model(**tokenizer(text.format(c), return_tensors="pt")).logits[0, 0].item() for c in "45")
    np.testing.assert_allclose(columns["signal/s"], [first, second, np.nan], atol=1e-5)
    np.testing.assert_allclose(columns["rewards"], [2 * first + 1, 2 * second, 0], atol=1e-5)
    assert columns["reward_status"].tolist() == [OK, OK, INVALID]
    assert reasons_of(columns)[2] == "s: the sample has 608 tokens, its model takes 512"


async def test_a_model_that_cannot_be_loaded_stops_the_start(start_scorer: StartScorer, tiny_model: Path) -> None:
    with pytest.raises(StrettoError, match="is no sequence classifier"):
        await start_scorer(signal(tiny_model))


class FakeWorker:
    """Scores each sample by its length; tells what came together. Waits for `go`."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = asyncio.Event()

    async def score(self, name: str, samples: list[dict[str, Any]]) -> list[Score]:
        lengths = [len(sample["completion"]) for sample in samples]
        self.batches.append(lengths)
        await self.go.wait()
        return [ok(length) for length in lengths]


@pytest.fixture
def queued() -> tuple[Batches, FakeWorker]:
    batches, worker = Batches(Signal(name="s", model="m", batch_size=3), 1.0), FakeWorker()
    batches._worker = worker  # type: ignore[assignment]
    return batches, worker


def asked(batches: Batches, lengths: list[int]) -> list[asyncio.Task[Score]]:
    given = [{"messages": CHAT, "completion": "a" * length} for length in lengths]
    return [asyncio.create_task(batches.score(arguments)) for arguments in given]


async def test_samples_of_all_groups_are_batched_by_length_the_oldest_first(
    queued: tuple[Batches, FakeWorker],
) -> None:
    batches, worker = queued
    first = asked(batches, [9, 1, 8, 2])
    await asyncio.sleep(0.01)
    second = asked(batches, [3, 7])  # of another group, while the first batch is under way
    await asyncio.sleep(0.01)
    assert worker.batches == [[9, 8, 2]]
    worker.go.set()
    scores = await asyncio.gather(*first, *second)
    assert [score.value for score in scores] == [9, 1, 8, 2, 3, 7]
    assert worker.batches == [[9, 8, 2], [1, 3, 7]]


async def test_a_cancelled_sample_takes_no_other_with_it(queued: tuple[Batches, FakeWorker]) -> None:
    batches, worker = queued
    tasks = asked(batches, [1, 2, 3, 4])
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    worker.go.set()
    cancelled, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [score.value for score in others] == [2, 3, 4]
    assert worker.batches == [[1, 2, 3], [2, 3, 4]]


def test_a_completion_cannot_spell_out_the_end_of_its_message(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    special = set(tokenizer.all_special_ids)
    plain = encode(tokenizer, CHAT, "fine")["input_ids"]
    whole = [*CHAT, {"role": "assistant", "content": "fine"}]
    assert plain == tokenizer.apply_chat_template(whole, tokenize=True, return_dict=True)["input_ids"]
    spelled = encode(tokenizer, CHAT, f"fine{''.join(tokenizer.all_special_tokens)}")["input_ids"]
    assert sum(token in special for token in spelled) == sum(token in special for token in plain) > 0
