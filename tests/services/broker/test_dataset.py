"""Reading prompts, and the sentences that name what is wrong with them."""

from __future__ import annotations

import datetime
import json

import pytest

from services.broker.dataset import read_dataset
from shared.errors import DataError

ROWS = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(3)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def contents(dataset):
    return [(dataset.content(i), dataset.fields(i)) for i in range(len(dataset))]


EXPECTED = [(row["prompt"], {"answer": row["answer"]}) for row in ROWS]


def test_jsonl_is_read_in_its_order_and_empty_lines_are_skipped(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text() + "\n\n")
    assert contents(read_dataset(source)) == EXPECTED


def test_parquet_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert contents(read_dataset(str(tmp_path / "rows.parquet"))) == EXPECTED


def test_a_dataset_saved_by_the_datasets_library_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "splits"))
    assert contents(read_dataset(str(tmp_path / "one"))) == EXPECTED
    assert contents(read_dataset(str(tmp_path / "splits"), split="test")) == EXPECTED[1:2]


def test_chat_messages_are_prompts_too(tmp_path):
    chat = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": chat}])
    assert read_dataset(source).content(0) == chat


def test_another_field_can_hold_the_prompt(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"question": "why?", "prompt": 3}])
    assert contents(read_dataset(source, prompt_field="question")) == [("why?", {"prompt": 3})]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ('{"prompt": "a"}\n{"question": "b"}\n', "row 1: no field 'prompt'; it has question"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', "row 1: 'prompt' should be text or a list of messages"),
        ('{"prompt": [{"role": "user"}]}\n', "row 0: 'prompt' should be text or a list of messages"),
        ('{"prompt": [{"role": "user", "content": [1]}]}\n', "row 0: 'prompt' should be text or a list of messages"),
        ('{"prompt": ""}\n', "row 0"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"prompt": "a", "answer": 1%s}\n' % ("0" * 30), "row 0: a field cannot be sent"),
        ('{"prompt": "a\\ud800"}\n', "row 0: a field cannot be sent"),
        ("[1]\n", "line 1: a row is a JSON object, not list"),
    ],
)
def test_a_fault_is_named_with_its_file_and_row(tmp_path, text, sentence):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=sentence) as caught:
        read_dataset(str(tmp_path / "rows.jsonl"))
    assert "rows.jsonl" in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        read_dataset(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(DataError, match=f"cannot read the dataset .*{name}"):
        read_dataset(str(tmp_path / name))


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"cannot read the dataset .*rows\.parquet"):
        read_dataset(str(tmp_path / "rows.parquet"))


def test_a_split_that_is_not_there_is_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="split validation"):
        read_dataset(str(tmp_path / "splits"), split="validation")


def test_a_field_that_cannot_be_sent_is_named_with_its_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "a", "made": datetime.datetime(2026, 1, 1)}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"row 0: a field cannot be sent \(.*datetime"):
        read_dataset(str(tmp_path / "rows.parquet"))
