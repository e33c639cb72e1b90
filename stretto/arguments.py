"""The arguments of a Trainer as a run config, with what only the caller's memory holds set apart."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.reward.builtin import BUILTINS
from shared.algorithms import PRESETS
from shared.config import RunConfig, parse_config, read_tree
from shared.errors import ConfigError
from stretto.devices import place
from stretto.inputs import FILES, has_own_order

SHORT_KEYS = {
    "actor_model": "model",
    "reference_model": "reference.model",
    "critic_model": "critic.model",
    "reward_model": "reward.signals",
    "cost_model": "cost.signals",
    "data_provider": "data.train",
    "heldout": "data.heldout",
    "generate_workers": "rollout.replicas",
    "reward_workers": "reward.replicas",
    "update_workers": "learner.ranks",
}
"""Arguments with names of their own, and what the config calls them. (`device_map` is for devices.py.)"""
DEFAULTS = {"prompts_per_step": 8, "samples_per_prompt": 8}
STEPS = 100
"""Defaults of what a config file must give."""

Source = Mapping[str, Any] | RunConfig | str | Path | None


@dataclass(frozen=True, slots=True)
class Arguments:
    """tree: the config, of plain values. objects: what is written to files, by setting. functions: by signal.

    missing: the settings that a run needs and nobody gave; the tree has empty ones.
    """

    tree: dict[str, Any]
    objects: dict[str, Any]
    functions: dict[str, Callable[..., Any]]
    missing: list[str]

    def config(self, inputs: Path, servers: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """The config with the files of a folder for objects, and settings of servers in place of functions."""
        tree = copy.deepcopy(self.tree)
        for key in self.objects:
            _put(tree, key, str(inputs / FILES[key]))
        for signal in _signals(tree):
            if signal["name"] in servers:
                for name in ("function", "args"):
                    signal.pop(name, None)
                signal |= servers[signal["name"]]
        return parse_config(tree)


def read_arguments(source: Source, arguments: Mapping[str, Any], preset: str | None) -> Arguments:
    """What a source (map, YAML file, config) and arguments, which go before it, ask for.

    preset: the only algorithm that they may name. Raises ConfigError.
    """
    if isinstance(source, RunConfig):
        source = source.model_dump(mode="json")
    elif isinstance(source, str | Path):
        source = read_tree(source)
    tree = DEFAULTS | _merged(_by_config_keys(source or {}), _by_config_keys(arguments))
    if "steps" not in tree and "epochs" not in tree:
        tree["steps"] = STEPS
    tree["algorithm"] = {"name": preset or "grpo"} | tree.get("algorithm", {})
    algorithm = tree["algorithm"]["name"]
    if preset is not None and algorithm != preset:
        raise ConfigError(f"this trainer is for {preset} alone: use stretto.Trainer for {algorithm}")
    tree.setdefault("name", re.sub(r"[^\w.-]+", "-", algorithm, flags=re.ASCII))
    functions = {}
    for signal in _signals(tree):
        if callable(function := signal.get("function")):
            functions[signal.get("name", "")] = function
            signal["function"] = f"{getattr(function, '__module__', '')}:{_name(function)}"
    place(tree.pop("device_map", {}), tree)
    objects = _set_objects_apart(tree)
    return Arguments(tree, objects, functions, _fill_in(tree, algorithm))


def _by_config_keys(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the config's own keys, without what is None."""
    known = [*SHORT_KEYS, "device_map", *RunConfig.model_fields]
    tree: dict[str, Any] = {}
    for name, value in sorted(arguments.items(), key=lambda item: item[0] in SHORT_KEYS):  # the sections first
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or known
            raise ConfigError(f"{name}: unknown argument; did you mean {' or '.join(near)}?")
        key = SHORT_KEYS.get(name, name)
        if value is None or (isinstance(value, str) and not value):
            continue
        if name in SHORT_KEYS and _get(tree, key) is not None:
            raise ConfigError(f"{name} and {key} are one setting: give it once")
        if key.endswith(".signals"):
            value = read_signals(value, name)
        elif key == "algorithm" and isinstance(value, str):
            value = {"name": value}
        _put(tree, key, value if name in SHORT_KEYS else _merged({}, value))
    return tree


def read_signals(value: Any, argument: str) -> list[dict[str, Any]]:
    """The signals of a source, of a list of sources or of a map of them by name; (source, weight) is one, too."""
    if isinstance(value, Mapping) and not {"function", "model", "server"} & value.keys():
        return [_signal(source, argument) | {"name": name} for name, source in value.items()]
    signals: dict[str, dict[str, Any]] = {}
    for source in value if isinstance(value, list) else [value]:
        signal = _signal(source, argument)
        name = signal.get("name") or _name(signal.get("function"))
        name = name if re.fullmatch(r"[a-z][a-z0-9_]*", name) else argument.removesuffix("_model")
        name = name if name not in signals else f"{name}_{len(signals) + 1}"
        signals[name] = signal | {"name": name}
    return list(signals.values())


def _signal(source: Any, argument: str) -> dict[str, Any]:
    match source:
        case Mapping():
            return dict(source)
        case (inner, int() | float() as weight):
            return _signal(inner, argument) | {"weight": weight}
        case str() | Path():
            text = str(source)
            is_server = re.match(r"tcp://|https?://", text)
            return {"server" if is_server else "function" if text in BUILTINS or ":" in text else "model": text}
    if not callable(source) or hasattr(source, "save_pretrained"):
        raise ConfigError(
            f"{argument} is a {type(source).__name__}, expected a function, the name or folder of a model, the address "
            "of a server, (one of these, weight), or a list or map of them"
        )
    return {"function": source}


def _set_objects_apart(tree: dict[str, Any]) -> dict[str, Any]:
    objects = {}
    for key, file in FILES.items():
        value = _get(tree, key)
        if value is None or isinstance(value, str):
            continue
        if isinstance(value, Path):
            _put(tree, key, str(value))
            continue
        if key in ("model", "tokenizer") and not hasattr(value, "save_pretrained"):
            raise ConfigError(
                f"the {key} is a {type(value).__name__}, expected a name, a folder or one of transformers"
            )
        if key == "data.train" and has_own_order(value):
            tree["data"].setdefault("shuffle", False)
            if "steps" not in tree and not hasattr(value, "__len__"):
                raise ConfigError("the prompts come without their number, which may be endless: give `steps`")
        objects[key] = value
        _put(tree, key, file)
    if "model" in objects and not tree.get("tokenizer"):
        raise ConfigError("a model in memory has no tokenizer with it: give that as `tokenizer`")
    return objects


def _fill_in(tree: dict[str, Any], algorithm: str) -> list[str]:
    """Put empty settings where a run needs some and has none; returns which."""
    empty: dict[str, Any] = {"model": "", "data.train": "", "reward.signals": [{"name": "reward", "model": ""}]}
    if algorithm in PRESETS and PRESETS[algorithm].uses_costs:
        empty["cost.signals"] = [{"name": "cost", "model": ""}]
    missing = [key for key in empty if not _get(tree, key)]
    for key in missing:
        _put(tree, key, empty[key])
    return missing


def _signals(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    stages = [tree.get("reward"), tree.get("cost"), *(tree.get("stages") or ())]
    return [s for stage in stages if isinstance(stage, dict) for s in stage.get("signals") or () if isinstance(s, dict)]


def _name(function: Any) -> str:
    """What a function, or the one that a text names, is called."""
    text = function.rpartition(":")[2] if isinstance(function, str) else getattr(function, "__name__", "")
    return text or type(function).__name__


def _merged(below: Any, above: Any) -> Any:
    """Sections merged, as copies; of anything else the one above."""
    if isinstance(above, list):
        return [_merged({}, value) for value in above]
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _merged(below.get(key, {}), value) for key, value in above.items()}


def _get(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for name in sections:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{name} should be a map of settings, not {tree!r}")
    tree[last] = value
