"""Filters of single trajectories: format, tools, length, repeated calls, reflection and correction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from afm.agents import AgentSpec, Grade
from afm.configuration import Settings
from afm.distill.filters.base import (
    COPY_OF,
    Rule,
    draw,
    known_role,
    origin_of,
    split_of,
    steps_of,
)
from afm.errors import ConfigError, MissingExtraError
from afm.findings import fetch_advice
from afm.tools.registry import Reader, faults_of, usual_readers
from afm.trajectory.programs import call_form, exact_form, is_program
from afm.trajectory.record import Record


class FormatSettings(Settings):
    """Settings of the format filter. The agent's declaration defines all other rules."""

    tools: Path | None = None
    """Tools YAML whose classes check the calls. The default is the shipped tools, by name."""


@dataclass(frozen=True)
class FormatFilter(Rule):
    """Keeps rows that the agent's declaration accepts (structure, transitions, authors) and whose calls the tools can read."""

    spec: AgentSpec
    readers: Mapping[str, Reader] = field(default_factory=usual_readers)
    name: str = "format"

    def reason(self, record: Record) -> str:
        """Return the first fault of :func:`afm.tools.registry.faults_of`."""
        parts = split_of(record, self.spec)
        issues = faults_of(record.segments, self.spec, parts=parts, readers=self.readers)
        return str(issues[0]) if issues else ""


class ComplexitySettings(Settings):
    """Minimum use of tools in a trajectory."""

    min_calls: int = Field(default=5, ge=1, le=1000)
    """Minimum number of tool interactions. The default is AFM's (arXiv 2508.13167)."""
    min_tools: int = Field(default=1, ge=1, le=100)
    """Minimum number of different tools among them."""


@dataclass(frozen=True)
class ComplexityFilter(Rule):
    """Drops rows with few tool interactions or few different tools, because they teach little about tools.

    Raises:
        ConfigError: The agent has fewer tools than ``min_tools``, so no row could be kept.
    """

    spec: AgentSpec
    settings: ComplexitySettings = field(default_factory=ComplexitySettings)
    name: str = "complexity"

    def __post_init__(self) -> None:
        known = sorted(set(self.spec.tool_roles.values()))
        if self.settings.min_tools > len(known):
            raise ConfigError(
                f"filter {self.name!r}: min_tools: got {self.settings.min_tools}, agent {self.spec.name!r} has {len(known)} "
                f"({', '.join(known) or 'no tools'})"
            )

    def reason(self, record: Record) -> str:
        """Count the closed calls of the agent's tools, and the different tools."""
        tools = self.spec.tool_roles
        called = [tools[step.role] for step in steps_of(record, self.spec) if step.role in tools]
        if len(called) < self.settings.min_calls:
            return f"{len(called)} tool interactions, expected at least {self.settings.min_calls}"
        if len(set(called)) < self.settings.min_tools:
            return f"calls only {', '.join(sorted(set(called)))}, expected at least {self.settings.min_tools} tools"
        return ""


class LengthSettings(Settings):
    """Bounds of a trajectory. ``null`` means no bound."""

    min_hops: int | None = Field(default=None, ge=0)
    """Minimum number of tool interactions."""
    max_hops: int | None = Field(default=None, ge=0)
    """Maximum number of tool interactions."""
    max_chars: int | None = Field(default=None, ge=1)
    """Maximum number of characters of the whole response, including observations."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of the whole response, counted with ``tokenizer``."""
    tokenizer: Path | None = None
    """A ``tokenizer.json``, or a folder that contains one."""

    @model_validator(mode="after")
    def _check(self) -> LengthSettings:
        if (self.max_tokens is None) != (self.tokenizer is None):
            raise ValueError("`max_tokens` and `tokenizer` belong together; give both or neither")
        if self.min_hops is not None and self.max_hops is not None and self.min_hops > self.max_hops:
            raise ValueError(f"min_hops {self.min_hops} is above max_hops {self.max_hops}")
        return self


def tokenizer_file(path: Path) -> Path:
    """Return the file that the setting ``tokenizer`` refers to."""
    return path / "tokenizer.json" if path.is_dir() else path


@dataclass(frozen=True)
class LengthFilter(Rule):
    """Drops rows that are too short or too long in hops, characters or tokens."""

    spec: AgentSpec
    settings: LengthSettings
    name: str = "length"

    def reason(self, record: Record) -> str:
        """Return the first broken bound. Tokens are counted last, because counting them is expensive."""
        bounds = self.settings
        hops = sum(step.role in self.spec.tool_roles for step in steps_of(record, self.spec))
        if bounds.min_hops is not None and hops < bounds.min_hops:
            return f"{hops} hops, expected at least {bounds.min_hops}"
        if bounds.max_hops is not None and hops > bounds.max_hops:
            return f"{hops} hops, expected at most {bounds.max_hops}"
        chars = sum(len(segment.text) for segment in record.segments)
        if bounds.max_chars is not None and chars > bounds.max_chars:
            return f"{chars} characters, expected at most {bounds.max_chars}"
        if bounds.max_tokens is None:
            return ""
        tokens = len(self._tokenizer.encode(record.text, add_special_tokens=False).ids)
        return f"{tokens} tokens, expected at most {bounds.max_tokens}" if tokens > bounds.max_tokens else ""

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingExtraError("tokenizers", "sft") from error
        file = tokenizer_file(self.settings.tokenizer or Path())
        if not file.is_file():
            place = self.settings.tokenizer
            advice = fetch_advice(str(place))
            raise ConfigError(f"filter {self.name!r}: {place}: no tokenizer.json there{advice}")
        return Tokenizer.from_file(str(file))


_WORD = re.compile(r"\w+")


class RepetitionSettings(Settings):
    """What counts as a repeated call."""

    max_repeats: int = Field(default=0, ge=0, le=1000)
    """Maximum number of calls of a row that repeat an earlier call."""
    similar: float | None = Field(default=0.9, gt=0, le=1)
    """Share of common words (Jaccard) from which a call counts as repeated. Words with digits must be the same. With
    ``null`` only the same text counts, except for whitespace at the ends of lines. Programs are always compared this
    way."""


@dataclass(frozen=True, slots=True)
class _ToolCall:
    number: int
    role: str
    text: str
    form: str
    words: frozenset[str]

    def repeats(self, earlier: _ToolCall, similar: float | None) -> bool:
        if self.role != earlier.role:
            return False
        if self.form == earlier.form:
            return True
        if similar is None or not self.words or not earlier.words:
            return False
        shared = len(self.words & earlier.words)
        if shared < similar * len(self.words | earlier.words):
            return False
        return not any(any(map(str.isdigit, word)) for word in self.words ^ earlier.words)


@dataclass(frozen=True)
class RepetitionFilter(Rule):
    """Drops rows whose tool inputs repeat, or nearly repeat, earlier ones."""

    spec: AgentSpec
    settings: RepetitionSettings = field(default_factory=RepetitionSettings)
    name: str = "repetition"

    def reason(self, record: Record) -> str:
        """Compare every call with the earlier calls of the same tool."""
        repeats = list(self._repeats(record))
        if len(repeats) <= self.settings.max_repeats:
            return ""
        again, earlier = repeats[0]
        more = f" ({len(repeats)} repeated calls in total)" if len(repeats) > 1 else ""
        return f"call {again.number} <{again.role}> repeats call {earlier.number}: {again.text[:80]!r}{more}"

    def _repeats(self, record: Record) -> Iterator[tuple[_ToolCall, _ToolCall]]:
        calls: list[_ToolCall] = []
        for step in steps_of(record, self.spec):
            if step.role not in self.spec.tool_roles:
                continue
            call = self._call(len(calls) + 1, step.role, step.content)
            earlier = next((old for old in calls if call.repeats(old, self.settings.similar)), None)
            if earlier is not None:
                yield call, earlier
            calls.append(call)

    def _call(self, number: int, role: str, content: str) -> _ToolCall:
        text, tool = " ".join(content.split()), self.spec.tool_roles[role]
        exact = self.settings.similar is None or is_program(tool, content)
        form = exact_form(content) if exact else call_form(tool, content)
        return _ToolCall(number, role, text, form, frozenset(() if exact else _WORD.findall(text.casefold())))


class ReflectionSettings(Settings):
    """The role, and the share of rows without it to keep."""

    role: str
    """The agent's role of reflection."""
    keep_without: float = Field(ge=0, le=1)
    """Probability of keeping a row without that role."""


@dataclass(frozen=True)
class ReflectionFilter(Rule):
    """Drops rows without reflection by rejection sampling.

    The decision about a row depends only on the seed and :func:`origin_of`. The same rows are kept in any order, with
    any number of processes, and with any other rows.

    Raises:
        ConfigError: The agent has no such role.
    """

    spec: AgentSpec
    settings: ReflectionSettings
    seed: int = 0
    name: str = "reflection"

    def __post_init__(self) -> None:
        known_role(self.settings.role, self.spec, self.name)

    def reason(self, record: Record) -> str:
        """Draw for a row without reflection."""
        role, keep = self.settings.role, self.settings.keep_without
        if any(step.role == role and step.content.strip() for step in steps_of(record, self.spec)):
            return ""
        drawn = draw(self.seed, self.name, origin_of(record))
        return "" if drawn < keep else f"no <{role}>, drew {drawn:.4f}, expected below {keep:g}"


class CorrectionSettings(Settings):
    """How often to repeat corrected work."""

    times: int = Field(default=3, ge=2, le=100)
    """Number of times that the result contains the row."""
    role: str | None = None
    """The graded role that checks an answer. The default is the role whose good grade lets the agent answer. An agent
    without such a role has no such rows."""
    min_score: float = Field(default=1.0, allow_inf_nan=False)
    """Lowest score of a right answer."""


@dataclass(frozen=True)
class Correction(Rule):
    """Repeats rows whose first check rejected the answer and whose final answer is right.

    No row is dropped. A row without a verdict is not repeated, because its answer may be wrong.

    Raises:
        ConfigError: The agent has no such role, or the role is not graded.
    """

    spec: AgentSpec
    settings: CorrectionSettings = field(default_factory=CorrectionSettings)
    name: str = "correction"

    def __post_init__(self) -> None:
        role = self.settings.role
        if role is not None and self.spec.roles[known_role(role, self.spec, self.name)].grade is None:
            raise ConfigError(f"filter {self.name!r}: role {role!r} of {self.spec.name!r} has no grade")

    @cached_property
    def role(self) -> str | None:
        """The role that checks answers, or ``None``."""
        return self.settings.role or checking_role(self.spec)

    def reason(self, record: Record) -> str:
        """Return no reason, because this stage drops no row. See :meth:`copies`."""
        return ""

    def copies(self, record: Record) -> Iterator[Record]:
        """Yield the copies of a kept record, each with its own id and provenance."""
        if not self._corrected(record):
            return
        for number in range(2, self.settings.times + 1):
            provenance = record.provenance | {COPY_OF: origin_of(record), "copy": number}
            yield record.model_copy(update={"id": f"{record.identity}+{number}", "provenance": provenance})

    def _corrected(self, record: Record) -> bool:
        score = record.verdict.score if record.verdict is not None else None
        role = self.role
        if role is None or score is None or score < self.settings.min_score:
            return False
        grade = self.spec.roles[role].grade
        first = next((step for step in steps_of(record, self.spec) if step.role == role), None)
        return first is not None and grade is not None and bool(grade.rejects(first.content))


def checking_role(spec: AgentSpec) -> str | None:
    """Return the role whose good grade lets the agent answer, and whose bad grade does not."""

    def decides(grade: Grade | None) -> bool:
        return (
            grade is not None
            and spec.answer_role in grade.when_accepted
            and spec.answer_role not in grade.when_rejected
        )

    return next((tag for tag, role in spec.roles.items() if decides(role.grade)), None)
