"""Taking the samples of a selection, many at a time, and finding the questions that cannot be sampled.

A failed engine ends the run. No sample is lost. A question that fails while the engine works would block every run. It
is asked again after all others. Then a question that was answered before is asked. The first question is at fault only
if that one is answered again.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path

from pydantic import Field, field_validator

from afm.configuration import OneOrMany, Settings, apply_overrides, read_extended, validated
from afm.datasets import Task
from afm.distill.model_team.settings import anchored
from afm.distill.queries.askers import Answered, QuestionAsker
from afm.errors import EngineError, RefusedError, RewardError, SandboxUnavailableError, ToolError
from afm.play import work_in_parallel
from afm.runs.journal import Journal, read_rows
from afm.seeds import episode_seed


class FailedQuestions(StrEnum):
    """The treatment of a question that cannot be sampled although others can: drop it, or end without a selection."""

    DROP = "drop"
    ERROR = "error"


class QuerySettings(Settings):
    """Settings of samples and solve rates.

    With ``a`` right answers among ``samples``, the solve rate of a question is ``r_q = a / samples``. The question is
    kept if ``r_q <= max_rate``.
    """

    samples: int = Field(default=32, ge=1, le=10_000)
    """Number of answers sampled for each question."""
    with_tools: bool = False
    """``true``: a sample is an episode of the agent with its tools. ``false``: it is one answer without tools."""
    max_rate: float | None = Field(default=0.3, ge=0, le=1)
    """Maximum solve rate of a kept question. ``null`` drops only questions that every sample solves."""
    target: int | None = Field(default=None, ge=1)
    """Maximum number of kept questions, drawn at random in proportion to their data sources."""
    seed: int = 0
    """Seed of the samples and the draw."""
    max_parallel: int = Field(default=64, ge=1, le=10_000)
    """Number of samples in progress at the same time."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """Temperature of the samples."""
    max_tokens: int | None = Field(default=2048, ge=1, le=1_000_000)
    """Maximum number of tokens of one sample, without tool results. ``null`` means the agent's own limits."""
    failures_in_a_row: int = Field(default=20, ge=1)
    """After this many failed samples in a row (at least twice ``max_parallel``), the engine is asked a question that it
    answered before. If it fails there too, the run ends. If more questions than this fail, the engine is at fault."""
    on_bad_rows: FailedQuestions = FailedQuestions.DROP
    """Questions that cannot be sampled although others can: ``drop`` leaves them out, ``error`` ends the run without
    a selection."""

    @property
    def most_right(self) -> int:
        """Maximum number of right answers of a kept question."""
        if self.max_rate is None:
            return self.samples - 1
        return int(self.max_rate * self.samples + 1e-9)


class QueryConfig(QuerySettings):
    """A YAML of ``afm data queries`` (``configs/queries/``)."""

    tasks: OneOrMany[Path] = Field(min_length=1)
    """Questions as JSONL or parquet."""
    output_dir: Path
    """Folder for everything that the run writes. ``kept.jsonl`` holds the questions. The same command resumes a run."""
    model: str = Field(min_length=1)
    """A model's folder, a run, or the address of an OpenAI-compatible server."""
    model_name: str | None = None
    """Name of the model if the server has several."""
    tokenizer: Path | None = None
    """Folder of the served model's tokenizer. ``with_tools`` needs it."""
    timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds for one reply of a chat endpoint. Then it is asked again."""
    agent: str
    """Agent that answers. It has its tools only with ``with_tools``."""
    tools: Path | None = None
    """YAML of tools, for ``with_tools``."""
    rewards: Path | None = None
    """Reward YAML that judges episodes with tools. Without tools, the answer must equal the gold answer."""
    ability: str | None = None
    """Asks only rows of this ability. The default is all rows."""
    sft: OneOrMany[Path] = ()
    """SFT data whose questions must not occur among the kept ones. A missing file is an error."""

    @field_validator("sft")
    @classmethod
    def _exist(cls, files: tuple[Path, ...]) -> tuple[Path, ...]:
        for file in files:
            if not file.is_file():
                raise ValueError(
                    f"files that exist; {file}: no such file, so overlap with the SFT data cannot be excluded. Make it with "
                    "the agent's prepare.sh, or run the command in the folder that the path begins in"
                )
        return files


def read_selection(path: Path, overrides: Sequence[str] = ()) -> QueryConfig:
    """Read the settings of a YAML, which may extend another (``extends``). Its paths are relative to the file.

    Raises:
        ConfigError: Names file, key path, value and what was expected.
        UsageError: An override is wrong.
    """
    data = read_extended(path, "a selection of queries", anchor=anchored)
    apply_overrides(data, overrides)
    return validated(QueryConfig, data, str(path), overrides=overrides)


class SampleLog(Journal):
    """The samples of one selection, open for writing by one process at a time. Use it as a context manager.

    The sample of a torn last line is taken again. So are samples of a question that has changed.

    Raises:
        ConfigError: Another process is writing the log.
        DataError: A complete line is not a sample.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._keys: dict[str, str] = {}
        self._taken: dict[tuple[str, str], tuple[int, int]] = {}

    def _read_back(self) -> None:
        for _, row in read_rows(self.path, {"task": str, "key": str, "sample": int, "right": bool}):
            self._note(row["task"], row["key"], row["sample"], row["right"])

    def add(self, task: Task, number: int, *, right: bool, stop: str) -> None:
        """Append one sample and pass it to the operating system at once."""
        key = self._key(task)
        self.append_row({"task": task.id, "key": key, "sample": number, "right": right, "stop": stop})
        self._note(task.id, key, number, right)

    def missing(self, task: Task, samples: int) -> list[int]:
        """Return the numbers of the first ``samples`` samples that are missing."""
        done, _ = self._taken.get((task.id, self._key(task)), (0, 0))
        return [number for number in range(samples) if not done >> number & 1]

    def right(self, task: Task, samples: int) -> int:
        """Return the number of right answers among the first ``samples``."""
        _, right = self._taken.get((task.id, self._key(task)), (0, 0))
        return (right & ((1 << samples) - 1)).bit_count()

    def _key(self, task: Task) -> str:
        """Return a key of question and gold answer. It is cached, because the tests of a program may take megabytes."""
        if task.id not in self._keys:
            content = json.dumps([task.question, task.ground_truth], sort_keys=True, default=str)
            self._keys[task.id] = blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return self._keys[task.id]

    def _note(self, task: str, key: str, number: int, right: bool) -> None:
        done, correct = self._taken.get((task, key), (0, 0))
        bit = 1 << number
        if not done & bit:
            self._taken[task, key] = (done | bit, correct | (bit if right else 0))


OnSample = Callable[[int, int], None]
"""Receives the number of samples so far, including those of earlier runs, and the total number."""

_TRIES = 3
_PARALLEL_AGAIN = 4
_NAMED = 5
_NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f]*")


@dataclass(slots=True)
class _Fault:
    """Errors of a question's missing samples.

    Attributes:
        kinds: Messages without numbers.
    """

    refused: bool = False
    samples: int = 0
    kinds: set[str] = field(default_factory=set)
    last: str = ""

    def note(self, error: Exception) -> None:
        self.last = f"{type(error).__name__}: {error}"
        self.samples += 1
        self.kinds.add(_NUMBER.sub("#", self.last))
        self.refused = self.refused or isinstance(error, RefusedError)


class Sampling:
    """Takes the samples of one selection. ``resumed`` samples were in the log, ``sampled`` ones are new.

    Attributes:
        unjudged: Tasks whose answers cannot be judged, by id with the reason.
        unsampled: Tasks that the engine does not answer although it answers others, by id with the reason.
    """

    def __init__(
        self,
        asker: QuestionAsker,
        log: SampleLog,
        settings: QuerySettings,
        total: int,
        on_sample: OnSample | None,
    ) -> None:
        self.resumed = self.sampled = 0
        self.unjudged: dict[str, str] = {}
        self.unsampled: dict[str, str] = {}
        self._asker, self._log, self._settings = asker, log, settings
        self._total, self._on_sample = total, on_sample
        self._faults: dict[str, _Fault] = {}
        self._in_a_row = 0
        self._last = ""

    async def work(self, tasks: Sequence[Task]) -> None:
        """Take all samples that are missing in the log.

        Raises:
            EngineError: Samples are missing, and their questions are not at fault. Existing samples stay.
            SandboxUnavailableError: Model-written code cannot run on this machine.
        """
        self.resumed = self._total - sum(len(self._missing(task)) for task in tasks)
        await self._pass(tasks, tasks, self._settings.max_parallel)
        if self.unjudged and not await self._works(tasks):
            raise self._incomplete()
        if not self._faults:
            return
        failing = [task for task in tasks if task.id in self._faults]
        if self._settings.on_bad_rows is FailedQuestions.ERROR or not self._own_faults(failing):
            raise self._incomplete()
        self._faults, self._in_a_row = {}, 0
        await self._pass(failing, tasks, min(_PARALLEL_AGAIN, self._settings.max_parallel), patient=False)
        failing = [task for task in tasks if task.id in self._faults]
        if failing and not (self._own_faults(failing, patient=False) and await self._works(tasks)):
            raise self._incomplete()
        self.unsampled = {name: fault.last for name, fault in self._faults.items()}

    def _own_faults(self, failing: Sequence[Task], *, patient: bool = True) -> bool:
        """Return whether the questions may be at fault: all were rejected, or a few questions had only one kind of error."""
        stuck = [task for task in failing if not self._faults[task.id].refused]
        if len(stuck) > self._settings.failures_in_a_row:
            return False
        samples = self._settings.samples
        for task in stuck:
            fault = self._faults[task.id]
            if len(fault.kinds) > 1 or len(self._missing(task)) < samples:
                return False
            if patient and fault.samples < samples:
                return False
        return True

    async def _pass(
        self, tasks: Sequence[Task], everyone: Sequence[Task], parallel: int, *, patient: bool = True
    ) -> None:
        """Take the missing samples of ``tasks``. Without ``patient``, a question stops at its first error."""
        most = max(self._settings.failures_in_a_row, 2 * self._settings.max_parallel)

        async def take(sample: tuple[Task, int]) -> None:
            task, number = sample
            fault = self._faults.get(task.id)
            if task.id in self.unjudged or (fault is not None and (fault.refused or not patient)):
                return
            answered = await self._ask(task, number)
            if answered is not None:
                self._in_a_row = 0
                self._log.add(task, number, right=answered.right, stop=answered.stop)
                self.sampled += 1
                if self._on_sample is not None:
                    self._on_sample(self.resumed + self.sampled, self._total)
                return
            self._in_a_row += 1
            if self._in_a_row >= most:
                self._in_a_row = 0
                if not await self._works(everyone):
                    raise self._incomplete()

        missing = [(task, number) for task in tasks for number in self._missing(task)]
        await work_in_parallel(missing, take, parallel)

    async def _ask(self, task: Task, number: int) -> Answered | None:
        seed = episode_seed(self._settings.seed, task.id, number)
        failed: RewardError | EngineError | ToolError | None = None
        for _ in range(_TRIES):
            try:
                return await self._asker.ask(task, seed)
            except SandboxUnavailableError:
                raise
            except RefusedError as error:
                failed = error
                break
            except (RewardError, EngineError, ToolError) as error:
                failed = error
        if isinstance(failed, RewardError):
            self.unjudged[task.id] = self._last = str(failed)
        elif failed is not None:
            fault = self._faults.setdefault(task.id, _Fault())
            fault.note(failed)
            self._last = fault.last
        return None

    async def _works(self, tasks: Sequence[Task]) -> bool:
        """Return whether a question that worked before, or one that has not failed yet, is answered and judged now."""
        others = [task for task in tasks if task.id not in self._faults and task.id not in self.unjudged]
        answered = (task for task in others if len(self._missing(task)) < self._settings.samples)
        control = next(answered, None)
        many = min(len(others), self._settings.failures_in_a_row)
        draw = random.Random(self._settings.seed)
        failures = 0
        for task in [control] * _TRIES if control is not None else draw.sample(others, many):
            try:
                await self._asker.ask(task, episode_seed(self._settings.seed, task.id, 0))
            except SandboxUnavailableError:
                raise
            except (RewardError, EngineError, ToolError) as error:
                self._last = f"{type(error).__name__}: {error}"
                failures += not isinstance(error, RefusedError)
                if failures == _TRIES:
                    return False
            else:
                return True
        return False

    def _missing(self, task: Task) -> list[int]:
        return self._log.missing(task, self._settings.samples)

    def _incomplete(self) -> EngineError:
        there, names = self.resumed + self.sampled, sorted(self._faults)
        failed = sum(fault.samples for fault in self._faults.values())
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        examples = f" (of {', '.join(map(repr, names[:_NAMED]))}{more})" if names else ""
        return EngineError(
            f"{self._total - there} of {self._total} samples are missing, {failed} of them failed{examples}; the last: "
            f"{self._last}. Remove the cause and run the same command again; existing samples are kept"
        )
