"""What was looked at before a training, and how it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from afm.errors import AfmError

T = TypeVar("T")


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    text: str

    def __str__(self) -> str:
        """One line, as ``afm doctor`` prints it."""
        return f"{self.level:<8} {self.subject:<15} {self.text}"

    @property
    def why(self) -> str:
        """What was seen, without the :attr:`next_step`."""
        return self.text.removesuffix(f"; {self.next_step}") if self.next_step else self.text

    @property
    def next_step(self) -> str:
        """What to do about it: the last clause of a text that is not fine; empty where nothing is to be done."""
        return "" if self.level is Level.OK else self.text.rpartition("; ")[2] if "; " in self.text else ""


class Report:
    """Findings in the order in which they were made."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        """Note findings."""
        self.findings += findings

    def asked(self, subject: str, question: Callable[[], T]) -> T | None:
        """The answer to a question; an error of it is a finding."""
        try:
            return question()
        except AfmError as error:
            self.add(Finding(Level.ERROR, subject, " ".join(str(error).split())))
            return None


def failed(findings: Iterable[Finding]) -> bool:
    """Whether the training would not start, or would not end well."""
    return any(finding.level is Level.ERROR for finding in findings)
