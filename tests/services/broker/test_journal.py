"""The journal alone: what was flushed is found again, and a file that is not one is refused."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from services.broker import segments
from services.broker.journal import FORMAT, Journal
from services.broker.ledger import Entry
from shared.errors import DataError, StrettoError
from shared.group import Prompt, TrajectoryGroup

ROOT = Path(__file__).parents[3]


def entry(number, columns=None):
    prompt = Prompt(number, 1, [{"role": "user", "content": "1+1"}], {"answer": "2"})
    return Entry(TrajectoryGroup(f"g{number:08d}", "train", prompt, 3, columns or {}), number, 4)


def open_journal(folder, state=None, durability="normal"):
    return Journal(folder / "journal.sqlite", durability, lambda: state or {"version": 1})


def equal(one, other):
    assert (one.group.group_id, one.group.prompt, one.group.min_version) == (
        other.group.group_id,
        other.group.prompt,
        other.group.min_version,
    )
    assert (one.number, one.admitted_at, one.turn) == (other.number, other.admitted_at, other.turn)
    assert one.group.columns.keys() == other.group.columns.keys()
    for name, array in one.group.columns.items():
        found = other.group.columns[name]
        assert array.dtype == found.dtype and array.shape == found.shape and array.tobytes() == found.tobytes()


async def test_groups_are_found_again_with_every_column(tmp_path, columns_of):
    journal = open_journal(tmp_path, {"version": 7, "returned": [[1, 2]]})
    entries = [entry(i) for i in range(3)]
    for one in entries:
        journal.admit(one)
        for stage in ("rollout", "reward")[: one.number]:
            columns = columns_of(stage)
            one.group.columns |= columns
            journal.complete(one.group.group_id, columns)
    await journal.flush()
    journal.close()
    again = open_journal(tmp_path)
    assert again.saved_state() == {"version": 7, "returned": [[1, 2]]}
    for one, other in zip(entries, again.in_flight(), strict=True):
        equal(one, other)
    again.close()


async def test_consumed_groups_are_given_back_in_their_order_until_a_checkpoint_covers_them(tmp_path):
    journal = open_journal(tmp_path)
    for number in range(6):
        journal.admit(entry(number))
        journal.complete(f"g{number:08d}", {"x": np.full(2, number)})
    journal.consume(1, ["g00000003", "g00000001"])
    journal.consume(2, ["g00000004", "g00000000"])
    journal.remove("g00000005")
    after = await journal.consumed_after(0)
    assert [(e.number, e.turn) for e in after] == [(3, (1, 0)), (1, (1, 1)), (4, (2, 0)), (0, (2, 1))]
    assert [int(e.group.columns["x"][0]) for e in after] == [3, 1, 4, 0]
    journal.rewind(1)
    await journal.flush()
    assert [(e.number, e.turn) for e in journal.in_flight()] == [(0, (2, 1)), (2, None), (4, (2, 0))]
    assert [e.number for e in await journal.consumed_after(0)] == [3, 1]
    journal.prune(1)
    await journal.flush()
    assert await journal.consumed_after(0) == []
    journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection:
        assert connection.execute("SELECT count(*) FROM groups").fetchone() == (3,)
        assert connection.execute("SELECT count(*) FROM columns").fetchone() == (6,)


async def test_dead_letters_are_kept_until_they_are_given_back(tmp_path):
    journal = open_journal(tmp_path)
    for name in ("b", "a"):
        journal.bury({"group_id": name, "errors": ["x"]})
    await journal.flush()
    assert [letter["group_id"] for letter in journal.dead_letters()] == ["b", "a"]
    journal.unbury("b")
    await journal.flush()
    assert journal.dead_letters() == [{"group_id": "a", "errors": ["x"]}]
    journal.close()


async def test_writes_that_come_while_others_go_to_the_disk_are_committed_together(tmp_path):
    journal = open_journal(tmp_path)
    commits = []
    commit = journal._commit
    journal._commit = lambda statements: (commits.append(len(statements)), commit(statements))[1]
    flushes = []
    for number in range(50):
        journal.admit(entry(number))
        flushes.append(journal.flush())
    for flush in flushes:
        await flush
    assert len(commits) == 1 and commits[0] == 51  # and the state
    journal.close()


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = [{here!r}]
from test_journal import entry, open_journal

async def main():
    numbers = []
    journal = open_journal(Path({folder!r}), numbers_state := {{"flushed": numbers}})
    for number in range(100_000):
        journal.admit(entry(number))
        numbers[:] = [number]
        await journal.flush()
        print(number, flush=True)

asyncio.run(main())
"""


def test_a_kill_loses_nothing_that_was_flushed(tmp_path):
    script = KILLED.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stdout:
            if int(line) == 200:
                process.send_signal(signal.SIGKILL)
                break
        flushed = max([200, *(int(line) for line in process.stdout)])
    journal = open_journal(tmp_path)
    numbers = [e.number for e in journal.in_flight()]
    assert numbers == list(range(len(numbers))) and len(numbers) > flushed
    assert journal.saved_state() == {"flushed": [numbers[-1]]}
    journal.close()


async def test_a_full_disk_is_one_clear_error_and_what_was_flushed_stays(tmp_path):
    journal = open_journal(tmp_path)
    journal.admit(entry(0))
    await journal.flush()
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    for number in range(1, 65):
        journal.admit(entry(number))
        journal.complete(f"g{number:08d}", {"x": np.zeros(1 << 10)})
    for _ in range(2):
        with pytest.raises(StrettoError, match=r"cannot be written \(database or disk is full\): make room"):
            await journal.flush()
    journal.close()
    again = open_journal(tmp_path)
    assert [e.number for e in again.in_flight()] == [0]
    again.close()


async def test_no_room_for_a_large_column_is_the_same_error(tmp_path):
    journal = open_journal(tmp_path)
    journal.admit(entry(0))
    journal.complete("g00000000", {"x": np.arange(1 << 16)})
    await journal.flush()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        journal.admit(entry(1))
        journal.complete("g00000001", {"x": np.arange(1 << 18)})
        with pytest.raises(StrettoError, match=r"cannot be written \(.*File too large\): make room"):
            await journal.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.close()
    again = open_journal(tmp_path)
    (left,) = again.in_flight()
    assert left.group.columns["x"].tolist() == list(range(1 << 16))
    again.close()


def segments_in(folder):
    return sorted(path.name for path in folder.glob("journal-*.columns"))


async def test_large_columns_lie_in_files_that_go_with_the_last_group_in_them(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 2 << 20)
    large = {"x": np.arange(1 << 17), "y": np.ones(3, dtype="f4")}
    journal = open_journal(tmp_path)
    for number in range(5):
        journal.admit(entry(number))
        journal.complete(f"g{number:08d}", {name: array + number for name, array in large.items()})
    await journal.flush()
    assert segments_in(tmp_path) == [f"journal-00000{n}.columns" for n in (1, 2, 3)]
    journal.close()
    journal = open_journal(tmp_path)
    for number, found in enumerate(journal.in_flight()):
        for name, array in large.items():
            assert np.array_equal(found.group.columns[name], array + number)
    journal.admit(entry(5))
    journal.complete("g00000005", large)
    journal.consume(1, ["g00000000", "g00000001", "g00000002"])
    journal.prune(1)
    await journal.flush()
    assert segments_in(tmp_path) == [f"journal-00000{n}.columns" for n in (2, 3, 4)]
    journal.close()


async def test_a_damaged_file_of_large_columns_is_refused(tmp_path):
    journal = open_journal(tmp_path)
    journal.admit(entry(0))
    journal.complete("g00000000", {"x": np.arange(1 << 14)})
    await journal.flush()
    journal.close()
    file = tmp_path / "journal-000001.columns"
    for damage, message in (
        (lambda: file.write_bytes(file.read_bytes()[:-1]), "is damaged: put a good copy"),
        (file.unlink, "cannot be read .No such file or directory.: put a good copy"),
    ):
        damage()
        again = open_journal(tmp_path)
        with pytest.raises(DataError, match=message):
            again.in_flight()
        again.close()


async def test_without_durability_nothing_is_written_and_nothing_is_waited_for(tmp_path):
    journal = open_journal(tmp_path, durability="off")
    journal.admit(entry(0))
    await journal.flush()
    assert journal.saved_state() is None and await journal.consumed_after(0) == []
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_two_brokers_never_share_a_journal(tmp_path):
    journal = open_journal(tmp_path)
    with pytest.raises(DataError, match="in use: another broker works on this run folder"):
        open_journal(tmp_path)
    journal.close()


def damage_header(file):
    file.write_bytes(b"not a database" * 1000)


def damage_page(file):
    data = bytearray(file.read_bytes())
    data[4096:8192] = os.urandom(4096)
    file.write_bytes(data)


def truncate(file):
    file.write_bytes(file.read_bytes()[: 2 * 4096 + 100])


def foreign(file):
    file.unlink()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE people (name TEXT)")


def newer(file):
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
        connection.commit()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_header, r"cannot be read as a journal .*: move it away"),
        (damage_page, r"(damaged|cannot be read as a journal) .*: move it away"),
        (truncate, r"(damaged|cannot be read as a journal) .*: move it away"),
        (foreign, r"is not a journal of Stretto but another SQLite file: move it away"),
        (newer, rf"has format {FORMAT + 1}, and this version of Stretto reads {FORMAT}: use a newer version"),
    ],
)
async def test_what_is_not_a_whole_journal_of_this_format_is_refused_and_left_as_it_is(tmp_path, damage, message):
    journal = open_journal(tmp_path)
    for number in range(200):
        journal.admit(entry(number))
    await journal.flush()
    journal.close()
    file = tmp_path / "journal.sqlite"
    damage(file)
    before = file.read_bytes()
    with pytest.raises(DataError, match=message):
        open_journal(tmp_path)
    assert file.read_bytes() == before
