"""The Python front door: a run described by arguments, on this host. See docs/python.md."""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from services.reward.signals import Function
from shared.algorithms import load_algorithm
from shared.config import RunConfig
from shared.cores import available_cores, plan_cores, plan_gpus
from shared.errors import ConfigError, RunStopped, StrettoError, Unreachable
from stretto.arguments import SHORT_KEYS, Source, read_arguments
from stretto.background import LOOPBACK, Background, host
from stretto.check import Facts, check_run, derived, signals_of
from stretto.devices import ResourcePool
from stretto.inputs import write_inputs
from stretto.launcher import LocalRun, instances
from stretto.live import LiveView, PlainView, console_here
from stretto.models import MODELS, pull, resolve
from stretto.report import make_report, show_report
from stretto.train import (
    ENDING,
    first_evaluation,
    follow,
    new_run_folder,
    resumed_run_folder,
    sigterm_as_ctrl_c,
)

INPUTS = "inputs"
"""The folder, below the run folder, of what was in memory."""
RUN_CLOSE_S, FUNCTIONS_CLOSE_S = 60.0, 5.0
ASYNC_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to.

    checkpoint: the latest, a Hugging Face folder (with LoRA one of peft), or None; metrics: of the last step;
    evaluations: the oldest first.
    """

    folder: Path
    checkpoint: Path | None
    steps: int
    stop_reason: str
    metrics: dict[str, float]
    evaluations: list[dict[str, Any]]


class Trainer:
    """A run of any algorithm, on this host.

    config: what it does; objects in memory have the names of files that they are written to when they are needed.
    """

    preset: ClassVar[str | None] = None

    def __init__(
        self,
        config: Source = None,
        *,
        actor_model: Any = None,
        reward_model: Any = None,
        cost_model: Any = None,
        tokenizer: Any = None,
        data_provider: Any = None,
        heldout: Any = None,
        device_map: dict[str, Any] | None = None,
        generate_workers: int | None = None,
        reward_workers: int | None = None,
        update_workers: int | None = None,
        run_folder: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Check what can be checked without models, GPUs or data. docs/python.md tells what each argument may be.

        config: a map, YAML file or RunConfig; the other arguments go before it. settings: the config's own keys.
        run_folder: default FOLDER/NAME, or NAME-2, … where it is taken. Raises ConfigError.
        """
        own = {name: value for name, value in locals().items() if name in (*SHORT_KEYS, "tokenizer", "device_map")}
        self._arguments = read_arguments(config, settings | own, self.preset)
        self.config = self._arguments.config(Path(INPUTS), {})
        load_algorithm(self.config.algorithm).check(self.config)
        functions = self._arguments.functions
        self._functions = {
            s.name: Function(s, functions[s.name]) for s in signals_of(self.config) if s.name in functions
        }
        self._folder = None if run_folder is None else Path(run_folder)
        self._aside: Path | None = None
        self._loops: list[Background] = []
        self._run: LocalRun | None = None
        self._ended: Future[Any] = Future()
        self.plan()

    def plan(self) -> list[tuple[str, str]]:
        """What a run would start, as name and text: each process, where it runs and what it computes with.

        Raises ConfigError where the cores are not there.
        """
        config, names = self.config, instances(self.config)
        cores, gpus = plan_cores(config.cores, names, available_cores()), plan_gpus(config.gpus, names)
        length = f"{config.steps} steps" if config.epochs is None else f"{config.epochs} epochs"
        length = f"{length} of {config.prompts_per_step} × {config.samples_per_prompt} samples"
        lines = [("run", length), ("algorithm", config.algorithm.name), ("model", config.model)]
        lines += [(f"signal {s.name}", s.function or s.model or s.server or "") for s in signals_of(config)]
        for name in names:
            where = f"cores {', '.join(map(str, cores[name]))}"
            where += f"; GPUs {', '.join(map(str, gpus[name]))}" if name in gpus else ""
            lines.append((name, where))
        missing = ", ".join(self._arguments.missing)
        return [*lines, ("still missing", missing)] if missing else lines

    def __str__(self) -> str:
        return "\n".join(f"{name:28} {value}" for name, value in self.plan())

    def check(self) -> dict[str, str]:
        """Every value that follows from the arguments, after a check of all that they name. Raises ConfigError."""
        self._require_ready()
        config, facts = self._checked(self._inputs(), dict.fromkeys(self._functions, LOOPBACK))
        return dict(derived(config, facts)) | {f"server of {name}": "this process" for name in self._functions}

    def train(self, *, resume: bool = False, progress: bool = True) -> Result:
        """Run to the end, and tell what came of it.

        resume: go on with the run in `run_folder`, or else the latest of this name, with the prompts that it has.
        Ctrl-C or SIGTERM has the learner save and ends the run, a second one ends it at once; then KeyboardInterrupt is
        raised. Raises StrettoError, with the words of the service that failed.
        """
        with self, sigterm_as_ctrl_c():
            self.start(resume=resume, progress=progress)
            try:
                result = self.wait()
            except KeyboardInterrupt:
                self._view.event(ENDING)
                with contextlib.suppress(StrettoError):
                    self.stop()
                raise
        if progress and result.metrics:
            show_report(console_here(), make_report(result.folder))
        return result

    def start(self, *, resume: bool = False, progress: bool = True) -> Self:
        """Begin a run and return, for `status`, `stop` and `wait`. Raises ConfigError."""
        self._require_ready()
        folder = (resumed_run_folder if resume else new_run_folder)(self.config, self._folder)
        if not resume and self._arguments.objects:
            shutil.copytree(self._inputs(), folder / INPUTS, dirs_exist_ok=True)
        config = self._hosted(folder / INPUTS)
        console = console_here(quiet=not progress)
        console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
        self._view = LiveView(console) if console.is_terminal else PlainView(console)
        self._run = LocalRun(config, folder, on_event=self._view.event)
        self._ended = self._loops[0].submit(follow(self._run, self._view))
        return self

    def wait(self) -> Result:
        """What the run came to, once it has ended. Raises StrettoError where it failed."""
        if self._run is None:
            raise ConfigError("no run was started")
        try:
            self._ended.result()
        except CancelledError:
            raise RunStopped("the run was ended at once; go on with it by train(resume=True)") from None
        status = self.status()
        found = (status[name] for name in ("version", "stop_reason", "metrics", "evaluations"))
        return Result(self._run.folder, self._checkpoint(), *found)

    def status(self) -> dict[str, Any]:
        """How the run stands, as `stretto status --json` tells; the `state` alone where there is no broker to ask."""
        if self._run is None:
            return {"state": "not started"}
        if not self._ended.done():
            try:
                return self._loops[0].call(self._run.status())
            except Unreachable:
                return {"state": "starting"}
        final = self._run.folder / "status.json"
        return dict(json.loads(final.read_text())) if final.is_file() else {"state": "failed"}

    def stop(self) -> Result:
        """End the run in order: the learner saves what it has. Raises StrettoError where the run fails."""
        if self._run is not None and not self._ended.done():
            self._loops[0].call(self._run.drain("stopped"))
        return self.wait()

    def evaluate(self) -> dict[str, Any]:
        """Greedy answers to the held-out prompts and their scores, by the latest checkpoint or else the actor model.

        It starts the services of a run, and ends them before they train. Raises StrettoError.
        """
        self._require_ready()
        if self.config.data.heldout is None:
            raise ConfigError("there are no held-out prompts: give some as `heldout`")
        with self, tempfile.TemporaryDirectory() as folder:
            config = self._hosted(self._inputs())
            if (checkpoint := self._checkpoint()) is not None:
                if config.learner.lora is not None:
                    from services.compute.lora import merge

                    merge(checkpoint, checkpoint := Path(folder) / "merged")
                config = config.model_copy(update={"model": str(checkpoint)})
            return self._loops[0].call(first_evaluation(LocalRun(config, Path(folder))))

    def close(self) -> None:
        """End at once whatever still runs. Safe to call at any time and again."""
        while self._loops:
            self._loops[0].close()
            del self._loops[0]
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_ready(self) -> None:
        if self._arguments.missing:
            raise ConfigError(f"this is no run yet; still missing: {', '.join(self._arguments.missing)}")
        if self._run is not None and not self._ended.done():
            raise ConfigError("the run of this trainer goes on: stop it before another one is started")

    def _inputs(self) -> Path:
        """What is in memory as files, in a folder that is there as long as this trainer."""
        if self._aside is None:
            aside = tempfile.mkdtemp(prefix="stretto-")
            weakref.finalize(self, shutil.rmtree, aside, ignore_errors=True)
            write_inputs(self._arguments.objects, self.config, Path(aside))
            self._aside = Path(aside)
        return self._aside

    def _hosted(self, inputs: Path) -> RunConfig:
        """Answer for the functions from now on; the config of a run that asks them. Raises StrettoError."""
        if self.config.model in MODELS:
            pull(self.config.model)
        self.close()
        self._loops = [
            Background("run", close_s=RUN_CLOSE_S),
            Background("reward functions", close_s=FUNCTIONS_CLOSE_S),
        ]
        atexit.register(self.close)
        for function in self._functions.values():
            function.prepare()
        addresses = host(self._loops[1], [_by_name(function) for function in self._functions.values()])
        return self._checked(inputs, dict(zip(self._functions, addresses, strict=True)))[0]

    def _checked(self, inputs: Path, addresses: dict[str, str]) -> tuple[RunConfig, Facts]:
        """The whole config and what is known of it. Raises ConfigError."""
        servers = {
            # A sample a request, which may take as long as a function's call may.
            name: {"server": address, "batch_size": 1, "concurrency": ASYNC_REQUESTS if function.is_async else 1}
            for (name, function), address in zip(self._functions.items(), addresses.values(), strict=True)
        }
        config = self._arguments.config(inputs, servers)
        config = config.model_copy(update={"model": resolve(config.model)})
        here = len(ResourcePool.here().gpus)
        for service, gpus in config.gpus.items():
            if max(gpus, default=0) >= here:
                raise ConfigError(f"gpus.{service} names GPU {max(gpus)}, and this host has {here}")
        return config, check_run(config, self._functions)

    def _checkpoint(self) -> Path | None:
        """The latest of the run."""
        found = [] if self._run is None else (self._run.folder / "checkpoints").glob("checkpoint-*")
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


class GRPOTrainer(Trainer):
    """A run of GRPO."""

    preset = "grpo"


class PPOTrainer(Trainer):
    """A run of PPO, with a critic."""

    preset = "ppo"


class ReMaxTrainer(Trainer):
    """A run of ReMax."""

    preset = "remax"


class SafeRLHFTrainer(Trainer):
    """A run of Safe RLHF, with costs and two critics."""

    preset = "safe_rlhf"


def _by_name(function: Function) -> Callable[..., Any]:
    return lambda **sample: function.call(sample)
