"""What a model reads of its own episode where the protocol trims it: AFM's published rule for a context that is full.

Facts: ``AFM/evaluation/web_agent/utils.py`` and ``inference_web_agent.py`` of the published repository (revision 8f94516).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_TAG = re.compile(r"(<[^>]+>)")


@dataclass(slots=True)
class History:
    """The text of an episode as its model is shown it.

    Attributes:
        kept_roles: Tags whose closed blocks are the last to go. They stand first in what is shown, even where nothing is cut.
        total_tokens: Context, of which half is in effect the bound of the history: its own length is taken off as well.
        text: Everything so far, untrimmed.
    """

    kept_roles: tuple[str, ...]
    total_tokens: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    text: str = field(default="", init=False)

    def shown(self, *, prompt_tokens: int, turn_tokens: int, reserve: int) -> tuple[str, bool]:
        """What fits into the context, and whether something was cut.

        Args:
            prompt_tokens: Of the prompt.
            turn_tokens: Kept free for the next generation.
            reserve: Kept free for the chat template.
        """
        own = len(self.encode(self.text)) if self.text else 0
        room = self.total_tokens - turn_tokens - prompt_tokens - own - reserve
        shown = trimmed(self.text, room, self.kept_roles, self.encode, self.decode)
        return shown, len(shown) < len(self.text)


def trimmed(
    text: str,
    max_tokens: int,
    kept_roles: Sequence[str],
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """``text`` in at most ``max_tokens`` tokens, counted piece by piece between tags.

    Closed blocks of ``kept_roles`` come first, then as many of the other pieces as fit, the newest first, in their order. Of
    the first text that does not fit its beginning is kept. Where the blocks alone are too long, the newest of their pieces
    that fit are all that is left, or else the first piece of the text.
    """
    pieces = [piece for piece in _TAG.split(text) if piece]
    if not pieces:
        return ""
    counts = [len(encode(piece)) for piece in pieces]
    kept = _blocks(pieces, kept_roles)
    room = max_tokens - sum(counts[at] for at in kept)
    if room < 0:
        left = _newest_that_fit(kept, counts, max_tokens)
        return "".join(pieces[at] for at in left) or pieces[0]
    others: list[str] = []
    for at in reversed([at for at in range(len(pieces)) if at not in kept]):
        if room <= 0:
            break
        if counts[at] <= room:
            others.append(pieces[at])
            room -= counts[at]
        elif not _TAG.match(pieces[at]):
            others.append(decode(encode(pieces[at])[:room]))
            room = 0
    return "".join([*(pieces[at] for at in sorted(kept)), *reversed(others)])


def _blocks(pieces: Sequence[str], roles: Sequence[str]) -> set[int]:
    """Places of the pieces in closed blocks of ``roles``, tags included."""
    found: set[int] = set()
    opened: dict[str, list[int]] = {role: [] for role in roles}
    for at, piece in enumerate(pieces):
        name = piece[1:-1].removeprefix("/")
        if not _TAG.fullmatch(piece) or name not in opened:
            continue
        if not piece.startswith("</"):
            opened[name].append(at)
        elif opened[name]:
            found.update(range(opened[name].pop(), at + 1))
    return found


def _newest_that_fit(places: set[int], counts: Sequence[int], max_tokens: int) -> list[int]:
    left: list[int] = []
    for at in sorted(places, reverse=True):
        if counts[at] <= max_tokens:
            left.insert(0, at)
            max_tokens -= counts[at]
    return left
