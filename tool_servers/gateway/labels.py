"""Whose call a request is: by the path it came on, its headers, the end of its API key, or else its first words.

| form | where |
|---|---|
| base URL | ``http://HOST:PORT/task/ID/agent/NAME/v1`` (``/agent/NAME`` may be absent) |
| headers | ``X-AFM-Task``, ``X-AFM-Agent``, ``X-AFM-Attempt`` |
| API key | ``KEY:task=ID,agent=NAME,attempt=2`` |

Values are percent-decoded in all three. The earlier form wins, name by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError

from afm.distill.gateway import Label, message_text
from afm.errors import DataError

_SUFFIX = re.compile(r"^(?P<key>.*?)(?::(?P<names>(?:task|agent|attempt)=.*))?$", re.DOTALL)
_NAMES = ("task", "agent", "attempt")
_HIDDEN = re.compile(r"[\x00-\x1f\x7f]")


def key_and_names(authorization: str) -> tuple[str, dict[str, str]]:
    """The key of an ``Authorization`` header without the names behind it, and these.

    Raises:
        DataError: They are not of the form ``task=ID,agent=NAME``.
    """
    given = authorization.partition(" ")[2] if authorization[:7].lower() == "bearer " else ""
    found = _SUFFIX.match(given)
    if found is None or found["names"] is None:
        return given, {}
    names: dict[str, str] = {}
    for part in found["names"].split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in _NAMES:
            raise DataError(
                f"API key: got {part[:40]!r} behind it, expected task=ID,agent=NAME,attempt=NUMBER; write other signs of "
                "a value as %2C and the like"
            )
        names[name] = unquote(value)
    return found["key"], names


def label_of(
    headers: Mapping[str, str], in_path: Mapping[str, str], in_key: Mapping[str, str], body: Mapping[str, Any]
) -> Label:
    """The label of a request; one that names no task gets one made of its first words.

    Raises:
        DataError: A name is too long or holds control characters, or the attempt is no number.
    """
    in_headers = {name: unquote(headers.get(f"x-afm-{name}", "")) for name in _NAMES}
    told = {
        name: in_path.get(name) or in_headers[name] or in_key.get(name, "")
        for name in _NAMES
        if in_path.get(name) or in_headers[name] or in_key.get(name)
    }
    told.setdefault("task", _task_by_words(body))
    try:
        label = Label.model_validate(told)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise DataError(f"{first['loc'][0]}: {first['msg']}") from None
    if _HIDDEN.search(label.task + label.agent):
        raise DataError("task or agent: got control characters, expected a name")
    return label


def _task_by_words(body: Mapping[str, Any]) -> str:
    """The same for all calls of one conversation: its first message of the user decides."""
    messages = body.get("messages")
    first = ""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        said = (item for item in messages if isinstance(item, Mapping) and item.get("role") == "user")
        first = message_text(next(said, {}))
    words = first or str(body.get("prompt", ""))
    return "auto-" + hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()[:12]
