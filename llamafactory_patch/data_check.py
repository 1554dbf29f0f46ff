"""Check the data of a training run without starting it: read every local row, and tokenise a sample.

Importing this module imports LLaMA-Factory; call :func:`llamafactory_patch.engine.load_engine` first.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from afm.agents.prompt_record import check_prompts, record_of_model
from afm.errors import AfmError, ConfigError, DataError
from afm.findings import Finding, Level, Report
from afm.terminal import plural
from llamafactory_patch.engine import TOKENISED_STAGES, Arguments, load_tools, quiet
from llamafactory_patch.masks import refuse_unseen, rendering, unseen_roles
from llamafactory_patch.prompts import PromptCounter, PromptCounts, row_prompts
from llamafactory_patch.reading import FAULT_COLUMN, FEATURES, BadRow, BadRowReport, entries, local_rows
from llamafactory_patch.tokenise import check_layout, check_stored, tokenise

_SAMPLED_ROWS = 200
_LISTED_ROWS = 3

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataSet:
    """One data set as training would read it.

    Attributes:
        attr: The entry in ``dataset_info.json``.
        evaluation: Whether the data set is used for evaluation, not for training.
        rows: Number of rows, including bad ones, without rows that a filter did not keep. ``None`` if the rows are not in
            local JSON files and were not read.
        bad: Number of bad rows.
        listed: Descriptions of the first bad rows.
        taken: Number of good rows after ``num_samples`` and ``max_samples``.
        sample: At most 200 of these rows, evenly spread.
        asked: Prompts of the good rows, if an agent is trained.
        unseen: Names in ``roles_without_loss`` that occur in no row.
    """

    attr: Any
    evaluation: bool
    rows: int | None = None
    bad: int = 0
    listed: tuple[str, ...] = ()
    taken: int = 0
    sample: tuple[Row, ...] = ()
    asked: PromptCounts | None = None
    unseen: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file, or the other source that ``dataset_info.json`` names."""
        return str(self.attr.dataset_name)


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """The result of preparing a sample of the rows for the trainer.

    Attributes:
        rows: Rows of the sample, without those of ``eval_dataset``.
        sequences: Sequences, or packs if they are packed, that the trainer gets for these rows.
        bad: Rows that cannot be trained on.
    """

    rows: int
    sequences: int
    bad: tuple[BadRow, ...]


def report_data(arguments: Arguments, sets: Sequence[DataSet], report: Report) -> int | None:
    """Report on the rows, their prompts and a sample of them; return the sequences of an epoch if known."""
    stops = arguments.stage in TOKENISED_STAGES and arguments.sft.on_bad_rows == "error"
    level = Level.ERROR if stops else Level.WARNING
    for data_set in sets:
        report.add(*_rows(data_set, level))
    report.asked("prompts", lambda: check_records(arguments, sets))
    report.asked("data", lambda: _check_silent_roles(sets))
    sample = _report_sample(arguments, sets, report, level)
    trained = [data_set for data_set in sets if not data_set.evaluation]
    if not trained or any(data_set.rows is None for data_set in trained):
        return None
    data = arguments.data
    rows = sum(data_set.taken for data_set in trained)
    if evaluated := validation_rows(rows, data.val_size):
        text = f"val_size={data.val_size} reserves {evaluated:,} of {rows:,} rows for evaluation"
        report.add(Finding(Level.OK if evaluated < rows else Level.ERROR, "data", text))
    rows = max(0, rows - evaluated)
    if sample is not None:
        return -(-rows * sample.sequences // sample.rows)
    mixed = data.mix_strategy != "concat" and len(trained) > 1
    return None if data.packing or mixed else rows


def _rows(data_set: DataSet, level: Level) -> Iterator[Finding]:
    name = data_set.name
    if data_set.rows is None:
        yield Finding(Level.WARNING, "data", f"{name}: not in local JSON files, so the rows were not read")
        return
    good = data_set.rows - data_set.bad
    purpose = "evaluate" if data_set.evaluation else "train"
    yield Finding(Level.OK if good else Level.ERROR, "data", f"{name}: {plural(good, 'row')} to {purpose} on")
    if data_set.asked and sum(data_set.asked.rows.values()):
        yield Finding(Level.OK, "prompts", f"{name}: {data_set.asked}")
    if data_set.bad:
        yield _bad_rows(level, f"{name}: {plural(data_set.bad, 'bad row')}", data_set.listed, data_set.bad)


def _bad_rows(level: Level, text: str, listed: Sequence[str], count: int) -> Finding:
    more = " ..." if count > len(listed) else ""
    return Finding(level, "data", ", ".join(filter(None, (text, "; ".join(listed)))) + more)


def check_records(arguments: Arguments, sets: Sequence[DataSet]) -> None:
    """Check that the training rows have the prompt that the model was trained with.

    Raises:
        ConfigError: The model was trained with another prompt.
    """
    model = str(arguments.model.model_name_or_path)
    base = record_of_model(model)
    for data_set in sets:
        if data_set.asked and not data_set.evaluation and arguments.sft.prompt_check:
            check_prompts(data_set.asked.record, base, model)


def _check_silent_roles(sets: Sequence[DataSet]) -> None:
    """Refuse roles that no row has, unless some rows are not in local JSON files."""
    trained = [data_set for data_set in sets if not data_set.evaluation]
    if trained and all(data_set.rows is not None for data_set in trained):
        refuse_unseen([role for role in trained[0].unseen if all(role in other.unseen for other in trained)])


def _report_sample(
    arguments: Arguments, sets: Sequence[DataSet], report: Report, level: Level
) -> SampleCheck | None:
    """Prepare a sample of the rows as training does, if there is a tokenizer here."""
    here = Path(str(arguments.model.model_name_or_path or "-")).expanduser().is_dir()
    if not sets or not all(data_set.sample for data_set in sets) or not here:
        return None
    if report.asked("tokenizer", lambda: load_tools(arguments)) is None:
        return None
    sample = report.asked("data", lambda: check_sample(arguments, sets))
    if sample is not None:
        report.add(*_sample(sample, level))
    if lengths := sequence_lengths(arguments, [row for data_set in sets for row in data_set.sample]):
        cutoff = arguments.data.cutoff_len
        long = sum(length > cutoff for length in lengths)
        text = f"{long} of {len(lengths)} sampled rows are longer than cutoff_len={cutoff:,}"
        text += f" (longest {max(lengths):,} tokens)" + ("; they will be cut" if long else "")
        report.add(Finding(Level.WARNING if long else Level.OK, "lengths", text))
    return sample


def _sample(sample: SampleCheck, level: Level) -> Iterator[Finding]:
    """Report what training would report about the sampled rows."""
    bad = [row for row in sample.bad if row.is_fault]
    none_left = bool(sample.rows) and not sample.sequences
    text = f"{plural(len(bad), 'bad row')} in the sample" if bad else ""
    if none_left:
        level, text = Level.ERROR, ": ".join(filter(None, ("no sampled row can be trained on", text)))
    if text:
        yield _bad_rows(level, text, [str(row) for row in bad[:_LISTED_ROWS]], len(bad))
    else:
        yield Finding(Level.OK, "sample", f"{plural(sample.rows, 'row')} can be prepared as in training")


def read_data(arguments: Arguments) -> list[DataSet]:
    """Return every data set; read and convert all rows of those in local JSON files.

    Raises:
        ConfigError: ``dataset_info.json`` is wrong, or the data sets or stored rows do not fit the run.
        DataError: A whole file is broken.
    """
    check_layout(arguments)
    check_stored(arguments)
    data = arguments.data
    trained = [_read(attr, arguments, evaluation=False) for attr in entries(data.dataset, arguments)]
    return [
        *trained,
        *(_read(attr, arguments, evaluation=True) for attr in entries(data.eval_dataset, arguments)),
    ]


def _read(attr: Any, arguments: Arguments, *, evaluation: bool) -> DataSet:
    rows = local_rows(attr, arguments)
    if rows is None:
        return DataSet(attr, evaluation)
    data = arguments.data
    sample: list[Row] = []
    listed: list[str] = []
    bad = good = 0
    step = 1
    unseen = list(arguments.sft.roles_without_loss)
    counter = PromptCounter(row_prompts(arguments.sft))
    for row in rows:
        fault = BadRow.load(row[FAULT_COLUMN]) if row[FAULT_COLUMN] else None
        if fault is None:
            within = attr.num_samples is not None or data.max_samples is None or good < data.max_samples
            sample += [row] if within and good % step == 0 else []
            unseen = unseen_roles([row], unseen) if within else unseen
            good += 1
            counter.add(row)
        elif fault.is_fault:
            bad += 1
            listed += [str(fault)] if len(listed) < _LISTED_ROWS else []
        if len(sample) > _SAMPLED_ROWS:
            sample, step = sample[::2], 2 * step
    drawn = good if attr.num_samples is None else int(attr.num_samples)
    taken = drawn if data.max_samples is None else min(drawn, data.max_samples)
    asked = counter.counts() if arguments.sft.agent else None
    counts = (good + bad, bad, tuple(listed), taken)
    return DataSet(attr, evaluation, *counts, tuple(sample), asked, tuple(unseen))


def check_sample(arguments: Arguments, sets: Sequence[DataSet]) -> SampleCheck:
    """Prepare the samples of the data sets as training does, without storing anything.

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
        with preparing(), redirect_stderr(io.StringIO()):  # progress bars
            made = tokenise(replace(arguments, data=data), report, sample_of, whole=False)
        sequences = len(made.sets.get("train", ()))
    except DataError:
        if not report.rows:
            raise
        sequences = 0
    return SampleCheck(rows, sequences, tuple(report.rows))


@contextmanager
def preparing() -> Iterator[None]:
    """Silence standard output, and turn the errors of LLaMA-Factory into a ``ConfigError``."""
    try:
        with quiet(), redirect_stdout(io.StringIO()):
            yield
    except AfmError:
        raise
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"the data cannot be prepared: {error}") from None


def sequence_lengths(arguments: Arguments, rows: Sequence[Row]) -> list[int]:
    """Return the tokens of each row, or of the longer side of a pair, before it is cut; skip rows that cannot be rendered.

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


def validation_rows(rows: int, val_size: float) -> int:
    """Return how many rows ``val_size`` reserves (LLaMA-Factory 0.9.5, data/data_utils.py, ``split_dataset``)."""
    if val_size <= 1e-6:
        return 0
    return int(val_size) if val_size > 1 or isinstance(val_size, int) else math.ceil(rows * val_size)
