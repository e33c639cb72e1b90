"""`stretto settings`: every setting with its default and its meaning, from the config's own descriptions."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shared.algorithms import PRESETS, Algorithm
from shared.config import RunConfig, Section

HEAD = """# Settings

A run is one YAML file. Unknown keys are errors, and `stretto check` prints every value that follows from a config.
Any key can be overridden on the command line: `stretto train run.yaml learner.lr=1e-5 data.system='Be brief.'`.

This page is what `stretto settings` prints.
"""


def settings_page() -> str:
    """All settings as a Markdown page."""
    parts = [HEAD, *_section("The run", "", RunConfig)]
    for name, field in RunConfig.model_fields.items():
        section = _section_of(field)
        if section is not None and name != "algorithm":
            what = field.description or (section.__doc__ or "").splitlines()[0].rstrip(".").lower()
            parts += _section(f"`{name}`: {what}", name, section)
    common = Algorithm.model_fields
    parts += ["\n## `algorithm`: settings of all\n", *_table([_row(f"algorithm.{n}", f) for n, f in common.items()])]
    for preset, algorithm in PRESETS.items():
        own = {n: f for n, f in algorithm.model_fields.items() if n not in common or f.default != common[n].default}
        rows = [_row(f"algorithm.{n}", f, common[n].description if n in common else None) for n, f in own.items()]
        parts += [f"\n## `algorithm: {preset}`\n", *(_table(rows) if rows else ["As above."])]
    return "\n".join(parts) + "\n"


def _section(title: str, path: str, section: type[Section]) -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        inner = _section_of(field)
        if inner is None:
            rows.append(_row(f"{path}.{name}" if path else name, field))
        elif path:
            rows += [_row(f"{path}.{name}.{key}", value) for key, value in inner.model_fields.items()]
    return [f"\n## {title}\n", *_table(rows)]


def _table(rows: list[str]) -> list[str]:
    return ["| setting | default | meaning |", "|---|---|---|", *rows]


def _row(name: str, field: FieldInfo, meaning: str | None = None) -> str:
    """meaning: where the field does not tell its own."""
    default = field.get_default(call_default_factory=True, validated_data={})
    shown = "required" if default is PydanticUndefined else f"`{_plain(default)}`"
    meaning = field.description or meaning or ""
    if choices := _choices(field.annotation):
        meaning = f"{meaning}{': ' if meaning else ''}one of {', '.join(f'`{choice}`' for choice in choices)}"
    return f"| `{name}` | {shown} | {meaning} |"


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _choices(annotation: Any) -> list[str]:
    """The texts that a field of a few allowed values takes."""
    arguments = get_args(annotation)
    if arguments and all(isinstance(argument, str) for argument in arguments):
        return list(arguments)
    return []


def _section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, also where it may be empty or holds several."""
    candidates = [field.annotation, *get_args(field.annotation)]
    for candidate in candidates:
        if get_origin(candidate) is None and isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
