"""One run as it stands: its groups, prompts, evaluations and figures, and how it ends. No sockets and no members.

Everything that changes goes to the journal, from which a broker that starts again has it back, and to the files that
people read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.messages import Checkpointed, Commit, LeaseRequest
from services.broker import outcomes
from services.broker.dataset import read_dataset
from services.broker.evaluation import Evaluations
from services.broker.gate import Policy
from services.broker.journal import FILE, Journal
from services.broker.ledger import Grant, Ledger
from services.broker.pace import Pace
from services.broker.prompts import PromptSource, first_prompts, total_steps
from services.broker.runlog import RunLog, latest_records
from services.broker.trackers import Trackers
from shared.algorithms import load_algorithm
from shared.config import RunConfig
from shared.drift import DriftWarnings
from shared.errors import DataError, ProtocolError, StrettoError
from shared.graph import check_graph
from shared.group import Columns, Lane, Prompt, TrajectoryGroup, mean_reward, signal_means
from shared.log import log

SHOWN_DEAD_LETTERS = 20
"""How many the status shows, so that it stays within a message."""
LISTED_DEAD_LETTERS = 500


class Run:
    """state: `running`, `draining`, `finished`, `stopped` (on request) or `failed`; stop_reason: once it has ended.

    contacts: where the services of the run last listened, by instance, for those that start again.
    """

    def __init__(self, config: RunConfig, folder: Path, announce: Callable[[str], None] = lambda kind: None) -> None:
        """Begin a run, or go on with the one whose journal is in the folder. announce: told the kind of each event.

        Raises ConfigError or DataError where that cannot work.
        """
        algorithm = load_algorithm(config.algorithm)
        algorithm.check(config)
        stages = check_graph(algorithm.stages(config))
        train = read_dataset(config.data.train, split=config.data.split, prompt_field=config.data.prompt_field)
        self.config = config
        self.folder = folder.resolve()
        self.stages = {stage.name: stage for stage in stages}
        self.total_steps = total_steps(len(train), config.prompts_per_step, config.steps, config.epochs)
        if self.total_steps == 0:
            raise DataError(
                f"{config.data.train} has {len(train)} rows; in {config.epochs} epochs that is not one step of "
                f"{config.prompts_per_step} prompts"
            )
        self.state = "running"
        self.stop_reason: str | None = None
        self.run_id = f"{config.name}-{os.urandom(8).hex()}"
        self.contacts: dict[str, str] = {}
        self.warnings: deque[str] = deque(maxlen=20)
        self._drift = DriftWarnings(config)
        self.ledger = Ledger(stages, Policy.of(config, self.total_steps, replace_equal=algorithm.replace_equal))
        self.log = RunLog(self.folder)
        self._announce = announce
        self._source = PromptSource(train, seed=config.seed, shuffle=config.data.shuffle)
        self._evaluations = Evaluations(config, _heldout(config), self.total_steps)
        self._samples: dict[Lane, int] = {"train": algorithm.samples(config), "eval": 1}
        self._started = time.time()
        self._outcome = ("stopped", "")
        self._saved_version = 0
        self._metrics: dict[str, float] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=200)
        self._staleness = 0
        self._pace = Pace()
        self._replaced: list[TrajectoryGroup] = []
        self._dead_letters: dict[str, dict[str, Any]] = {}
        self.journal = Journal(self.folder / FILE, config.broker.journal, self._durable)
        saved = self.journal.saved_state()
        if saved is not None:
            self._restore(saved)
        self._trackers = Trackers(config, self.folder, self.run_id, self.ledger.version, self.warnings.append)

    def _durable(self) -> dict[str, Any]:
        """What the journal keeps beside groups and dead letters, as plain values."""
        return {
            "run_id": self.run_id,
            "started": self._started,
            "total_steps": self.total_steps,
            "saved_version": self._saved_version,
            "contacts": self.contacts,
            "ledger": self.ledger.state(),
            "source": self._source.state(),
            "evaluations": self._evaluations.results,
            "evaluating": self._evaluations.unfinished,
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        self._source.restore(saved["source"])
        self.run_id, self._started = saved["run_id"], saved["started"]
        self._saved_version, self.contacts = saved["saved_version"], saved["contacts"]
        in_flight = self.journal.in_flight()
        self.ledger.restore(saved["ledger"], in_flight, self.journal.batch(saved["ledger"]["version"]))
        self._evaluations.restore(saved["evaluations"], unfinished=saved["evaluating"])
        self._dead_letters = {letter["group_id"]: letter for letter in self.journal.dead_letters()}
        written = latest_records(self.folder / "metrics.jsonl")
        self._history.extend(record for record in written if record["version"] <= self.ledger.version)
        log.info("goes on with its journal", version=self.ledger.version, groups=len(in_flight))

    # Leases

    def lease(self, request: LeaseRequest, *, version: int, rollouts: int, now: float) -> list[Grant]:
        """Groups for a request of an instance whose weights have this version, of so many rollouts that are there."""
        max_groups = request.max_groups
        if not self.stages[request.stage].needs:
            max_groups = min(max_groups, self._admit(request, rollouts))
        return self.ledger.lease(
            request.stage,
            request.instance,
            now,
            max_groups=max(1, max_groups),
            min_groups=request.min_groups,
            version=version,
            max_samples=request.max_samples,
            samples=self._samples,
        )

    def _admit(self, request: LeaseRequest, rollouts: int) -> int:
        """Admit what a rollout asks for as far as the gate allows; returns its share of what there is to generate."""
        self._admit_evaluation()
        wanted = request.max_groups
        if request.max_samples is not None:
            wanted = min(wanted, request.max_samples // self._samples["train"])
        room = self._room()
        waiting = self.ledger.waiting(request.stage)
        share = -(-(waiting["train"] + room) // max(1, rollouts))
        for _ in range(min(room, min(wanted, share) - waiting["train"])):
            entry = self.ledger.admit("train", self._source.draw())
            entry.written = self.journal.admit(entry)
        return share + waiting["eval"]

    def _room(self) -> int:
        return self.ledger.room() if self.state == "running" else 0

    def _admit_evaluation(self) -> None:
        for prompt in self._evaluations.due(self.ledger.version):
            self.ledger.admit("eval", prompt)

    # What services report

    def complete(self, group_id: str, lease_id: str, columns: Columns) -> None:
        """A stage has added these columns to a group."""
        entry = self.ledger.entry(group_id)
        happened = self.ledger.complete(group_id, lease_id, columns)
        if entry is not None and entry.group.lane == "train":
            entry.written = self.journal.complete(group_id, columns)
        self._pace.generated(len(columns.get("tokens", ())))
        self.take(happened)

    def commit(self, commit: Commit) -> None:
        """The learner has made a version of these groups."""
        self._require_lineage(commit.lineage)
        groups, happened = self.ledger.commit(commit.version, commit.group_ids)
        if not groups:
            return  # it was done before
        if any(self.ledger.balance().values()):
            raise StrettoError(f"the accounts of version {commit.version} do not balance: {self.ledger.accounts()}")
        self.journal.consume(commit.version, commit.group_ids)
        now = time.time()
        self._pace.committed(now, sum(group.n_samples for group in groups))
        self._staleness = max((commit.version - 1 - group.oldest_version() for group in groups), default=0)
        self._metrics = dict(commit.metrics) | {
            "reward/generated": mean_reward([*groups, *self._replaced]),
            "replaced/groups": float(len(self._replaced)),
        }
        self._metrics |= signal_means(groups)
        self._replaced.clear()
        if warning := self._drift.of(commit.metrics, commit.version - 1):
            self.warnings.append(warning)
            log.warning("drift", warning=warning)
        record = self._metrics | {"version": commit.version, "lineage": commit.lineage, "time": now}
        self._history.append(record)
        self.log.write("metrics", record)
        self._trackers.log(commit.version, self._metrics | {"lineage": commit.lineage})
        for group in groups:
            self.log.group(group, commit.version)
        self._admit_evaluation()
        self._announce("version")
        self.take(happened)

    def checkpointed(self, saved: Checkpointed) -> None:
        """The learner has saved a version."""
        self._require_lineage(saved.lineage)
        self._saved_version = saved.version
        self.journal.prune(saved.oldest)
        log.info("checkpoint", version=saved.version, location=saved.location)

    async def resume(self, version: int) -> int:
        """The learner goes on from a checkpoint of `version`; returns the new lineage.

        Raises ProtocolError where the journal does not have all that came after it.
        """
        current = self.ledger.version
        if self.ledger.is_new:  # there is no journal (any more): the prompts go on about where they were
            if not 0 <= version <= self.total_steps:
                raise ProtocolError("bad_header", f"version {version} is not one of a run of {self.total_steps} steps")
            self._source.position = version * self.config.prompts_per_step
        elif version > current:
            raise ProtocolError(
                "bad_header",
                f"the checkpoint of version {version} is newer than the journal, which ends at {current}: move "
                f"{self.journal.file} away to go on without it, or remove the checkpoint",
            )
        consumed = await self.journal.consumed_after(version) if version < current else []
        found = {entry.turn[0] for entry in consumed if entry.turn is not None}
        if found != set(range(version + 1, max(version, current) + 1)):
            raise ProtocolError(
                "bad_header",
                f"the run is at version {current}, and its journal does not reach back to the checkpoint of {version}: "
                f"move {self.journal.file} away to go on without it",
            )
        lineage = self.ledger.rewind(version, consumed)
        self.journal.rewind(version)
        self._evaluations.rewind(version)
        self._saved_version = version
        self._replaced.clear()
        self._trackers.rewind(version)
        self._history = deque((r for r in self._history if r["version"] <= version), self._history.maxlen)
        log.info("rewound", version=version, before=current, groups=len(consumed))
        return lineage

    def _require_lineage(self, lineage: int) -> None:
        if lineage != self.ledger.lineage:
            raise ProtocolError("unknown_lease", f"lineage {lineage}; the run is at {self.ledger.lineage}")

    def take(self, happened: list[outcomes.Outcome]) -> None:
        """Write down what happened in the ledger, and do what follows from it."""
        for outcome in happened:
            match outcome:
                case outcomes.Evaluated(group, scheduled):
                    self.log.group(group, scheduled)
                    self._take_result(self._evaluations.add(group, scheduled))
                case outcomes.Dropped(group, reason):
                    self._source.give_back(group.prompt)
                    self.journal.remove(group.group_id)
                    log.info("dropped", group=group.group_id, reason=reason)
                case outcomes.Replaced(group):
                    self._replaced.append(group)
                    self.journal.remove(group.group_id)
                    self.log.group(group, None)
                case outcomes.Dead(group, stage, errors):
                    self._bury(group, stage, errors)
                case outcomes.Returned(group_id, stage, holder, reason):
                    self.warnings.append(f"group {group_id} went back to the queue of {stage}: {holder} {reason}")
                    log.warning("returned", group=group_id, stage=stage, holder=holder, reason=reason)
                case outcomes.SystematicFault(stage, deaths, last_error):
                    reason = f"{deaths} groups in a row failed at the stage {stage}; the last: {last_error}"
                    self.drain("failed", reason)

    def _bury(self, group: TrajectoryGroup, stage: str, errors: tuple[str, ...]) -> None:
        letter = {
            "group_id": group.group_id,
            "lane": group.lane,
            "stage": stage,
            "row": group.prompt.row,
            "epoch": group.prompt.epoch,
            "errors": list(errors),
        }
        log.error("dead letter", **letter)
        letter["prompt"] = group.prompt.text
        self.log.write("dead_letters", letter)
        if group.lane == "eval":
            self._take_result(self._evaluations.lose(group.min_version))
        else:
            self._dead_letters[group.group_id] = letter
            self.journal.bury(letter)
            self.journal.remove(group.group_id)

    def _take_result(self, result: dict[str, Any] | None) -> None:
        if result is not None:
            self.log.write("evaluations", {"time": time.time()} | result)
            means = {"accuracy": result["accuracy"], "reward": result["reward"], **result["signals"]}
            self._trackers.log(result["version"], {f"evaluation/{name}": value for name, value in means.items()})
            log.info("evaluated", **result)
            self.journal.note()

    # What the operator asks for

    def dead_letters(self) -> list[dict[str, Any]]:
        """The training groups that failed too often: the newest of them, in their order."""
        return list(self._dead_letters.values())[-LISTED_DEAD_LETTERS:]

    def requeue(self, group_ids: list[str] | None) -> int:
        """Have the prompts of dead letters (None: of all) drawn again, before any other; returns how many.

        Raises ProtocolError where a group is not among them.
        """
        chosen = list(self._dead_letters) if group_ids is None else list(dict.fromkeys(group_ids))
        if unknown := [group_id for group_id in chosen if group_id not in self._dead_letters]:
            raise ProtocolError("bad_header", f"no dead letter: {', '.join(name[:64] for name in unknown[:8])}")
        for group_id in chosen:
            letter = self._dead_letters.pop(group_id)
            self._source.give_back(self._source.prompt(letter["row"], letter["epoch"]))
            self.journal.unbury(group_id)
            log.info("requeued", group=group_id)
        return len(chosen)

    # The end

    def drain(self, outcome: str, reason: str) -> None:
        """Admit nothing more; the run ends with this outcome once the learner has saved what it trained."""
        if self.state == "running":
            self.state, self._outcome = "draining", (outcome, reason)
            log.info("draining", outcome=outcome, reason=reason)
            self._announce("drain")

    def end_if_done(self, *, learner_is_there: bool) -> None:
        """End the run where all is done and saved."""
        saved = self._saved_version == self.ledger.version
        if self.state == "running" and self.ledger.version >= self.total_steps:
            if saved and self._evaluations.complete(self.total_steps):
                self.stop("finished", f"all {self.total_steps} steps are done")
        elif self.state == "draining" and (saved or not learner_is_there):
            self.stop(*self._outcome)

    def stop(self, state: str, reason: str) -> None:
        """End the run, unless it has ended."""
        if self.stop_reason is None:
            self.state, self.stop_reason = state, reason
            log.info("run ends", state=state, reason=reason)

    def close(self) -> None:
        """Close the files."""
        self.journal.close()
        self.log.close()
        self._trackers.close()

    def status(self) -> dict[str, Any]:
        """A snapshot of plain values; the keys are described in protocol/SPEC.md."""
        groups = self.ledger.accounts()
        queued, leased = groups["train"]["queued"], groups["train"]["leased"]
        first, *_, last = self.stages
        return {
            "run_id": self.run_id,
            "name": self.config.name,
            "run_folder": str(self.folder),
            "state": self.state,
            "stop_reason": self.stop_reason,
            "started": self._started,
            "version": self.ledger.version,
            "steps": self.total_steps,
            "lineage": self.ledger.lineage,
            "groups": groups,
            "groups_wanted": self._room() + queued.get(first, 0) + leased.get(first, 0),
            "groups_ready": queued.get(last, 0),
            "staleness": self._staleness,
            "metrics": self._metrics,
            "history": list(self._history),
            "evaluations": self._evaluations.results,
            "dead_letters": [_short(letter) for letter in self.dead_letters()[-SHOWN_DEAD_LETTERS:]],
            "warnings": list(self.warnings),
            "saved_version": self._saved_version,
            "prompts_drawn": self._source.position,
            **self._pace.figures(self.total_steps - self.ledger.version),
        }


def _short(letter: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in letter.items() if name != "prompt"}


def _heldout(config: RunConfig) -> list[Prompt]:
    data = config.data
    if data.heldout is None:
        return []
    heldout = read_dataset(data.heldout, split=data.heldout_split, prompt_field=data.prompt_field)
    return first_prompts(heldout, config.evaluation.prompts)
