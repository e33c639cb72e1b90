"""Packing: samples that share their prompt in a row get the log-probs they have alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.packing import GroupBatch, micro_batches, pack


def group_of(prompt: int, lengths: list[int], seed: int = 0) -> GroupBatch:
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 256, n).astype("i4") for n in lengths]
    return GroupBatch(
        group_id="g",
        prompt=random.integers(0, 256, prompt).astype("i4"),
        tokens=tokens,
        mask=[np.ones(n, dtype=bool) for n in lengths],
        columns={"number": [np.full(n, i + 1.0) for i, n in enumerate(lengths)]},
        lags=np.arange(len(lengths)),
    )


groups = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 15), min_size=1, max_size=6)), min_size=1, max_size=5
)


@given(groups, st.integers(16, 80))
def test_every_sample_is_in_exactly_one_row_and_no_micro_batch_passes_its_budget(shapes, budget):
    batch = [group_of(prompt, lengths, seed) for seed, (prompt, lengths) in enumerate(shapes)]
    batches = micro_batches(batch, budget)
    placed = sorted((id(row.group), i) for rows in batches for row in rows for i in row.samples)
    assert placed == sorted((id(group), i) for group in batch for i in range(len(group.tokens)))
    for rows in batches:
        alone = len(rows) == 1 and len(rows[0].samples) == 1
        assert alone or max(row.length for row in rows) * len(rows) <= budget


@given(groups)
def test_each_token_is_predicted_from_the_token_before_it(shapes):
    batch = [group_of(prompt, lengths, seed) for seed, (prompt, lengths) in enumerate(shapes)]
    for rows in micro_batches(batch, 200):
        packed = pack(rows)
        k = 0
        for row in rows:
            for i in row.samples:
                sequence = [*row.group.prompt, *row.group.tokens[i]]
                for t in range(len(row.group.tokens[i])):
                    at = packed.source[k]
                    place = len(row.group.prompt) + t - 1
                    assert packed.target[k] == sequence[place + 1]
                    assert packed.ids.reshape(-1)[at] == sequence[place]
                    assert packed.positions.reshape(-1)[at] == place
                    k += 1
        assert k == len(packed.target)


def test_a_sample_attends_to_the_prompt_and_itself_alone():
    (rows,) = micro_batches([group_of(2, [3, 2])], 100)
    seen = pack(rows).attention()[0].astype(int).tolist()
    assert seen == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("budget", [1000, 40, 12])
def test_packed_log_probs_are_those_of_each_sample_alone(backend, budget):
    batch = [group_of(9, [5, 1, 8, 3], seed=1), group_of(3, [7, 7], seed=2)]
    for rows in micro_batches(batch, budget):
        logprobs, _ = backend.logprobs(pack(rows), 0.7)
        parts = logprobs.detach().split([len(row.group.tokens[i]) for row in rows for i in row.samples])
        samples = [(row, i) for row in rows for i in row.samples]
        for part, (row, i) in zip(parts, samples, strict=True):
            ids = torch.tensor([[*row.group.prompt.tolist(), *row.group.tokens[i].tolist()]])
            logits = backend._model(ids).logits[0, len(row.group.prompt) - 1 : -1].float() / 0.7
            alone = torch.log_softmax(logits, -1).gather(-1, ids[0, len(row.group.prompt) :, None])[:, 0]
            torch.testing.assert_close(part, alone.detach(), atol=1e-5, rtol=1e-5)


def test_chunked_logits_give_the_same_log_probs_and_gradients(backend, monkeypatch):
    from services.compute import hf

    (rows,) = micro_batches([group_of(6, [9, 4, 7])], 1000)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = backend.logprobs(pack(rows), 1.0)
        logprobs.sum().backward()
        backend.collect_gradients()
        gradient = torch.cat([p.grad.reshape(-1) for p in backend.parameters.values()])
        for parameter in backend.parameters.values():
            parameter.grad = None
        return torch.cat([logprobs.detach(), entropy]), gradient

    whole = run()
    monkeypatch.setattr(hf, "LOGIT_CHUNK", 6)
    chunked = run()
    torch.testing.assert_close(chunked[0], whole[0])
    torch.testing.assert_close(chunked[1], whole[1], atol=1e-5, rtol=1e-5)
