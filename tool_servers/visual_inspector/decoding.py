"""Pictures are unpacked in processes of their own: a hostile one costs its process and no more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

from afm.processes import tied_environment
from tool_servers.shared.fetch import Fault, FetchError
from tool_servers.visual_inspector.picture import Picture

_WORKER = ("-P", "-m", "tool_servers.visual_inspector.picture_worker")
_KEPT = ("PATH", "LANG", "HOME", "TMPDIR", "AFM_PARENT_PROCESS")


class Decoder:
    """Unpacks pictures in processes that know none of this process's keys.

    Args:
        workers: Most pictures unpacked at the same time.
        picture_s: Longest time for a picture; then its process is killed.
        max_pixels: Width times height.
        max_side: Longer sides are scaled down to it.
    """

    def __init__(self, workers: int, picture_s: float, max_pixels: int, max_side: int) -> None:
        self._places = asyncio.Semaphore(workers)
        self._picture_s = picture_s
        self._head = json.dumps({"max_pixels": max_pixels, "max_side": max_side}).encode() + b"\n"

    async def decode(self, body: bytes) -> Picture:
        """The picture in ``body``.

        Raises:
            FetchError: There is none that can be read within the limits.
        """
        async with self._places:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *_WORKER, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=_environment()
            )
            try:
                async with asyncio.timeout(self._picture_s):
                    answer, _ = await process.communicate(self._head + body)
            except TimeoutError:
                message = f"reading the picture took longer than {self._picture_s:g} s"
                raise FetchError(Fault.PARSE, message) from None
            finally:
                await _ended(process)
        return _picture(answer)


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in tied_environment().items() if name in _KEPT}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment


async def _ended(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _picture(answer: bytes) -> Picture:
    head, _, body = answer.partition(b"\n")
    try:
        about = json.loads(head)
    except ValueError:
        raise FetchError(Fault.PARSE, "reading the picture ended its reader") from None
    if "error" in about:
        raise FetchError(Fault.PARSE, f"the picture cannot be used: {about['error']}")
    return Picture(**about, body=body)
