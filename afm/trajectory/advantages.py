"""Advantages of episodes, in a file beside theirs: they are known only after the episodes are written.

``step_000001.advantages.json`` belongs to ``step_000001.jsonl``: an object with the ids of episodes and, for each, a number that holds
for every token its agent wrote, or a list with a number for each token of the response.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afm.errors import DataError

SUFFIX = ".advantages.json"

Advantages = float | list[float]


def advantages_file(episodes: Path) -> Path:
    """Where the advantages of a file's episodes stand."""
    return episodes.with_suffix(SUFFIX)


def load_advantages(episodes: Path) -> Mapping[str, Any]:
    """By the episodes' ids; empty where nobody wrote any.

    Raises:
        DataError: The file is no JSON object.
    """
    file = advantages_file(episodes)
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", path=str(file)) from None
    if not isinstance(found, dict):
        raise DataError(
            f"got {type(found).__name__}, expected an object with the ids of episodes", path=str(file)
        )
    return found
