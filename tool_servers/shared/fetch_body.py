"""Bodies of pages: decompressed within a bound, and turned into text."""

from __future__ import annotations

import codecs
import re
import zlib

_TEXT_CODECS = re.compile(
    r"ascii|utf[-_](?:8|8[-_]sig|16|16[-_][bl]e|32|32[-_][bl]e)|iso8859[-_]\d+|latin[-_]1|cp\d{3,4}|koi8[-_][rtu]"
    r"|mac[-_]\w+|gb2312|gbk|gb18030|big5\w*|euc[-_]\w+|shift[-_]jis\w*|iso2022[-_]\w+|johab|hz|tis[-_]620|ptcp154"
)
_META = re.compile(rb"""(?i)<meta[^>]{0,200}?charset\s{0,9}=\s{0,9}["']?\s{0,9}([a-z0-9_:.+-]{2,40})""")
_META_BYTES = 4096
_MEMBERS = 1_000
_GZIP_MARK = 0x1F
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


class TooLongError(Exception):
    """More bytes than allowed."""


class CodingError(Exception):
    """The body is not in the encoding that it is said to be in."""


class Inflater:
    """Collects a body, decompressed as it comes, and never holds more than ``max_bytes``.

    A gzip body may have several members, one behind the other. Other bytes behind its end are passed over, as browsers do.

    Args:
        coding: The ``Content-Encoding``: none, ``identity``, ``gzip`` or ``deflate``.

    Raises:
        CodingError: Another coding.
    """

    def __init__(self, coding: str, max_bytes: int) -> None:
        coding = coding.strip().lower()
        if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise CodingError(f"the page is sent in the coding {coding[:40]!r}, expected gzip or none")
        self._max_bytes = max_bytes
        self._deflate = coding == "deflate"
        self._unpacker = zlib.decompressobj(47) if coding not in ("", "identity") else None
        self._gzip, self._members = coding in ("gzip", "x-gzip"), 1
        self._body = bytearray()
        self._received = 0
        self._over = False

    def add(self, chunk: bytes) -> None:
        """The next bytes from the network.

        Raises:
            TooLongError: The body is too long.
            CodingError: It is not compressed as it should be.
        """
        self._received += len(chunk)
        if self._received > self._max_bytes:
            raise TooLongError
        if self._unpacker is None:
            self._body += chunk
            return
        if self._deflate and self._received == len(chunk) and chunk and chunk[0] & 0x0F != 8:
            self._unpacker = zlib.decompressobj(-15)  # without the zlib header, as some servers do
        while chunk and not self._over:
            if self._unpacker.eof:
                self._next_member(chunk)
                continue
            room = self._max_bytes - len(self._body)
            try:
                self._body += self._unpacker.decompress(chunk, room + 1)
            except zlib.error as error:
                raise CodingError(f"the page is said to be compressed but is not: {error}") from None
            if len(self._body) > self._max_bytes:
                raise TooLongError
            chunk = self._unpacker.unused_data

    def _next_member(self, rest: bytes) -> None:
        """Begin to unpack another member, if ``rest`` is the beginning of one."""
        self._over = not self._gzip or rest[0] != _GZIP_MARK
        if self._over:
            return
        self._members += 1
        if self._members > _MEMBERS:
            raise CodingError(f"the page has more than {_MEMBERS} gzip members")
        self._unpacker = zlib.decompressobj(31)

    def body(self) -> bytes:
        """Everything.

        Raises:
            CodingError: The compressed body breaks off.
        """
        if self._unpacker is not None and self._received and not self._unpacker.eof:
            raise CodingError("the compressed page breaks off")
        return bytes(self._body)


def text_of(body: bytes, charset: str | None) -> str:
    """The text of a body: by its byte order mark, the header's charset, its own ``meta`` tag, UTF-8, or Windows-1252.

    Wrong bytes become U+FFFD. Only codecs of text in linear time are used, whatever a page asks for.
    """
    for mark, codec in _BOMS:
        if body.startswith(mark):
            return body.decode(codec, "replace")
    declared = _META.search(body, 0, _META_BYTES)
    for name in (charset, declared[1].decode() if declared else None):
        known = _codec(name)
        if known:
            return body.decode(known, "replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return body.decode("cp1252", "replace")


def _codec(name: str | None) -> str | None:
    try:
        codec = codecs.lookup(name.strip()).name if name else ""
    except (LookupError, ValueError):
        return None
    if codec in ("iso8859-1", "ascii"):
        return "cp1252"  # as browsers do
    return codec if _TEXT_CODECS.fullmatch(codec) else None
