"""The files of a run folder."""

from __future__ import annotations

import json

from services.broker.runlog import RunLog
from shared.group import Prompt, TrajectoryGroup


def read(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_group_is_written_as_a_person_wants_to_read_it(tmp_path, columns_of):
    prompt = Prompt(3, 1, [{"role": "system", "content": "s"}, {"role": "user", "content": "6·7?"}], {"answer": "42"})
    group = TrajectoryGroup("g1", "train", prompt, 0, columns_of("rollout", 4) | columns_of("reward"))
    RunLog(tmp_path).group(group, 5)
    (record,) = read(tmp_path, "samples")
    assert (record["group"], record["version"], record["row"], record["epoch"]) == ("g1", 5, 3, 1)
    assert (record["prompt"], record["texts"], record["fields"]) == ("6·7?", ["42", "42"], {"answer": "42"})
    assert record["reward_status"] == ["ok", "ok"] and record["finish"] == ["stop", "stop"]
    assert record["versions"] == [[[4, 2]], [[4, 2]]]


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    RunLog(tmp_path).write("metrics", {"loss": float("nan"), "kl": float("inf"), "reward": 1.5})
    assert read(tmp_path, "metrics") == [{"loss": None, "kl": None, "reward": 1.5}]


def test_lines_are_added_to_those_of_an_earlier_run(tmp_path):
    for version in (1, 2):
        log = RunLog(tmp_path)
        log.write("metrics", {"version": version})
        log.close()
    assert read(tmp_path, "metrics") == [{"version": 1}, {"version": 2}]


def test_the_status_is_replaced_as_a_whole(tmp_path):
    log = RunLog(tmp_path)
    log.status({"version": 1, "long": "x" * 1000})
    log.status({"version": 2})
    assert json.loads((tmp_path / "status.json").read_text()) == {"version": 2}
    assert not list(tmp_path.glob("*.partial"))
