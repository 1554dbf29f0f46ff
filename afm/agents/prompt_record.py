"""The prompts of a model's training, recorded in its folder's ``prompt.json``, and their comparison with a run's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from afm.agents.load import model_folder
from afm.agents.prompt_source import (
    QUESTION_MARK,
    Messages,
    PromptMode,
    PromptSource,
    PromptTemplate,
    single_turn,
)
from afm.agents.spec import AgentSpec
from afm.errors import ConfigError, DataError
from afm.runs.atomic import replace_text
from afm.terminal import plural

PROMPT_FILE = "prompt.json"
"""The file in a trained model's folder that records its prompts."""
_KEPT = 32
_BARE = PromptTemplate("")
_WINDOW = 80
_LEAD = 20
_WAYS_OUT = (
    "use prompt=row (each row's own), prompt=FILE (the text that the model was trained with), "
    "or prompt_check=off to use another prompt on purpose"
)

Asked = Iterable[tuple[str, str, Messages | None]]
"""The name (file and line, or id), the question and the prompt of each row of a run."""


class RecordedTemplate(BaseModel):
    """One prompt of a training run: its system turn, its user turn with ``{question}``, and the number of its rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    system: str = ""
    user: str
    rows: int

    @property
    def template(self) -> PromptTemplate:
        """The same prompt as a template that takes a question."""
        return PromptTemplate.of_text(self.user, self.system)


class PromptRecord(BaseModel):
    """The prompts of a training run or an evaluation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: PromptMode
    """The source of the prompts: ``own``, ``row`` or ``file``."""
    templates: tuple[RecordedTemplate, ...] = ()
    """The most frequent prompts first, at most 32."""
    more: int = 0
    """The number of rows with further prompts."""
    unknown: int = 0
    """The number of rows in whose prompt the question cannot be separated from the instruction."""

    @property
    def the_one(self) -> PromptTemplate | None:
        """The prompt that all rows share, or ``None`` if there are several or unknown ones."""
        single = len(self.templates) == 1 and not self.more and not self.unknown
        return self.templates[0].template if single else None

    @property
    def digests(self) -> frozenset[str]:
        """The digests of the prompts."""
        return frozenset(prompt.digest for prompt in self.templates)

    def holds(self, other: PromptRecord) -> bool:
        """Return whether every prompt of ``other`` is in this record."""
        return other.digests <= self.digests

    def plus(self, other: PromptRecord) -> PromptRecord:
        """Return the union of both records, with the mode of this one."""
        rows: Counter[PromptTemplate] = Counter()
        for prompt in (*self.templates, *other.templates):
            rows[prompt.template] += prompt.rows
        return _recorded(self.mode, rows, self.unknown + other.unknown, self.more + other.more)

    def after(self, base: PromptRecord | None) -> PromptRecord:
        """Return the record of a model that was trained with these prompts, starting from a model with record ``base``.

        The prompts of ``base`` are kept if they include all of these, and dropped otherwise.
        """
        if base is None or not base.holds(self):
            return self
        earlier = tuple(prompt for prompt in base.templates if prompt.digest not in self.digests)
        return self.plus(base.model_copy(update={"templates": earlier}))

    def save(self, path: Path) -> None:
        """Write the record as JSON. Replaces ``path`` atomically."""
        replace_text(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> PromptRecord:
        """Read a record that :meth:`save` wrote.

        Raises:
            ConfigError: The file cannot be read, or a digest does not match its text.
        """
        try:
            record = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            text = f"{path}: cannot be read as the record of a model's prompts"
            raise ConfigError(f"{text} ({type(error).__name__}); copy it again or remove it") from None
        for number, prompt in enumerate(record.templates):
            if prompt.digest != prompt.template.digest:
                raise ConfigError(
                    f"{path}: templates.{number}: got the digest {prompt.digest!r}, expected "
                    f"{prompt.template.digest!r} for its text; copy the file again or remove it"
                )
        return record


def record_of_model(model: str | Path | None) -> PromptRecord | None:
    """Return the prompts recorded in a model's or a run's folder, or ``None`` without a record.

    Raises:
        ConfigError: The record is damaged.
    """
    if not model or "://" in str(model):
        return None
    path = model_folder(Path(model).expanduser()) / PROMPT_FILE
    return PromptRecord.load(path) if path.is_file() else None


class PromptTally:
    """Counts the prompts of rows. Chats of several turns are skipped.

    Args:
        mode: The source of the prompts.
        known: Prompts to look for first. In an unknown prompt the question follows a line ``Question:`` or ``Task:``, or is
            the user turn after a system turn. In mode ``row`` the bare question, which fits every chat, is tried last.
    """

    def __init__(self, mode: PromptMode, known: Iterable[PromptTemplate] = ()) -> None:
        self._mode = mode
        # The longest template goes first. The order is total, so that every process finds the same one.
        self._known = sorted(
            set(known) - {_BARE},
            key=lambda known: (
                -len(known.before) - len(known.after),
                known.before,
                known.after,
                known.system,
            ),
        )
        self._bare = _BARE in set(known)
        self._rows: Counter[PromptTemplate] = Counter()
        self._open: list[tuple[PromptTemplate, ...]] = []
        self._seen: Counter[PromptTemplate] = Counter()
        self._unknown = 0

    def add(self, messages: Messages) -> None:
        """Count the prompt of one row."""
        turns = single_turn(messages)
        if turns is None:
            return
        places = tuple(self._found(messages, *turns))
        self._seen.update(places)
        if len(places) == 1:
            self._rows[places[0]] += 1
        elif places:
            self._open.append(places)
        else:
            self._unknown += 1

    def _found(self, messages: Messages, system: str, user: str) -> Iterator[PromptTemplate]:
        """Yield the possible templates of a chat in the order of the text."""
        known = next((prompt for prompt in self._known if prompt.question_in(messages) is not None), None)
        bare = self._bare and not system
        if known is None and bare and self._mode is not PromptMode.ROW:
            known = _BARE
        if known is not None:
            yield known
            return
        places = list(_places(system, user))
        yield from places or ([_BARE] if bare else [])

    def record(self) -> PromptRecord:
        """Return the counted prompts. If a prompt can be split in several ways, the most frequent or last one counts."""
        rows = self._rows.copy()
        for places in self._open:
            rows[max(reversed(places), key=self._seen.__getitem__)] += 1
        return _recorded(self._mode, rows, self._unknown)


def prompts_of_run(
    source: PromptSource, spec: AgentSpec, rows: Asked, trained: PromptRecord | None = None
) -> PromptRecord:
    """Return the prompts of a run's rows.

    Args:
        trained: The record of the run's model. Its prompts are recognized in the rows.

    Raises:
        DataError: A row has no prompt. The message names the row.
    """
    tally = PromptTally(
        source.mode,
        [
            PromptTemplate.of_agent(spec),
            *([source.template] if source.template else []),
            *(prompt.template for prompt in (trained.templates if trained else ())),
        ],
    )
    for name, question, own in rows:
        try:
            tally.add(source.messages(spec, question, own))
        except DataError as error:
            raise DataError(f"{name}: {error.message}") from None
    return tally.record()


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The prompts of a run, and those of its model's training if they are known."""

    source: PromptSource
    asked: PromptRecord
    trained: PromptRecord | None

    def __str__(self) -> str:
        if self.trained is None:
            compared = "the model's folder does not record its training prompt"
        elif prompt_difference(self.asked, self.trained):
            compared = "differs from the model's training prompt, as requested"
        else:
            compared = "the same as in the model's training"
        kinds = len(self.asked.templates)
        several = f" ({kinds} prompts)" if kinds > 1 or self.asked.more else ""
        unknown = (
            f"; {plural(self.asked.unknown, 'row')} whose prompt cannot be compared"
            if self.asked.unknown
            else ""
        )
        words = {PromptMode.OWN: "the agent's own", PromptMode.ROW: "each row's own"}
        source = words.get(self.source.mode, f"that of {self.source}")
        return f"prompt: {source}{several}, {compared}{unknown}"


def run_prompts(
    source: PromptSource, spec: AgentSpec, rows: Asked, model: str | Path | None, *, check: bool = True
) -> RunPrompts:
    """Return the prompts of a run after comparing them with the record in the model's folder.

    With ``row``, rows without a prompt get the prompt that the model was trained with, if that was a single one.

    Raises:
        ConfigError: ``check`` is on and the model was trained with another prompt, or its record is damaged.
        DataError: A row has no prompt. The message names the row.
    """
    trained = record_of_model(model)
    source = source.filled_by(trained.the_one if trained else None)
    asked = prompts_of_run(source, spec, rows, trained)
    if check:
        check_prompts(asked, trained, str(model))
    return RunPrompts(source, asked, trained)


def check_prompts(asked: PromptRecord, trained: PromptRecord | None, model: str | Path) -> None:
    """Check that a model was trained with the prompts of a run. A model without a record accepts any prompt.

    Raises:
        ConfigError: The prompts differ. The message shows the first line that does.
    """
    text = prompt_difference(asked, trained)
    if text is not None:
        raise ConfigError(f"prompt: {model} was trained with another prompt: {text}; {_WAYS_OUT}")


def prompt_difference(asked: PromptRecord, trained: PromptRecord | None) -> str | None:
    """Return the first line of a run's prompts that differs from the model's, or ``None`` if none does or is known."""
    if trained is None or not trained.templates or trained.more or trained.holds(asked):
        return None
    others = [prompt for prompt in asked.templates if prompt.digest not in trained.digests]
    closest = max(trained.templates, key=lambda prompt: _shared(_text(prompt), _text(others[0])))
    rows = sum(prompt.rows for prompt in others)
    return f"{plural(rows, 'row')}, {_first_difference(others[0], closest)}"


def _places(system: str, user: str) -> Iterator[PromptTemplate]:
    """Yield a template for each place where the question may begin, in the order of the text."""
    marks = [mark.end() for mark in QUESTION_MARK.finditer(user) if user[mark.end() :].strip()]
    yield from (PromptTemplate(user[:end], "", system) for end in marks)
    if not marks and system and "<" not in user:
        yield PromptTemplate("", "", system)


def _recorded(mode: PromptMode, rows: Counter[PromptTemplate], unknown: int, more: int = 0) -> PromptRecord:
    ordered: Sequence[tuple[PromptTemplate, int]] = rows.most_common()
    kept = tuple(
        RecordedTemplate(digest=prompt.digest, system=prompt.system, user=prompt.user, rows=count)
        for prompt, count in ordered[:_KEPT]
    )
    return PromptRecord(
        mode=mode, templates=kept, more=more + sum(count for _, count in ordered[_KEPT:]), unknown=unknown
    )


def _text(prompt: RecordedTemplate) -> str:
    return f"{prompt.system}\0{prompt.user}"


def _shared(text: str, other: str) -> int:
    """Return the number of equal characters at the start of both texts."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(text), len(other)))


def _first_difference(got: RecordedTemplate, expected: RecordedTemplate) -> str:
    turn = "user" if got.system == expected.system else "system"
    pairs = zip_longest(getattr(got, turn).split("\n"), getattr(expected, turn).split("\n"))
    number, (ours, theirs) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"line {number} of the {turn} turn: got {_shown(ours, theirs)}, expected {_shown(theirs, ours)}"


def _shown(line: str | None, other: str | None) -> str:
    """Return the part of the line around its first difference."""
    if line is None:
        return "no such line"
    begin = max(0, _shared(line, other or "") - _LEAD)
    part = line[begin : begin + _WINDOW]
    return f"{'...' if begin else ''}{part!r}{'...' if begin + _WINDOW < len(line) else ''}"
