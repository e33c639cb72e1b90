"""Loads what users name in a config: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from shared.errors import PluginError


def load_plugin(reference: str) -> Any:
    """The object that `reference` names. Raises PluginError, which says what was not found where."""
    module_name, colon, name = reference.rpartition(":")
    if not colon or not module_name or not name:
        raise PluginError(f"{reference!r} should be package.module:name or path/to/file.py:name")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name)
    try:
        return getattr(module, name)
    except AttributeError:
        public = ", ".join(n for n in vars(module) if not n.startswith("_")) or "nothing"
        raise PluginError(f"{module_name} has no {name!r}; it defines {public}") from None


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise PluginError(f"cannot import {name}: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PluginError(f"there is no file {path} (looked in {Path.cwd()})")
    digest = hashlib.sha1(str(path.resolve()).encode(), usedforsecurity=False).hexdigest()[:8]
    name = f"_plugin_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"cannot load {path}: {type(error).__name__}: {error}") from error
    return module
