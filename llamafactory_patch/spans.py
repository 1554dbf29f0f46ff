"""Who wrote what, told from tag names alone: stock LLaMA-Factory users declare no agent.

For a sound trajectory the result equals :func:`afm.trajectory.author_segments` (a test holds them together).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from afm.errors import ConfigError, Fault, TrajectoryError
from afm.masking import role_spans
from afm.trajectory import Segment
from afm.trajectory.tags import segments_around


def segments_by_tag(text: str, tags: Sequence[str]) -> tuple[Segment, ...]:
    """Split ``text`` by author: each ``<tag>...</tag>`` is the environment's, white space around it included.

    Segments alternate and join to ``text``; none is empty.

    Raises:
        TrajectoryError: A tag is opened twice, closed without being open, never closed, or written in another
            way (``<Observation>``, ``</observation >``, ``<observation id="1">``). Masking anything there, or
            nothing, would be a guess.
    """
    return tuple(segments_around(text, _spans(text, tuple(tags))))


def check_roles(rows: Iterable[Mapping[str, Any]], roles: Sequence[str]) -> None:
    """Check that each of ``roles`` stands in an assistant turn of aligned rows, outside of other roles.

    Reading ends as soon as all were seen.

    Raises:
        ConfigError: A role is in no row: it is spelled wrongly, or the rows are others.
    """
    unseen = list(roles)
    for row in rows if unseen else ():
        turns = (*row["_prompt"], *row["_response"])
        texts = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        unseen = [role for role in unseen if not any(next(role_spans(text, [role]), None) for text in texts)]
        if not unseen:
            return
    if unseen:
        raise ConfigError(
            f"roles_without_loss: no row has {' or '.join(f'<{role}>' for role in unseen)} outside of other "
            "roles; expected roles that the rows have"
        )


@lru_cache(maxsize=16)
def _tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(re.escape(tag) for tag in tags)
    attributes = r"\s+[\w:.-]+\s*=[^<>]*"
    return re.compile(rf"<\s*(/?)\s*({names})(?:\s*/?\s*|{attributes})>", re.IGNORECASE | re.ASCII)


def _spans(text: str, tags: tuple[str, ...]) -> list[tuple[int, int]]:
    """Begin and end of each observation."""
    spans: list[tuple[int, int]] = []
    opened: re.Match[str] | None = None
    for tag in _tag_pattern(tags).finditer(text):
        closes = tag[1] == "/"
        is_exact = tag[2] in tags and tag[0] == f"<{tag[1]}{tag[2]}>"
        if opened is None:
            if not is_exact:
                name = next(name for name in tags if name.lower() == tag[2].lower())
                message = f"{tag[0]} at character {tag.start()}: expected <{tag[1]}{name}>"
                raise _fault(Fault.UNKNOWN_ROLE, message, tag)
            if closes:
                raise _fault(Fault.STRAY_CLOSE, f"{tag[0]} at character {tag.start()} closes nothing", tag)
            opened = tag
        elif is_exact and tag[2] == opened[2]:
            if not closes:
                message = f"{tag[0]} opened at character {opened.start()} is opened again"
                raise _fault(Fault.NESTED, f"{message} at character {tag.start()} before it is closed", tag)
            spans.append((opened.start(), tag.end()))
            opened = None
    if opened is not None:
        message = f"{opened[0]} opened at character {opened.start()} is never closed"
        raise _fault(Fault.UNCLOSED, message, opened)
    return spans


def _fault(kind: Fault, message: str, tag: re.Match[str]) -> TrajectoryError:
    return TrajectoryError(message, kind=kind, character=tag.start())
