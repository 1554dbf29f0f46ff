"""The endpoint's key taken out of what the endpoint says, should it repeat it."""

from __future__ import annotations

_INSTEAD = b"[key]"


class Blackout:
    """Takes a key out of what comes in pieces. Only bytes with which the key may begin are held back.

    Args:
        key: ``None`` or empty: everything goes on as it is.
    """

    def __init__(self, key: str | None) -> None:
        self._key = (key or "").encode()
        self._rest = b""

    def whole(self, content: bytes) -> bytes:
        """``content`` without the key."""
        return content.replace(self._key, _INSTEAD) if self._key else content

    def feed(self, piece: bytes) -> bytes:
        """What may go on now, of ``piece`` and of what was held back."""
        content = self.whole(self._rest + piece)
        longest = min(len(self._key) - 1, len(content))
        held = next((size for size in range(longest, 0, -1) if content.endswith(self._key[:size])), 0)
        passed, self._rest = content[: len(content) - held], content[len(content) - held :]
        return passed

    def end(self) -> bytes:
        """What was held back and is not the key after all."""
        rest, self._rest = self._rest, b""
        return rest
