"""The settings of ``afm sft`` that LLaMA-Factory does not get."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from afm.agents import AgentSpec, PromptMode, PromptSource, load_agent
from afm.choices import Boundary
from afm.configuration import Settings, validated
from afm.errors import suggestion


def names_in(value: Any) -> Any:
    """Split a text at commas into names; return a list unchanged."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",")] if value.strip() else []
    return [] if value is None else value


def _check_tags(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(re.fullmatch(r"[^\s<>/]+", name) for name in names):
        raise ValueError("names of tags without brackets, commas between several")
    return names


_WITH_COMMAS = PlainSerializer(",".join, when_used="json")  # the form of LLaMA-Factory's lists
TagNames = Annotated[tuple[str, ...], BeforeValidator(names_in), AfterValidator(_check_tags), _WITH_COMMAS]


class SftSettings(Settings):
    """The agent to train, what has no loss, the prompt of the rows, and what to do with bad rows."""

    agent: str | None = None
    """Name or YAML of the agent to train. It is saved with the model as `agent.yaml`, so that evaluation and
    RL use the same prompt. It switches `ignore_observation` and `match_chat_template` on."""
    ignore_observation: bool = False
    """Exclude the text of the environment from the loss."""
    ignore_observation_token: TagNames = ("observation",)
    """Tag of the environment, or several separated by commas. The default is that of the agent."""
    observation_boundary: Boundary = Boundary.SPLIT
    """`split` encodes the text of each author separately, exactly as rollouts do. `mask` and `keep` use the ids of
    stock LLaMA-Factory. A token that spans a boundary is then masked or trained on."""
    roles_without_loss: TagNames = ()
    """Roles of the agent to exclude from the loss, for example `plan`. They stay in the text and change no
    token."""
    on_bad_rows: Literal["error", "drop"] = "error"
    """Rows that cannot be trained on: `error` stops, `drop` continues without them. Both list each one with
    file, line and reason in `bad_rows.jsonl` of the output folder."""
    prompt: str = PromptMode.OWN.value
    """Prompt of the agent's rows: `own`, `row` or a file with `{question}`. See docs/prompts.md."""
    prompt_check: bool = True
    """Refuse to train with a prompt other than the one that the model was trained with."""
    match_chat_template: bool = False
    """Refuse to train when `template` renders a question differently from the tokenizer's own chat template,
    which rollouts use."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each training process."""

    @property
    def spec(self) -> AgentSpec | None:
        """The agent to train."""
        return load_agent(self.agent) if self.agent else None

    @property
    def masked_tags(self) -> tuple[str, ...]:
        """Tags whose text has no loss."""
        return self.ignore_observation_token if self.ignore_observation else ()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Add the settings that the agent implies, and make paths absolute."""
        data = dict(data)
        if isinstance(name := data.get("agent"), str):
            role = load_agent(name).observation_role
            implied = {"match_chat_template": True, "ignore_observation": True}
            data = implied | ({"ignore_observation_token": role} if role else {}) | data
            data["agent"] = str(Path(name).resolve()) if name.endswith((".yaml", ".yml")) else name
        if isinstance(prompt := data.get("prompt"), str) and (path := PromptSource.load(prompt).path):
            data["prompt"] = str(Path(path).resolve())
        return data

    @model_validator(mode="after")
    def _check(self) -> SftSettings:
        silent, tags, spec = self.roles_without_loss, self.ignore_observation_token, self.spec
        if not tags:
            raise ValueError("ignore_observation_token: expected the name of a tag, or several")
        if silent and not self.ignore_observation:
            raise ValueError("roles_without_loss needs ignore_observation=true")
        if both := set(silent) & set(tags):
            raise ValueError(f"roles_without_loss: {sorted(both)} are already tags of the environment")
        if spec is None:
            if self.prompt not in (PromptMode.OWN, PromptMode.ROW):
                raise ValueError("prompt: a file needs `agent`, the agent whose rows get this prompt")
            return self
        if spec.observation_role is not None and spec.observation_role not in tags:
            raise ValueError(
                f"ignore_observation_token: got {','.join(tags)!r}, but the environment of agent {spec.name!r} writes "
                f"{spec.observation_role!r}; remove the key"
            )
        for role in silent:
            if role not in spec.roles:
                near = suggestion(role, spec.roles)
                raise ValueError(f"roles_without_loss: agent {spec.name!r} has no role {role!r}; {near}")
        return self


def split_config(
    config: Mapping[str, Any], label: str = "configuration", overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], SftSettings]:
    """Split a configuration into LLaMA-Factory's part and ours.

    Raises:
        ConfigError: One of our settings is invalid.
        UsageError: One of our settings is invalid and comes from an override.
    """
    own = {key: value for key, value in config.items() if key in SftSettings.model_fields}
    stock = {key: value for key, value in config.items() if key not in own}
    return stock, validated(SftSettings, own, label, overrides=overrides)
