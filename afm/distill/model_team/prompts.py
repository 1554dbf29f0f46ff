"""The templates of a member: what its model is told, and what of its reply goes into the trajectory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from afm.configuration import read_file, validated
from afm.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Environment

_SHIPPED = Path(__file__).parent / "prompts"
_FENCED = re.compile(r"\s*```[\w+-]*\n(.*?)\n?```\s*", re.DOTALL)


class PromptFile(BaseModel):
    """A YAML of Jinja templates.

    Attributes:
        system: Who the member is, and the form of its reply.
        user: The task as far as this member needs to know it.
        says: What of its reply becomes its message.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    system: str
    user: str
    says: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A member's templates; errors in them name ``label``."""

    label: str
    file: PromptFile

    def system(self, view: Mapping[str, Any]) -> str:
        """The system message."""
        return _filled(self.file.system, view, f"{self.label}: system").strip()

    def user(self, view: Mapping[str, Any]) -> str:
        """The user's message."""
        return _filled(self.file.user, view, f"{self.label}: user").strip()

    def says(self, view: Mapping[str, Any]) -> str:
        """The member's message in the trajectory."""
        return _filled(self.file.says, view, f"{self.label}: says").strip()


def read_prompt(name: str, path: Path | None = None, says: str | None = None) -> Prompt:
    """The templates in ``path``, or the shipped ones called ``name``; ``says`` replaces theirs.

    Raises:
        ConfigError: No such file, an unknown key, or a template that cannot be read.
    """
    file = path or _SHIPPED / f"{name}.yaml"
    read = validated(PromptFile, read_file(file, "prompt templates"), str(file))
    if says is not None:
        read = read.model_copy(update={"says": says})
    prompt = Prompt(str(file), read)
    for key in PromptFile.model_fields:
        _compiled(getattr(read, key), f"{prompt.label}: {key}")
    return prompt


def filled(template: str, view: Mapping[str, Any], where: str) -> str:
    """A template of a team's file with its names replaced.

    Raises:
        ConfigError: It is no template, or names something unknown.
    """
    return _filled(template, view, where)


def _filled(template: str, view: Mapping[str, Any], where: str) -> str:
    from jinja2 import TemplateError

    try:
        return str(_compiled(template, where).render(view))
    except TemplateError as error:
        raise ConfigError(f"{where}: {error}") from None


@lru_cache(maxsize=256)
def _compiled(template: str, where: str) -> Any:
    from jinja2 import TemplateError

    try:
        return _environment().from_string(template)
    except TemplateError as error:
        raise ConfigError(f"{where}: no template: {error}") from None


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["unfenced"] = unfenced
    return environment


def unfenced(text: str) -> str:
    """The inside of a text that is one code fence; any other text without blanks around it."""
    fence = _FENCED.fullmatch(text)
    return fence[1] if fence else text.strip()
