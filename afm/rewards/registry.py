"""The reward of a run: the data source chooses the scorer (AFM, section on rewards), a formula combines the parts.

Your own scorer is a class that a reward YAML names by its dotted name. A row of data cannot name one.
"""

from __future__ import annotations

import logging
import math
import reprlib
import time
from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, SupportsFloat, cast

from pydantic import Field, model_validator

from afm.configuration import Settings, read_mapping, validated
from afm.errors import AfmError, ConfigError, RepeatedErrors, suggestion
from afm.plugins import code_place, fault_of, import_class
from afm.rewards.base import (
    CORRECT,
    DEFAULT_FORMULA,
    FORMAT,
    OVERLONG,
    CountedTokens,
    FormScorer,
    Formula,
    OverlongPenalty,
    Part,
    Sample,
    Scorer,
)
from afm.rewards.code_tests import CodeTests
from afm.rewards.code_tests.runner import TestPolicy
from afm.rewards.judge import JudgeSettings, ModelJudge
from afm.rewards.math import MathVerify
from afm.rewards.text_match import ChoiceLetter, ExactMatch, MatchVariant, Substring, TokenF1
from afm.rewards.tool_use import AgentH, TEval, TEvalSettings
from afm.sandbox import SandboxSettings, open_sandbox
from afm.settings import load_settings
from afm.terminal import keyed
from afm.tools.remote import remote_sandbox
from afm.trajectory import validate
from afm.trajectory.observation import whole_characters
from afm.trajectory.record import Verdict

_LOG = logging.getLogger(__name__)

Judge = Callable[[Sample], Awaitable[Part]]
"""Scores one part of a verdict."""
SCORERS = ("math", "exact_match", "f1", "substring", "choice", "code_tests", "judge", "t_eval", "agent_h")

BY_SOURCE: dict[str, str] = {
    **dict.fromkeys(("math_dapo", "aime24", "aime25", "math", "math500", "gsm8k", "amc23"), "math"),
    **dict.fromkeys(("olympiadbench", "skywork_math", "retool", "mini_math", "gms8k", "svamp"), "math"),
    **dict.fromkeys(("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa"), "exact_match"),
    **dict.fromkeys(("musique", "bamboogle", "mercury", "tq", "mini_wiki"), "exact_match"),
    **dict.fromkeys(("livecodebench*", "lcbv4", "lcbv5", "skywork", "skywork_livecodebench*"), "code_tests"),
    **dict.fromkeys(("codecontests*", "codeforces*"), "code_tests"),
    "gpqa*": "choice",
    "t_eval*": "t_eval",
    "agent_h*": "agent_h",
    **dict.fromkeys(("search", "gaia*", "hle*", "webwalker*", "browsecomp*"), "judge"),
    # Names in verl's examples.
    **dict.fromkeys(("openai/gsm8k", "lighteval/math", "digitallearninggmbh/math-lighteval"), "math"),
    **dict.fromkeys(("huggingfaceh4/math-500", "math_dapo_reasoning", "numina_*"), "math"),
    "searchr1_*": "exact_match",
}
MISSPELT = {"gms8k": "gsm8k"}  # published misspellings of data sources, never a suggestion


class MathSettings(Settings):
    """See :class:`MathVerify`."""

    cpu_s: float = Field(default=5.0, gt=0)
    """CPU seconds per comparison. The wall-clock limit is twelve times as long."""
    workers: int | None = Field(default=None, ge=1)
    """Worker processes. By default the number of cores, at most 4."""


class ExactMatchSettings(Settings):
    """See :class:`ExactMatch`."""

    variant: MatchVariant = MatchVariant.TRAINING


class TextMatchSettings(Settings):
    """See :class:`TokenF1` and :class:`Substring`."""

    variant: MatchVariant = MatchVariant.TRAINING
    max_words: int = Field(default=30, ge=1)


class CodeTestsSettings(TestPolicy):
    """See :class:`CodeTests`."""

    livecodebench: Path | None = None
    """File or folder of LiveCodeBench's JSONL files with the complete tests. By default LIVECODEBENCH_DATA_PATH."""
    sandbox: SandboxSettings | None = None
    """Sandbox for programs on this machine, for example ``backend`` and ``max_parallel``."""
    urls: tuple[str, ...] = ()
    """Code servers that run the programs instead."""

    @property
    def complete_tests(self) -> Path | None:
        """Return the place of LiveCodeBench's complete tests, or ``None`` if not set."""
        return self.livecodebench or load_settings().livecodebench_data_path

    def scorer(self) -> CodeTests:
        """Return the scorer with these settings. It starts nothing yet.

        Raises:
            ConfigError: The sandbox does not have an option, or both ``urls`` and ``sandbox`` are given.
        """
        if self.urls and self.sandbox is not None:
            raise ConfigError("code_tests: either `urls` of code servers or a local `sandbox`, not both")
        local = self.sandbox or SandboxSettings()
        sandbox = remote_sandbox(self.urls) if self.urls else open_sandbox(**local.options())
        return CodeTests(sandbox, self, livecodebench=self.complete_tests)


class OverlongSettings(Settings):
    """See :class:`OverlongPenalty`."""

    max_tokens: int = Field(ge=1)
    """Length at which the penalty reaches -1."""
    buffer_tokens: int = Field(ge=1)
    """Number of tokens before that length at which the penalty begins."""
    count: CountedTokens = CountedTokens.ALL
    """Whose tokens count: ``all``, or only the ``agent``'s."""

    @model_validator(mode="after")
    def _check(self) -> OverlongSettings:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"a buffer_tokens of at most max_tokens = {self.max_tokens}")
        return self


class RewardSettings(Settings):
    """A reward file."""

    formula: str = DEFAULT_FORMULA
    """How the parts ``correct``, ``format`` and ``overlong`` make the score."""
    by_source: dict[str, str] = Field(default_factory=dict)
    """``data_source: scorer``, on top of the built-in table. ``*`` stands for anything, a dotted name for
    a class of your own. A row whose ``extra_info`` names a scorer under ``reward`` is judged by that
    one."""
    math: MathSettings = MathSettings()
    """``cpu_s``, CPU seconds of one comparison, and ``workers``, worker processes."""
    exact_match: ExactMatchSettings = ExactMatchSettings()
    """``variant``: ``evaluation`` or ``training``."""
    text_match: TextMatchSettings = TextMatchSettings()
    """``max_words`` of the scorers ``f1`` and ``substring``."""
    code_tests: CodeTestsSettings = CodeTestsSettings()
    """Programs and their tests: see below."""
    judge: JudgeSettings = JudgeSettings()
    """The model judge: see docs/judge.md."""
    t_eval: TEvalSettings = TEvalSettings()
    """Sentence embedding model for T-Eval: see docs/evaluation.md."""
    overlong: OverlongSettings | None = None
    """``max_tokens``, ``buffer_tokens`` and ``count`` (``all`` or ``agent``) of the penalty; needed when
    the formula uses it."""


class CombinedReward:
    """Judges answer, format and length, and combines the three into a score.

    Args:
        settings: The content of a reward file, kept as ``settings``.
        label: Name of the reward in errors.
        folder: Folder to import your own scorers from (see :mod:`afm.plugins`). By default Python's path.

    Raises:
        ConfigError: The formula or the table of sources is wrong, or a scorer cannot be imported.
    """

    def __init__(
        self, settings: RewardSettings, label: str = "reward configuration", folder: Path | None = None
    ) -> None:
        self.settings = settings
        try:
            self._formula = Formula(settings.formula, (CORRECT, FORMAT, OVERLONG))
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from None
        if (OVERLONG in self._formula.names) != (settings.overlong is not None):
            raise ConfigError(
                f"{label}: formula {settings.formula!r} and the settings `overlong` belong together; "
                "give both or neither"
            )
        for source, name in settings.by_source.items():
            checked_name(name, f"{label}: by_source.{source}", own=True)
        self._table = BY_SOURCE | {source.lower(): name for source, name in settings.by_source.items()}
        self._makers: dict[str, Callable[[], Scorer]] = {
            "math": lambda: MathVerify(settings.math.cpu_s, settings.math.workers),
            "exact_match": lambda: ExactMatch(settings.exact_match.variant),
            "f1": lambda: TokenF1(settings.text_match.variant),
            "substring": lambda: Substring(settings.text_match.variant, settings.text_match.max_words),
            "choice": ChoiceLetter,
            "judge": lambda: ModelJudge(settings.judge),
            "code_tests": lambda: settings.code_tests.scorer(),
            "t_eval": lambda: TEval(settings.t_eval),
            "agent_h": AgentH,
        }
        for source, name in settings.by_source.items():
            if name not in SCORERS:
                self._makers[name] = scorer_class(name, folder, f"{label}: by_source.{source}")
        self._scorers: dict[str, Scorer] = {}
        self._faults = RepeatedErrors()  # a bug may fail on every row
        self._extra: dict[str, Judge] = {}
        if (long := settings.overlong) is not None:
            penalty = OverlongPenalty(long.max_tokens, long.buffer_tokens, long.count)
            self._extra[OVERLONG] = penalty.judge

    async def score(self, sample: Sample) -> Verdict:
        """Judge ``sample``.

        Raises:
            ConfigError: No scorer for its data source, or the row names one that does not exist.
            MissingExtraError: The scorer's packages are not installed.
        """
        started = time.monotonic()
        scorer = self._scorer(sample)
        form = scorer.form if isinstance(scorer, FormScorer) else check_format
        judges: dict[str, Judge] = {CORRECT: scorer.judge, FORMAT: form, **self._extra}
        parts = {name: await self._part(name, judge, sample) for name, judge in judges.items()}
        if not sample.answer_alone:
            return self._verdict(parts, time.monotonic() - started)
        verdict = self._verdict(parts | {FORMAT: Part(1.0)}, time.monotonic() - started)
        del verdict.parts[FORMAT]
        return verdict

    def check(self, source: str, own: str = "") -> None:
        """Check that rows of this data source, or rows that name the scorer ``own``, can be judged.

        Raises:
            ConfigError: The data source has no scorer, or there is no scorer of that name.
        """
        self._scorer_name(own, source)

    async def close(self) -> None:
        """Free worker processes, and log the number of faults that were not logged."""
        for line in self._faults.rest():
            _LOG.warning(line)
        for scorer in self._scorers.values():
            await scorer.close()

    async def _part(self, name: str, judge: Judge, sample: Sample) -> Part:
        """Return a part of the verdict. A fault of the scorer that a response triggers abstains and does not end the run."""
        error: Exception | None = None
        try:
            part = await judge(sample)
            fault, kind = _wrong_part(name, judge, part), ""
        except AfmError:
            raise
        except Exception as raised:  # noqa: BLE001 - the border to what models write
            error, fault, kind = raised, fault_of(raised), fault_of(raised, message=False)
        if not fault:
            return part
        if self._faults.is_new(fault, kind):
            text = "%s of a %r row has no score: %s (the verdict of each row has it)"
            _LOG.warning(text, name, sample.data_source, fault)
            _LOG.debug("traceback of %s", fault, exc_info=error)
        return Part(None, f"{name}: {fault}")

    def _scorer(self, sample: Sample) -> Scorer:
        name = self._scorer_name(str(sample.extra_info.get("reward") or ""), sample.data_source)
        if name not in self._scorers:
            self._scorers[name] = self._makers[name]()
        return self._scorers[name]

    def _scorer_name(self, own: str, source: str) -> str:
        """Return the name of a row's scorer: the one that it names, else that of its data source."""
        if own:
            return checked_name(own, f"extra_info.reward of a {source!r} row")
        return scorer_name(source, self._table)

    def _verdict(self, parts: Mapping[str, Part], seconds: float) -> Verdict:
        known = {name: float(part.score) for name, part in parts.items() if part.score is not None}
        reasons = [part.evidence for part in parts.values() if part.evidence]
        score = self._formula(known) if self._formula.names <= set(known) else None
        if score is not None and not math.isfinite(score):
            reasons.append(f"formula {self._formula.text!r} gives {score}, expected a finite number")
            score = None
        return Verdict(
            score=score,
            parts=known,
            evidence=whole_characters("; ".join(reasons)),
            seconds=seconds,
        )


def load_reward(source: str | Path | Mapping[str, Any] | None = None) -> CombinedReward:
    """Load the reward that a YAML file or mapping describes, or the built-in one if ``source`` is ``None``.

    Worker processes start with the first sample that needs them.

    Raises:
        ConfigError: The message names the file, the key path, the value and what was expected.
    """
    label, data = read_mapping({} if source is None else source, "reward")
    folder = Path(source).parent if isinstance(source, str | Path) else None
    return CombinedReward(validated(RewardSettings, data, label), label, folder)


def _wrong_part(name: str, judge: Judge, part: object) -> str:
    """Describe what is wrong with the value that ``judge`` returned; empty for a valid part."""
    if not isinstance(part, Part):
        fault = f"{reprlib.repr(part)} ({type(part).__name__}), expected Part(score, why)"
    elif not isinstance(part.evidence, str):
        fault = (
            f"the reason {reprlib.repr(part.evidence)} ({type(part.evidence).__name__}), expected a string"
        )
    elif part.score is not None and not _is_score(part.score, bounded=name == CORRECT):
        expected = "a number from 0 to 1" if name == CORRECT else "a finite number"
        kind = type(part.score).__name__
        fault = f"the score {reprlib.repr(part.score)} ({kind}), expected {expected}, or None to abstain"
    else:
        return ""
    return f"{code_place(judge, name)} returned {fault}"


def _is_score(score: object, *, bounded: bool) -> bool:
    """Whether ``score`` is a finite number and, if ``bounded``, from 0 to 1 except for rounding."""
    if not isinstance(score, SupportsFloat):
        return False
    try:
        number = float(score)
    except OverflowError:
        return False
    return math.isfinite(number) and (not bounded or -1e-6 <= number <= 1 + 1e-6)


async def check_format(sample: Sample) -> Part:
    """Score 1 if the response follows its agent's rules, else 0 with the first fault as evidence."""
    faults = validate(sample.segments, sample.spec)
    return Part(0.0, f"format: {faults[0].message}") if faults else Part(1.0)


def scorer_name(data_source: str, table: Mapping[str, str]) -> str:
    """Return the name of the scorer for ``data_source``. Case does not matter; ``*`` in the table matches anything.

    Raises:
        ConfigError: The table has no entry for it.
    """
    key = data_source.lower()
    if (name := table.get(key)) is None:
        patterns = [pattern for pattern in table if "*" in pattern and fnmatchcase(key, pattern)]
        if not patterns:
            raise ConfigError(_unknown_source(data_source, table))
        name = table[max(patterns, key=len)]
    return checked_name(name, f"data_source {data_source!r}", own=True)


def _unknown_source(source: str, table: Mapping[str, str]) -> str:
    """Return the error for a data source that ``table`` lacks: the nearest ones first, then those of the reward YAML."""
    if not source:
        return (
            "the row has no data_source, which chooses the reward; add a column `data_source` with a name that "
            "`afm list rewards` prints; `afm data prepare tasks FILE --data-source NAME --out TASKS.jsonl` adds it to "
            "questions, and `afm data filter --config configs/filters/logs.yaml` filters logs without it"
        )
    spelt = [name for name in table if name not in MISSPELT]
    near = " or ".join(map(repr, get_close_matches(source.lower(), spelt)))
    own = [name for name in table if name not in BY_SOURCE]
    text = f"no reward for data_source {source!r}: {f'did you mean {near}? ' if near else ''}"
    if own:
        text += f"`by_source` has {', '.join(own[:5])}{f' and {len(own) - 5} more' if own[5:] else ''}; "
    text += f"`afm list rewards` prints the {len(BY_SOURCE)} built-in ones; "
    option = "rewards=YAML" if keyed() else "--rewards YAML"
    return f"{text}or name one under `by_source` in a reward YAML and give it: {option}"


def checked_name(name: str, place: str, *, own: bool = False) -> str:
    """Return ``name`` if there is a scorer of that name.

    Args:
        own: Whether the dotted name of a class is allowed, as in a reward YAML. Rows cannot name classes.

    Raises:
        ConfigError: There is no such scorer. The message begins with ``place``.
    """
    if name in SCORERS or (own and "." in name.strip(".")):
        return name
    own_class = ""
    if own and name[:1].isupper():
        own_class = f"; a class of your own in FILE.py beside this YAML: FILE.{name}"
    raise ConfigError(f"{place}: reward {name!r} is unknown, {suggestion(name, SCORERS)}{own_class}")


def scorer_class(name: str, folder: Path | None, where: str) -> type[Scorer]:
    """Import the class ``name``. It is created without arguments.

    Raises:
        ConfigError: It cannot be imported, or is not a scorer (see :class:`afm.rewards.base.Scorer`).
    """
    expected = "async methods judge(sample) and close()"
    return cast("type[Scorer]", import_class(name, folder, where, ("judge", "close"), expected))
