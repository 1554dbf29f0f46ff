"""What LLaMA-Factory says to a configuration and its data, asked without a training.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.engine.load_engine` comes first.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from datasets import Dataset

from afm.errors import AfmError, ConfigError, DataError
from llamafactory_patch.bad_rows import FAULT_COLUMN, BadRow, BadRowReport
from llamafactory_patch.engine import TOKENISED_STAGES, Arguments, load_tools, quiet
from llamafactory_patch.masks import check_roles, rendering
from llamafactory_patch.prompts import PromptCounter, PromptCounts, row_prompts
from llamafactory_patch.reading import FEATURES, entries, local_rows
from llamafactory_patch.tokenise import Tokenised, check_layout, check_stored, load_or_tokenise, tokenise

_SAMPLED_ROWS = 200
_LISTED_ROWS = 3

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataSet:
    """One data set as a training would read it.

    Attributes:
        attr: Its entry of ``dataset_info.json``.
        evaluation: Whether the trainer is evaluated on it, and not trained.
        rows: Number of rows, bad ones among them, those that a filter had not kept left out; ``None`` when it is not
            in local JSON files, and was not read.
        bad: Number of bad rows.
        listed: The first of them.
        taken: Number of good rows that ``num_samples`` and ``max_samples`` let through.
        sample: Some of these, evenly spread, at most 200.
        asked: The prompts of the good rows, when an agent is trained.
    """

    attr: Any
    evaluation: bool
    rows: int | None = None
    bad: int = 0
    listed: tuple[str, ...] = ()
    taken: int = 0
    sample: tuple[Row, ...] = ()
    asked: PromptCounts | None = None

    @property
    def name(self) -> str:
        """The file, or what else ``dataset_info.json`` names."""
        return str(self.attr.dataset_name)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What became of a sample of the rows on the way to the trainer.

    Attributes:
        rows: Rows of the sample, those of ``eval_dataset`` left out.
        sequences: What the trainer gets of them: packs, when they are packed.
        bad: Rows that cannot be trained on.
    """

    rows: int
    sequences: int
    bad: tuple[BadRow, ...]


def read_data(arguments: Arguments) -> Iterator[DataSet]:
    """Every data set; of those in local JSON files all rows are read and converted.

    Raises:
        ConfigError: ``dataset_info.json`` is wrong, or the data sets or stored rows do not fit the training.
        DataError: A file as a whole is broken.
    """
    check_layout(arguments)
    check_stored(arguments)
    for attr in entries(arguments.data.dataset, arguments):
        yield _read(attr, arguments, evaluation=False)
    for attr in entries(arguments.data.eval_dataset, arguments):
        yield _read(attr, arguments, evaluation=True)


def _read(attr: Any, arguments: Arguments, *, evaluation: bool) -> DataSet:
    rows = local_rows(attr, arguments)
    if rows is None:
        return DataSet(attr, evaluation)
    data = arguments.data
    sample: list[Row] = []
    listed: list[str] = []
    bad = good = 0
    step = 1
    counter = PromptCounter(row_prompts(arguments.agent))
    for row in rows:
        fault = BadRow.load(row[FAULT_COLUMN]) if row[FAULT_COLUMN] else None
        if fault is None:
            within = attr.num_samples is not None or data.max_samples is None or good < data.max_samples
            sample += [row] if within and good % step == 0 else []
            good += 1
            counter.add(row)
        elif fault.is_fault:
            bad += 1
            listed += [str(fault)] if len(listed) < _LISTED_ROWS else []
        if len(sample) > _SAMPLED_ROWS:
            sample, step = sample[::2], 2 * step
    drawn = good if attr.num_samples is None else int(attr.num_samples)
    taken = drawn if data.max_samples is None else min(drawn, data.max_samples)
    asked = counter.counts() if arguments.agent.record_agent else None
    return DataSet(attr, evaluation, good + bad, bad, tuple(listed), taken, tuple(sample), asked)


def stops_at_bad_rows(arguments: Arguments) -> bool:
    """Whether a bad row ends the training; otherwise it goes on without it."""
    return arguments.stage in TOKENISED_STAGES and arguments.agent.on_bad_rows == "error"


def check_silent_roles(arguments: Arguments) -> None:
    """Whether the rows have the ``roles_without_loss``; nothing is said of rows that are not in local JSON files.

    Raises:
        ConfigError: One is in no row.
    """
    roles, data = arguments.agent.silent_roles, arguments.data
    sets = [local_rows(attr, arguments) for attr in entries(data.dataset, arguments)] if roles else []
    local = [rows for rows in sets if rows is not None]
    if local and len(local) == len(sets):
        good = ((row for row in rows if not row[FAULT_COLUMN]) for rows in local)
        check_roles(chain.from_iterable(islice(rows, data.max_samples) for rows in good), roles)


def rehearse(arguments: Arguments, sets: Sequence[DataSet]) -> Rehearsal:
    """Send the samples of the data sets the way of a training; nothing is stored of it.

    Raises:
        ConfigError: The data does not fit the kind of training.
    """
    data = copy.copy(arguments.data)
    data.preprocessing_num_workers, data.val_size = None, 0.0
    data.mix_strategy, data.interleave_probs = "concat", None
    report = BadRowReport("drop")

    def sample_of(attr: Any, *_: object) -> Dataset:
        rows = next(data_set.sample for data_set in sets if data_set.attr == attr)
        return report.sieve(Dataset.from_list(list(rows), features=FEATURES))

    rows = sum(len(data_set.sample) for data_set in sets if not data_set.evaluation)
    try:
        with _preparing(), redirect_stderr(io.StringIO()):  # progress
            made = tokenise(replace(arguments, data=data), report, sample_of, whole=False)
        sequences = len(made.sets.get("train", ()))
    except DataError:
        if not report.rows:
            raise
        sequences = 0
    return Rehearsal(rows, sequences, tuple(report.rows))


def training_sets(arguments: Arguments, folder: Path) -> Tokenised:
    """The data sets as the trainer gets them (packed, pairs, ...); those in ``folder`` if they are its own, and nothing is stored.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or the data does not fit the kind of training.
        DataError: A row cannot be trained on, and ``on_bad_rows`` is ``error``.
    """
    if arguments.stage not in TOKENISED_STAGES:
        raise ConfigError(f"stage: the rows of {arguments.stage!r} have no labels; nothing to show")
    with _preparing():
        return load_or_tokenise(arguments, folder)


@contextmanager
def _preparing() -> Iterator[None]:
    """Without a word on standard output, and with one error for what LLaMA-Factory may raise."""
    try:
        with quiet(), redirect_stdout(io.StringIO()):
            yield
    except AfmError:
        raise
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"the data cannot be prepared: {error}") from None


def sequence_lengths(arguments: Arguments, rows: Sequence[Row]) -> list[int]:
    """Tokens of each row (of the longer side of a pair) before anything is cut; rows that no template can write are left out.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or its chat template is not the configured one.
    """
    tools, template = load_tools(arguments)
    lengths = []
    for row in rows:
        with suppress(DataError), rendering():
            lengths.append(max(_lengths(template, tools["tokenizer"], row)))
    return lengths


def _lengths(template: Any, tokenizer: Any, row: Row) -> Iterator[int]:
    for response in row["_response"]:
        turns = [*row["_prompt"], response]
        pairs = template.encode_multiturn(tokenizer, turns, row["_system"], row["_tools"])
        yield sum(len(prompt) + len(answer) for prompt, answer in pairs)
