"""Measurements in one SQLite file, which runs and models share.

Every measurement is one transaction, so that a process may be killed at any moment: what was
recorded stays, and the next run goes on from there. A measurement is claimed before it starts; one
that ended its process twice is recorded as failed, so that no run meets it for ever.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from autopar.costs.profiles import LinkKey, LinkRecord, Machine, OpRecord, Profile, Timing
from autopar.errors import InputError
from autopar.ir.collective import CollectiveOp

VERSION = 2
MOST_ATTEMPTS = 2
FATAL = f"ended the process {MOST_ATTEMPTS} times while it was measured"

_APPLICATION = 0x61757450
"""SQLite's `application_id` of these files."""

_MAGIC = b"SQLite format 3\0"
_WAIT_S = 30.0

_SAME_LINK = "op = ? AND ranks = ? AND level = ? AND packed = ? AND nbytes = ?"

_SCHEMA = f"""
BEGIN;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {VERSION};
CREATE TABLE machines (
    id INTEGER PRIMARY KEY, device TEXT, row TEXT, kind TEXT, driver TEXT, torch TEXT,
    cores INTEGER, UNIQUE (device, driver, torch, cores));
CREATE TABLE ops (
    machine INTEGER REFERENCES machines, key TEXT, family TEXT, extents TEXT, work REAL,
    attempts INTEGER, state TEXT, reason TEXT, forward TEXT, backward TEXT,
    PRIMARY KEY (machine, key));
CREATE TABLE links (
    machine INTEGER REFERENCES machines, op TEXT, ranks INTEGER, level TEXT, packed INTEGER,
    nbytes INTEGER, attempts INTEGER, state TEXT, reason TEXT, time TEXT,
    PRIMARY KEY (machine, op, ranks, level, packed, nbytes));
COMMIT;
"""


class Database:
    """The measurements of one machine in a file; other machines' may be in it too.

    Raises InputError where the file is something else, of another version, or broken.
    """

    def __init__(self, path: Path | str, machine: Machine) -> None:
        self.path = Path(path)
        self._connection = _connect(self.path, create=True)
        with _explained(self.path), self._connection:
            fields = (machine.device, machine.driver, machine.torch, machine.cores)
            self._connection.execute(
                "INSERT OR IGNORE INTO machines (device, driver, torch, cores, row, kind) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*fields, machine.row, machine.kind),
            )
            found = self._connection.execute(
                "SELECT id FROM machines WHERE (device, driver, torch, cores) = (?, ?, ?, ?)",
                fields,
            )
            self._machine: int = found.fetchone()[0]

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def op_reasons(self) -> dict[str, str]:
        """Every op that has a record, with the reason it has no times; empty where it has."""
        rows = self._read("SELECT key, reason FROM ops WHERE machine = ? AND state = 'done'")
        return dict(rows)

    def links_done(self) -> set[LinkKey]:
        """The collectives that have a record."""
        rows = self._read(
            "SELECT op, ranks, level, packed, nbytes FROM links WHERE machine = ? "
            "AND state = 'done'"
        )
        return {_link_key(row) for row in rows}

    def claim_op(self, record: OpRecord) -> bool:
        """Note that an op is about to be measured. False where it has ended too many processes,
        which is then recorded."""
        return self._claim("ops", "key = ?", (record.key,), lambda: self._put_op(record, "claimed"))

    def claim_link(self, key: LinkKey) -> bool:
        """As `claim_op`, of a collective."""
        record = LinkRecord(key=key)
        return self._claim(
            "links", _SAME_LINK, _link_row(key), lambda: self._put_link(record, "claimed")
        )

    def release_op(self, record: OpRecord) -> None:
        """Take a claim back: the measurement was broken off on purpose."""
        self._release("ops", "key = ?", (record.key,))

    def release_link(self, key: LinkKey) -> None:
        """As `release_op`, of a collective."""
        self._release("links", _SAME_LINK, _link_row(key))

    def _release(self, table: str, where: str, values: tuple[Any, ...]) -> None:
        with _explained(self.path), self._connection:
            self._connection.execute(
                f"UPDATE {table} SET attempts = attempts - 1 WHERE machine = ? AND {where}",
                (self._machine, *values),
            )

    def add_op(self, record: OpRecord) -> None:
        """Keep the times of an op, or the reason it has none; replaces what was known of it."""
        with _explained(self.path), self._connection:
            self._put_op(record, "done")

    def add_link(self, record: LinkRecord) -> None:
        """Keep the time of a collective, or the reason it has none."""
        with _explained(self.path), self._connection:
            self._put_link(record, "done")

    def add(self, profile: Profile) -> None:
        """Keep all records of a profile of this machine, all or none."""
        with _explained(self.path), self._connection:
            for op in profile.ops.values():
                self._put_op(op, "done")
            for link in profile.links.values():
                self._put_link(link, "done")

    def _claim(
        self, table: str, where: str, values: tuple[Any, ...], put: Callable[[], None]
    ) -> bool:
        with _explained(self.path), self._connection:
            put()
            found = (self._machine, *values)
            where = f"machine = ? AND {where}"
            self._connection.execute(
                f"UPDATE {table} SET attempts = attempts + 1 WHERE {where}", found
            )
            attempts: int = self._connection.execute(
                f"SELECT attempts FROM {table} WHERE {where}", found
            ).fetchone()[0]
            if attempts <= MOST_ATTEMPTS:
                return True
            self._connection.execute(
                f"UPDATE {table} SET state = 'done', reason = ? WHERE {where}", (FATAL, *found)
            )
            return False

    def _put_op(self, record: OpRecord, state: str) -> None:
        self._connection.execute(
            "INSERT INTO ops (machine, key, family, extents, work, attempts, state, reason, "
            "forward, backward) VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, ?) "
            "ON CONFLICT (machine, key) DO UPDATE SET state = excluded.state, "
            "reason = excluded.reason, forward = excluded.forward, backward = excluded.backward",
            (
                self._machine,
                record.key,
                record.family,
                json.dumps(record.extents),
                record.work,
                state,
                record.reason,
                _timing_text(record.forward),
                _timing_text(record.backward),
            ),
        )

    def _put_link(self, record: LinkRecord, state: str) -> None:
        self._connection.execute(
            "INSERT INTO links (machine, op, ranks, level, packed, nbytes, attempts, state, "
            "reason, time) VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?) "
            "ON CONFLICT (machine, op, ranks, level, packed, nbytes) DO UPDATE SET "
            "state = excluded.state, reason = excluded.reason, time = excluded.time",
            (
                self._machine,
                *_link_row(record.key),
                state,
                record.reason,
                _timing_text(record.time),
            ),
        )

    def _read(self, statement: str) -> list[Any]:
        with _explained(self.path):
            return self._connection.execute(statement, (self._machine,)).fetchall()


def is_database(path: Path | str) -> bool:
    """Whether a file begins as SQLite files do. Raises InputError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def read_database(path: Path | str) -> tuple[Profile, ...]:
    """What a file holds, one profile per machine, in the order of machines.

    Raises InputError where the file is missing, something else, of another version, or broken.
    """
    path = Path(path)
    connection = _connect(path, create=False)
    try:
        with _explained(path):
            machines = connection.execute(
                "SELECT id, device, row, kind, driver, torch, cores FROM machines"
            ).fetchall()
            found = [
                Profile(
                    machine=Machine(
                        device=row[1],
                        row=row[2],
                        kind=row[3],
                        driver=row[4],
                        torch=row[5],
                        cores=row[6],
                    ),
                    ops=_ops(connection, row[0]),
                    links=_links(connection, row[0]),
                )
                for row in machines
            ]
    finally:
        connection.close()
    return tuple(sorted(found, key=lambda profile: profile.machine))


def _ops(connection: sqlite3.Connection, machine: int) -> dict[str, OpRecord]:
    rows = connection.execute(
        "SELECT key, family, extents, work, reason, forward, backward FROM ops "
        "WHERE machine = ? AND state = 'done' ORDER BY key",
        (machine,),
    )
    return {
        row[0]: OpRecord(
            key=row[0],
            family=row[1],
            extents=tuple(json.loads(row[2])),
            work=row[3],
            reason=row[4],
            forward=_timing(row[5]),
            backward=_timing(row[6]),
        )
        for row in rows
    }


def _links(connection: sqlite3.Connection, machine: int) -> dict[LinkKey, LinkRecord]:
    rows = connection.execute(
        "SELECT op, ranks, level, packed, nbytes, reason, time FROM links "
        "WHERE machine = ? AND state = 'done' ORDER BY op, ranks, level, packed, nbytes",
        (machine,),
    )
    records = (
        LinkRecord(key=_link_key(row[:5]), reason=row[5], time=_timing(row[6])) for row in rows
    )
    return {record.key: record for record in records}


def _connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """An open file of this version, with its tables."""
    new = not path.exists() or (create and path.stat().st_size == 0)
    if new and not create:
        raise InputError(f"{path}: there is no such file; 'autopar profile' writes one")
    if not new and not is_database(path):
        raise InputError(
            f"{path}: is no profile database (it does not begin as SQLite files do); "
            "give another file"
        )
    with _explained(path):
        connection = sqlite3.connect(path, timeout=_WAIT_S)
        try:
            if new:
                with connection:
                    connection.executescript(_SCHEMA)
            _check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    application, version = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version")
    )
    if application != _APPLICATION:
        raise InputError(
            f"{path}: is a SQLite file of another program (application_id {application}, expected "
            f"{_APPLICATION}); give another file"
        )
    if version != VERSION:
        raise InputError(
            f"{path}: is a profile database of version {version}, expected {VERSION}; "
            "profile again, into a new file"
        )
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise InputError(f"{path}: is broken ({problem}); profile again, into a new file")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, ValueError) as error:
        raise InputError(
            f"{path}: cannot be used as a profile database: {error}; profile again, into a new file"
        ) from None


def _timing_text(timing: Timing | None) -> str:
    return json.dumps([timing.median_s, timing.spread_s, timing.count]) if timing else ""


def _timing(text: str) -> Timing | None:
    if not text:
        return None
    median_s, spread_s, count = json.loads(text)
    return Timing(median_s=median_s, spread_s=spread_s, count=count)


def _link_row(key: LinkKey) -> tuple[str, int, str, int, int]:
    return str(key.op), key.ranks, key.level, key.packed, key.nbytes


def _link_key(row: Sequence[Any]) -> LinkKey:
    op, ranks, level, packed, nbytes = row
    return LinkKey(op=CollectiveOp(op), ranks=ranks, level=level, packed=packed, nbytes=nbytes)
