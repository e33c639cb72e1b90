"""The Python of docs/python.md, docs/migration.md and the README works, short of training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stretto
from shared.config import RunConfig
from stretto.arguments import SHORT_KEYS
from stretto.settings import settings_page

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "python" / "grpo.py"
PAGES = ("README.md", "docs/python.md", "docs/migration.md")


def snippets() -> list[tuple[str, str]]:
    """Those that use Trainers, by page and place."""
    found = []
    for page in PAGES:
        texts = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        found += [
            (f"{page} {i}", text)
            for i, text in enumerate(texts)
            if "import stretto" in text or "stretto import" in text
        ]
    return found


@pytest.fixture
def here(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, where the small model by its name is the tiny one."""
    models = tmp_path / "home" / "models"
    models.mkdir(parents=True)
    (models / "smollm2-135m").symlink_to(tiny_model)
    monkeypatch.setenv("STRETTO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("place", "source"), snippets(), ids=[place for place, _ in snippets()])
def test_a_snippet_describes_a_run_that_passes_its_check(place, source, here, monkeypatch):
    monkeypatch.setattr(stretto.Trainer, "train", lambda self, **options: self.check())
    exec(compile(source, place, "exec"), {"__name__": "__main__"})


def test_the_example_is_that_of_the_pages_and_short():
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 12
    for page in ("README.md", "docs/python.md"):
        assert f"```python\n{source}```" in (ROOT / page).read_text()


@pytest.mark.timeout(600)
def test_the_example_trains(here, monkeypatch):
    """The file as it is, with the tiny model and one step."""
    import runpy

    results = []

    class Small(stretto.GRPOTrainer):
        def __init__(self, settings, **arguments):
            super().__init__(settings, **arguments, steps=1, prompts_per_step=2, samples_per_prompt=2, cores="shared")

        def train(self, **options):
            results.append(super().train(**options))

    monkeypatch.setattr(stretto, "GRPOTrainer", Small)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STRETTO_SHM", str(here))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert [result.steps for result in results] == [1]
    assert (here / "runs" / "grpo" / "report.md").is_file()


def test_the_table_of_arguments_has_every_short_key_with_its_setting():
    page = (ROOT / "docs" / "python.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", page, re.MULTILINE)
    assert dict(rows) == SHORT_KEYS | {"tokenizer": "tokenizer"}


def test_the_page_names_what_is_public():
    section = (ROOT / "docs" / "python.md").read_text().partition("## What stays as it is?")[2]
    assert set(stretto.__all__) <= set(re.findall(r"`(\w+)`", section))


def settings_of(cell: str) -> list[str]:
    """What a cell of a table names as settings of a run."""
    return [name for name in re.findall(r"`([a-z_.]+)`", cell) if "." in name or name in ALONE]


ALONE = {*RunConfig.model_fields, *SHORT_KEYS, "tokenizer", "device_map", "run_folder"}


def test_what_the_tables_of_other_trainers_lead_to_exists():
    page = (ROOT / "docs" / "migration.md").read_text()
    cells = re.findall(r"^\| .* \| (.*) \|$", page, re.MULTILINE)
    documented = set(re.findall(r"^\| `([\w.]+)` \|", settings_page(), re.MULTILINE))
    documented |= {*ALONE, *SHORT_KEYS.values(), "algorithm.name"}
    assert len(cells) > 70
    for cell in cells:
        for name in settings_of(cell):
            assert name in documented, f"docs/migration.md names {name}"
        assert settings_of(cell) or cell in ("Stretto", "here", "`train(resume=True)`"), cell
