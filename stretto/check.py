"""`stretto check`: everything that can be known of a run before it starts, without a GPU and without torch."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from services.broker.dataset import Dataset, read_dataset
from services.broker.prompts import first_prompts, total_steps
from services.reward.signals import Function
from services.rollout.vllm.arguments import check as check_vllm
from shared.algorithms import load_algorithm
from shared.config import RunConfig, Signal
from shared.cores import available_cores, plan_cores, plan_gpus
from shared.drift import warn_limit
from shared.errors import ConfigError, StrettoError
from shared.graph import Stage, check_graph
from stretto.launcher import instances, metrics_address
from stretto.memory import count_parameters, policy_memory, role_memory, signal_memory

ROLES = ("reference", "critic", "cost_critic")
PORTS = {"http": 80, "https": 443}
CONNECT_S = 2.0
MODEL_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the checks found.

    parameters: of the model, None where it is not a folder here; so too reward_models, by signal, and role_parameters,
    of the reference and the critics that the algorithm has.
    """

    stages: list[Stage]
    rows: int
    heldout_rows: int
    total_steps: int
    parameters: int | None
    context: int | None
    first_prompt: str
    reward_models: dict[str, int | None]
    role_parameters: dict[str, int | None]


def check_run(config: RunConfig, hosted: Mapping[str, Function] = MappingProxyType({})) -> Facts:
    """Check a config against the files it names. Raises ConfigError with all faults at once, one a line.

    hosted: functions of the caller's own process, by the signals that ask for them.
    """
    faults: list[str] = []

    def attempt(check: Any, *args: Any) -> Any:
        try:
            return check(*args)
        except StrettoError as error:
            faults.append(str(error))
            return None

    algorithm, stages = attempt(load_algorithm, config.algorithm), None
    if algorithm is not None:
        attempt(algorithm.check, config)
        stages = attempt(check_graph, algorithm.stages(config))
        attempt(plan_cores, config.cores, instances(config), available_cores())
        attempt(plan_gpus, config.gpus, instances(config))
    train = attempt(_data, config, config.data.train, config.data.split)
    heldout = attempt(_data, config, config.data.heldout, config.data.heldout_split) if config.data.heldout else None
    model = attempt(_model, config)
    if config.metrics.wandb is not None:
        attempt(_require, "wandb", "metrics.wandb", "wandb")
    if config.rollout.engine == "vllm":
        attempt(check_vllm, config.rollout)
    if config.learner.lora is not None:
        attempt(_require, "peft", "learner.lora", "lora")
    prompt = first_prompts(train, 1)[0] if train is not None else None
    sizes: dict[str, int | None] = {}
    for scoring, before in config.scoring.values():
        for signal in scoring.signals:
            if signal.model is not None:
                sizes[signal.name] = attempt(_reward_model, signal)
                continue
            function = hosted.get(signal.name) or (attempt(Function, signal) if signal.server is None else None)
            if function is not None and prompt is not None:
                attempt(function.check, prompt, before)
    roles = {stage.name: attempt(_role_model, config, stage.name) for stage in stages or () if stage.name in ROLES}
    steps = total_steps(len(train), config.prompts_per_step, config.steps, config.epochs) if train is not None else 0
    if train is not None and steps == 0:
        faults.append(f"{config.data.train} has too few rows for one step of {config.prompts_per_step} prompts")
    if faults:
        raise ConfigError("\n  ".join(["the run cannot start:", *faults]) if len(faults) > 1 else faults[0])
    assert prompt is not None and train is not None and stages is not None
    parameters, context = model
    return Facts(stages, len(train), len(heldout or ()), steps, parameters, context, prompt.text, sizes, roles)


def derived(config: RunConfig, facts: Facts) -> list[tuple[str, str]]:
    """Every value that follows from a config, as name and text."""
    longest = config.sampling.max_tokens
    lines = [
        ("prompts per step", f"{config.prompts_per_step}"),
        ("samples per step", f"{config.samples_per_step} ({config.samples_per_prompt} a prompt)"),
        ("new tokens per step", f"at most {config.samples_per_step * longest} ({longest} a sample)"),
        ("groups in flight", f"at most {config.in_flight_groups} (max_staleness {config.max_staleness})"),
        ("training prompts", f"{facts.rows} in {config.data.train}"),
        ("held-out prompts", f"{min(facts.heldout_rows, config.evaluation.prompts)} of {facts.heldout_rows}"),
        ("first prompt", repr(facts.first_prompt)),
        ("steps", f"{facts.total_steps}"),
        ("epochs", f"{facts.total_steps * config.prompts_per_step / facts.rows:.2f}"),
        ("evaluations", f"{2 + (facts.total_steps - 1) // config.evaluation.every if facts.heldout_rows else 0}"),
        (
            "checkpoints",
            f"each {config.checkpoint.every} versions and the last; {config.checkpoint.keep_last} are kept",
        ),
    ]
    stop = config.learner.drift_stop
    end = "it ends no run" if stop is None else f"the end above {stop:g}"
    lines.append(("log-prob drift", f"a warning above {warn_limit(config):g} nats on average; {end}"))
    lines += [(f"stage {s.name}", f"needs {_names(s.needs)}; provides {_names(s.provides)}") for s in facts.stages]
    cores = plan_cores(config.cores, instances(config), available_cores())
    lines += [(f"cores of {name}", ", ".join(map(str, own))) for name, own in cores.items()]
    gpus = plan_gpus(config.gpus, instances(config))
    lines += [(f"GPUs of {name}", ", ".join(map(str, own))) for name, own in gpus.items()]
    shown = {name: metrics_address(config, name) for name in instances(config)}
    lines += [(f"metrics of {name}", f"http://{address}/metrics") for name, address in shown.items() if address]
    for signal in signals_of(config):
        if signal.model is not None:
            lines.append((f"model of {signal.name}", signal_memory(signal, facts.reward_models[signal.name])))
        if signal.server is not None:
            lines.append((f"server of {signal.name}", _reached(signal.server)))
        if signal.auth_env is not None:
            is_set = "is set" if os.environ.get(signal.auth_env) else "is not set here; the reward service needs it"
            lines.append((f"token of {signal.name}", f"{signal.auth_env} {is_set}"))
    lines += policy_memory(config, facts.parameters)
    return lines + [(f"memory of the {r}", role_memory(config, r, n)) for r, n in facts.role_parameters.items()]


def _reached(address: str) -> str:
    """Whether something listens there, as seen from here; another host may see it otherwise."""
    url = urlsplit(address)
    if url.port == 0:
        return "this process, at a port of its own"
    try:
        socket.create_connection((url.hostname or "", url.port or PORTS[url.scheme]), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{address} cannot be reached from here: {error.strerror or type(error).__name__}"
    return f"{address} can be reached from here"


def _names(columns: frozenset[str]) -> str:
    return ", ".join(sorted(column for column in columns if not column.endswith("_offsets"))) or "nothing"


def _data(config: RunConfig, source: str, split: str) -> Dataset:
    return read_dataset(source, split=split, prompt_field=config.data.prompt_field)


def signals_of(config: RunConfig) -> list[Signal]:
    """All signals of a run: of the reward, the cost, and then of the run's own stages."""
    return [signal for scoring, _ in config.scoring.values() for signal in scoring.signals]


def _require(package: str, setting: str, extra: str) -> None:
    """Raise ConfigError where the package that a setting needs is not there."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{setting} needs {package}, which is not installed: pip install 'stretto[{extra}]'")


def _reward_model(signal: Signal) -> int | None:
    """Parameters of a signal's model, None where it is not a folder here. Raises ConfigError."""
    assert signal.model is not None
    folder, title = Path(signal.model), f"signal {signal.name}"
    if signal.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"{title}: its backend is vllm, which is not installed: pip install 'stretto[vllm]'")
    if signal.dtype == "int8":
        _require("torchao", f"{title}: int8", "int8")
    if not folder.is_dir():
        if folder.is_absolute() or signal.model.startswith(".") or signal.model.count("/") > 1:
            raise ConfigError(f"{title}: there is no model folder {folder}")
        return None
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{title}: {folder} is not a Hugging Face model: it has no config.json")
    settings = json.loads((folder / "config.json").read_text())
    architectures = settings.get("architectures") or ["nothing"]
    if not any("ForSequenceClassification" in name for name in architectures):
        raise ConfigError(
            f"{title}: {folder} is {', '.join(architectures)}, expected a model ForSequenceClassification"
        )
    labels = len(settings.get("id2label") or "ab")  # two where a config does not say
    if signal.label >= labels:
        raise ConfigError(f"{title}: label is {signal.label}, but {folder} has {labels} labels, from 0 on")
    return count_parameters(folder)


def _role_model(config: RunConfig, role: str) -> int | None:
    """Parameters of the model of a reference or critic, None where it is not a folder here. Raises ConfigError."""
    name = config.reference.model if role == "reference" else config.critic_settings(role).model
    folder = Path(name or config.model)
    if name is not None and not folder.is_dir() and (folder.is_absolute() or name.startswith(".")):
        raise ConfigError(f"{role}.model: there is no model folder {folder}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"{role}.model: {folder} is not a Hugging Face model: it has no config.json")
    return count_parameters(folder) if folder.is_dir() else None


def _model(config: RunConfig) -> tuple[int | None, int | None]:
    """Parameters and context of a model folder; nothing is known of a name on a hub."""
    folder = Path(config.model)
    if not folder.is_dir():
        if folder.is_absolute() or config.model.startswith("."):
            raise ConfigError(f"there is no model folder {folder}")
        return None, None
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a Hugging Face model: it has no config.json")
    words = Path(config.tokenizer) if config.tokenizer else folder
    if words.is_dir() and not any((words / name).is_file() for name in MODEL_FILES):
        raise ConfigError(f"the folder {words} has no tokenizer ({MODEL_FILES[0]}); give one with `tokenizer`")
    settings = json.loads((folder / "config.json").read_text())
    context = settings.get("max_position_embeddings")
    if config.rollout.max_context is not None and context is not None and config.rollout.max_context > context:
        raise ConfigError(
            f"rollout.max_context is {config.rollout.max_context}; {folder} was made for {context} tokens"
        )
    return count_parameters(folder), context
