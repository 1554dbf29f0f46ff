"""What is checked when the arguments of a training are parsed: its stage, its data sets and stored rows.

LLaMA-Factory loads what lies under ``tokenized_path`` whatever the other options say, so stored rows carry a record of
what they were made from. Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` does it at
the right moment.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from llamafactory.data.parser import get_dataset_list
from llamafactory.extras.constants import DATA_CONFIG
from llamafactory.extras.misc import has_tokenized_data
from llamafactory.hparams import parser
from llamafactory.hparams.data_args import DataArguments
from llamafactory.hparams.model_args import ProcessorArguments

from afm.agents import PromptMode, PromptSource
from afm.errors import ConfigError
from afm.runs.atomic import replace_text
from llamafactory_patch.arguments import MASKING_REVISION, AgentDataArguments
from llamafactory_patch.bad_rows import begin_report
from llamafactory_patch.loading import FileState, agents_of, data_sets, evaluation_sets

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


_REFUSED = {
    "pt": "pre-training trains on every token of a text, whoever wrote it",
    "rm": "a reward model scores the last token of a whole response, and no loss falls on single tokens",
    "ppo": "LLaMA-Factory's PPO samples the responses itself, without tools; use `afm rl` for agents",
}

_OF_PAIRS, _OF_JUDGED = ("dpo", "rm"), ("kto",)
_PAIRS = "pairs of a chosen and a rejected answer (`ranking: true`)"
_JUDGED = "answers marked as desired or not (column `kto_tag`: stage kto)"
_SINGLE = "rows of one answer (neither `ranking` nor `kto_tag`)"


def check_stage(stage: str, data_args: Any, finetuning_args: Any) -> None:
    """Refuse the author mask where it would do nothing or be wrong.

    Raises:
        ConfigError: The stage, or one of its options, knows no masked tokens inside a response.
    """
    if not getattr(data_args, "ignore_observation", False):
        return
    if stage in _REFUSED:
        raise ConfigError(
            f"ignore_observation works in the stages sft, dpo and kto, got stage {stage!r}: {_REFUSED[stage]}"
        )
    if stage == "dpo" and getattr(finetuning_args, "ld_alpha", None) is not None:
        raise ConfigError(
            "ignore_observation does not go together with ld_alpha, which takes a response for one run of tokens"
        )


def check_layout(stage: str, data_args: Any) -> None:
    """Refuse data sets whose rows are not what a stage trains on: pairs, judged answers, or one answer each.

    Nothing is said where no local ``dataset_info.json`` says anything of them. LLaMA-Factory loads and tokenizes them first, and then leaves every row out.

    Raises:
        ConfigError: One has other rows, or ``dataset_info.json`` is wrong.
    """
    stored = data_args.tokenized_path is not None and has_tokenized_data(data_args.tokenized_path)
    if stored or not Path(data_args.dataset_dir, DATA_CONFIG).is_file():
        return
    for attr in (*data_sets(data_args), *evaluation_sets(data_args)):
        if bool(attr.ranking) != (stage in _OF_PAIRS):
            found, needed = _PAIRS if attr.ranking else _SINGLE, _PAIRS if stage in _OF_PAIRS else _SINGLE
        elif stage in _OF_JUDGED and not attr.kto_tag:
            found, needed = _SINGLE, _JUDGED
        elif stage == "sft" and attr.kto_tag:
            found, needed = _JUDGED, _SINGLE
        else:
            continue
        raise ConfigError(
            f"stage: got {stage!r}, which trains on {needed}, but dataset_info.json says that {attr.dataset_name} "
            f"holds {found}; choose another stage or data set"
        )


def install_stages() -> None:
    """Check each training's stage as soon as its arguments are parsed (0.9.5, hparams/parser.py).

    A data processor cannot tell: LLaMA-Factory loads the data of DPO under the name ``rm``.
    """
    parser._parse_train_args = _checking(parser._parse_train_args)
    parser._parse_train_mca_args = _checking(parser._parse_train_mca_args)


def _checking(parse: Any) -> Any:
    @functools.wraps(parse)
    def parse_checked(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        model_args, data_args, training_args, finetuning_args, _ = parsed
        check_stage(finetuning_args.stage, data_args, finetuning_args)
        check_layout(finetuning_args.stage, data_args)
        note_origin(model_args, data_args, training_args, finetuning_args)
        begin_report()
        return parsed

    return parse_checked
