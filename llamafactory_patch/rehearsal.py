"""What LLaMA-Factory says to a configuration and its data, asked without a training.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` comes first.
"""

from __future__ import annotations

import copy
import io
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.data.parser import get_dataset_list
from llamafactory.data.template import TEMPLATES
from llamafactory.extras.misc import has_tokenized_data
from llamafactory.hparams import get_train_args

from afm.errors import AfmError, ConfigError, DataError, suggestion
from llamafactory_patch.authors import check_chat_template
from llamafactory_patch.bad_rows import BadRow
from llamafactory_patch.loading import FAULT_COLUMN, local_rows, takes_part

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
        name: The file, or what else ``dataset_info.json`` names.
        rows: Number of rows, bad ones among them, those that a filter had not kept left out; ``None`` when it is not
            in local JSON files, and was not read.
        bad: Number of bad rows.
        listed: The first of them.
        stops: Whether a bad row stops the training.
        sample: Good rows, evenly spread, at most 200.
    """

    name: str
    rows: int | None = None
    bad: int = 0
    listed: tuple[str, ...] = ()
    stops: bool = False
    sample: tuple[Row, ...] = ()


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


def data_sets(arguments: Arguments) -> Iterator[DataSet]:
    """Every data set; of those in local JSON files all rows are read and converted.

    Raises:
        ConfigError: ``dataset_info.json`` is wrong.
        DataError: A file as a whole is broken.
    """
    data = arguments.data
    try:
        found = get_dataset_list([*(data.dataset or ()), *(data.eval_dataset or ())], data.dataset_dir)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{data.dataset_dir}/dataset_info.json: {error}") from None
    for attr in found:
        rows = local_rows(attr, data)
        stops = takes_part(data) and data.on_bad_rows == "error"
        yield DataSet(attr.dataset_name) if rows is None else _read(attr.dataset_name, rows, stops)


def _read(name: str, rows: Iterator[Row], stops: bool) -> DataSet:
    sample: list[Row] = []
    listed: list[str] = []
    bad = good = 0
    step = 1
    for row in rows:
        fault = BadRow.load(row[FAULT_COLUMN]) if row[FAULT_COLUMN] else None
        if fault is None:
            sample += [row] if good % step == 0 else []
            good += 1
        elif fault.is_fault:
            bad += 1
            listed += [str(fault)] if len(listed) < _LISTED_ROWS else []
        if len(sample) > _SAMPLED_ROWS:
            sample, step = sample[::2], 2 * step
    return DataSet(name, good + bad, bad, tuple(listed), stops, tuple(sample))


def training_rows(arguments: Arguments) -> tuple[Any, Any]:
    """The data set as the trainer gets it (streamed, packed, pairs, ...), and the tokenizer.

    Rows that an earlier training stored are taken; none are stored for the sake of a look.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or the data does not fit the kind of training.
        DataError: A row cannot be trained on, and ``on_bad_rows`` is ``error``.
    """
    tokenizer, template = _tokenizer(arguments)
    report = Path(tempfile.mkdtemp(prefix="afm_"))
    training, data = copy.copy(arguments.training), copy.copy(arguments.data)
    training.output_dir = str(report)
    if data.tokenized_path is not None and not has_tokenized_data(data.tokenized_path):
        data.tokenized_path = None
    stage = _DATA_OF_STAGE.get(arguments.finetuning.stage, arguments.finetuning.stage)
    try:
        with _quiet(), redirect_stdout(io.StringIO()):
            module = get_dataset(template, arguments.model, data, training, stage=stage, tokenizer=tokenizer)
    except AfmError:
        raise
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(f"the data cannot be prepared: {error}") from None
    finally:
        with suppress(OSError):  # it holds a report of bad rows, which a message may have named
            report.rmdir()
    return module["train_dataset"], tokenizer


def sequence_lengths(arguments: Arguments, rows: Sequence[Row]) -> list[int]:
    """Tokens of each row (of the longer side of a pair) before anything is cut.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or its chat template is not the configured one.
        DataError: The template cannot render a row.
    """
    tokenizer, template = _tokenizer(arguments)
    try:
        return [max(_lengths(template, tokenizer, row)) for row in rows]
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise DataError(f"the template cannot render a row: {error}") from None


def _tokenizer(arguments: Arguments) -> tuple[Any, Any]:
    """The tokenizer and the template of a training."""
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
