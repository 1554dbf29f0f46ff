"""Tokenized data sets are stored with what they were made from, and refused when any of it is another now.

LLaMA-Factory loads what lies under ``tokenized_path`` whatever the other options say. Importing this module
imports LLaMA-Factory; :func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from llamafactory.data.parser import get_dataset_list
from llamafactory.hparams.data_args import DataArguments
from llamafactory.hparams.model_args import ProcessorArguments

from afm.agents import PromptMode, PromptSource
from afm.errors import ConfigError
from afm.runs.atomic import replace_text
from llamafactory_patch.arguments import MASKING_REVISION, AgentDataArguments
from llamafactory_patch.loading import FileState, agents_of

_WITHOUT_EFFECT: Final = frozenset(
    {
        *("dataset_dir", "media_dir", "tokenized_path", "data_shared_file_system", "overwrite_cache"),
        *("preprocessing_num_workers", "streaming", "buffer_size", "match_chat_template"),
        *("record_agent", "eval_num_beams", "ignore_pad_token_for_loss", "prompt", "prompt_check"),
    }
)
"""Data arguments that change no row; a new one counts until it is named here."""

_OF_THE_MODEL: Final = (
    *("use_fast_tokenizer", "model_revision", "resize_vocab", "split_special_tokens"),
    *("add_tokens", "add_special_tokens", "new_special_tokens_config"),
    *(field.name for field in fields(ProcessorArguments)),
)
_TOKENIZER_FILES: Final = ("*token*.json", "*token*.py", "vocab*", "merges.txt", "*.model", "*.tiktoken")
_SHOWN_CHARS: Final = 120


def note_origin(model_args: Any, data_args: Any, training_args: Any, finetuning_args: Any) -> None:
    """Note what the rows of this run depend on, and refuse stored ones that were made from anything else.

    Raises:
        ConfigError: ``tokenized_path`` holds rows of another origin.
    """
    if not isinstance(data_args, AgentDataArguments) or data_args.tokenized_path is None:
        return
    origin = _origin(model_args, data_args, training_args.seed, finetuning_args.stage)
    data_args.origin = json.loads(json.dumps(origin))
    folder = Path(data_args.tokenized_path)
    if folder.is_dir() and any(folder.iterdir()):
        _check(folder, data_args)


def store_origin(data_args: AgentDataArguments) -> None:
    """Write beside ``tokenized_path`` what the rows that will lie there are made from."""
    if data_args.tokenized_path is None:
        return
    path = _origin_file(Path(data_args.tokenized_path))
    replace_text(path, json.dumps(data_args.origin, indent=1))


def _origin(model_args: Any, data_args: AgentDataArguments, seed: int, stage: str) -> dict[str, Any]:
    options = [field.name for field in fields(data_args) if field.name not in _WITHOUT_EFFECT]
    if not data_args.ignore_observation:
        stock = {field.name for field in fields(DataArguments)}
        options = [name for name in options if name in stock or name in ("ignore_observation", "on_bad_rows")]
    return {
        "revision": MASKING_REVISION,
        "stage": stage,
        "seed": seed,
        "tokenizer": _tokenizer(str(model_args.model_name_or_path)),
        **{name: getattr(model_args, name, None) for name in _OF_THE_MODEL},
        **{name: getattr(data_args, name) for name in options},
        **(
            {} if data_args.prompt == PromptMode.OWN else {"prompt": PromptSource.load(data_args.prompt).told}
        ),
        "data sets": _data_sets(data_args),
    }


def _tokenizer(name: str) -> str:
    """A digest of the files of a local tokenizer, so that its folder may be moved; else its name."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    digest = sha256()
    for path in sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()[:16]}"


def _data_sets(data_args: AgentDataArguments) -> dict[str, Any] | None:
    """Entries and files of the data sets, ``None`` where they are not there any more: nothing can be stale then."""
    names = [*(data_args.dataset or ()), *(data_args.eval_dataset or ())]
    if str(data_args.dataset_dir).startswith("REMOTE:"):
        return None
    try:
        attrs = get_dataset_list(names, data_args.dataset_dir)
    except ValueError:
        return None
    found = {}
    for name, attr in zip(names, attrs, strict=True):
        entry = {key: value for key, value in asdict(attr).items() if value is not None}
        place = Path(data_args.dataset_dir) / attr.dataset_name
        if attr.load_from == "file" and not place.exists():
            return None
        states = (
            [*_files(place), *agents_of(attr, place.parent, data_args)] if attr.load_from == "file" else []
        )
        found[name] = {**entry, "files": [_state(one) for one in states]}
    return found


def _files(place: Path) -> Iterator[FileState]:
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        yield FileState.of(path)


def _state(state: FileState | str) -> str:
    if isinstance(state, str):
        return state
    return f"{Path(state.path).name} ({state.size} bytes, {state.modified_ns})"


def _check(folder: Path, data_args: AgentDataArguments) -> None:
    path, now = _origin_file(folder), data_args.origin
    stored = _stored_origin(path)
    if stored is None:
        if data_args.ignore_observation:
            raise ConfigError(
                f"tokenized_path: nobody wrote down what the data set in {folder} was made from, or with which mask; "
                "delete the folder or name another"
            )
        return
    gone = () if now["data sets"] is not None else ("data sets",)
    others = [key for key in now if key not in gone and (key not in stored or stored[key] != now[key])]
    if others:
        raise ConfigError(
            f"tokenized_path: the data set in {folder} was made with {_shown(stored, others)}; this run asks for "
            f"{_shown(now, others)}; delete the folder or name another"
        )


def _stored_origin(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        stored = None
    if not isinstance(stored, dict):
        raise ConfigError(f"tokenized_path: {path} is damaged; delete it and the data set beside it")
    return stored


def _shown(origin: Mapping[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key}={_short(origin[key])}" if key in origin else f"{key} unknown" for key in keys)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _origin_file(tokenized: Path) -> Path:
    return tokenized.with_name(f"{tokenized.name}.masking.json")
