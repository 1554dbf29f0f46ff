"""Where the prompt of a question comes from: the agent's declaration, the row itself, or a text of the user's.

One :class:`PromptSource` serves training and evaluation, so a model is asked with the prompt that it learnt with.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from afm.agents.spec import AgentSpec
from afm.configuration import read_file
from afm.errors import ConfigError, DataError
from afm.runs.atomic import replace_text

PLACEHOLDER = "{question}"
QUESTION_MARK = re.compile(r"^(?:Task|Question):[ \t]*(?:\r?\n)?", re.MULTILINE)
"""The line of a published prompt behind which the question begins."""

_ROLES = ("system", "user", "assistant")
_SHOWN_CHARS = 60

Messages = Sequence[Mapping[str, str]]
"""A chat: ``{role, content}`` each."""


class PromptMode(StrEnum):
    """The three answers to the key ``prompt``; any other value is a path and means ``FILE``."""

    OWN = "own"
    ROW = "row"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A prompt with a gap for the question: the user turn before and after it, and the system turn (empty for none)."""

    before: str
    after: str = ""
    system: str = ""

    @classmethod
    def of_text(cls, user: str, system: str = "") -> PromptTemplate:
        """A user turn that holds ``{question}``; the last one counts."""
        before, _, after = user.rpartition(PLACEHOLDER)
        return cls(before, after, system)

    @classmethod
    def of_agent(cls, spec: AgentSpec) -> PromptTemplate:
        """What an agent asks with."""
        return cls.of_text(spec.user_message(PLACEHOLDER))

    @property
    def user(self) -> str:
        """The user turn with ``{question}``."""
        return f"{self.before}{PLACEHOLDER}{self.after}"

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the texts."""
        text = json.dumps([self.system, self.user], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def messages(self, question: str) -> list[dict[str, str]]:
        """Chat messages for one question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": f"{self.before}{question}{self.after}"}]

    def question_in(self, messages: Messages) -> str | None:
        """The question of a chat that is exactly this prompt; ``None`` for any other chat."""
        turns = single_turn(messages)
        if turns is None or turns[0] != self.system:
            return None
        user, edges = turns[1], len(self.before) + len(self.after)
        if len(user) <= edges or not (user.startswith(self.before) and user.endswith(self.after)):
            return None
        return user[len(self.before) : len(user) - len(self.after)]


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What the key ``prompt`` says.

    Attributes:
        template: The text of ``FILE``; with ``row`` what a row without a prompt is asked with, if anything.
        path: Of ``FILE``.
    """

    mode: PromptMode = PromptMode.OWN
    template: PromptTemplate | None = None
    path: str = ""

    @classmethod
    def load(cls, value: str | Path) -> PromptSource:
        """``own``, ``row``, or the path of a text with ``{question}`` or of a YAML ``{system, user}``.

        The text is literal except for ``{question}``; one line break at its end is the file's and not the prompt's.

        Raises:
            ConfigError: No such file, it is empty, or it does not hold ``{question}`` exactly once.
        """
        if value in (PromptMode.OWN.value, PromptMode.ROW.value):
            return cls(PromptMode(value))
        path = Path(value).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"prompt: got {str(value)!r}, expected own (the agent's), row (each row's) or a file with {PLACEHOLDER}"
            )
        return cls(PromptMode.FILE, _read(path), str(path))

    @property
    def told(self) -> dict[str, str]:
        """What two runs are compared by: the mode, and of ``FILE`` the digest of its content."""
        if self.mode is PromptMode.FILE and self.template is not None:
            return {"mode": self.mode.value, "digest": self.template.digest}
        return {"mode": self.mode.value}

    def messages(
        self, spec: AgentSpec, question: str, row_messages: Messages | None = None
    ) -> list[dict[str, str]]:
        """The chat that asks ``question``.

        Args:
            row_messages: What the row itself holds. ``row`` takes it as it is; where it is the text of ``FILE`` with
                a question, that question is asked, since ``question`` may hold words of the text behind it.

        Raises:
            DataError: With ``row``, the row holds no prompt, and no file fills in for it (without location).
        """
        if self.mode is PromptMode.OWN:
            return spec.prompt_messages(question)
        if self.mode is PromptMode.ROW and row_messages:
            return [dict(message) for message in row_messages]
        if self.template is None:
            raise DataError(
                f"prompt=row, but the row holds no prompt (question {question[:_SHOWN_CHARS]!r}); "
                f"say prompt=FILE, the text with {PLACEHOLDER} that the model was trained with, or prompt=own"
            )
        own = self.template.question_in(row_messages) if row_messages else None
        return self.template.messages(question if own is None else own)

    def filled_by(self, template: PromptTemplate | None) -> PromptSource:
        """With ``row``: the same, rows without a prompt asked with ``template``."""
        return replace(self, template=template) if self.mode is PromptMode.ROW else self

    def kept_in(self, folder: Path) -> PromptSource:
        """The same with its file copied into ``folder``, so that it cannot change during a run.

        Named by its content, so several may be kept.
        """
        if self.mode is not PromptMode.FILE or self.template is None:
            return self
        path = folder / f"prompt_{self.template.digest}.yaml"
        texts = {"system": self.template.system, "user": self.template.user}
        replace_text(path, yaml.safe_dump(texts, allow_unicode=True))
        return replace(self, path=str(path.absolute()))

    def __str__(self) -> str:
        return self.path if self.mode is PromptMode.FILE else self.mode.value


def single_turn(messages: Messages) -> tuple[str, str] | None:
    """System text (empty for none) and user text of a chat with one user turn and no answer; ``None`` for others."""
    roles = [message["role"] for message in messages]
    if roles == ["user"]:
        return "", messages[0]["content"]
    if roles == ["system", "user"]:
        return messages[0]["content"], messages[1]["content"]
    return None


def row_messages(prompt: Any) -> tuple[dict[str, str], ...] | None:
    """The chat in a row's ``prompt``: a list of ``{role, content}``, or a text as one user turn; ``None`` for anything else."""
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # of a table
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},) if prompt.strip() else None
    if not isinstance(prompt, Sequence) or not prompt:
        return None
    messages = []
    for message in prompt:
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if role in _ROLES else None
        if not isinstance(content, str):
            return None
        messages.append({"role": str(role), "content": content})
    return tuple(messages)


def _read(path: Path) -> PromptTemplate:
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(path)
    try:
        # An editor's mark of the byte order is no part of the prompt, and nobody would see it.
        text = path.read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}:1: cannot be read as text: {error}") from None
    return _checked(text, "", str(path))


def _read_yaml(path: Path) -> PromptTemplate:
    data = read_file(path, "a prompt (system, user)")
    if unknown := sorted(set(data) - {"system", "user"}):
        raise ConfigError(f"{path}: got the keys {', '.join(unknown)}, expected `user` and maybe `system`")
    for key, value in data.items():
        if not isinstance(value, str | None):
            raise ConfigError(f"{path}: {key}: got {value!r}, expected a text")
    system = data.get("system") or ""
    if PLACEHOLDER in system:
        raise ConfigError(f"{path}: system: {PLACEHOLDER} belongs into `user`")
    return _checked(data.get("user") or "", system, f"{path}: user")


def _checked(user: str, system: str, place: str) -> PromptTemplate:
    lines = user.split("\n")
    places = [number for number, line in enumerate(lines, 1) for _ in range(line.count(PLACEHOLDER))]
    if not user.strip():
        raise ConfigError(f"{place}:1: the prompt is empty; expected a text with {PLACEHOLDER}")
    if not places:
        raise ConfigError(
            f"{place}:{len(lines)}: no {PLACEHOLDER} up to the last line; write it where the question goes"
        )
    if len(places) > 1:
        raise ConfigError(
            f"{place}:{places[1]}: {PLACEHOLDER} is there {len(places)} times, first in line {places[0]}; expected once"
        )
    return PromptTemplate.of_text(user, system)
