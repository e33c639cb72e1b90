"""The arithmetic example holds together; what it learns is seen by running it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.config import load_config
from shared.plugins import load_plugin

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]


def test_no_heldout_sum_is_trained_on():
    train, heldout = ({row["prompt"] for row in rows(name)} for name in ("train", "heldout"))
    assert (len(train), len(heldout), len(train & heldout)) == (377, 64, 0)


def test_the_data_are_what_make_data_writes(tmp_path):
    shutil.copy(EXAMPLE / "make_data.py", tmp_path)
    subprocess.run([sys.executable, str(tmp_path / "make_data.py")], check=True)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()


def test_the_config_is_valid_and_names_files_that_exist():
    config = load_config(EXAMPLE / "config.yaml")
    for path in (config.data.train, config.data.heldout):
        assert path is not None and (ROOT / path).is_file()


@pytest.mark.parametrize(
    ("better", "worse"),
    [("21", "7+15=22"), ("7+15=22", "7 + 15 = 22"), ("7 + 15 = 22", "The sum of 7"), ("The sum of 7", "The sum")],
)
def test_what_is_closer_to_a_bare_number_earns_more(better, worse, monkeypatch):
    monkeypatch.chdir(ROOT)
    near_miss = load_plugin("examples/arithmetic/reward.py:near_miss")
    assert 1 > near_miss(better, answer="22") > near_miss(worse, answer="22")


def test_the_exact_answer_is_left_to_its_own_signal(monkeypatch):
    monkeypatch.chdir(ROOT)
    near_miss = load_plugin("examples/arithmetic/reward.py:near_miss")
    assert near_miss(" 22\n", answer="22") == 0
