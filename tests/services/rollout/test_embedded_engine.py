"""The embedded engine from the event loop: what callers see of its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import torch

from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import Request, Weights
from shared.config import Sampling
from shared.errors import ConfigError, DataError, StrettoError, WeightsError
from shared.group import FinishReason
from stretto.models import pull

PROMPT = list(b"what is it?")
BRIEF = Sampling(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(pull("tiny", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
async def engine(folder: str) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine.load(folder, dtype="float32", max_samples=8, max_context=100, initial_version=0)
    yield engine
    await engine.close()


@pytest.fixture
async def gate(engine: EmbeddedEngine) -> AsyncIterator[Callable[[int], None]]:
    """Lets the engine take so many decoding steps; before, it takes none."""
    steps, step = threading.Semaphore(0), engine._decoder.step

    def gated() -> None:
        # Between two tries the thread looks at what it was asked, as it does between two steps.
        if steps.acquire(timeout=0.001):
            step()

    engine._decoder.step = gated  # type: ignore[method-assign]
    yield lambda count: steps.release(count) if count else None
    steps.release(1000)


def request(name: str, n: int = 2, sampling: Sampling = BRIEF, prompt: list[int] = PROMPT) -> Request:
    return Request(name, prompt, n, sampling, seed=1)


async def test_requests_made_in_one_turn_of_the_loop_start_in_one_pass(engine: EmbeddedEngine) -> None:
    answers = await asyncio.gather(*(engine.generate(request(str(i))) for i in range(4)))
    assert [len(samples) for samples in answers] == [2] * 4
    assert engine.stats()["steps"] == 5  # the first step takes two tokens: the prompt's and one more
    assert engine.stats()["tokens"] == 4 * 2 * 6
    assert engine.stats()["samples"] == 8


async def test_the_same_seed_gives_the_same_answer(engine: EmbeddedEngine) -> None:
    one, other = await engine.generate(request("a")), await engine.generate(request("b"))
    assert [s.tokens.tolist() for s in one] == [s.tokens.tolist() for s in other]


async def test_it_says_when_it_is_busy(engine: EmbeddedEngine) -> None:
    states: list[bool] = []
    engine.on_state = states.append
    for name in "ab":
        await engine.generate(request(name))
        await engine.score(PROMPT)  # the thread answers after it has told its state
    assert states == [True, False, True, False]
    assert engine.stats()["busy_s"] > 0


async def test_swapped_weights_are_used_in_place_and_the_output_layer_stays_tied(engine: EmbeddedEngine) -> None:
    before = await engine.score(PROMPT)
    tensors = {name: 1.1 * p for name, p in engine.model.named_parameters()}
    assert await engine.swap(Weights(0, 3, tensors)) < 1
    assert engine.version == 3
    assert engine.model.lm_head.weight.data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()
    after = await engine.score(PROMPT)
    assert np.abs(after - before).max() > 1e-3
    tensors["model.norm.weight"].zero_()
    np.testing.assert_allclose(await engine.score(PROMPT), -np.log(260), atol=1e-5)


async def test_a_swap_waits_for_no_request(engine: EmbeddedEngine, gate: Callable[[int], None]) -> None:
    answer = asyncio.create_task(engine.generate(request("a")))
    gate(2)
    while engine.stats()["steps"] < 2:
        await asyncio.sleep(0)
    await engine.swap(Weights(0, 1, {name: p.clone() for name, p in engine.model.named_parameters()}))
    gate(9)
    assert [s.versions.tolist() for s in await answer] == [[0, 0, 0, 1, 1, 1]] * 2


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "dtype"])
async def test_weights_that_do_not_fit_change_nothing(engine: EmbeddedEngine, damage: str) -> None:
    before = await engine.score(PROMPT)
    tensors = {name: torch.zeros_like(p) for name, p in engine.model.named_parameters()}
    norm = tensors.pop("model.norm.weight")
    match damage:
        case "unknown":
            tensors |= {"model.norm.weight": norm, "extra": norm}
        case "shape":
            tensors["model.norm.weight"] = norm[:-1]
        case "dtype":
            tensors["model.norm.weight"] = norm.bfloat16()
    with pytest.raises(WeightsError, match="extra" if damage == "unknown" else "model.norm.weight"):
        await engine.swap(Weights(0, 1, tensors))
    assert engine.version == 0
    np.testing.assert_array_equal(await engine.score(PROMPT), before)


async def test_nothing_is_generated_before_the_first_swap(folder: str) -> None:
    engine = EmbeddedEngine.load(folder, dtype="float32", max_samples=2, max_context=50)
    try:
        assert engine.version == -1
        with pytest.raises(StrettoError, match="swap first"):
            await engine.generate(request("a"))
        await engine.swap(Weights(0, 0, dict(engine.model.named_parameters())))
        assert len(await engine.generate(request("a"))) == 2
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("prompt", "text"), [([5] * 100, "100 tokens.* 99 "), ([], "0 tokens"), ([260], "vocabulary of 260")]
)
async def test_a_prompt_that_cannot_be_answered_is_refused(
    engine: EmbeddedEngine, prompt: list[int], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        await engine.generate(request("a", prompt=prompt))
    assert len((await engine.generate(request("b", prompt=[5] * 99)))[0].tokens) == 1


async def test_abort_ends_a_request_in_flight(engine: EmbeddedEngine, gate: Callable[[int], None]) -> None:
    answer = asyncio.create_task(engine.generate(request("a")))
    gate(1)
    while engine.stats()["steps"] < 1:
        await asyncio.sleep(0)
    await engine.abort("unknown")
    states: list[bool] = []
    engine.on_state = states.append
    await engine.abort("a")
    assert [(len(s.tokens), s.finish_reason) for s in await answer] == [(2, FinishReason.ABORTED)] * 2
    await engine.score(PROMPT)
    assert states == [False]


async def test_a_cancelled_request_frees_its_places(engine: EmbeddedEngine, gate: Callable[[int], None]) -> None:
    answer = asyncio.create_task(engine.generate(request("a", n=8)))
    gate(1)
    while engine.stats()["steps"] < 1:
        await asyncio.sleep(0)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await engine.score(PROMPT)
    assert engine.stats()["samples_in_flight"] == 0


async def test_two_requests_in_flight_cannot_have_one_id(engine: EmbeddedEngine) -> None:
    one, other = await asyncio.gather(*(engine.generate(request("a")) for _ in range(2)), return_exceptions=True)
    assert isinstance(one, list)
    assert isinstance(other, StrettoError)


async def test_a_failure_of_the_thread_reaches_all_who_wait_and_all_who_come(engine: EmbeddedEngine) -> None:
    def broken() -> None:
        raise RuntimeError("out of everything")

    engine._decoder.step = broken  # type: ignore[method-assign]
    answers = await asyncio.gather(*(engine.generate(request(n)) for n in "abc"), return_exceptions=True)
    for answer in answers:
        assert isinstance(answer, StrettoError)
        assert "out of everything" in str(answer)
    for late in (
        engine.generate(request("d")),
        engine.score(PROMPT),
        engine.abort("a"),
        engine.swap(Weights(0, 1, {})),
    ):
        with pytest.raises(StrettoError, match="out of everything"):
            await late


async def test_close_ends_what_is_in_flight_with_an_error(engine: EmbeddedEngine, gate: Callable[[int], None]) -> None:
    answer = asyncio.create_task(engine.generate(request("a")))
    await engine.score(PROMPT)
    await engine.close()
    with pytest.raises(StrettoError, match="closed"):
        await answer
    with pytest.raises(StrettoError, match="closed"):
        await engine.generate(request("b"))


def test_a_context_beyond_the_models_limit_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"513.*512"):
        EmbeddedEngine.load(folder, dtype="float32", max_samples=2, max_context=513)


def test_a_folder_without_a_model_is_refused(tmp_path: object) -> None:
    with pytest.raises(DataError, match="cannot load the model"):
        EmbeddedEngine.load(str(tmp_path), dtype="float32", max_samples=2)


@pytest.mark.parametrize("tokens", [[5], [5] * 101, [5, 260]])
async def test_a_sequence_that_cannot_be_scored_is_refused(engine: EmbeddedEngine, tokens: list[int]) -> None:
    with pytest.raises(DataError, match="sequence to score"):
        await engine.score(tokens)
    assert len(await engine.score([5] * 100)) == 99
