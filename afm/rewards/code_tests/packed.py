"""LiveCodeBench's packed private tests, read without unpickling: a pickle can run any code.

The published form is base64 of zlib of a pickle of one string, which is JSON. Only the opcodes of a pickled string
are accepted.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib

from afm.errors import DataError

MAX_BYTES = 256 << 20
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT"}


def unpacked(text: str, max_bytes: int = MAX_BYTES) -> str:
    """The string that ``text`` packs.

    Args:
        max_bytes: Bound of its size when unpacked.

    Raises:
        DataError: It is damaged, too large, or a pickle of anything but one string.
    """
    try:
        packed = base64.b64decode(text, validate=True)
        engine = zlib.decompressobj()
        data = engine.decompress(packed, max_bytes)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise DataError(
            f"packed tests: neither base64 nor zlib ({error}); expected LiveCodeBench's layout"
        ) from None
    if not engine.eof:
        reason = "is cut off" if len(data) < max_bytes else f"holds more than {max_bytes} bytes"
        raise DataError(f"packed tests: the compressed data {reason}")
    return pickled_string(data)


def pickled_string(data: bytes) -> str:
    """The one string in a pickle.

    Raises:
        DataError: The pickle holds or does anything else.
    """
    found: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _STRINGS:
                found.append(str(argument))
            elif opcode.name == "STOP":
                break
            elif opcode.name not in _HARMLESS:
                raise DataError(
                    f"packed tests: the pickle has opcode {opcode.name}, expected one string and no more"
                )
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise DataError(f"packed tests: no pickle ({error})") from None
    if len(found) != 1:
        raise DataError(f"packed tests: the pickle has {len(found)} strings, expected one")
    return found[0]
