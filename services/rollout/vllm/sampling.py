"""Requests and samples in vLLM's terms: sampling parameters in, completions out."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from services.rollout.engine import Request, Sample
from services.rollout.vocabulary import Vocabulary
from shared.errors import StrettoError
from shared.group import FinishReason

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


def sampling_params(request: Request, limit: int, vocabulary: Vocabulary) -> SamplingParams:
    """Parameters for all samples of a request; `limit`: most new tokens a sample. Sample i draws by seed + i."""
    sampling = request.sampling
    return SamplingParams(
        n=request.n,
        temperature=sampling.temperature,
        # Greedy samples have log-probs of the plain distribution, as the embedded engine gives them.
        top_p=sampling.top_p if sampling.temperature > 0 else 1.0,
        top_k=sampling.top_k if sampling.temperature > 0 else 0,
        max_tokens=limit,
        stop=[] if sampling.ignore_eos else list(sampling.stop),
        stop_token_ids=[] if sampling.ignore_eos else sorted(vocabulary.end_tokens),
        ignore_eos=sampling.ignore_eos,
        seed=request.seed,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """Parameters that give the log-probs of the prompt's tokens; one more token is made and thrown away."""
    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)


def sample_of(completion: Any, request: Request, vocabulary: Vocabulary) -> Sample:
    """The sample in a finished CompletionOutput. Raises StrettoError where vLLM gave no reason that we know."""
    reason = REASONS.get(completion.finish_reason)
    if reason is None:
        raise StrettoError(f"a sample of {request.request_id} ended with {completion.finish_reason!r} in vLLM")
    tokens = list(completion.token_ids)
    versions = np.full(len(tokens), -1, dtype=np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    stop = request.sampling.stop if reason is FinishReason.STOP else ()
    return Sample(
        tokens=np.asarray(tokens, dtype=np.int32),
        logprobs=_sampled_logprobs(completion.logprobs, len(tokens)),
        versions=versions,
        finish_reason=reason,
        text=vocabulary.text(tokens, stop),
    )


def _sampled_logprobs(flat: Any, count: int) -> np.ndarray:
    """[T] float32 from FlatLogprobs: the first entry of each position is the sampled token's."""
    if count == 0:
        return np.zeros(0, dtype=np.float32)
    return np.asarray([flat.logprobs[at] for at in flat.start_indices[:count]], dtype=np.float32)


def prompt_logprobs(output: Any, tokens: list[int]) -> np.ndarray:
    """[T-1] float32 log-probs of tokens[1:] in a RequestOutput for `scoring_params`."""
    rows = output.prompt_logprobs[1:]
    return np.asarray([row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)], dtype=np.float32)
