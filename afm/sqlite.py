"""SQLite files that several processes share."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from afm.errors import ConfigError

_PAUSE_S = 0.01
_BUSY_S = 30.0


def write_ahead(connection: sqlite3.Connection, *, timeout_s: float) -> None:
    """Switch a file to its write-ahead log, so that readers and a writer do not wait for each other.

    SQLite refuses the switch at once while another process makes it, whatever the connection's own timeout:
    it is tried again.

    Raises:
        sqlite3.OperationalError: The file stayed locked.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(_PAUSE_S)


class SharedFile:
    """One SQLite file for the threads of many processes; each process opens it when it first needs it.

    Args:
        what: What the file is, for errors.
        schema: The statement that makes a missing table.
    """

    def __init__(self, path: Path, what: str, schema: str) -> None:
        self.path = path
        self._what, self._schema = what, schema
        self._lock = threading.Lock()
        self._process = 0
        self._connection: sqlite3.Connection | None = None

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """Write alone, other threads and processes kept out.

        Raises:
            ConfigError: The file cannot be used at all.
            sqlite3.Error: It cannot be used at the moment: the disk is full, another process does not let go of it.
        """
        return self._begun("BEGIN IMMEDIATE")

    def snapshot(self) -> AbstractContextManager[sqlite3.Connection]:
        """Read what is there now; processes that write are not waited for. Raises like :meth:`transaction`."""
        return self._begun("BEGIN")

    @contextmanager
    def _begun(self, statement: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._connection is None or self._process != os.getpid():
                try:
                    self._connection, self._process = self._connect(), os.getpid()
                except (sqlite3.Error, OSError) as error:
                    raise ConfigError(f"{self.path}: cannot be used as a {self._what}: {error}") from error
            with self._connection:
                self._connection.execute(statement)
                yield self._connection

    def close(self) -> None:
        """Close the file; it is opened again when it is needed again."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, check_same_thread=False)
        try:
            write_ahead(connection, timeout_s=_BUSY_S)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(self._schema)
            connection.commit()
        except BaseException:
            connection.close()
            raise
        return connection
