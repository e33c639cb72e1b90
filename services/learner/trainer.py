"""One update of the policy: micro-batches through the backend, the algorithm's loss, the optimizer."""

from __future__ import annotations

import math
import time
from collections import defaultdict

import numpy as np
import torch

from services.learner.backend import Backend
from services.learner.batch import GroupBatch, StepBatch, step_batch
from services.learner.optimizer import Optimizer
from services.learner.packing import PackedRows, micro_batches, pack
from shared.algorithms import Algorithm
from shared.algorithms.base import LossInput
from shared.algorithms.losses import aggregate, kl_k3, log_ratio
from shared.config import RunConfig
from shared.drift import check_drift, tolerance
from shared.errors import SelfCheckError, StrettoError
from shared.group import TrajectoryGroup


class Trainer:
    """Updates a policy. version: number of updates so far."""

    def __init__(self, config: RunConfig, backend: Backend, algorithm: Algorithm, *, total_steps: int) -> None:
        self.config = config
        self._algorithm = algorithm
        self.backend = backend
        self.optimizer = Optimizer(backend.parameters, config.learner, total_steps)
        self.version = 0

    def step(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        """One update from all groups of a step; returns its metrics. The version and the schedule go up by one.

        Where no group has an advantage there is no gradient, and the optimizer is left as it is.
        Raises DriftError, before the weights are touched, where the engine's log-probs are off by more than
        `learner.drift_stop`, and StrettoError where the loss is not finite; the weights are spoilt then and must not
        be used.
        """
        started = time.perf_counter()
        batch = step_batch(groups, self._algorithm, self.version, self.config.sampling.max_tokens)
        sums: dict[str, torch.Tensor] = {}
        seconds: dict[str, float] = defaultdict(float)
        for rows in micro_batches(batch.groups, self.config.learner.tokens_per_micro_batch):
            self._micro_batch(pack(rows), batch, sums, seconds)
        metrics = batch.metrics | _means(sums) | {"lr": self.optimizer.lr}
        if "drift/fresh/mean" in metrics:
            metrics["drift/fresh/lag"] = float(batch.fresh_lag)
        check_drift(metrics, self.version, self.config.learner.drift_stop)
        before = time.perf_counter()
        if batch.groups:
            metrics["grad_norm"] = float(self.optimizer.step())
        seconds["time/optimizer_s"] = time.perf_counter() - before
        self.optimizer.advance()
        self.version += 1
        metrics |= seconds | {"time/step_s": time.perf_counter() - started}
        if not math.isfinite(metrics["loss"] + metrics.get("grad_norm", 0.0)):
            names = ", ".join(group.group_id for group in batch.groups)
            raise StrettoError(
                f"the loss of version {self.version} is {metrics['loss']} and the gradient norm "
                f"{metrics.get('grad_norm')} (groups {names}): lower learner.lr, or resume from the last checkpoint"
            )
        return metrics

    def _micro_batch(
        self, packed: PackedRows, batch: StepBatch, sums: dict[str, torch.Tensor], seconds: dict[str, float]
    ) -> None:
        start = time.perf_counter()
        logprobs, entropy = self.backend.logprobs(packed, self.config.sampling.temperature)
        losses, measures = self._losses(packed, logprobs)
        counted = torch.from_numpy(packed.mask)
        sample = torch.from_numpy(packed.sample)[counted]
        loss = aggregate(losses, sample, packed.n_samples, self._algorithm.aggregation, batch.whole)
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        self.backend.collect_gradients()
        end = time.perf_counter()
        seconds["time/forward_s"] += middle - start
        seconds["time/backward_s"] += end - middle
        measures |= _fresh_drift(packed, logprobs, batch.fresh_lag)
        _add(sums, measures | {"loss": loss.detach(), "entropy": entropy[counted].sum()})

    def _losses(self, packed: PackedRows, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of each token that counts, and sums of what is measured on them.

        A token without a finite behaviour log-prob counts as one of ratio 1.
        """
        counted = torch.from_numpy(packed.mask)
        new = logprobs[counted]
        reported = torch.from_numpy(packed.logprobs)[counted]
        missing = ~reported.isfinite()
        old = torch.where(missing, new.detach(), reported)
        batch = LossInput(
            logprobs=new,
            old_logprobs=old,
            advantages=torch.from_numpy(packed.advantages)[counted],
            sample=torch.from_numpy(packed.sample)[counted],
            n_samples=packed.n_samples,
        )
        losses, extra = self._algorithm.loss(batch)
        with torch.no_grad():
            difference = new - old
            measures = {name: values.float().sum() for name, values in extra.items()}
            measures |= {
                "tokens": counted.sum(),
                "kl": kl_k3(old, new).sum(),
                "drift/mean": difference.abs().sum(),
                "drift/max": difference.abs().max(),
                "drift/missing": missing.sum(),
                "ratio/max": log_ratio(new, old).exp().max(),
            }
        return losses, measures

    @torch.no_grad()
    def self_check(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        """Check, before the first update, that the engine sampled from the policy that the learner computes.

        An update with learning rate 0 must have a ratio of 1 and clip nothing. Returns what was measured; raises
        SelfCheckError, which names the likely causes.
        """
        group = next((group for group in groups if group.columns["loss_mask"].any()), None)
        if group is None:
            return {}
        tokens, logprobs, mask = (group.samples(name) for name in ("tokens", "behavior_logprobs", "loss_mask"))
        advantages = np.ones(len(tokens))
        lags = np.zeros(len(tokens), dtype="i8")
        batch = GroupBatch(group.group_id, group.columns["prompt_tokens"], tokens, logprobs, mask, advantages, lags)
        sums: dict[str, torch.Tensor] = {}
        for rows in micro_batches([batch], self.config.learner.tokens_per_micro_batch):
            packed = pack(rows)
            _add(sums, self._losses(packed, self.backend.logprobs(packed, self.config.sampling.temperature)[0])[1])
        found = _means(sums)
        allowed = tolerance(self.config)
        if not found["drift/mean"] <= allowed or found.get("clip_fraction", 0.0) > 0.05:
            raise SelfCheckError(
                f"engine and learner disagree before the first update: log-probs of the engine's samples differ by "
                f"{found['drift/mean']:.3g} on average (allowed: {allowed:g}), at most by {found['drift/max']:.3g}. "
                "Likely causes: another temperature or sampling filter on one side, a dtype that is too coarse, or a "
                "chat template or end token that the engine treats differently"
            )
        return found


@torch.no_grad()
def _fresh_drift(packed: PackedRows, logprobs: torch.Tensor, lag: int) -> dict[str, torch.Tensor]:
    """Sums of |learner − engine| and of k3, and the largest distance, on the samples of this lag; {} without any.

    A whole sample counts by the version it began with: the engine keeps keys and values over a swap, so that a token
    sampled by the learner's own version after older ones is none that the learner would compute alike.
    """
    chosen = torch.from_numpy(packed.mask & (packed.lag == lag) & np.isfinite(packed.logprobs))
    if not chosen.any():
        return {}
    new, old = logprobs[chosen], torch.from_numpy(packed.logprobs)[chosen]
    distance = (new - old).abs()
    return {
        "drift/fresh/tokens": chosen.sum(),
        "drift/fresh/mean": distance.sum(),
        "drift/fresh/max": distance.max(),
        "drift/fresh/k3": kl_k3(old, new).sum(),
    }


def _add(sums: dict[str, torch.Tensor], measures: dict[str, torch.Tensor]) -> None:
    """Add up over micro-batches; a `…/max` keeps the largest."""
    for name, value in measures.items():
        if name not in sums:
            sums[name] = value
        elif name.endswith("/max"):
            sums[name] = torch.maximum(sums[name], value)
        else:
            sums[name] = sums[name] + value


def _means(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Means over the tokens that were trained, or over the freshest; the loss, counts and maxima as they are."""
    values = {name: float(value) for name, value in sums.items()}
    tokens = values.pop("tokens", 0.0)
    for name in values.keys() - {"loss", "drift/missing", "drift/fresh/tokens"}:
        if not name.endswith("/max"):
            values[name] /= max(values["drift/fresh/tokens"] if name.startswith("drift/fresh/") else tokens, 1.0)
    return {"loss": 0.0} | values
