"""Worker processes that read pages: a page that takes too long or too much memory costs its worker and no more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process

from afm.processes import tied_environment
from tool_servers.crawl_page.extract import Extracted
from tool_servers.crawl_page.extract_worker import LENGTH
from tool_servers.shared.fetch import Fault, Fetched, FetchError

_WORKER = ("-P", "-m", "tool_servers.crawl_page.extract_worker")
_PAGES_PER_WORKER = 500
_START_S = 30.0


class ExtractPool:
    """Reads pages in worker processes, which know none of this process's keys.

    Args:
        workers: Most pages read at the same time.
        page_s: Longest time for a page; then its worker is killed.
        max_chars: Longer texts lose their end.
    """

    def __init__(self, workers: int, page_s: float, max_chars: int) -> None:
        self._page_s = page_s
        self._max_chars = max_chars
        self._places: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._workers = [_Worker() for _ in range(workers)]
        for worker in self._workers:
            self._places.put_nowait(worker)

    async def extract(self, page: Fetched) -> Extracted:
        """The text of ``page``.

        Raises:
            FetchError: It has none, or could not be read within the limits.
        """
        about = {
            "media_type": page.media_type,
            "charset": page.charset,
            "url": page.url,
            "max_chars": self._max_chars,
        }
        message = json.dumps(about).encode() + b"\n" + page.body
        worker = await self._places.get()
        try:
            answer = await worker.ask(message, self._page_s)
        except TimeoutError:
            raise FetchError(Fault.PARSE, f"reading the page took longer than {self._page_s:g} s") from None
        except (OSError, EOFError, ValueError):
            raise FetchError(Fault.PARSE, "reading the page ended its reader") from None
        finally:
            self._places.put_nowait(worker)
        if "error" in answer:
            raise FetchError(Fault.PARSE, answer["error"])
        return Extracted(answer["title"], answer["text"])

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(worker.end() for worker in self._workers))


class _Worker:
    """One process, started when it is needed."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._pages = 0

    async def ask(self, message: bytes, seconds: float) -> dict[str, str]:
        process = self._process
        try:
            if process is None:
                process = await self._started()
            async with asyncio.timeout(seconds):
                answer = await _exchanged(process, message)
        except BaseException:
            await self.end()
            raise
        self._pages += 1
        if self._pages >= _PAGES_PER_WORKER:
            await self.end()
        return answer

    async def _started(self) -> Process:
        keep = ("PATH", "LANG", "HOME", "TMPDIR", "AFM_PARENT_PROCESS")
        environment = {name: value for name, value in tied_environment().items() if name in keep}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *_WORKER,
            stdin=PIPE,
            stdout=PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
        )
        self._pages = 0
        async with asyncio.timeout(_START_S):  # imports are not the page's fault
            await _exchanged(self._process, _FIRST)
        return self._process

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


_FIRST = b'{"media_type": "text/html", "charset": null, "url": "http://example.org/", "max_chars": 10}\n<p>hello</p>'


async def _exchanged(process: Process, message: bytes) -> dict[str, str]:
    if process.stdin is None or process.stdout is None:
        raise EOFError
    process.stdin.write(LENGTH.pack(len(message)) + message)
    await process.stdin.drain()
    length = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
    answer = json.loads(await process.stdout.readexactly(length))
    if not isinstance(answer, dict):
        raise EOFError
    return answer
