"""Parsers of untrusted files in separate processes: a hostile file can only crash its own process.

A message, in either direction, has its length in four bytes, a line of JSON and a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping
from typing import Any

from afm.errors import ToolError
from afm.processes import follow_parent, tied_environment

_LENGTH = struct.Struct(">I")
_MEMORY_BYTES = 2 << 30
_START_S = 30.0
_VARIABLES = ("PATH", "LANG", "HOME", "TMPDIR", "AFM_PARENT_PROCESS")

Parse = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]


class ParseError(ToolError):
    """A file could not be read; the message can be shown to the agent."""


class ParserPool:
    """Parser processes that have no access to the keys of this process.

    Args:
        module: Module that calls :func:`serve_parser` when it runs.
        noun: Word for a file in messages.
        workers: Number of processes, and so of files read at the same time.
        file_s: Seconds for one file; then its process is killed.
        files_per_process: Files after which a process is replaced.
        first: File to read when a process starts, so that the time for imports does not count for other files.
    """

    def __init__(
        self,
        module: str,
        noun: str,
        *,
        workers: int,
        file_s: float,
        files_per_process: int = 1,
        first: tuple[Mapping[str, Any], bytes] | None = None,
    ) -> None:
        self._command = (sys.executable, "-P", "-m", module)
        self._noun, self._file_s, self._files_per_process = noun, file_s, files_per_process
        self._first = first
        self._free: asyncio.LifoQueue[_ParserProcess] = asyncio.LifoQueue()
        self._processes = [_ParserProcess() for _ in range(workers)]
        for process in self._processes:
            self._free.put_nowait(process)

    async def parse(self, about: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the parser's answer for a file.

        Raises:
            ParseError: The parser refused the file or exceeded a limit.
        """
        parser = await self._free.get()
        try:
            if parser.process is None:
                await self._start(parser)
            async with asyncio.timeout(self._file_s):
                answer = await parser.exchange(about, body)
        except TimeoutError:
            await parser.end()
            message = f"reading the {self._noun} took longer than {self._file_s:g} s"
            raise ParseError(message) from None
        except (OSError, EOFError, ValueError):
            await parser.end()
            raise ParseError(f"the {self._noun} crashed its parser") from None
        except BaseException:
            await parser.end()
            raise
        finally:
            self._free.put_nowait(parser)
        if parser.files >= self._files_per_process:
            await parser.end()
        if "error" in answer[0]:
            raise ParseError(answer[0]["error"])
        return answer

    async def close(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(process.end() for process in self._processes))

    async def _start(self, parser: _ParserProcess) -> None:
        environment = {name: value for name, value in tied_environment().items() if name in _VARIABLES}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        parser.process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
        )
        if self._first is not None:
            async with asyncio.timeout(_START_S):
                await parser.exchange(*self._first)
        parser.files = 0


class _ParserProcess:
    """One parser process, started on first use."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.files = 0

    async def exchange(self, about: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        process = self.process
        if process is None or process.stdin is None or process.stdout is None:
            raise EOFError
        process.stdin.write(_message(about, body))
        await process.stdin.drain()
        length = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))[0]
        self.files += 1
        return _parts(await process.stdout.readexactly(length))

    async def end(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def serve_parser(noun: str, parse: Parse, refusal: type[Exception]) -> None:
    """Parse files from standard input one after another, with resource limits, until the input ends.

    Args:
        refusal: Error whose message says what is wrong with a file. Of other errors, only the type is reported.
    """
    follow_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.redirect_stdout(sys.stderr):  # the output of a parser must not mix with the answers
        while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
            about, body = _parts(source.read(_LENGTH.unpack(head)[0]))
            try:
                answer = parse(about, body)
            except refusal as error:
                answer = {"error": str(error)}, b""
            except MemoryError:
                answer = {"error": f"the {noun} needs too much memory to be read"}, b""
            except Exception as error:  # noqa: BLE001 - hostile files can raise anything; the type is reported
                answer = {"error": f"the {noun} cannot be read ({type(error).__name__})"}, b""
            sink.write(_message(*answer))
            sink.flush()


def _message(about: Mapping[str, Any], body: bytes) -> bytes:
    content = json.dumps(about).encode() + b"\n" + body
    return _LENGTH.pack(len(content)) + content


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, body = content.partition(b"\n")
    about = json.loads(head)
    if not isinstance(about, dict):
        raise ValueError("expected a JSON object")
    return about, body
