"""Groups of passages from which a question is made: chained by mention (depth) or side by side (width)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from afm.datasets.encyclopaedia.growth import Growth
from afm.errors import ConfigError, DataError
from afm.trajectory.io import json_rows

_LONGEST_TITLE = 6
_MAX_MISSES = 2_000
_WORD = re.compile(r"\w+(?:[-'’.]\w+)*")


class SourcePassage(BaseModel):
    """One passage of a corpus."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    title: str
    text: str = Field(min_length=1)


def read_passages(path: Path) -> list[SourcePassage]:
    """The passages of a corpus ``{"id", "contents"}``, contents being title, line feed, text; or ``{"id", "title", "text"}``.

    They are held in memory: a corpus of a million passages takes about a gigabyte.

    Raises:
        DataError: A row is no passage; with file and line.
    """
    return [_passage(row, path, line) for line, row in json_rows(path)]


def groups(
    passages: Sequence[SourcePassage], growth: Growth, size: int, seed: int
) -> Iterator[tuple[SourcePassage, ...]]:
    """Endless distinct groups of ``size`` passages; the same arguments give the same ones.

    By depth each passage mentions the title of the next one; by width they are drawn at random.

    Raises:
        ConfigError: The corpus holds no more such groups, or was searched long enough without finding one.
    """
    rng = random.Random(f"{growth}/{size}/{seed}")
    titles = {passage.title: passage for passage in passages} if growth is Growth.DEPTH else {}
    seen: set[tuple[str, ...]] = set()
    while True:
        for _ in range(_MAX_MISSES):
            group = _chain(rng, passages, titles, size) if titles else _side_by_side(rng, passages, size)
            key = tuple(passage.id for passage in group)
            if len(group) == size and key not in seen:
                seen.add(key)
                yield group
                break
        else:
            raise ConfigError(
                f"the corpus gave {len(seen)} groups of {size} passages by {growth} and no more; ask for fewer or smaller ones"
            )


def _chain(
    rng: random.Random, passages: Sequence[SourcePassage], titles: Mapping[str, SourcePassage], size: int
) -> tuple[SourcePassage, ...]:
    chain = [rng.choice(passages)]
    while len(chain) < size:
        named = [titles[title] for title in _mentioned(chain[-1].text, titles)]
        free = [passage for passage in named if passage not in chain]
        if not free:
            break
        chain.append(rng.choice(free))
    return tuple(chain)


def _side_by_side(
    rng: random.Random, passages: Sequence[SourcePassage], size: int
) -> tuple[SourcePassage, ...]:
    return tuple(rng.sample(passages, size)) if len(passages) >= size else ()


def _mentioned(text: str, titles: Mapping[str, SourcePassage]) -> list[str]:
    """Titles that stand in a text word for word, in the order of the text."""
    words = [(match.start(), match.end()) for match in _WORD.finditer(text)]
    mentions: dict[str, None] = {}
    for place, (start, _) in enumerate(words):
        for _, end in words[place : place + _LONGEST_TITLE]:
            if text[start:end] in titles:
                mentions[text[start:end]] = None
    return list(mentions)


def _passage(row: object, path: Path, line: int) -> SourcePassage:
    if isinstance(row, dict) and isinstance(row.get("contents"), str):
        title, _, text = row["contents"].partition("\n")
        row = {"id": row.get("id"), "title": title.strip().strip('"'), "text": text.strip()}
    try:
        return SourcePassage.model_validate(row)
    except ValueError:
        shown = str(row)[:80]
        raise DataError(
            f'no passage: {shown!r}; expected {{"id", "contents"}} or {{"id", "title", "text"}}',
            path=str(path),
            line=line,
        ) from None
