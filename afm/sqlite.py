"""What SQLite leaves to those who share a file."""

from __future__ import annotations

import sqlite3
import time

_PAUSE_S = 0.01


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
