"""The keys this package adds to a training configuration of LLaMA-Factory, which never sees them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from afm.errors import ConfigError
from afm.masking import Boundary

MASKING_REVISION = 3
"""Counts changes of the masking itself: data sets cached or stored by another revision are not reused."""


@dataclass
class AgentArguments:
    """What is masked, who asks the rows, and what becomes of bad ones."""

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
        self.ignore_observation_token = _joined(self.ignore_observation_token) or ""
        self.roles_without_loss = _joined(self.roles_without_loss)
        _check_tags("ignore_observation_token", self.observation_tags)
        _check_tags("roles_without_loss", self.silent_roles)
        _check_choice(
            "observation_boundary", self.observation_boundary, [str(boundary) for boundary in Boundary]
        )
        _check_choice("on_bad_rows", self.on_bad_rows, ["error", "drop"])
        if self.silent_roles and not self.ignore_observation:
            raise ConfigError("roles_without_loss needs ignore_observation=true")
        if both := set(self.silent_roles) & set(self.observation_tags):
            raise ConfigError(f"roles_without_loss: {sorted(both)} are tags of the environment already")

    @property
    def observation_tags(self) -> tuple[str, ...]:
        """Names of the tags between which the environment writes."""
        return tuple(tag.strip() for tag in self.ignore_observation_token.split(","))

    @property
    def silent_roles(self) -> tuple[str, ...]:
        """Names of the agent's roles that are not trained on."""
        return tuple(role.strip() for role in (self.roles_without_loss or "").split(",") if role.strip())


def split_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], AgentArguments]:
    """A configuration as LLaMA-Factory knows it, and the keys of this package.

    Raises:
        ConfigError: A value of ours makes no sense.
    """
    names = {key.name for key in fields(AgentArguments)}
    ours = {key: value for key, value in config.items() if key in names}
    return {key: value for key, value in config.items() if key not in names}, AgentArguments(**ours)


def _joined(names: Any) -> Any:
    """A list of names as the text that it may also be written as."""
    return ",".join(map(str, names)) if isinstance(names, list) else names


def _check_tags(option: str, tags: Sequence[str]) -> None:
    for tag in tags:
        if not re.fullmatch(r"[^\s<>/]+", tag):
            raise ConfigError(
                f"{option}: {tag!r} is no tag name; expected a name without brackets, or several with commas between"
            )


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{option}: got {value!r}, expected one of {list(choices)}")
