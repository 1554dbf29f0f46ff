"""The bytes of a picture, by address, by path below one folder, or inline, and their decoding."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import stat
from pathlib import Path

from tool_servers.shared.fetch import Fetcher, FetchError, FetchFault
from tool_servers.shared.parser_pool import ParseError, ParserPool
from tool_servers.visual_inspector.picture import PreparedPicture

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_INLINE = re.compile(r"data:[\w/+.-]*;base64,")


class PictureSource:
    """Reads pictures.

    Args:
        fetcher: For addresses; guarded.
        folder: Pictures below it may be named by their path; ``None`` for none at all.
        max_bytes: Of a file.
    """

    def __init__(self, fetcher: Fetcher, folder: Path | None, max_bytes: int) -> None:
        self._fetcher = fetcher
        self._folder = None if folder is None else folder.resolve()
        self._max_bytes = max_bytes

    async def read(self, place: str) -> bytes:
        """The file at ``place``: an address, a path, or ``data:...;base64,...``.

        Raises:
            FetchError: It cannot be had; the message is fit for the agent.
        """
        place = place.strip()
        if inline := _INLINE.match(place):
            return self._decoded(place[inline.end() :])
        if _ADDRESS.match(place):
            return (await self._fetcher.fetch(place)).body
        return await asyncio.to_thread(self._file, place)

    async def close(self) -> None:
        """Close connections."""
        await self._fetcher.close()

    def _decoded(self, text: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error:
            raise FetchError(FetchFault.BROKEN, "the inline picture is no base64") from None

    def _file(self, place: str) -> bytes:
        if self._folder is None:
            message = "pictures cannot be named by a path here, only by an address (https://...)"
            raise FetchError(FetchFault.BLOCKED, message)
        if not self._is_below(Path(os.path.realpath(self._folder / place.replace("\0", "?")))):
            raise self._absent()
        try:
            # Never waits for a named pipe; where a link leads is judged by what was opened, not by what is there later.
            descriptor = os.open(self._folder / place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise self._absent() from None
        try:
            opened = Path(f"/proc/self/fd/{descriptor}").readlink()
            about = os.fstat(descriptor)
            if not self._is_below(opened) or not stat.S_ISREG(about.st_mode):
                raise self._absent()
            if about.st_size > self._max_bytes:
                raise FetchError(FetchFault.TOO_LARGE, f"the file is larger than {self._max_bytes} bytes")
            with os.fdopen(os.dup(descriptor), "rb") as file:
                return file.read(self._max_bytes)
        finally:
            os.close(descriptor)

    def _is_below(self, path: Path) -> bool:
        return self._folder is not None and path.is_relative_to(self._folder)

    def _absent(self) -> FetchError:
        """The same words whether a file outside of the folder exists or not."""
        return FetchError(FetchFault.NAME, "there is no such file in the folder of pictures")


class PictureDecoder:
    """Prepares pictures, each in a process of its own.

    Args:
        workers: Most pictures unpacked at the same time.
        picture_s: Longest time for a picture; then its process is killed.
        max_pixels: Width times height.
        max_side: Longer sides are scaled down to it.
    """

    def __init__(self, workers: int, picture_s: float, max_pixels: int, max_side: int) -> None:
        module = "tool_servers.visual_inspector.picture"
        self._pool = ParserPool(module, "picture", workers=workers, file_s=picture_s)
        self._limits = {"max_pixels": max_pixels, "max_side": max_side}

    async def decode(self, body: bytes) -> PreparedPicture:
        """The picture in ``body``.

        Raises:
            FetchError: There is none that can be read within the limits.
        """
        try:
            about, picture = await self._pool.parse(self._limits, body)
        except ParseError as error:
            raise FetchError(FetchFault.PARSE, str(error)) from None
        return PreparedPicture(**about, body=picture)

    async def close(self) -> None:
        """End what is under way."""
        await self._pool.close()
