"""Secrets and personal data: rows are dropped, or matches in the agent's text are masked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

from pydantic import field_validator

from afm.agents import AgentSpec, RoleKind
from afm.configuration import Settings
from afm.distill.filters.base import Rule, dropped, steps_of
from afm.distill.filters.patterns import PERSONAL, SECRETS, Pattern
from afm.errors import suggestion
from afm.trajectory.record import Record
from afm.trajectory.tags import Author

_UNHEARD_OF = "~\\ no \u00a7 finding 7\u00df looks like this /~"
_ELSEWHERE = "text between the roles"


class Action(StrEnum):
    """The action on a row with a match."""

    DROP = "drop"
    MASK = "mask"


class _SensitiveSettings(Settings):
    """What to search for, and what to do with a match."""

    action: Action = Action.DROP
    """``drop`` drops the row. ``mask`` replaces a match in thoughts and text roles by ``[its kind]``, and drops rows with
    a match anywhere else. Observations and calls are never changed, because the record would no longer hold what the
    tool returned or was asked. A masked answer would no longer be the judged one."""
    observations: bool = True
    """``false`` does not search tool results. Web pages are full of contact data."""
    allow: tuple[str, ...] = ()
    """Regular expressions. A match that one of them fully matches does not count."""
    kinds: tuple[str, ...] = ()
    """The kinds to search for. The default is all kinds."""
    table: ClassVar[tuple[Pattern, ...]] = ()
    """The known kinds."""

    @field_validator("kinds")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = [pattern.kind for pattern in cls.table]
        if not value:
            raise ValueError(
                "at least one kind; leave `kinds` out for all kinds, or leave the stage out for none"
            )
        for kind in value:
            if kind not in known:
                raise ValueError(f"known kinds; {suggestion(kind, known)}")
        return value

    @field_validator("allow")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"a regular expression: {error}") from None
            if re.fullmatch(pattern, _UNHEARD_OF):
                raise ValueError(f"expressions for single findings; {pattern!r} allows everything")
        return value


class SecretSettings(_SensitiveSettings):
    """The secrets to search for. The default is all kinds."""

    table: ClassVar = SECRETS
    kinds: tuple[str, ...] = tuple(pattern.kind for pattern in SECRETS)


class PersonalSettings(_SensitiveSettings):
    """The personal data to search for. The default is all kinds. Leave cards out for texts with many numbers."""

    table: ClassVar = PERSONAL
    kinds: tuple[str, ...] = tuple(pattern.kind for pattern in PERSONAL)


@dataclass(frozen=True, slots=True)
class _Finding:
    """A match: a span of the response's text, and its role. Only the kind is ever shown."""

    kind: str
    start: int
    end: int
    role: str


@dataclass(frozen=True)
class SensitiveFilter(Rule):
    """Drops or masks rows that hold secrets or personal data. Reasons name the kind, never the match.

    A masked record loses its token ids, which spell the old text. ``provenance.masked`` counts the replaced matches of
    each kind.
    """

    spec: AgentSpec
    settings: SecretSettings | PersonalSettings

    @property
    def name(self) -> str:
        """``secrets`` or ``personal``."""
        return "secrets" if isinstance(self.settings, SecretSettings) else "personal"

    def reason(self, record: Record) -> str:
        """Return the first match, if rows are not masked."""
        return self._outside(record) or next(
            (f"{finding.kind} in {self._shown(finding.role)}" for finding in self._findings(record)), ""
        )

    def apply(self, record: Record) -> Record:
        """Return the record unchanged, masked or dropped."""
        if self.settings.action is Action.DROP:
            return super().apply(record)
        if reason := self._outside(record):
            return dropped(record, f"{self.name}: {reason}")
        findings = list(self._findings(record))
        fixed = next((finding for finding in findings if finding.role not in self._maskable), None)
        if fixed is not None:
            return dropped(
                record, f"{self.name}: {fixed.kind} in {self._shown(fixed.role)}, which is never masked"
            )
        return self._masked(record, findings) if findings else record

    @cached_property
    def _patterns(self) -> tuple[Pattern, ...]:
        settings = self.settings
        return tuple(pattern for pattern in settings.table if pattern.kind in settings.kinds)

    @cached_property
    def _allowed(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern) for pattern in self.settings.allow)

    @cached_property
    def _maskable(self) -> frozenset[str]:
        kinds = (RoleKind.THOUGHT, RoleKind.TEXT)
        return frozenset(tag for tag, role in self.spec.roles.items() if role.kind in kinds)

    def _spans(self, text: str) -> Iterator[tuple[str, int, int]]:
        for pattern in self._patterns:
            for start, end in pattern.spans(text):
                if not any(allowed.fullmatch(text, start, end) for allowed in self._allowed):
                    yield pattern.kind, start, end

    def _outside(self, record: Record) -> str:
        """Return a match in the question, or in the part of a tool's result that the agent did not see."""
        for kind, _, _ in self._spans(record.question):
            return f"{kind} in the question"
        if self.settings.observations:
            text = record.text
            for call in record.calls:
                hidden = "" if call.observation in text else call.observation
                for kind, _, _ in self._spans(hidden):
                    return f"{kind} in what {call.tool} returned"
        return ""

    def _findings(self, record: Record) -> Iterator[_Finding]:
        spans = list(self._spans(record.text))
        if not spans:
            return
        steps = steps_of(record, self.spec)
        for kind, start, end in sorted(spans, key=lambda span: span[1:]):
            inside = (step for step in steps if step.content_start <= start and end <= step.content_end)
            role = next((step.role for step in inside), "")
            if role != self.spec.observation_role or self.settings.observations:
                yield _Finding(kind, start, end, role)

    def _shown(self, role: str) -> str:
        return f"<{role}>" if role else _ELSEWHERE

    def _masked(self, record: Record, findings: Sequence[_Finding]) -> Record:
        segments, position = [], 0
        for segment in record.segments:
            stop = position + len(segment.text)
            own = [finding for finding in findings if position <= finding.start and finding.end <= stop]
            if segment.author is Author.AGENT and own:
                segment = replace(segment, text=_replaced(segment.text, own, position))
            segments.append(segment)
            position = stop
        counts = Counter(finding.kind for finding in findings)
        return record.model_copy(
            update={
                "segments": tuple(segments),
                "provenance": record.provenance | {"masked": record.provenance.get("masked", {}) | counts},
                "response_ids": None,
                "response_mask": None,
                "logprobs": None,
            }
        )


def _replaced(text: str, findings: Sequence[_Finding], offset: int) -> str:
    parts, done = [], 0
    for finding in findings:
        start, end = finding.start - offset, finding.end - offset
        if start >= done:  # the first of overlapping matches replaces all of them
            parts += [text[done:start], f"[{finding.kind}]"]
        done = max(done, end)
    return "".join((*parts, text[done:]))
