"""The source of a question's prompt: the agent's declaration, the row, or a file of the user.

Training and evaluation share :class:`PromptSource`, so that a model is evaluated with the prompt it was trained with.
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
from afm.errors import ConfigError, DataError, no_such_file
from afm.runs.atomic import replace_text

PLACEHOLDER = "{question}"
QUESTION_MARK = re.compile(r"^(?:Task|Question):[ \t]*(?:\r?\n)?", re.MULTILINE)
"""The line of a published prompt that precedes the question."""

_ROLES = ("system", "user", "assistant")
_SHOWN_CHARS = 60

Messages = Sequence[Mapping[str, str]]
"""The messages of a chat, each ``{role, content}``."""


class PromptMode(StrEnum):
    """The values of the key ``prompt``. Any value except ``own`` and ``row`` is a path and means ``FILE``."""

    OWN = "own"
    ROW = "row"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A prompt template: the user turn before and after the question, and the system turn (may be empty)."""

    before: str
    after: str = ""
    system: str = ""

    @classmethod
    def of_text(cls, user: str, system: str = "") -> PromptTemplate:
        """Return the template of a user turn. The last ``{question}`` in it marks the question."""
        before, _, after = user.rpartition(PLACEHOLDER)
        return cls(before, after, system)

    @classmethod
    def of_agent(cls, spec: AgentSpec) -> PromptTemplate:
        """Return the template of an agent's own prompt."""
        return cls.of_text(spec.user_message(PLACEHOLDER))

    @property
    def user(self) -> str:
        """The user turn, with ``{question}`` in place of the question."""
        return f"{self.before}{PLACEHOLDER}{self.after}"

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the texts' SHA-256."""
        text = json.dumps([self.system, self.user], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the chat messages for one question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": f"{self.before}{question}{self.after}"}]

    def question_in(self, messages: Messages) -> str | None:
        """Return the question of a chat that uses exactly this template, or ``None`` for any other chat."""
        turns = single_turn(messages)
        if turns is None or turns[0] != self.system:
            return None
        user, edges = turns[1], len(self.before) + len(self.after)
        if len(user) <= edges or not (user.startswith(self.before) and user.endswith(self.after)):
            return None
        return user[len(self.before) : len(user) - len(self.after)]


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The value of the key ``prompt``.

    Attributes:
        template: With ``FILE`` the text of the file. With ``row`` the template for rows without a prompt, if any.
        path: With ``FILE`` the path of the file, else empty.
    """

    mode: PromptMode = PromptMode.OWN
    template: PromptTemplate | None = None
    path: str = ""

    @classmethod
    def load(cls, value: str | Path) -> PromptSource:
        """Load ``own``, ``row``, or the path of a text with ``{question}`` or of a YAML ``{system, user}``.

        The text is literal except for ``{question}``. One line break at its end is not part of the prompt.

        Raises:
            ConfigError: The file does not exist, is empty, or does not contain ``{question}`` exactly once.
        """
        if value in (PromptMode.OWN.value, PromptMode.ROW.value):
            return cls(PromptMode(value))
        path = Path(value).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"prompt: got {str(value)!r}, {no_such_file(path)}; expected own (the agent's), row (each "
                f"row's) or a file with {PLACEHOLDER}"
            )
        return cls(PromptMode.FILE, _read(path), str(path))

    @property
    def recorded(self) -> dict[str, str]:
        """The mode, and with ``FILE`` the digest of the content. Runs are compared by these."""
        if self.mode is PromptMode.FILE and self.template is not None:
            return {"mode": self.mode.value, "digest": self.template.digest}
        return {"mode": self.mode.value}

    def messages(
        self, spec: AgentSpec, question: str, row_messages: Messages | None = None
    ) -> list[dict[str, str]]:
        """Return the chat that asks ``question``.

        Args:
            row_messages: The prompt in the row. ``row`` uses it unchanged. With ``FILE``, if it is the file's text
                filled with a question, that question is asked, because ``question`` may include text that follows it.

        Raises:
            DataError: With ``row``, the row has no prompt and there is no template for it. Without location.
        """
        if self.mode is PromptMode.OWN:
            return spec.prompt_messages(question)
        if self.mode is PromptMode.ROW and row_messages:
            return [dict(message) for message in row_messages]
        if self.template is None:
            raise DataError(
                f"prompt=row, but the row holds no prompt (question {question[:_SHOWN_CHARS]!r}); "
                f"use prompt=FILE, a text with {PLACEHOLDER} that the model was trained with, or prompt=own"
            )
        own = self.template.question_in(row_messages) if row_messages else None
        return self.template.messages(question if own is None else own)

    def filled_by(self, template: PromptTemplate | None) -> PromptSource:
        """Return the source that, with ``row``, uses ``template`` for rows without a prompt."""
        return replace(self, template=template) if self.mode is PromptMode.ROW else self

    def kept_in(self, folder: Path) -> PromptSource:
        """Return the source with its file copied into ``folder``, so that it cannot change during a run.

        The copy's name holds the digest of its content, so a folder can hold several.
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
    """Return the system text (or ``""``) and the user text of a chat of one user turn, or ``None`` for other chats."""
    roles = [message["role"] for message in messages]
    if roles == ["user"]:
        return "", messages[0]["content"]
    if roles == ["system", "user"]:
        return messages[0]["content"], messages[1]["content"]
    return None


def row_messages(prompt: Any) -> tuple[dict[str, str], ...] | None:
    """Return the chat in a row's ``prompt``: a list of ``{role, content}`` or a text, else ``None``."""
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
        # A byte order mark is invisible and must not become part of the prompt.
        text = path.read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}:1: cannot be read as text: {error}") from None
    return _checked(text, "", str(path))


def _read_yaml(path: Path) -> PromptTemplate:
    data = read_file(path, "a prompt (system, user)")
    if unknown := sorted(set(data) - {"system", "user"}):
        raise ConfigError(
            f"{path}: got the keys {', '.join(unknown)}, expected `user` and optionally `system`"
        )
    for key, value in data.items():
        if not isinstance(value, str | None):
            raise ConfigError(f"{path}: {key}: got {value!r}, expected a text")
    system = data.get("system") or ""
    if PLACEHOLDER in system:
        raise ConfigError(f"{path}: system: got {PLACEHOLDER}, which belongs in `user`; move it there")
    return _checked(data.get("user") or "", system, f"{path}: user")


def _checked(user: str, system: str, place: str) -> PromptTemplate:
    lines = user.split("\n")
    places = [number for number, line in enumerate(lines, 1) for _ in range(line.count(PLACEHOLDER))]
    if not user.strip():
        raise ConfigError(f"{place}:1: the prompt is empty; expected a text with {PLACEHOLDER}")
    if not places:
        raise ConfigError(
            f"{place}:{len(lines)}: no {PLACEHOLDER} up to the last line; add it where the question goes"
        )
    if len(places) > 1:
        raise ConfigError(
            f"{place}:{places[1]}: got {PLACEHOLDER} {len(places)} times, first in line {places[0]}; expected it once"
        )
    return PromptTemplate.of_text(user, system)
