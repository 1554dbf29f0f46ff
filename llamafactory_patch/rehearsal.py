"""What LLaMA-Factory says to a configuration and its data, asked without a training.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` comes first.
"""

from __future__ import annotations

import copy
import io
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.data.template import TEMPLATES
from llamafactory.extras.misc import has_tokenized_data
from llamafactory.hparams import get_train_args

from afm.errors import AfmError, ConfigError, DataError, suggestion
from llamafactory_patch.authors import check_chat_template, rendering
from llamafactory_patch.bad_rows import REPORT_FILE, BadRow, begin_report, reported
from llamafactory_patch.loading import FAULT_COLUMN, data_sets, evaluation_sets, local_rows, takes_part
from llamafactory_patch.prompts import PromptCounter, PromptCounts, row_prompts
from llamafactory_patch.spans import check_roles

_HARDWARE_KEYS = frozenset(
    {"deepspeed", "enable_liger_kernel", "fsdp", "fsdp_config", "pure_bf16", "resume_from_checkpoint", "tf32"}
)
"""Keys that LLaMA-Factory accepts on the GPUs of the training only."""

_DATA_OF_STAGE = {"dpo": "rm"}
"""Under that name the workflows of LLaMA-Factory load the data of a kind of training."""

_SAMPLED_ROWS = 200
_LISTED_ROWS = 3

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Arguments:
    """LLaMA-Factory's arguments, of which the training and its method matter to what is made of the data."""

    model: Any
    data: Any
    training: Any
    finetuning: Any


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


def engine_arguments(config: Mapping[str, Any]) -> Arguments:
    """Parse a configuration as a training does, as for one process on a CPU.

    Raises:
        ConfigError: The training would refuse it.
    """
    given = {key: value for key, value in config.items() if key not in _HARDWARE_KEYS}
    with tempfile.TemporaryDirectory() as empty, _quiet():
        try:
            model, data, training, finetuning, _ = get_train_args(
                {**given, "use_cpu": True, "output_dir": empty}
            )
        except AfmError:
            raise
        except (ValueError, TypeError, AssertionError, ImportError, NotImplementedError, OSError) as error:
            raise ConfigError(str(error)) from None
    if data.template is not None and data.template not in TEMPLATES:
        raise ConfigError(
            f"template: LLaMA-Factory has no {data.template!r}; {suggestion(data.template, TEMPLATES)}"
        )
    return Arguments(model, data, training, finetuning)


def read_data(arguments: Arguments) -> Iterator[DataSet]:
    """Every data set; of those in local JSON files all rows are read and converted.

    Raises:
        ConfigError: ``dataset_info.json`` is wrong.
        DataError: A file as a whole is broken.
    """
    for attr in data_sets(arguments.data):
        yield _read(attr, arguments.data, evaluation=False)
    for attr in evaluation_sets(arguments.data):
        yield _read(attr, arguments.data, evaluation=True)


def _read(attr: Any, data: Any, *, evaluation: bool) -> DataSet:
    rows = local_rows(attr, data)
    if rows is None:
        return DataSet(attr, evaluation)
    sample: list[Row] = []
    listed: list[str] = []
    bad = good = 0
    step = 1
    counter = PromptCounter(row_prompts(data))
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
    drawn = good if attr.num_samples is None or data.streaming else int(attr.num_samples)
    taken = drawn if data.max_samples is None else min(drawn, data.max_samples)
    asked = counter.counts() if data.record_agent else None
    return DataSet(attr, evaluation, good + bad, bad, tuple(listed), taken, tuple(sample), asked)


def stops_at_bad_rows(arguments: Arguments) -> bool:
    """Whether a bad row ends the training; otherwise it goes on without it."""
    return takes_part(arguments.data) and arguments.data.on_bad_rows == "error"


def check_silent_roles(arguments: Arguments) -> None:
    """Whether the rows have the ``roles_without_loss``; nothing is said of rows that are not in local JSON files.

    Raises:
        ConfigError: One is in no row.
    """
    data = arguments.data
    found = [local_rows(attr, data) for attr in data_sets(data)] if data.silent_roles else []
    local = [rows for rows in found if rows is not None]
    if local and len(local) == len(found):
        good = ((row for row in rows if not row[FAULT_COLUMN]) for rows in local)
        check_roles(chain.from_iterable(islice(rows, data.max_samples) for rows in good), data.silent_roles)


def rehearse(arguments: Arguments, found: Sequence[DataSet]) -> Rehearsal:
    """Send the samples of the data sets the way of a training; nothing is stored of it.

    Raises:
        ConfigError: The data does not fit the kind of training.
    """
    data = copy.copy(arguments.data)
    data.sample = [(data_set.attr, data_set.sample) for data_set in found]
    data.on_bad_rows = "drop"
    data.tokenized_path = data.preprocessing_num_workers = None
    data.streaming, data.val_size, data.mix_strategy, data.interleave_probs = False, 0.0, "concat", None
    rows = sum(len(data_set.sample) for data_set in found if not data_set.evaluation)
    sequences = 0
    with tempfile.TemporaryDirectory() as folder:
        begin_report()
        try:
            with redirect_stderr(io.StringIO()):  # progress, and a report that nobody will find
                sequences = len(_prepared(arguments, data, folder)[0])
        except DataError:
            if not (Path(folder) / REPORT_FILE).is_file():
                raise
        bad = tuple(reported(Path(folder) / REPORT_FILE))
    return Rehearsal(rows, sequences, bad)


def training_rows(arguments: Arguments) -> tuple[Any, Any]:
    """The data set as the trainer gets it (streamed, packed, pairs, ...), and the tokenizer.

    Rows that an earlier training stored are taken; none are stored for the sake of a look.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or the data does not fit the kind of training.
        DataError: A row cannot be trained on, and ``on_bad_rows`` is ``error``.
    """
    data = copy.copy(arguments.data)
    if data.tokenized_path is not None and not has_tokenized_data(data.tokenized_path):
        data.tokenized_path = None
    report = Path(tempfile.mkdtemp(prefix="afm_"))
    try:
        return _prepared(arguments, data, str(report))
    finally:
        with suppress(OSError):  # it holds a report of bad rows, which a message may have named
            report.rmdir()


def _prepared(arguments: Arguments, data: Any, output_dir: str) -> tuple[Any, Any]:
    """The data set that a training with these data arguments gets, and the tokenizer."""
    tokenizer, template = load_tools(arguments)
    training = copy.copy(arguments.training)
    training.output_dir = output_dir
    stage = _DATA_OF_STAGE.get(arguments.finetuning.stage, arguments.finetuning.stage)
    try:
        with _quiet(), redirect_stdout(io.StringIO()):
            module = get_dataset(template, arguments.model, data, training, stage=stage, tokenizer=tokenizer)
    except AfmError:
        raise
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"the data cannot be prepared: {error}") from None
    return module.get("train_dataset", ()), tokenizer


def sequence_lengths(arguments: Arguments, rows: Sequence[Row]) -> list[int]:
    """Tokens of each row (of the longer side of a pair) before anything is cut; rows that no template can write are left out.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or its chat template is not the configured one.
    """
    tokenizer, template = load_tools(arguments)
    lengths = []
    for row in rows:
        with suppress(DataError), rendering():
            lengths.append(max(_lengths(template, tokenizer, row)))
    return lengths


def load_tools(arguments: Arguments) -> tuple[Any, Any]:
    """The tokenizer and the template of a training.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or its chat template is not the configured one.
    """
    from llamafactory.model import load_tokenizer

    with _quiet():
        try:
            tokenizer = load_tokenizer(arguments.model)["tokenizer"]
            template = get_template_and_fix_tokenizer(tokenizer, arguments.data)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"the tokenizer cannot be used: {error}") from None
    if arguments.data.match_chat_template:
        check_chat_template(template, tokenizer)
    return tokenizer, template


def _lengths(template: Any, tokenizer: Any, row: Row) -> Iterator[int]:
    for response in row["_response"]:
        turns = [*row["_prompt"], response]
        pairs = template.encode_multiturn(tokenizer, turns, row["_system"], row["_tools"])
        yield sum(len(prompt) + len(answer) for prompt, answer in pairs)


@contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
