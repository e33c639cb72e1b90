"""What a caller has in memory (prompts, a model) as files that the services read, in `inputs` of the run folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.config import RunConfig
from shared.errors import DataError

FILES = {"model": "model", "tokenizer": "tokenizer", "data.train": "train.jsonl", "data.heldout": "heldout.jsonl"}
"""The settings that may be objects in memory, and the file or folder that each becomes."""


def write_inputs(objects: Mapping[str, Any], config: RunConfig, folder: Path) -> None:
    """Write objects, by their setting, into the folder.

    All rows are written of a source that can be indexed; of any other, a generator say, no more are drawn than the
    run's steps or evaluations take. Raises DataError for what is no row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps = None if config.steps is None else config.steps * config.prompts_per_step
    for key, value in objects.items():
        if key in ("model", "tokenizer"):
            value.save_pretrained(folder / FILES[key])
            continue
        rows = _rows(value() if callable(value) else value, config.data.prompt_field)
        if has_own_order(value):
            rows = itertools.islice(rows, steps if key == "data.train" else config.evaluation.prompts)
        with (folder / FILES[key]).open("w") as lines:
            for number, row in enumerate(rows):
                try:
                    lines.write(json.dumps(row, default=_plain) + "\n")
                except (TypeError, ValueError) as error:
                    raise DataError(f"{key}, row {number}: {error}") from None


def has_own_order(source: Any) -> bool:
    """Whether rows come one after the other, in an order that is kept: those of a list or dataset are shuffled."""
    return not hasattr(source, "__getitem__")


def _rows(item: Any, prompt_field: str) -> Iterator[dict[str, Any]]:
    """The rows of a text, of a map of fields, of a batch as a loader collates it, or of anything that yields these."""
    if isinstance(item, str):
        yield {prompt_field: item}
    elif isinstance(item, Mapping):
        prompts = item.get(prompt_field)
        if isinstance(prompts, list | tuple) and prompts and not isinstance(prompts[0], Mapping):  # no chat: a batch
            yield from (dict(zip(item, values, strict=True)) for values in zip(*item.values(), strict=True))
        else:
            yield dict(item)
    elif hasattr(item, "__iter__"):
        for inner in item:
            yield from _rows(inner, prompt_field)
    else:
        raise DataError(f"a prompt is text or a map of fields, not {type(item).__name__}")


def _plain(value: Any) -> Any:
    """A tensor or array as a number or a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent; text, numbers, lists and maps can")
