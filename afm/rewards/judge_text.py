"""A judge's prompt in the user's own words, such as a published one: a file with three gaps."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.configuration import read_file
from afm.errors import ConfigError
from afm.rewards.judge_prompt import SCHEMA, Case, Ruling, loaded_reply

GAPS = ("question", "gt_answer", "pred_answer")
_GAP = re.compile(r"\{\{|\}\}|\{(" + "|".join(GAPS) + r")\}")
_TOLD = ", ".join(f"{{{name}}}" for name in GAPS)

TEXT_SCHEMA: dict[str, Any] = {
    **SCHEMA,
    "schema": {
        **SCHEMA["schema"],
        "properties": {name: SCHEMA["schema"]["properties"][name] for name in ("rationale", "judgement")},
        "required": ["rationale", "judgement"],
    },
}
"""The ``json_schema`` of its verdict."""


@dataclass(frozen=True, slots=True)
class JudgeText:
    """The prompt; unlike ours it does not guard against answers that speak to the judge.

    Attributes:
        user: The user's turn with ``{question}``, ``{gt_answer}`` and ``{pred_answer}``; ``{{`` and ``}}`` are braces.
        system: The system turn, empty for none.
    """

    user: str
    system: str = ""

    @classmethod
    def load(cls, path: Path) -> JudgeText:
        """A text file, or a YAML ``{system, user}``.

        Raises:
            ConfigError: It cannot be read, or lacks a gap.
        """
        if path.suffix in (".yaml", ".yml"):
            data = read_file(path, "a judge's prompt (system, user)")
            if unknown := sorted(set(data) - {"system", "user"}):
                raise ConfigError(
                    f"{path}: got the keys {', '.join(unknown)}, expected `user` and maybe `system`"
                )
            user, system = str(data.get("user") or ""), str(data.get("system") or "")
        else:
            try:
                user, system = path.read_text(encoding="utf-8"), ""
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"judge.prompt: {path}: cannot be read: {error}; expected a text with {_TOLD}"
                ) from None
        found = {match[1] for match in _GAP.finditer(user)}
        if missing := [f"{{{name}}}" for name in GAPS if name not in found]:
            raise ConfigError(f"{path}: no {', '.join(missing)}; expected a text with {_TOLD}")
        return cls(user, system)

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of both turns."""
        text = json.dumps([self.system, self.user], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def messages(self, case: Case) -> list[dict[str, str]]:
        """The chat that asks for a verdict; several accepted answers stand with ``|`` between them."""
        values = {
            "question": case.question,
            "gt_answer": " | ".join(case.accepted),
            "pred_answer": case.answer,
        }
        user = _GAP.sub(lambda gap: values[gap[1]] if gap[1] else gap[0][0], self.user)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": user}]

    def read(self, text: str, case: Case) -> Ruling:
        """The verdict in a reply: one JSON object with ``judgement``, alone or in a fence.

        Raises:
            ValueError: It holds none.
        """
        data = loaded_reply(text)
        judgement, rationale = str(data.get("judgement", "")).strip().lower(), data.get("rationale", "")
        if judgement == "correct":
            return Ruling("correct", str(rationale))
        if judgement == "incorrect":
            return Ruling("incorrect", str(rationale))
        raise ValueError("the reply has no judgement")
