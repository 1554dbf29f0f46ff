"""The options this package adds to LLaMA-Factory's data arguments.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llamafactory.hparams import parser
from llamafactory.hparams.data_args import DataArguments

from afm.masking import Boundary

MASKING_REVISION = 3
"""Counts changes of the masking itself: data sets cached or stored by another revision are not reused."""


@dataclass
class AgentDataArguments(DataArguments):
    """LLaMA-Factory's data arguments and the author mask.

    Attributes:
        origin: What the rows depend on (see :func:`llamafactory_patch.stored.note_origin`); only with a
            ``tokenized_path``.
        asked: The prompts of the rows, once they are counted (see :mod:`llamafactory_patch.prompts`).
        sample: Converted rows of data sets, each beside its entry, that stand for the whole in a rehearsal.
    """

    ignore_observation: bool = field(
        default=False,
        metadata={"help": "No loss on what the environment wrote into the assistant's turns."},
    )
    ignore_observation_token: str = field(
        default="observation",
        metadata={"help": "Tag between which the environment writes; commas separate several."},
    )
    observation_boundary: Literal["split", "mask", "keep"] = field(
        default="split",
        metadata={
            "help": "A token over the border of an observation: `split` makes there be none (equals rollouts), "
            "`mask` takes no loss on it, `keep` does; the latter two tokenize like LLaMA-Factory without masks."
        },
    )
    roles_without_loss: str | None = field(
        default=None,
        metadata={
            "help": "Roles of the agent that are not trained on, `plan` say; commas separate several. They stay "
            "in the text and change no token."
        },
    )
    on_bad_rows: Literal["error", "drop"] = field(
        default="error",
        metadata={
            "help": "Rows that cannot be trained on: `error` stops, `drop` goes on without them; both list every "
            "one with file, line and reason in `bad_rows.jsonl` of the output folder."
        },
    )
    record_agent: str | None = field(
        default=None,
        metadata={
            "help": "Name or YAML of the agent that rows of `formatting: trajectory` are read and asked as; the key "
            "`agent` of a recipe sets it."
        },
    )
    prompt: str = field(
        default="own",
        metadata={
            "help": "What the rows of the agent are asked with: `own` (its prompt), `row` (as they are) or a file with "
            "{question}."
        },
    )
    prompt_check: bool = field(
        default=True,
        metadata={"help": "Refuse to train a model with another prompt than it was trained with before."},
    )
    match_chat_template: bool = field(
        default=False,
        metadata={
            "help": "Refuse to train when `template` renders a question otherwise than the tokenizer's own "
            "chat template, which rollouts use."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ignore_observation_token = _joined(self.ignore_observation_token) or ""
        self.roles_without_loss = _joined(self.roles_without_loss)
        _check_tags("ignore_observation_token", self.observation_tags)
        _check_tags("roles_without_loss", self.silent_roles)
        _check_choice("observation_boundary", self.observation_boundary, [str(one) for one in Boundary])
        _check_choice("on_bad_rows", self.on_bad_rows, ["error", "drop"])
        if self.silent_roles and not self.ignore_observation:
            raise ValueError("roles_without_loss needs ignore_observation=true")
        if both := set(self.silent_roles) & set(self.observation_tags):
            raise ValueError(f"roles_without_loss: {sorted(both)} are tags of the environment already")
        if self.ignore_observation and self.train_on_prompt:
            raise ValueError("ignore_observation trains on the agent's text only; switch train_on_prompt off")
        self.origin: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}
        self.sample: Sequence[tuple[Any, Sequence[Mapping[str, Any]]]] = ()

    @property
    def observation_tags(self) -> tuple[str, ...]:
        """Names of the tags between which the environment writes."""
        return tuple(tag.strip() for tag in self.ignore_observation_token.split(","))

    @property
    def silent_roles(self) -> tuple[str, ...]:
        """Names of the agent's roles that are not trained on."""
        return tuple(role.strip() for role in (self.roles_without_loss or "").split(",") if role.strip())


def _joined(given: Any) -> Any:
    """A list of names as the text that it may also be written as."""
    return ",".join(map(str, given)) if isinstance(given, list) else given


def _check_tags(option: str, tags: Sequence[str]) -> None:
    for tag in tags:
        if not re.fullmatch(r"[^\s<>/]+", tag):
            raise ValueError(
                f"{option}: {tag!r} is no tag name; expected a name without brackets, or several with commas between"
            )


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{option}: got {value!r}, expected one of {list(choices)}")


def install_arguments() -> None:
    """Make LLaMA-Factory parse :class:`AgentDataArguments`.

    Its parser takes the classes of the arguments from module lists (0.9.5, hparams/parser.py line 47);
    unknown keys are still refused, since the parser knows exactly these classes.
    """
    lists = (parser._TRAIN_ARGS, parser._INFER_ARGS, parser._EVAL_ARGS, parser._TRAIN_MCA_ARGS)
    for classes in lists:
        for index, found in enumerate(classes):
            if found is DataArguments:
                classes[index] = AgentDataArguments
    if AgentDataArguments not in parser._TRAIN_ARGS:
        raise RuntimeError("LLaMA-Factory's list of training arguments has no DataArguments to replace")
