"""Which of LLaMA-Factory's training stages can take the author mask.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from llamafactory.extras.constants import DATA_CONFIG
from llamafactory.extras.misc import has_tokenized_data
from llamafactory.hparams import parser

from afm.errors import ConfigError
from llamafactory_patch.bad_rows import begin_report
from llamafactory_patch.loading import data_sets, evaluation_sets
from llamafactory_patch.stored import note_origin

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
