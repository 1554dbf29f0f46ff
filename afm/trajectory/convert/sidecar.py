"""What a format has no place for, in one key beside it, so that the way there and back loses nothing.

The key ``afm`` holds the record's other fields. Where its exact text would not come back (odd white space, parts of
a trajectory that is none), the segments stand there too, with a digest of what the format shows: once somebody has changed that, the
change counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from afm.errors import DataError
from afm.trajectory.convert.dialogue import Dialogue
from afm.trajectory.io import explain
from afm.trajectory.record import Record, TextSegment

KEY = "afm"
SHOWN = ("question", "segments", "calls")
"""Fields that a row shows in its own way."""
_DIGEST = "shown"


def aside(record: Record, also: Collection[str] = (), shown: Any = None) -> dict[str, Any]:
    """The content of the key.

    Args:
        also: Fields of :data:`SHOWN` that do not come back as they are from what the row shows.
        shown: That.
    """
    rest = record.model_dump(mode="json", exclude=set(SHOWN), exclude_defaults=True)
    if not also:
        return rest
    return rest | record.model_dump(mode="json", include=set(also)) | {_DIGEST: _digest(shown)}


def restored(
    kept: Mapping[str, Any],
    question: str,
    segments: tuple[TextSegment, ...] | None,
    shown: Any,
    /,
    **fields: Any,
) -> Record:
    """The record of a row.

    Args:
        kept: The content of the key.
        segments: What the row shows; ``None`` when it shows none that its agent could have written.
        fields: Further ones that the row shows.

    Raises:
        DataError: The key holds something else.
    """
    rest = dict(kept)
    digest = rest.pop(_DIGEST, None)
    if digest is not None and digest != _digest(shown):
        rest = {key: value for key, value in rest.items() if key not in SHOWN}
    if segments is None and "segments" not in rest:
        raise DataError(f"{KEY}: the row was changed, and what it shows now is no trajectory of its agent")
    try:
        return Record.model_validate({"question": question, "segments": segments} | fields | rest)
    except ValidationError as error:
        raise DataError(f"{KEY}: {explain(error)}") from None


def kept_aside(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of the key in a row, empty without one.

    Raises:
        DataError: It is no object.
    """
    kept = row.get(KEY, {})
    if not isinstance(kept, Mapping):
        raise DataError(f"{KEY}: got {type(kept).__name__}, expected an object")
    return kept


def shown_by(dialogue: Dialogue) -> Any:
    """What a conversation shows, for the digest."""
    return [
        dialogue.question,
        [
            [
                turn.text,
                [[use.tool, use.arguments, use.result] for use in turn.uses],
                *([turn.thought] if turn.thought else []),
                *([{"result": turn.result}] if turn.result is not None else []),
            ]
            for turn in dialogue.turns
        ],
    ]


def _digest(shown: Any) -> str:
    text = json.dumps(shown, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
