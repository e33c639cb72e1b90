"""Reads prompts: JSONL, Parquet, or a Hugging Face dataset by its path or name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack

from shared.errors import ConfigError, DataError


class Dataset:
    """Rows in the order of their file. Each row is a map with a prompt (text or chat messages) and other fields."""

    def __init__(self, rows: list[dict[str, Any]], source: str, prompt_field: str) -> None:
        """Raises DataError where there is no row, or a row has no proper prompt or values that cannot be sent."""
        if not rows:
            raise DataError(f"the dataset {source} is empty")
        for number, row in enumerate(rows):
            _check_prompt(row, number, source, prompt_field)
            _check_plain(row, number, source)
        self._rows = rows
        self._prompt_field = prompt_field

    def __len__(self) -> int:
        return len(self._rows)

    def content(self, row: int) -> str | list[dict[str, str]]:
        """The prompt of a row."""
        content: str | list[dict[str, str]] = self._rows[row][self._prompt_field]
        return content

    def fields(self, row: int) -> dict[str, Any]:
        """The other fields of a row."""
        return {name: value for name, value in self._rows[row].items() if name != self._prompt_field}


def read_dataset(source: str, *, split: str = "train", prompt_field: str = "prompt") -> Dataset:
    """The dataset at a path or of a name.

    Raises DataError, naming file and row, where it is missing, empty or malformed.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        rows = _read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        rows = _read_hugging_face(source, split)
    return Dataset(rows, source, prompt_field)


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_json_row(line, path, number))
    except OSError as error:
        raise DataError(f"cannot read the dataset {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"the dataset {path} is not UTF-8 text") from None
    return rows


def _json_row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: a row is a JSON object, not {type(row).__name__}")
    return row


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read the dataset {path}: {str(error).splitlines()[0]}") from None
    return rows


def _read_hugging_face(source: str, split: str) -> list[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"to read {source} as a Hugging Face dataset: pip install 'stretto[cpu]'") from None
    try:
        if (Path(source) / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(source)[split]
        elif (Path(source) / "dataset_info.json").is_file():
            found = datasets.load_from_disk(source)
        else:
            found = datasets.load_dataset(source, split=split)
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"cannot read the dataset {source} (split {split}): {reason}") from None
    return [dict(row) for row in found]


def _check_prompt(row: dict[str, Any], number: int, source: str, prompt_field: str) -> None:
    content = row.get(prompt_field)
    if isinstance(content, str) and content:
        return
    if content is None:
        raise DataError(f"{source}, row {number}: no field {prompt_field!r}; it has {', '.join(row) or 'nothing'}")
    chat = isinstance(content, list) and content
    if not chat or not all(isinstance(m, dict) and _is_text(m, "role") and _is_text(m, "content") for m in content):
        raise DataError(
            f"{source}, row {number}: {prompt_field!r} should be text or a list of messages with role and content"
        )


def _check_plain(row: dict[str, Any], number: int, source: str) -> None:
    """Rows travel as msgpack and are written down as JSON; what either cannot hold is found before the run begins."""
    try:
        msgpack.packb(row)
        json.dumps(row)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{source}, row {number}: a field cannot be sent ({error}); text, numbers of 64 bits, lists and maps can"
        ) from None


def _is_text(message: dict[str, Any], name: str) -> bool:
    return isinstance(message.get(name), str)
