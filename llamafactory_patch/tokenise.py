"""Tokenise and store the rows that LLaMA-Factory's own training reads as its ``tokenized_path``.

LLaMA-Factory loads stored rows without checking other options, so each stored set has a record of its origin. Importing
this module imports LLaMA-Factory; call :func:`llamafactory_patch.engine.load_engine` first.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from datasets import Dataset, DatasetDict, load_from_disk
from llamafactory.data.data_utils import merge_dataset, split_dataset
from llamafactory.data.parser import DatasetAttr
from llamafactory.extras.constants import DATA_CONFIG
from llamafactory.extras.misc import has_tokenized_data
from llamafactory.hparams.data_args import DataArguments
from llamafactory.hparams.model_args import ProcessorArguments

from afm.agents import PromptMode, PromptSource
from afm.agents.prompt_record import PROMPT_FILE, PromptRecord
from afm.errors import ConfigError, DataError, EngineError
from afm.runs.atomic import replace_text
from afm.runs.folder import RunFolder, changes
from llamafactory_patch.encoding import row_processor
from llamafactory_patch.engine import (
    TOKENISED_STAGES,
    Arguments,
    load_tools,
    parse_arguments,
    tokenizer_digest,
)
from llamafactory_patch.masks import MASKING_REVISION, refuse_unseen, unseen_roles
from llamafactory_patch.prompts import PromptCounts, count_prompts, keep_record
from llamafactory_patch.reading import REPORT_FILE, BadRowReport, FileState, agents_of, entries, read_set
from llamafactory_patch.statistics import first_without_label, show_data

ORIGIN_FILE: Final = "masking.json"
"""File in a stored set that records its origin."""

Read = Callable[[DatasetAttr, Arguments, BadRowReport], Dataset]
"""Returns the valid rows of one data set."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """The data sets of a run in the form of LLaMA-Factory's ``tokenized_path``, their tokenizer and prompts."""

    sets: DatasetDict
    tokenizer: Any
    prompts: PromptCounts | None = None


def provide(config: Mapping[str, Any], folder: Path, output_dir: Path, *, node: int = 0) -> None:
    """Make sure that ``folder`` has the rows of a run, and save statistics next to its model.

    The first node tokenises the rows unless they are there. The other nodes wait for it.

    Raises:
        ConfigError: The configuration is wrong, or ``tokenized_path`` has other rows.
        DataError: A row cannot be trained on, and ``on_bad_rows`` is ``error``.
        EngineError: The first node has not stored the rows in time.
    """
    arguments = parse_arguments(config)
    data = arguments.data
    if arguments.stage not in TOKENISED_STAGES or not (data.dataset or data.eval_dataset):
        return
    origin, timeout_s = origin_of(arguments), float(arguments.training.ddp_timeout)
    if node:
        if not check_stored(arguments):
            _wait(folder, origin, timeout_s)
        return
    with RunFolder(folder.parent, "tokenized_path").locked(name=f".{folder.name}.lock", wait_s=timeout_s):
        if not check_stored(arguments) and not is_current(folder, origin):
            report = BadRowReport(arguments.sft.on_bad_rows, output_dir / REPORT_FILE)
            made = tokenise(arguments, report)
            _store(made, folder, origin)
            if made.prompts is not None:
                print(made.prompts, flush=True)
    _show(arguments, folder, output_dir)


def _show(arguments: Arguments, folder: Path, output_dir: Path) -> None:
    """Show the training data, and save its statistics and prompts next to the model."""
    sets = load_from_disk(str(folder))
    _check_labels(sets, arguments, folder)
    if (folder / PROMPT_FILE).is_file():
        keep_record(PromptRecord.load(folder / PROMPT_FILE), arguments, output_dir)
    if isinstance(sets, DatasetDict) and "train" in sets:
        tools, _ = load_tools(arguments)
        show_data(sets["train"], tools["tokenizer"], arguments.data.cutoff_len, output_dir)


def _check_labels(sets: Any, arguments: Arguments, folder: Path) -> None:
    """Refuse rows tokenised elsewhere that have no trained token: their loss would be 0/0 and ruin the model."""
    if _stored_origin(folder) is not None or not isinstance(sets, DatasetDict):
        return
    for name, rows in sets.items():
        ids = first_without_label(rows)
        if ids is not None:
            begin = load_tools(arguments)[0]["tokenizer"].decode(ids)
            raise DataError(
                f"tokenized_path: {folder} has a row ({name}) without a single trained token; it begins with {begin!r}. "
                "Was it tokenized with other settings? Delete tokenized_path and start over"
            )


def load_or_tokenise(arguments: Arguments, folder: Path) -> Tokenised:
    """Load the rows of a run from ``folder``, or else tokenise them without storing them.

    Raises:
        ConfigError: The data does not fit the stage, or was tokenised with other settings.
        DataError: A row cannot be trained on, and ``on_bad_rows`` is ``error``.
    """
    named = check_stored(arguments)
    if named or is_current(folder, origin_of(arguments)):
        return Tokenised(load_from_disk(str(folder)), load_tools(arguments)[0]["tokenizer"])
    return tokenise(arguments, BadRowReport(arguments.sft.on_bad_rows))


def tokenise(
    arguments: Arguments, report: BadRowReport, read: Read = read_set, *, whole: bool = True
) -> Tokenised:
    """Read, mix, split and encode the rows of a run.

    Args:
        report: Collects the bad rows.
        whole: Whether ``read`` returns all rows, so that their roles and prompts can be checked.

    Raises:
        ConfigError: The data does not fit the stage.
        DataError: A row cannot be trained on, and ``on_bad_rows`` is ``error``.
    """
    check_layout(arguments)
    tools, template = load_tools(arguments)
    data, seed = arguments.data, arguments.training.seed
    train = _read_all(data.dataset, arguments, report, read)
    evaluation: Any = _read_all(data.eval_dataset, arguments, report, read)
    if evaluation is not None and not data.eval_on_each_dataset:
        evaluation = merge_dataset(list(evaluation.values()), data, seed=seed)
    merged = None if train is None else merge_dataset(list(train.values()), data, seed=seed)
    trained, held_out = split_dataset(merged, evaluation, data, seed=seed)
    prompts = None
    if whole and "train" in trained:
        refuse_unseen(unseen_roles(trained["train"], arguments.sft.roles_without_loss))
        prompts = count_prompts(trained["train"], arguments.sft)
    stock = {"template": template, **tools, "data_args": data}
    sets = {name: _encoded(rows, arguments, stock, report) for name, rows in trained.items()}
    generated = arguments.training.predict_with_generate
    for name, rows in held_out.items():
        sets[name] = _encoded(rows, arguments, stock, report, do_generate=generated)
    return Tokenised(DatasetDict(sets), tools["tokenizer"], prompts)


def _read_all(
    names: Sequence[str] | None, arguments: Arguments, report: BadRowReport, read: Read
) -> dict[str, Dataset] | None:
    if names is None:
        return None
    attrs = dict(zip(names, entries(names, arguments), strict=True))
    return {name: read(attr, arguments, report) for name, attr in attrs.items()}


_DATA_OF_STAGE = {"dpo": "rm"}
"""Stages whose data LLaMA-Factory loads under the name of another stage."""


def _encoded(
    rows: Dataset,
    arguments: Arguments,
    stock: Mapping[str, Any],
    report: BadRowReport,
    *,
    do_generate: bool = False,
) -> Dataset:
    data = arguments.data
    stage = _DATA_OF_STAGE.get(arguments.stage, arguments.stage)
    encoded = rows.map(
        row_processor(stage, stock, arguments.sft, do_generate=do_generate).preprocess_dataset,
        batched=True,
        batch_size=data.preprocessing_batch_size,
        remove_columns=rows.column_names,
        num_proc=data.preprocessing_num_workers,
        load_from_cache_file=not data.overwrite_cache,
        desc="Running tokenizer on dataset",
    )
    return report.sieve(encoded)


_OF_PAIRS, _OF_JUDGED = ("dpo", "rm"), ("kto",)
_PAIRS = "pairs of a chosen and a rejected answer (`ranking: true`)"
_JUDGED = "answers marked as desired or not (column `kto_tag`: stage kto)"
_SINGLE = "rows of one answer (neither `ranking` nor `kto_tag`)"


def check_layout(arguments: Arguments) -> None:
    """Check that data sets have the rows of the stage: pairs, judged answers, or one answer each.

    Checks nothing without a local ``dataset_info.json``.

    Raises:
        ConfigError: A data set has other rows, or ``dataset_info.json`` is wrong.
    """
    stage, data = arguments.stage, arguments.data
    if not Path(data.dataset_dir, DATA_CONFIG).is_file():
        return
    for attr in (*entries(data.dataset, arguments), *entries(data.eval_dataset, arguments)):
        if bool(attr.ranking) != (stage in _OF_PAIRS):
            held, needed = _PAIRS if attr.ranking else _SINGLE, _PAIRS if stage in _OF_PAIRS else _SINGLE
        elif stage in _OF_JUDGED and not attr.kto_tag:
            held, needed = _SINGLE, _JUDGED
        elif stage == "sft" and attr.kto_tag:
            held, needed = _JUDGED, _SINGLE
        else:
            continue
        raise ConfigError(
            f"stage: got {stage!r}, which trains on {needed}, but according to dataset_info.json {attr.dataset_name} "
            f"has {held}; choose another stage or data set"
        )


def _store(made: Tokenised, folder: Path, origin: Mapping[str, Any]) -> None:
    """Store the sets and their origin in ``folder``, atomically: a killed process leaves all files or none."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    made.sets.save_to_disk(str(part))
    if made.prompts is not None and made.prompts.record.templates:
        made.prompts.record.save(part / PROMPT_FILE)
    replace_text(part / ORIGIN_FILE, json.dumps(origin, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


_WITHOUT_EFFECT: Final = frozenset(
    {
        *("dataset_dir", "media_dir", "tokenized_path", "data_shared_file_system", "overwrite_cache"),
        *("preprocessing_num_workers", "streaming", "buffer_size", "match_chat_template"),
        *("agent", "threads", "eval_num_beams", "ignore_pad_token_for_loss", "prompt", "prompt_check"),
    }
)
"""Data arguments that change no row; arguments that are not listed here count."""
_OF_THE_MASK: Final = ("ignore_observation_token", "observation_boundary", "roles_without_loss")
_OF_THE_MODEL: Final = (
    *("use_fast_tokenizer", "model_revision", "resize_vocab", "split_special_tokens"),
    *("add_tokens", "add_special_tokens", "new_special_tokens_config"),
    *(field.name for field in fields(ProcessorArguments)),
)
_SETS: Final = "data sets"


def origin_of(arguments: Arguments) -> dict[str, Any]:
    """Return everything that the tokenised rows of a run depend on."""
    model, data, own = arguments.model, arguments.data, arguments.sft
    stock = [field.name for field in fields(DataArguments) if field.name not in _WITHOUT_EFFECT]
    unmasked = () if own.ignore_observation else _OF_THE_MASK
    prompt = {} if own.prompt == PromptMode.OWN else {"prompt": PromptSource.load(own.prompt).recorded}
    origin = {
        "revision": MASKING_REVISION,
        "stage": arguments.stage,
        "seed": arguments.training.seed,
        "tokenizer": tokenizer_digest(str(model.model_name_or_path)),
        **{name: getattr(model, name, None) for name in _OF_THE_MODEL},
        **{name: getattr(data, name) for name in stock},
        **own.model_dump(mode="json", exclude={*_WITHOUT_EFFECT, *unmasked}),
        **prompt,
        _SETS: _data_sets(arguments),
    }
    return dict(json.loads(json.dumps(origin)))


def _data_sets(arguments: Arguments) -> dict[str, Any] | None:
    """Return entries and files of the data sets, or ``None`` if they no longer exist and cannot be compared."""
    data = arguments.data
    names = [*(data.dataset or ()), *(data.eval_dataset or ())]
    if str(data.dataset_dir).startswith("REMOTE:"):
        return None
    try:
        attrs = entries(names, arguments)
    except ConfigError:
        return None
    sets = {}
    for name, attr in zip(names, attrs, strict=True):
        entry = {key: value for key, value in asdict(attr).items() if value is not None}
        place = Path(data.dataset_dir) / attr.dataset_name
        if attr.load_from == "file" and not place.exists():
            return None
        local = attr.load_from == "file"
        states = [*_files(place), *agents_of(attr, place.parent, arguments)] if local else []
        sets[name] = {**entry, "files": [_state(state) for state in states]}
    return sets


def _files(place: Path) -> Iterator[FileState]:
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        yield FileState.of(path)


def _state(state: FileState | str) -> str:
    if isinstance(state, str):
        return state
    return f"{Path(state.path).name} ({state.size} bytes, {state.modified_ns})"


def is_current(folder: Path, origin: Mapping[str, Any]) -> bool:
    """Return whether ``folder`` has rows of this origin."""
    try:
        stored = _stored_origin(folder)
    except ConfigError:
        return False
    return stored is not None and not _differences(stored, origin)


def check_stored(arguments: Arguments) -> bool:
    """Return whether the configured ``tokenized_path`` has rows; check that they were made with the same settings.

    Raises:
        ConfigError: They were made with other settings, or their mask is unknown.
    """
    if arguments.data.tokenized_path is None or not has_tokenized_data(arguments.data.tokenized_path):
        return False
    folder = Path(arguments.data.tokenized_path)
    stored, origin = _stored_origin(folder), origin_of(arguments)
    if stored is None:
        if arguments.sft.ignore_observation:
            raise ConfigError(
                f"tokenized_path: {folder} has no record of the origin and the mask of its data set; delete the folder or "
                "choose another"
            )
        return True
    if others := _differences(stored, origin):
        raise ConfigError(
            f"tokenized_path: the data set in {folder} was made with other settings ({'; '.join(others)}); delete the "
            "folder or choose another"
        )
    return True


def _differences(stored: Mapping[str, Any], origin: Mapping[str, Any]) -> list[str]:
    gone = () if origin[_SETS] is not None else (_SETS,)
    before, now = ({key: side[key] for key in side if key not in gone} for side in (stored, origin))
    return changes(before, now)


def _stored_origin(folder: Path) -> dict[str, Any] | None:
    path = folder / ORIGIN_FILE
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        stored = None
    if not isinstance(stored, dict):
        raise ConfigError(f"tokenized_path: {path} is damaged; delete its folder")
    return stored


def _wait(folder: Path, origin: Mapping[str, Any], seconds: float) -> None:
    """Wait until the first node has stored the rows."""
    print(
        f"waiting for node 0, which tokenises the data into {folder}; all nodes must share this folder",
        flush=True,
    )
    deadline = time.monotonic() + seconds
    while not is_current(folder, origin):
        if time.monotonic() > deadline:
            stored = (_stored_origin(folder) or {}) if folder.is_dir() else {}
            held = (
                f"rows of other settings ({'; '.join(_differences(stored, origin))})" if stored else "no rows"
            )
            raise EngineError(
                f"{folder} has {held} after ddp_timeout={seconds:g} s; check the log of node 0, and that all nodes "
                "share the folder and have the same data sets"
            )
        time.sleep(0.5)
