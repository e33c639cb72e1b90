"""The vLLM engine with its model shared out over processes, against the learner's model."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import end_pair, make_pair, swap_while_it_speaks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

TEXT = list(b"Weights flow one way: from the learner to the rollouts.")


@pytest.mark.parametrize("parallel", ["tensor_parallel", "pipeline_parallel", "data_parallel"])
async def test_two_workers_generate_and_swap_as_one_does(vllm_model, parallel):
    pair = await make_pair(vllm_model, stage=True, **{parallel: 2})
    try:
        for _ in range(3):
            pair.train()
            await pair.engine.swap(pair.publish())
            logprobs = await pair.engine.score(TEXT)
            assert pair.error(TEXT, logprobs) < 1e-4
            assert logprobs.ndim == (2 if parallel == "data_parallel" else 1) and logprobs.size % (len(TEXT) - 1) == 0
        for sample in await pair.answer("a", n=3, prompt=TEXT, max_tokens=40):
            whole = [*TEXT, *sample.tokens.tolist()]
            np.testing.assert_allclose(sample.logprobs, pair.backend.score(whole)[-40:], atol=1e-4)
        await swap_while_it_speaks(pair)
    finally:
        await end_pair(pair)
