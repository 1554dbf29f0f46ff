"""``python -m tool_servers.crawl_page.extract_worker``: turns pages from standard input into text, one after the other.

A message is four bytes of length and so many bytes: a line of JSON about the page and its body one way, JSON back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import struct
import sys
from typing import BinaryIO

from afm.processes import follow_parent

LENGTH = struct.Struct(">I")
_MEMORY_BYTES = 2 << 30


def main() -> None:
    """Serve until standard input ends."""
    follow_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.redirect_stdout(sys.stderr):  # what a parser prints is no answer
        while message := _received(source):
            answer = json.dumps(_answer(message)).encode()
            sink.write(LENGTH.pack(len(answer)) + answer)
            sink.flush()


def _received(source: BinaryIO) -> bytes:
    length = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(length)[0]) if len(length) == LENGTH.size else b""


def _answer(message: bytes) -> dict[str, str]:
    from tool_servers.crawl_page.extract import NoTextError, extract

    head, _, body = message.partition(b"\n")
    try:
        page = extract(body, **json.loads(head))
    except NoTextError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "the page needs too much memory to be read"}
    except Exception as error:  # noqa: BLE001 - parsers fail in any way on hostile pages; the type is told
        return {"error": f"the page cannot be read ({type(error).__name__})"}
    return {"title": page.title, "text": page.text}


if __name__ == "__main__":
    main()
