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

    While another process makes the switch, SQLite refuses it at once and ignores the connection's timeout. So this
    function retries.

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
    """An SQLite file for the threads of many processes. Each process opens it at its first use.

    Args:
        what: What the file is, for errors.
        schema: The statement that creates a missing table.
    """

    def __init__(self, path: Path, what: str, schema: str) -> None:
        self.path = path
        self._what, self._schema = what, schema
        self._lock = threading.Lock()
        self._process = 0
        self._connection: sqlite3.Connection | None = None

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """Write in a transaction that excludes other threads and processes.

        Raises:
            ConfigError: The file cannot be used at all.
            sqlite3.Error: The file cannot be used now: the disk is full, or another process holds the lock.
        """
        return self._begun("BEGIN IMMEDIATE")

    def snapshot(self) -> AbstractContextManager[sqlite3.Connection]:
        """Read the current content without waiting for writers. Raises the errors of :meth:`transaction`."""
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
        """Close the file. The next use opens it again."""
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
