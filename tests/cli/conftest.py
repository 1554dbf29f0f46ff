"""The command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from afm.cli import main


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


@pytest.fixture
def afm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs ``afm WORDS...`` as ``main`` does, with its messages and exit statuses."""
    monkeypatch.setattr(main, "follow_parent", lambda: None)

    def run(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["afm", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err, said.err
        return Done(int(ended.value.code or 0), said.out, said.err.strip())

    return run
