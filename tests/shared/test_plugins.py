"""Loading what a config names."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import PluginError
from shared.plugins import load_plugin


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text(text)
    return file


def test_an_object_is_found_in_a_module_and_in_a_file(tmp_path: Path) -> None:
    import json

    assert load_plugin("json:dumps") is json.dumps
    assert load_plugin(f"{written(tmp_path, 'answer = 42')}:answer") == 42


def test_a_file_is_run_once_however_often_it_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, "class One: ...\nclass Two: ...\n")
    one = load_plugin(f"{file}:One")
    assert load_plugin(f"{file}:Two").__module__ == one.__module__
    assert load_plugin(f"{file}:One") is one


def test_two_files_of_one_name_do_not_get_mixed_up(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, f"name = {folder!r}")
    assert [load_plugin(f"{tmp_path / folder}/mine.py:name") for folder in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize("reference", ["json", "json:", ":dumps", ""])
def test_a_reference_without_two_parts_is_refused_with_the_right_form(reference: str) -> None:
    with pytest.raises(PluginError, match=r"package\.module:name"):
        load_plugin(reference)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, "def score(): ...\n_hidden = 1\n")
    with pytest.raises(PluginError, match="has no 'scor'; it defines score"):
        load_plugin(f"{file}:scor")
    with pytest.raises(PluginError, match=r"there is no file nowhere\.py"):
        load_plugin("nowhere.py:score")
    with pytest.raises(PluginError, match="cannot import no_such_module"):
        load_plugin("no_such_module:score")


def test_a_file_that_fails_is_refused_with_its_error_and_may_be_mended(tmp_path: Path) -> None:
    file = written(tmp_path, "1 / 0")
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        load_plugin(f"{file}:score")
    file.write_text("score = 1")
    assert load_plugin(f"{file}:score") == 1
