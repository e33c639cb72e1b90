"""The documentation says what is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from services.page import metric_name
from shared.algorithms import PRESETS
from stretto.settings import settings_page

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    ROOT / "protocol/SPEC.md",
]


def test_the_page_of_settings_is_what_the_command_prints():
    assert (ROOT / "docs" / "config.md").read_text() == settings_page(), "run: stretto settings > docs/config.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page} links to {target}"


def test_every_message_is_in_the_specification():
    from protocol.messages import BODIES

    text = (ROOT / "protocol" / "SPEC.md").read_text()
    inner = {"leased_group", "round"}
    assert not [name for name in BODIES if name not in inner and f"`{name}`" not in text]


def test_every_figure_of_a_version_has_its_metric(documented_metrics):
    text = (ROOT / "docs" / "metrics.md").read_text()
    table = text[text.index("## Each version") : text.index("## Of the weights")]
    figures = [f for row in re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE) for f in re.findall(r"`([\w/]+)`", row)]
    assert len(figures) > 50
    assert not [figure for figure in figures if f"stretto_step_{metric_name(figure)[0]}" not in documented_metrics]


def code_lines(source: str) -> int:
    """Lines without blank ones, comments and docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and i not in documented for i, line in lines)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_table_of_presets_has_their_lines(preset):
    source = (ROOT / "shared" / "algorithms" / f"{preset}.py").read_text()
    (row,) = re.findall(rf"^\| `{preset}` \|.*$", (ROOT / "docs" / "algorithms.md").read_text(), re.MULTILINE)
    assert row.endswith(f"| {len(source.splitlines())} ({code_lines(source)}) |")


def test_the_worked_algorithm_is_its_file_and_short():
    source = (ROOT / "examples" / "own_algorithm" / "opo.py").read_text()
    assert f"```python\n{source}```" in (ROOT / "docs" / "algorithms.md").read_text()
    assert len(source.splitlines()) <= 40
