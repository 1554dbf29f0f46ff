"""``python -m tool_servers.visual_inspector.picture_worker``: unpacks one picture from standard input, within limits.

In comes a line of JSON (the arguments of :func:`prepared`) and the file; out comes a line of JSON and the picture.
"""

from __future__ import annotations

import json
import resource
import sys

from afm.processes import follow_parent

_MEMORY_BYTES = 2 << 30


def main() -> None:
    """Read, unpack, answer, end."""
    follow_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    head, _, body = sys.stdin.buffer.read().partition(b"\n")
    about, picture = _answer(json.loads(head), body)
    sys.stdout.buffer.write(json.dumps(about).encode() + b"\n" + picture)


def _answer(limits: dict[str, int], body: bytes) -> tuple[dict[str, object], bytes]:
    from tool_servers.visual_inspector.picture import NoPictureError, prepared

    try:
        picture = prepared(body, **limits)
    except NoPictureError as error:
        return {"error": str(error)}, b""
    except MemoryError:
        return {"error": "it needs too much memory to be read"}, b""
    except Exception as error:  # noqa: BLE001 - decoders fail in any way on hostile files; the type is told
        return {"error": f"it cannot be read ({type(error).__name__})"}, b""
    about = {"width": picture.width, "height": picture.height, "kind": picture.kind}
    return about | {"media_type": picture.media_type}, picture.body


if __name__ == "__main__":
    main()
