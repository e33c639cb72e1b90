"""One update of the policy: micro-batches through the backend, the algorithm's loss, the optimizer."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.compute.backend import Backend
from services.compute.checkpoint import restore
from services.compute.device import peak_flops
from services.compute.hf import HFBackend
from services.compute.lora import ADAPTER_FILE
from services.compute.memory import Room
from services.compute.optimizer import Optimizer
from services.compute.packing import GroupBatch, PackedRows, Row, in_batches, micro_batches, pack, rows_of, unpack
from services.learner.batch import Part, StepBatch, step_batch
from services.learner.crew import Crew
from services.learner.measures import add, fresh_drift, means
from shared.algorithms import Algorithm, load_algorithm
from shared.algorithms.base import LossInput, State
from shared.algorithms.losses import Denominators, aggregate, kl_k3, log_ratio
from shared.config import RunConfig
from shared.drift import check_drift, tolerance
from shared.errors import DataError, SelfCheckError, StrettoError
from shared.group import TrajectoryGroup


class Trainer:
    """Updates a policy. version: number of updates so far; state: the algorithm's."""

    def __init__(
        self, config: RunConfig, backend: Backend, algorithm: Algorithm, *, total_steps: int, crew: Crew | None = None
    ) -> None:
        """crew: where several ranks share the backend; all of them have a trainer, and call it alike."""
        self.config = config
        self._crew = crew or Crew()
        self._algorithm = algorithm
        self.backend = backend
        self._room = Room("learner", config.learner, rank=self._crew.rank, ranks=self._crew.size)
        self.optimizer = Optimizer(backend.parameters, config.learner, total_steps)
        self.version = 0
        self.state = algorithm.initial_state()

    def prepare(self, groups: list[TrajectoryGroup]) -> StepBatch:
        """What the next update is made of, and what the critics may learn meanwhile."""
        self._crew.tell("prepare", [group.columns for group in groups], names=[group.group_id for group in groups])
        return step_batch(groups, self._algorithm, self.config, self.version, self.state)

    def step(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        """As `update`, of what `prepare` makes of the groups."""
        return self.update(self.prepare(groups))

    def update(self, batch: StepBatch) -> dict[str, float]:
        """One update; returns its metrics. The version and the schedule go up by one.

        Where no group has an advantage there is no gradient, and the optimizer is left as it is.
        Raises DriftError, before the weights are touched, where the engine's log-probs are off by more than
        `learner.drift_stop`, and StrettoError where the loss is not finite; the weights are spoilt then and must not
        be used.
        """
        self._crew.tell("update")
        started, halved = time.perf_counter(), self._room.halved
        sums: dict[str, torch.Tensor] = {}
        seconds: dict[str, float] = defaultdict(float)
        norms: list[float] = []
        parts = [part for part in batch.parts if part.groups]
        if len(parts) > 1 and self._algorithm.correction in ("decoupled", "mask"):
            self._keep_old_logprobs(parts)
        for number, part in enumerate(parts):
            if number > 0:
                self.backend.use_snapshot(None)  # compute with what the optimizer has made of the masters
            # Later parts are computed with other weights than the engine's.
            own = self._gradients(part, batch.state, seconds, fresh_lag=batch.fresh_lag if number == 0 else None)
            for measured in self._crew.gather({name: float(value) for name, value in own.items()}):
                add(sums, {name: torch.tensor(value) for name, value in measured.items()})
            if number == 0:
                check_drift(means(sums), self.version, self.config.learner.drift_stop)
            before = time.perf_counter()
            with self._room.during("the optimizer's step"):
                norms.append(float(self.optimizer.step()))
            seconds["time/optimizer_s"] += time.perf_counter() - before
        computed, positions = (float(sums.pop(name, 0.0)) for name in (_COMPUTED, _POSITIONS))
        metrics = batch.metrics | means(sums) | {"lr": self.optimizer.lr}
        metrics["loss"] /= max(len(parts), 1)
        if norms:
            metrics["grad_norm"] = sum(norms) / len(norms)
        metrics |= {f"algorithm/{name}": value for name, value in batch.state.items()}
        self.state = self._algorithm.after_step(batch.state, metrics)
        self.optimizer.advance()
        self.version += 1
        step_s = time.perf_counter() - started
        metrics |= seconds | {"time/step_s": step_s, "perf/tokens_per_second": computed / step_s}
        metrics["perf/padding"] = 1.0 - computed / max(positions, 1.0) if computed else 0.0
        if (peak := peak_flops()) is not None:
            parameters = sum(map(math.prod, self.backend.shapes.values()))
            metrics["perf/mfu"] = 6 * parameters * computed / step_s / (peak * self._crew.size)
        metrics["memory/halved"] = float(self._room.halved - halved)
        if not math.isfinite(metrics["loss"] + metrics.get("grad_norm", 0.0)):
            names = ", ".join(group.group_id for group in batch.groups)
            raise StrettoError(
                f"the loss of version {self.version} is {metrics['loss']} and the gradient norm "
                f"{metrics.get('grad_norm')} (groups {names}): lower learner.lr, or resume from the last checkpoint"
            )
        return metrics

    def _rows(self, groups: list[GroupBatch]) -> list[list[Row] | None]:
        """This rank's micro-batches, of like many tokens as those of the others; None: others have one more."""
        parts = [in_batches(part, self._room.max_tokens) for part in self._shares(groups)]
        own, longest = parts[self._crew.rank], max(map(len, parts))
        return [*own, *[None] * (longest - len(own))]

    def _shares(self, groups: list[GroupBatch]) -> list[list[Row]]:
        """The rows of all ranks. No row is longer than what one of them has on average, or some could have none."""
        max_tokens, ranks = self._room.max_tokens, self._crew.size
        rows = rows_of(groups, max_tokens)
        if ranks > 1:
            rows = rows_of(groups, min(max_tokens, sum(row.length for row in rows) // ranks))
        return self._crew.share(rows, [row.length for row in rows])

    def _idle(self) -> None:
        """Take part in a micro-batch of the other ranks, with nothing of one's own."""
        logprobs, _ = self.backend.logprobs(pack(_NOTHING), self.config.sampling.temperature)
        if torch.is_grad_enabled():
            (logprobs.sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _keep_old_logprobs(self, parts: list[Part]) -> None:
        """Write down the policy's log-probs from before the first of several optimizer steps."""
        for group in (group for part in parts for group in part.groups):
            group.columns["old_logprobs"] = [np.zeros(len(tokens)) for tokens in group.tokens]
        for rows in (rows for part in parts for rows in self._rows(part.groups)):
            if rows is None:
                self._idle()
                continue
            for found in self._room.compute(rows, self._computed):
                for group, i, values in found:
                    group.columns["old_logprobs"][i] = values

    def _computed(self, rows: list[Row]) -> list[tuple[GroupBatch, int, np.ndarray]]:
        """The policy's log-probs, sample by sample, as `unpack` gives them."""
        logprobs, _ = self.backend.logprobs(pack(rows), self.config.sampling.temperature)
        return list(unpack(rows, logprobs.numpy()))

    def _gradients(
        self, part: Part, state: State, seconds: dict[str, float], *, fresh_lag: int | None
    ) -> dict[str, torch.Tensor]:
        """Add this rank's share of a part to the gradients, and its time to the seconds; returns sums of measures.

        fresh_lag: of the samples whose drift is measured; None: of none.
        """
        batches = self._rows(part.groups)
        own = [rows for rows in batches if rows is not None]
        sums = {
            _COMPUTED: torch.tensor(float(sum(row.length for rows in own for row in rows))),
            _POSITIONS: torch.tensor(float(sum(len(rows) * max(row.length for row in rows) for rows in own))),
        }
        for number, rows in enumerate(batches, start=1):
            self.backend.begin_micro_batch(is_last=number == len(batches))
            if rows is None:
                self._idle()
                continue
            work = partial(self._micro_batch, part.whole, state, seconds, fresh_lag)
            for measures in self._room.compute(rows, work, self.backend.discard_gradients):
                add(sums, measures)
        return sums

    def _micro_batch(
        self, whole: Denominators, state: State, seconds: dict[str, float], fresh_lag: int | None, rows: list[Row]
    ) -> dict[str, torch.Tensor]:
        """Add to the gradients and the seconds; returns sums of what is measured."""
        packed = pack(rows)
        start = time.perf_counter()
        logprobs, entropy = self.backend.logprobs(packed, self.config.sampling.temperature)
        losses, measures = self._losses(packed, logprobs, entropy, state)
        counted = torch.from_numpy(packed.mask)
        sample = torch.from_numpy(packed.sample)[counted]
        loss = aggregate(losses, sample, packed.n_samples, self._algorithm.aggregation, whole)
        measures |= {"loss": loss.detach(), "entropy": entropy.detach()[counted].sum()}
        if fresh_lag is not None:
            measures |= fresh_drift(packed, logprobs.detach(), fresh_lag)
        middle = time.perf_counter()
        (loss * self._crew.size).backward()  # type: ignore[no-untyped-call]  # gradients are averaged over ranks
        with self._room.during("the sum of the gradients"):
            self.backend.collect_gradients()
        end = time.perf_counter()
        seconds["time/forward_s"] += middle - start
        seconds["time/backward_s"] += end - middle
        return measures

    def _losses(
        self, packed: PackedRows, logprobs: torch.Tensor, entropy: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of each token that counts, and sums of what is measured on them.

        A token without a finite behaviour log-prob counts as one of ratio 1.
        """
        counted = torch.from_numpy(packed.mask)
        columns = {name: torch.from_numpy(column)[counted] for name, column in packed.columns.items()}
        new = logprobs[counted]
        missing = ~columns["behavior_logprobs"].isfinite()
        behavior = torch.where(missing, new.detach(), columns["behavior_logprobs"])
        uncorrected = self._algorithm.correction == "none"
        old = behavior if uncorrected else columns.get("old_logprobs", new.detach())
        batch = LossInput(
            logprobs=new,
            entropy=entropy[counted],
            old_logprobs=old,
            behavior_logprobs=behavior,
            ref_logprobs=columns.get("ref_logprobs"),
            advantages=columns["advantages"],
            sample=torch.from_numpy(packed.sample)[counted],
            n_samples=packed.n_samples,
            state=state,
        )
        losses, extra = self._algorithm.objective(batch)
        with torch.no_grad():
            difference = new - behavior
            ratio = log_ratio(new, behavior).exp()
            measures = {name: values.float().sum() for name, values in extra.items()}
            measures |= {
                "tokens": counted.sum(),
                "kl": kl_k3(behavior, new).sum(),
                "drift/mean": difference.abs().sum(),
                "drift/max": difference.abs().max(),
                "drift/missing": missing.sum(),
                "ratio/mean": ratio.sum(),
                "ratio/max": ratio.max(),
                "ratio/beyond_cap": (ratio > self._algorithm.correction_cap).sum(),
            }
        return losses, measures

    def _measured(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Sums of what is measured, without an update."""
        packed = pack(rows)
        computed = self.backend.logprobs(packed, self.config.sampling.temperature)
        return self._losses(packed, *computed, self.state)[1]

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
        self._crew.tell("self_check", [group.columns])
        mask = [own & sampled for own, sampled in zip(mask, group.is_sampled(), strict=True)]
        columns = {"behavior_logprobs": logprobs, "advantages": [np.ones(len(part)) for part in tokens]}
        lags = np.zeros(len(tokens), dtype="i8")
        batch = GroupBatch(group.group_id, group.columns["prompt_tokens"], tokens, mask, columns, lags)
        sums: dict[str, torch.Tensor] = {}
        for rows in micro_batches([batch], self._room.max_tokens):  # each rank computes all of it
            for measures in self._room.compute(rows, self._measured):
                add(sums, measures)
        found = means(sums)
        allowed = tolerance(self.config)
        if not found["drift/mean"] <= allowed or found.get("clip_fraction", 0.0) > 0.05:
            raise SelfCheckError(
                f"engine and learner disagree before the first update: log-probs of the engine's samples differ by "
                f"{found['drift/mean']:.3g} on average (allowed: {allowed:g}), at most by {found['drift/max']:.3g}. "
                "Likely causes: another temperature or sampling filter on one side, a dtype that is too coarse, or a "
                "chat template or end token that the engine treats differently"
            )
        return found


_COMPUTED, _POSITIONS = "computed", "positions"
"""Tokens that went through forward and backward, prompts included; and with the padding of their micro-batches."""

_ONE_TOKEN = np.zeros(1, dtype="i4")
_NOTHING = [
    Row(
        GroupBatch(
            group_id="",
            prompt=_ONE_TOKEN,
            tokens=[_ONE_TOKEN],
            mask=[np.zeros(1, dtype=bool)],
            columns={},
            lags=np.zeros(1, dtype="i8"),
        ),
        (0,),
    )
]
"""Rows that add nothing."""


def load_trainer(config: RunConfig, total_steps: int, checkpoint: Path | None, crew: Crew | None = None) -> Trainer:
    """The trainer of a run, at the version of a checkpoint or, without one, at version 0. Raises DataError."""
    trains_adapter = config.learner.lora is not None
    if checkpoint is not None and (checkpoint / ADAPTER_FILE).is_file() != trains_adapter:
        holds, setting = ("a whole model", "set") if trains_adapter else ("an adapter", "not set")
        raise DataError(
            f"the checkpoint {checkpoint} holds {holds}, and learner.lora is {setting}: resume with the setting that "
            "it was made with"
        )
    model = config.model if checkpoint is None or trains_adapter else str(checkpoint)
    places: dict[str, Any] = {"tokenizer": config.tokenizer, "adapter": checkpoint if trains_adapter else None}
    torch.manual_seed(config.seed)  # of a new adapter, which all ranks begin alike
    backend: HFBackend
    if crew is None or crew.size == 1:
        backend = HFBackend.load(model, config.learner, **places)
    else:
        from services.compute.sharded import ShardedBackend

        tree, location = config.model_dump(mode="json"), None if checkpoint is None else str(checkpoint)
        crew.tell("load", config=tree, total_steps=total_steps, checkpoint=location)
        backend = ShardedBackend.load_shards(model, config.learner, crew.tell, **places)
    trainer = Trainer(config, backend, load_algorithm(config.algorithm), total_steps=total_steps, crew=crew)
    if checkpoint is not None:
        restore(checkpoint, trainer)
    return trainer
