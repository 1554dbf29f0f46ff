"""What kinds of questions a benchmark has: levels, topics, subjects, as its owner names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUPS_KEY = "groups"
"""Where a record's provenance holds the groups of its question."""

KEYS = (
    "level",
    "difficulty",
    "category",
    "subject",
    "subfield",
    "domain",
    "problem_topic",
    "type",
    "prop",
    "platform",
)
"""Fields of the owners' rows that tell questions apart."""

_MOST_CHARS = 80
_MOST_GROUPS = 60


def groups_of(extra_info: Mapping[str, Any]) -> dict[str, str]:
    """The groups that a question belongs to, by the name of their field."""
    found = {key: extra_info.get(key) for key in KEYS}
    return {
        key: str(value)
        for key, value in found.items()
        if isinstance(value, str | int) and 0 < len(str(value)) <= _MOST_CHARS
    }


def worth_showing(groups: Mapping[str, Any]) -> bool:
    """Whether these groups of one field tell questions apart, and are not nearly a group a question."""
    return 2 <= len(groups) <= _MOST_GROUPS
