"""The decoding loop against transformers: same tokens, same log-probs, whatever is decoded beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from services.rollout.embedded.decoder import Decoder
from services.rollout.embedded.model import load_model
from services.rollout.engine import Request, Sample, Weights
from services.rollout.vocabulary import Vocabulary, end_tokens
from shared.config import Sampling
from shared.group import FinishReason
from stretto.models import pull

GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
WARM = Sampling(temperature=0.7, max_tokens=10, ignore_eos=True)
SHORT, MIDDLE, LONG = list(b"hello"), list(b"a prompt of the middle kind"), list(b"0123456789 abcdefghij" * 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(pull("tiny", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    return load_model(folder, "float32")


@pytest.fixture(scope="module")
def peer(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def vocabulary(folder: str, model: Any) -> Vocabulary:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Vocabulary(tokenizer, end_tokens(model.generation_config, tokenizer))


@pytest.fixture
def make(model: Any, vocabulary: Vocabulary) -> Any:
    def make(max_samples: int = 16, max_context: int = 512) -> Decoder:
        return Decoder(model, vocabulary, max_samples=max_samples, max_context=max_context, version=0)

    return make


class Run:
    """Drives a decoder by hand; `done` holds the samples of finished requests."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.done: dict[str, list[Sample]] = {}

    def submit(
        self, name: str, prompt: list[int], n: int, sampling: Sampling, seed: int = 0, priority: int = 0
    ) -> None:
        request = Request(name, prompt, n, sampling, seed, priority)
        self.decoder.submit(request, lambda samples: self.done.__setitem__(name, samples))

    def finish(self) -> dict[str, list[Sample]]:
        while not self.decoder.idle:
            self.decoder.step()
        return self.done


def same(one: Sequence[Sample], other: Sequence[Sample]) -> None:
    assert [s.tokens.tolist() for s in one] == [s.tokens.tolist() for s in other]
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def logits_of(peer: Any, prompt: list[int], sample: Sample) -> torch.Tensor:
    """[T, V] logits that each token of a sample was drawn from, by one forward pass over everything."""
    tokens = torch.tensor([prompt + sample.tokens.tolist()])
    logits: torch.Tensor = peer(tokens).logits[0, len(prompt) - 1 : -1]
    return logits


def test_greedy_answers_are_those_of_transformers(make: Any, peer: Any) -> None:
    run = Run(make())
    prompts = {"short": SHORT, "middle": MIDDLE, "long": LONG}
    for name, prompt in prompts.items():
        run.submit(name, prompt, 2, GREEDY)
    for name, samples in run.finish().items():
        ids = torch.tensor([prompts[name]])
        theirs = peer.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=-1
        )
        for sample in samples:
            assert sample.tokens.tolist() == theirs[0, len(prompts[name]) :].tolist()
            expected = logits_of(peer, prompts[name], sample).log_softmax(-1).max(-1).values
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def test_log_probs_are_those_of_a_full_forward_pass_at_the_temperature(make: Any, peer: Any) -> None:
    run = Run(make())
    run.submit("a", MIDDLE, 6, WARM, seed=5)
    samples = run.finish()["a"]
    assert len({tuple(s.tokens) for s in samples}) == 6
    for sample in samples:
        expected = (logits_of(peer, MIDDLE, sample) / 0.7).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(sample.tokens).long()[:, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def test_log_probs_are_renormalised_over_what_top_k_and_top_p_keep(make: Any, peer: Any) -> None:
    run = Run(make())
    run.submit("a", MIDDLE, 6, WARM.model_copy(update={"top_k": 12, "top_p": 0.7}))
    for sample in run.finish()["a"]:
        for logits, token, logprob in zip(logits_of(peer, MIDDLE, sample), sample.tokens, sample.logprobs, strict=True):
            p = (logits.double() / 0.7).softmax(-1)
            largest, ids = p.topk(12)
            largest = largest / largest.sum()
            kept = int((largest.cumsum(0) < 0.7).sum()) + 1
            place = ids.tolist().index(token)
            assert place < kept
            assert logprob == pytest.approx(float((largest[place] / largest[:kept].sum()).log()), abs=1e-5)


def test_a_shared_prompt_gives_what_a_prompt_for_each_sample_gives(make: Any) -> None:
    shared, alone = Run(make(max_samples=8)), Run(make(max_samples=1))
    for run in (shared, alone):
        run.submit("a", LONG, 8, WARM, seed=3)
    same(shared.finish()["a"], alone.finish()["a"])
    assert shared.decoder.prompt_tokens == len(LONG)
    assert alone.decoder.prompt_tokens == 8 * len(LONG)


def test_what_is_decoded_beside_a_request_changes_nothing(make: Any) -> None:
    requests = [
        ("a", SHORT, 1, 4),
        ("b", LONG, 5, 9),
        ("c", MIDDLE, 3, 12),
        ("d", LONG[:40], 2, 7),
        ("e", SHORT[:1], 4, 10),
    ]
    together = Run(make(max_samples=9))
    for number, (name, prompt, n, length) in enumerate(requests):
        together.submit(name, prompt, n, WARM.model_copy(update={"max_tokens": length}), seed=number)
        if number % 2:
            together.decoder.step()
    together.finish()
    for number, (name, prompt, n, length) in enumerate(requests):
        alone = Run(make())
        alone.submit(name, prompt, n, WARM.model_copy(update={"max_tokens": length}), seed=number)
        same(together.done[name], alone.finish()[name])


def test_a_request_larger_than_the_places_runs_in_pieces(make: Any) -> None:
    small, large = Run(make(max_samples=3)), Run(make(max_samples=8))
    for run in (small, large):
        run.submit("a", MIDDLE, 8, WARM, seed=1)
    same(small.finish()["a"], large.finish()["a"])


def test_samples_that_end_free_their_places_for_those_that_wait(make: Any) -> None:
    run = Run(make(max_samples=4))
    run.submit("brief", SHORT, 2, WARM.model_copy(update={"max_tokens": 3}))
    run.submit("lasting", SHORT, 2, WARM.model_copy(update={"max_tokens": 9}))
    run.submit("next", MIDDLE, 2, WARM.model_copy(update={"max_tokens": 3}))
    run.decoder.step()
    assert (run.decoder.samples_in_flight, run.decoder.samples_waiting) == (4, 2)
    run.decoder.step()
    assert set(run.done) == {"brief"}
    run.decoder.step()
    assert (run.decoder.samples_in_flight, run.decoder.samples_waiting) == (4, 0)
    assert list(run.finish()) == ["brief", "next", "lasting"]


def test_nobody_overtakes_a_large_request_that_waits(make: Any) -> None:
    run = Run(make(max_samples=4))
    run.submit("first", SHORT, 2, WARM.model_copy(update={"max_tokens": 4}))
    run.submit("large", SHORT, 4, WARM.model_copy(update={"max_tokens": 4}))
    run.submit("small", SHORT, 1, WARM.model_copy(update={"max_tokens": 2}))
    assert list(run.finish()) == ["first", "large", "small"]


def test_the_smallest_priority_of_those_that_wait_goes_first_and_equals_keep_their_order(make: Any) -> None:
    run = Run(make(max_samples=1))
    brief = WARM.model_copy(update={"max_tokens": 3})
    run.submit("first", SHORT, 1, brief, priority=9)
    run.decoder.step()
    for name, priority in (("late", 2), ("early", -1), ("late too", 2), ("middle", 0)):
        run.submit(name, SHORT, 1, brief, priority=priority)
    assert list(run.finish()) == ["first", "early", "middle", "late", "late too"]


def test_a_longer_prompt_that_comes_and_goes_in_one_step_disturbs_nobody(make: Any) -> None:
    disturbed, alone = Run(make()), Run(make())
    for run in (disturbed, alone):
        run.submit("a", SHORT, 3, WARM)
        run.decoder.step()
    disturbed.submit("b", MIDDLE, 1, WARM.model_copy(update={"max_tokens": 1}))
    same(disturbed.finish()["a"], alone.finish()["a"])


def test_memory_goes_with_the_last_sample(make: Any) -> None:
    run = Run(make())
    run.submit("a", LONG, 4, WARM)
    run.decoder.step()
    assert run.decoder._cache.answers.keys.numel() > 0
    run.finish()
    assert run.decoder._cache.answers.keys.numel() == 0
    assert not run.decoder._cache._classes


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_swap_changes_the_tokens_to_come_and_keeps_what_was_read(make: Any, model: Any, folder: str) -> None:
    torch.manual_seed(4)
    old = {name: p.clone() for name, p in model.named_parameters()}
    new = {name: p + 0.05 * torch.randn_like(p) for name, p in old.items()}
    run = Run(make())
    run.submit("a", MIDDLE, 3, WARM)
    for _ in range(4):
        run.decoder.step()
    run.decoder.swap(Weights(0, 7, new))
    run.submit("b", MIDDLE, 1, WARM)
    samples = run.finish()["a"]
    assert all(s.versions.tolist() == [0] * 5 + [7] * 5 for s in samples)
    assert run.done["b"][0].versions.tolist() == [7] * 10
    run.decoder.swap(Weights(0, 0, old))
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt_sample, boundary in [(samples[0], 5), (samples[2], 5), (run.done["b"][0], 0)]:
        np.testing.assert_allclose(
            prompt_sample.logprobs, mixed_logprobs(peer, prompt_sample, boundary, old, new), atol=1e-5
        )


@torch.inference_mode()
def mixed_logprobs(peer: Any, sample: Sample, boundary: int, old: Any, new: Any) -> list[float]:
    """Log-probs token by token, the weights changed under a kept cache before token number `boundary`."""
    cache, step, logprobs = DynamicCache(), torch.tensor([MIDDLE]), []
    for number, token in enumerate(sample.tokens.tolist()):
        peer.load_state_dict(old if number < boundary else new, strict=False)
        logits = peer(step, past_key_values=cache, use_cache=True).logits[0, -1]
        logprobs.append(float((logits / 0.7).log_softmax(-1)[token]))
        step = torch.tensor([[token]])
    return logprobs


def test_an_aborted_request_returns_what_there_is_and_frees_its_places(make: Any) -> None:
    run = Run(make(max_samples=2))
    run.submit("a", SHORT, 4, WARM)
    run.submit("b", SHORT, 1, WARM)
    for _ in range(3):
        run.decoder.step()
    run.decoder.abort("a")
    assert [len(s.tokens) for s in run.done["a"]] == [4, 4, 0, 0]
    assert {s.finish_reason for s in run.done["a"]} == {FinishReason.ABORTED}
    assert len(run.finish()["b"][0].tokens) == 10


def test_an_abort_moves_the_samples_of_others_and_changes_nothing_for_them(make: Any) -> None:
    run = Run(make(max_samples=8))
    run.submit("gone", SHORT, 3, WARM)
    run.submit("stays", MIDDLE, 4, WARM, seed=5)
    for _ in range(3):
        run.decoder.step()
    run.decoder.abort("gone")
    stays = run.finish()["stays"]
    alone = Run(make(max_samples=8))
    alone.submit("stays", MIDDLE, 4, WARM, seed=5)
    for one, other in zip(stays, alone.finish()["stays"], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_a_stop_string_ends_a_sample_and_leaves_its_text(make: Any) -> None:
    run = Run(make())
    run.submit("free", MIDDLE, 4, Sampling(max_tokens=60), seed=2)
    free = next(s for s in run.finish()["free"] if len(s.text) > 25)
    stop = free.text[12:15]
    run.submit("stopped", MIDDLE, 4, Sampling(max_tokens=60, stop=("never there", stop)), seed=2)
    stopped = run.finish()["stopped"][[s is free for s in run.done["free"]].index(True)]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()
    assert stop in bytes_of(run.decoder, stopped)


def bytes_of(decoder: Decoder, sample: Sample) -> str:
    return decoder._vocabulary.text(sample.tokens.tolist())


def test_the_end_token_is_kept_and_ends_a_sample_unless_told_otherwise(make: Any, vocabulary: Vocabulary) -> None:
    run = Run(make(max_samples=64))
    run.submit("ends", SHORT, 64, Sampling(max_tokens=40))
    run.submit("goes on", SHORT, 64, Sampling(max_tokens=40, ignore_eos=True))
    run.finish()
    ended = [s for s in run.done["ends"] if s.finish_reason is FinishReason.STOP]
    assert ended
    for sample in run.done["ends"]:
        at = [t in vocabulary.end_tokens for t in sample.tokens]
        assert sum(at) == (sample.finish_reason is FinishReason.STOP)
        assert at[-1] == (sample.finish_reason is FinishReason.STOP)
        assert "<|" not in sample.text
    assert all(len(s.tokens) == 40 and s.finish_reason is FinishReason.LENGTH for s in run.done["goes on"])


def test_max_tokens_is_cut_to_the_room_in_the_context(make: Any) -> None:
    run = Run(make(max_context=len(MIDDLE) + 6))
    run.submit("a", MIDDLE, 2, WARM)
    assert [(len(s.tokens), s.finish_reason) for s in run.finish()["a"]] == [(6, FinishReason.LENGTH)] * 2


def test_scores_are_those_of_a_full_forward_pass(make: Any, peer: Any) -> None:
    with torch.inference_mode():
        expected = peer(torch.tensor([LONG])).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(-1, torch.tensor(LONG[1:])[:, None])[:, 0]
    np.testing.assert_allclose(make().score(LONG), expected, atol=1e-5)


def test_positions_do_not_drift_with_bfloat16_weights(folder: str, vocabulary: Vocabulary) -> None:
    tokens = torch.randint(0, 256, (500,), generator=torch.Generator().manual_seed(0)).tolist()

    def score(model: Any) -> np.ndarray:
        return Decoder(model, vocabulary, max_samples=1, max_context=512, version=0).score(tokens)

    exact = load_model(folder, "bfloat16").float()
    ours, drifted = load_model(folder, "bfloat16"), load_model(folder, "float32").bfloat16()
    assert ours.model.rotary_emb.inv_freq.dtype == torch.float32
    error, drift = (np.abs(score(m) - score(exact))[250:].mean() for m in (ours, drifted))
    assert error < drift / 2
