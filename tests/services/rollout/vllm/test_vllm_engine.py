"""The vLLM engine against the learner's model, on vLLM's CPU build."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal

import numpy as np
import pytest

from services.rollout.engine import Slot, Weights
from services.rollout.vllm.remains import segments_of
from shared.errors import DataError, EngineFailed, StrettoError, WeightsError
from shared.group import FinishReason, version_runs
from shared.snapshot import Layout, SnapshotFile

from .conftest import in_flight, swap_while_it_speaks

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

TEXT = list(b"Weights flow one way: from the learner to the rollouts.")


async def waiting(pair, count: int) -> None:
    async with asyncio.timeout(20):
        while pair.engine.stats()["samples_waiting"] < count:
            await asyncio.sleep(0)


async def test_logprobs_are_the_learners_to_a_ten_thousandth(pair):
    assert pair.error(TEXT, await pair.engine.score(TEXT)) < 1e-4
    for sample in await pair.answer("a", n=3, prompt=TEXT, max_tokens=40):
        whole = [*TEXT, *sample.tokens.tolist()]
        np.testing.assert_allclose(sample.logprobs, pair.backend.score(whole)[-40:], atol=1e-4)


async def test_logprobs_are_those_of_the_distribution_that_is_sampled_from(pair):
    import torch

    with torch.no_grad():
        logits = pair.backend._model(input_ids=torch.tensor([TEXT])).logits[0, -1].float() / 0.7
    kept = logits.masked_fill(logits < logits.topk(20).values[-1], -torch.inf)
    order = kept.softmax(-1).sort(descending=True)
    nucleus = order.indices[order.values.cumsum(-1) - order.values < 0.8]
    cut = torch.full_like(kept, -torch.inf).index_copy(0, nucleus, kept[nucleus]).log_softmax(-1)
    samples = await pair.answer("a", n=16, prompt=TEXT, max_tokens=1, temperature=0.7, top_k=20, top_p=0.8)
    assert len({int(s.tokens[0]) for s in samples}) > 1
    for sample in samples:
        np.testing.assert_allclose(sample.logprobs[0], cut[int(sample.tokens[0])], atol=1e-4)


async def test_a_greedy_sample_has_logprobs_of_the_plain_distribution(pair):
    (sample,) = await pair.answer("a", n=1, prompt=TEXT, temperature=0.0, top_p=0.5, top_k=3)
    whole = [*TEXT, *sample.tokens.tolist()]
    np.testing.assert_allclose(sample.logprobs, pair.backend.score(whole)[-12:], atol=1e-4)


async def test_the_same_seed_gives_the_same_answer_and_samples_differ(pair):
    one, other = await asyncio.gather(pair.answer("a", n=3), pair.answer("b", n=3))
    assert [s.tokens.tolist() for s in one] == [s.tokens.tolist() for s in other]
    assert len({tuple(s.tokens.tolist()) for s in one}) == 3
    assert [s.tokens.tolist() for s in await pair.answer("c", n=3, seed=2)] != [s.tokens.tolist() for s in one]


async def test_a_sample_ends_at_a_stop_string_which_its_tokens_hold_and_its_text_does_not(pair):
    sampling = {"n": 1, "max_tokens": 40, "ignore_eos": False}
    (free,) = await pair.answer("a", **sampling)
    at = next(i for i, letter in enumerate(free.text) if i > 3 and letter.isascii() and letter.isprintable())
    (ended,) = await pair.answer("b", **sampling, stop=(free.text[at],))
    first = free.text.find(free.text[at])
    assert ended.finish_reason is FinishReason.STOP
    assert ended.text == free.text[:first]
    assert ended.tokens.tolist() == free.tokens.tolist()[: len(ended.tokens)]
    assert len(ended.tokens) < len(free.tokens)


async def test_an_end_token_ends_a_sample_and_belongs_to_it(pair):
    end = pair.engine.tokenizer.eos_token_id
    pair.always_say(end)
    await pair.engine.swap(pair.publish())
    (ended,) = await pair.answer("a", n=1, ignore_eos=False)
    assert (ended.tokens.tolist(), ended.text, ended.finish_reason) == ([end], "", FinishReason.STOP)
    (free,) = await pair.answer("b", n=1)
    assert (free.tokens.tolist(), free.finish_reason) == ([end] * 12, FinishReason.LENGTH)


async def test_swapped_weights_reach_every_layer_and_a_tied_output_layer(pair):
    """Of itself vLLM's reload leaves a tied output layer with the weights that its kernel had packed before."""
    for _ in range(3):  # the spare model's weights are exchanged, so what it held two swaps ago must not come back
        pair.train()
        before = await pair.engine.score(TEXT)
        await pair.engine.swap(pair.publish())
        after = await pair.engine.score(TEXT)
        assert np.abs(after - before).max() > 0.01
        assert pair.error(TEXT, after) < 1e-4


async def test_each_token_carries_the_version_of_the_weights_that_made_it(pair):
    await swap_while_it_speaks(pair)


async def test_two_hundred_swaps_lose_no_sample_and_each_tells_all_versions_it_was_made_by(pair):
    first, swaps, answers, enough = pair.version, pair.engine.stats()["swaps"], [], asyncio.Event()

    async def keep_asking(lane):
        while not enough.is_set():
            answers.append(await pair.answer(f"{lane}/{len(answers)}", n=4, max_tokens=40 + 10 * lane))

    async with asyncio.TaskGroup() as tasks:
        for lane in range(4):
            tasks.create_task(keep_asking(lane))
        await in_flight(pair, 12)
        for _ in range(200):
            pair.train(0.001)
            await pair.engine.swap(pair.publish())
        enough.set()
    assert pair.engine.stats()["swaps"] == swaps + 200 and pair.version == first + 200
    assert pair.error(TEXT, await pair.engine.score(TEXT)) < 1e-4
    seen = set()
    for samples in answers:
        assert len(samples) == 4
        for sample in samples:
            runs = version_runs(sample.versions)
            assert len(sample.tokens) in {40, 50, 60, 70} and runs[:, 1].sum() == len(sample.tokens)
            assert (np.diff(runs[:, 0]) > 0).all() and runs[0, 0] >= first and runs[-1, 0] <= first + 200
            seen.update(runs[:, 0].tolist())
    assert len(answers) >= 8 and len(seen) > 150


async def test_what_older_weights_read_of_a_prompt_is_not_used_for_new_requests(pair):
    prompt = (TEXT * 6)[:300]  # longer than two blocks of the cache
    await pair.answer("old", n=1, prompt=prompt)
    pair.train(0.2)
    await pair.engine.swap(pair.publish())
    for name in ("new", "new, from the cache"):
        (sample,) = await pair.answer(name, n=1, prompt=prompt)
        whole = [*prompt, *sample.tokens.tolist()]
        np.testing.assert_allclose(sample.logprobs, pair.backend.score(whole)[-12:], atol=1e-4)


async def test_the_smallest_priority_of_those_that_wait_goes_first(pair):
    ended = []

    async def answer(name, priority, **sampling):
        await pair.answer(name, n=16, priority=priority, **sampling)
        ended.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer("first", 9, max_tokens=200))
        await in_flight(pair, 16)  # as many as there are places
        tasks.create_task(answer("late", 2))
        await waiting(pair, 16)
        tasks.create_task(answer("early", -1))
        await waiting(pair, 32)
        score = await pair.engine.score(TEXT)
        assert not ended or ended == ["first"]
    assert pair.error(TEXT, score) < 1e-4
    assert ended == ["first", "early", "late"]


async def test_abort_ends_a_request_in_flight(pair):
    answer = asyncio.create_task(pair.answer("a", n=2, max_tokens=400))
    await in_flight(pair, 2)
    await pair.engine.abort("unknown")
    await pair.engine.abort("a")
    for sample in await answer:
        assert sample.finish_reason is FinishReason.ABORTED
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) < 400
    assert set(np.concatenate([s.versions for s in await answer]).tolist()) <= {pair.version}


async def test_a_cancelled_request_frees_its_places(pair):
    answer = asyncio.create_task(pair.answer("a", n=16, max_tokens=400))
    await in_flight(pair, 16)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await pair.answer("b")
    assert pair.engine.stats()["samples_in_flight"] <= 2


async def test_weights_that_had_to_be_loaded_again_void_what_was_made_with_them(pair):
    answer = asyncio.create_task(pair.answer("a", max_tokens=400))
    await in_flight(pair, 2)
    await pair.engine.swap(pair.publish(pair.version))
    with pytest.raises(StrettoError, match="weights that were wrong"):
        await answer
    assert len(await pair.answer("a")) == 2


@pytest.mark.parametrize(
    ("damage", "text"), [("missing", "model.norm.weight"), ("shape", "32"), ("empty", "overwritten")]
)
async def test_staged_weights_that_are_not_right_change_nothing(pair, damage, text):
    before = await pair.engine.score(TEXT)
    weights = pair.publish()
    tensors = dict(weights.slot.layout.tensors)
    dtype, shape, at = tensors.pop("model.norm.weight")
    if damage != "missing":
        tensors["model.norm.weight"] = (dtype, (32,) if damage == "shape" else shape, at)
    wrong = SnapshotFile.create("stretto-wrong", Layout(tensors, weights.slot.layout.size_bytes), 3)
    if damage != "empty":
        wrong.seal(0, 0, 999)
    try:
        with pytest.raises(WeightsError, match=f"cannot load version 999.*{text}"):
            await pair.engine.swap(Weights(0, 999, {}, Slot(wrong.path.name, 0, wrong.layout)))
    finally:
        wrong.unlink()
    np.testing.assert_array_equal(await pair.engine.score(TEXT), before)
    await pair.engine.swap(weights)
    assert pair.error(TEXT, await pair.engine.score(TEXT)) < 1e-4


@pytest.mark.parametrize(
    ("prompt", "text"), [([5] * 500, "500 tokens.* 499 "), ([260], "vocabulary of 260"), ([-1], "vocabulary")]
)
async def test_a_prompt_that_cannot_be_answered_is_refused(pair, prompt, text):
    with pytest.raises(DataError, match=text):
        await pair.answer("a", prompt=prompt)
    assert len((await pair.answer("b", prompt=[5] * 499))[0].tokens) == 1


async def test_weights_outside_of_shared_memory_are_refused(pair):
    with pytest.raises(WeightsError, match="shared memory"):
        await pair.engine.swap(Weights(0, 5, {}))


async def test_an_engine_core_that_dies_is_noticed_by_all_and_its_shared_memory_removed(plain_pair):
    pair = plain_pair
    with pytest.raises(StrettoError, match="swap first"):
        await pair.answer("too early")
    await pair.engine.swap(pair.publish())
    pair.train()
    await pair.engine.swap(pair.publish())  # into the model in use, since this engine does not stage
    assert pair.error(TEXT, await pair.engine.score(TEXT)) < 1e-4
    answer = asyncio.create_task(pair.answer("a", max_tokens=400))
    await in_flight(pair, 2)
    (core,) = [child for child in multiprocessing.active_children() if is_core_of(pair.engine, child.pid)]
    segments = segments_of(core.pid)
    assert segments and all(segment.exists() for segment in segments)
    os.kill(core.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        with pytest.raises(EngineFailed, match="died"):
            await answer
        with pytest.raises(EngineFailed, match="died"):
            await pair.engine.failed()
        for late in (pair.answer("b"), pair.engine.score(TEXT), pair.engine.swap(pair.publish())):
            with pytest.raises(EngineFailed):
                await late
    await pair.engine.close()
    assert not any(segment.exists() for segment in segments)


def is_core_of(engine, pid: int) -> bool:
    return pid in {process.pid for process in engine.llm.engine_core.resources.engine_manager.processes}
