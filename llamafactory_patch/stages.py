"""Which of LLaMA-Factory's training stages can take the author mask.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import functools
from typing import Any

from llamafactory.hparams import parser

from afm.errors import ConfigError
from llamafactory_patch.bad_rows import begin_report
from llamafactory_patch.stored import note_origin

_REFUSED = {
    "pt": "pre-training trains on every token of a text, whoever wrote it",
    "rm": "a reward model scores the last token of a whole response, and no loss falls on single tokens",
    "ppo": "LLaMA-Factory's PPO samples the responses itself, without tools; use `afm rl` for agents",
}


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
        note_origin(model_args, data_args, training_args, finetuning_args)
        begin_report()
        return parsed

    return parse_checked
