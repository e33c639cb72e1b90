"""The journal: what must survive a broker that is killed, in a SQLite file (WAL) of the run folder.

It holds the training groups with their columns, in flight and consumed, until a checkpoint covers them, the order in
which they were consumed, dead letters, and one record of everything else (`state`). Large columns lie in files beside
it (segments.py). Writes are collected while the last ones go to the disk, and committed together, each time with the
state of that moment: the file is always consistent.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgpack

from protocol.codec import columns_from_frames, columns_to_frames
from services.broker.ledger import Entry
from services.broker.segments import Place, Segments
from shared.errors import DataError, StrettoError
from shared.group import Columns, Prompt, TrajectoryGroup

FORMAT = 2
APPLICATION_ID = 0x5374_7274
"""Tells SQLite files of ours from those of others."""
FILE = "journal.sqlite"
WAL_PAGES = 16_384
"""Written (64 MiB) before they are copied into the file and synced, which the group commits wait for."""

_SCHEMA = """
CREATE TABLE state (id INTEGER PRIMARY KEY CHECK (id = 0), value BLOB NOT NULL);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, prompt BLOB NOT NULL, min_version INTEGER NOT NULL,
    admitted_at INTEGER NOT NULL, consumed INTEGER NOT NULL DEFAULT 0, version INTEGER, place INTEGER
);
CREATE INDEX by_version ON groups (version);
CREATE TABLE columns (group_id TEXT NOT NULL, data BLOB NOT NULL, segment INTEGER);
CREATE INDEX by_group ON columns (group_id);
CREATE INDEX by_segment ON columns (segment) WHERE segment IS NOT NULL;
CREATE TABLE dead_letters (group_id TEXT PRIMARY KEY, letter BLOB NOT NULL);
"""

_SEGMENTS = "SELECT DISTINCT segment FROM columns WHERE segment IS NOT NULL"
_ADD_FRAME = "INSERT INTO columns VALUES (?, ?, ?)"

Durability = Literal["normal", "full", "off"]
Statement = tuple[str, tuple[Any, ...]]
T = TypeVar("T")


class Journal:
    """The journal of one run. Used from one event loop; a thread of its own writes the file.

    failure: why nothing more can be written, once that is so. state: gives the plain values that are written with every
    commit, and found again by `saved_state`.
    """

    def __init__(self, file: Path, durability: Durability, state: Callable[[], dict[str, Any]]) -> None:
        """Open the file or begin a new one; with durability `off` nothing is written or found.

        Raises DataError where the file is damaged, not a journal, of a newer format, or in use by another broker.
        """
        self.file = file
        self._state = state
        self._connection = None if durability == "off" else _open(file, durability)
        self._durability = durability
        self._segments = Segments(file)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._queue: list[Statement] = []
        self._written = self._committed = 0
        self._writing: asyncio.Future[None] | None = None
        self.failure: StrettoError | None = None

    # Writing: each call queues what happened; `flush` waits for it to be in the file.

    def admit(self, entry: Entry) -> int:
        """A training group exists. Returns what `flush` takes."""
        group = entry.group
        prompt = msgpack.packb(group.prompt.to_wire())
        row = (entry.number, group.group_id, prompt, group.min_version, entry.admitted_at)
        self._write("INSERT INTO groups VALUES (?, ?, ?, ?, ?, 0, NULL, NULL)", row)
        return self._written

    def complete(self, group_id: str, columns: Columns) -> int:
        """A stage has added these columns to a group; they must not change any more. Returns what `flush` takes."""
        table, frames = columns_to_frames(columns)
        for frame in (msgpack.packb([table, len(frames)]), *frames):
            self._write(_ADD_FRAME, (group_id, frame, None))
        return self._written

    def consume(self, version: int, group_ids: Sequence[str]) -> None:
        """The update that made `version` was made of these groups, in this order."""
        for place, group_id in enumerate(group_ids):
            values = (version, place, group_id)
            self._write("UPDATE groups SET consumed = 1, version = ?, place = ? WHERE group_id = ?", values)

    def remove(self, group_id: str) -> None:
        """A group is gone without having been consumed."""
        self._write("DELETE FROM columns WHERE group_id = ?", (group_id,))
        self._write("DELETE FROM groups WHERE group_id = ?", (group_id,))

    def rewind(self, version: int) -> None:
        """What was consumed after `version` is in flight again."""
        self._write("UPDATE groups SET consumed = 0 WHERE consumed AND version > ?", (version,))

    def prune(self, version: int) -> None:
        """Nobody will ask again for what was consumed up to `version`."""
        covered = "consumed AND version <= ?"
        self._write(f"DELETE FROM columns WHERE group_id IN (SELECT group_id FROM groups WHERE {covered})", (version,))
        self._write(f"DELETE FROM groups WHERE {covered}", (version,))
        self._write(_SEGMENTS, ())

    def bury(self, letter: dict[str, Any]) -> None:
        """A group became a dead letter."""
        self._write("INSERT OR REPLACE INTO dead_letters VALUES (?, ?)", (letter["group_id"], msgpack.packb(letter)))

    def unbury(self, group_id: str) -> None:
        """The prompt of a dead letter was given back."""
        self._write("DELETE FROM dead_letters WHERE group_id = ?", (group_id,))

    def note(self) -> None:
        """The state has changed, and nothing else."""
        self._write("SELECT 1", ())

    def _write(self, statement: str, parameters: tuple[Any, ...]) -> None:
        if self._connection is not None:
            self._queue.append((statement, parameters))
            self._written += 1

    async def flush(self, upto: int | None = None) -> None:
        """Wait until all that was written up to some point is in the file, by default up to now.

        Raises StrettoError where it cannot be written (any more).
        """
        target = self._written if upto is None else upto
        while self._committed < target:
            if self.failure is not None:
                raise self.failure
            if self._writing is None:
                self._writing = asyncio.ensure_future(self._write_out())
            await asyncio.shield(self._writing)

    async def _write_out(self) -> None:
        statements, self._queue = self._queue, []
        upto, state = self._written, msgpack.packb(self._state())
        statements.append(("INSERT OR REPLACE INTO state VALUES (0, ?)", (state,)))
        try:
            await self._in_thread(lambda: self._commit(statements))
            self._committed = upto
        except (sqlite3.Error, OSError) as error:
            self.failure = StrettoError(
                f"the journal {self.file} cannot be written ({error}): make room for it and go on with --resume; what "
                "it held before is intact"
            )
            raise self.failure from None
        finally:
            self._writing = None

    def _commit(self, statements: Iterable[Statement]) -> None:
        assert self._connection is not None
        needed: set[int] | None = None
        with self._connection:
            self._connection.execute("BEGIN")
            for statement, parameters in statements:
                if statement is _ADD_FRAME and isinstance(parameters[1], memoryview):
                    place = self._segments.append(parameters[1])
                    parameters = (parameters[0], place.record, place.segment)
                rows = self._connection.execute(statement, parameters)
                if statement is _SEGMENTS:
                    needed = {number for (number,) in rows}
            if self._durability == "full":
                self._segments.sync()
        if needed is not None:
            self._segments.keep(needed)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    # Reading

    def saved_state(self) -> dict[str, Any] | None:
        """The state of the last commit; None for a new journal. Before anything is written."""
        rows = self._rows("SELECT value FROM state")
        return msgpack.unpackb(rows[0][0], strict_map_key=False) if rows else None

    def in_flight(self) -> list[Entry]:
        """The groups that were not consumed, in the order of their admission. Before anything is written."""
        return self._entries("NOT consumed ORDER BY number")

    def batch(self, version: int) -> list[str]:
        """Ids of the groups that a version consumed, in their order. Before anything is written."""
        return [row[0] for row in self._rows("SELECT group_id FROM groups WHERE version = ? ORDER BY place", version)]

    def dead_letters(self) -> list[dict[str, Any]]:
        """The dead letters, oldest first. Before anything is written."""
        return [msgpack.unpackb(row[0]) for row in self._rows("SELECT letter FROM dead_letters ORDER BY rowid")]

    async def consumed_after(self, version: int) -> list[Entry]:
        """The groups that later versions consumed, in their order."""
        await self.flush()
        return await self._in_thread(lambda: self.read_consumed(version))

    def read_consumed(self, version: int) -> list[Entry]:
        """The same, where nothing is written."""
        return self._entries("consumed AND version > ? ORDER BY version, place", version)

    def _entries(self, condition: str, *parameters: Any) -> list[Entry]:
        fields = "number, group_id, prompt, min_version, admitted_at, version, place"
        entries = []
        for number, group_id, prompt, min_version, admitted_at, version, place in self._rows(
            f"SELECT {fields} FROM groups WHERE {condition}", *parameters
        ):
            columns: Columns = {}
            rows = self._rows("SELECT data, segment FROM columns WHERE group_id = ? ORDER BY rowid", group_id)
            frames = iter(d if segment is None else self._segments.read(Place(segment, d)) for d, segment in rows)
            for first in frames:
                table, n_frames = msgpack.unpackb(first)
                columns |= columns_from_frames(table, [memoryview(frame) for frame in islice(frames, n_frames)])
            prompt = Prompt.from_wire(msgpack.unpackb(prompt, strict_map_key=False))
            group = TrajectoryGroup(group_id, "train", prompt, min_version, columns)
            turn = None if version is None else (version, place)
            entries.append(Entry(group, number, admitted_at, turn=turn))
        return entries

    def _rows(self, query: str, *parameters: Any) -> list[Any]:
        return [] if self._connection is None else self._connection.execute(query, parameters).fetchall()

    def close(self) -> None:
        """Close the file; what was not flushed is not in it."""
        self._thread.shutdown()
        self._segments.close()
        if self._connection is not None:
            self._connection.close()


def _open(file: Path, durability: Durability) -> sqlite3.Connection:
    remedy = "move it away to begin without it, which gives up what was queued, or put a good copy in its place"
    connection = sqlite3.connect(file, timeout=2.0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN IMMEDIATE")  # takes the lock
        connection.execute("COMMIT")
        is_new = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        if not is_new:
            _check(connection, file, remedy)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {durability}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        if is_new:
            connection.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT;"
            )
    except sqlite3.DatabaseError as error:
        connection.close()
        if "locked" in str(error):
            raise DataError(f"the journal {file} is in use: another broker works on this run folder") from None
        raise DataError(f"{file} cannot be read as a journal ({error}): {remedy}") from None
    except DataError:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, file: Path, remedy: str) -> None:
    (application,), (format_,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    if application != APPLICATION_ID:
        raise DataError(f"{file} is not a journal of Stretto but another SQLite file: {remedy}")
    if format_ != FORMAT:
        other = "a newer" if format_ > FORMAT else "an older"
        raise DataError(f"{file} has format {format_}, and this version of Stretto reads {FORMAT}: use {other} version")
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise DataError(f"the journal {file} is damaged ({verdict.splitlines()[-1]}): {remedy}")
