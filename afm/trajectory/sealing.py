"""Text that its owner publishes encrypted, and records of episodes about it: never on disk in plain form.

BrowseComp (arXiv 2504.12516) is distributed so that crawlers cannot pick it up: every row has a canary, and its texts are
combined by XOR with the SHA-256 digest of that canary, repeated to the text's length, and written as base64. This hides, it
does not protect: the key stands beside the text. A record about such a row is sealed in the same way, because its
question, the agent's words, the calls and the judge's reasons all give the question or the answer away.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Final

from pydantic import ValidationError

from afm.errors import DataError
from afm.trajectory.record import Record

SEALING_KEY: Final = "sealing_key"
"""Where a task's ``extra_info`` holds the key, when nothing about the task may be written in plain form."""
HIDDEN: Final = "(sealed)"
_SEALED, _KEY = "sealed", "sealed_with"


def encrypt(text: str, key: str) -> str:
    """``text`` in the owner's form; the inverse of :func:`decrypt`."""
    return base64.b64encode(_combined(text.encode("utf-8", "surrogatepass"), key)).decode("ascii")


def decrypt(sealed: str, key: str) -> str:
    """The plain text of base64 ``sealed``.

    Raises:
        DataError: It is no base64, or the key is another one (so that no text comes out).
    """
    try:
        return _combined(base64.b64decode(sealed, validate=True), key).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        raise DataError("cannot be decrypted: it is no base64, or its canary is another one") from None


def sealed(record: Record, key: str) -> Record:
    """``record`` as it may be written: figures stay, every text that tells of the question is encrypted."""
    verdict = record.verdict.model_copy(update={"evidence": ""}) if record.verdict is not None else None
    calls = (call.model_copy(update={"argument": "", "observation": ""}) for call in record.calls)
    return record.model_copy(
        update={
            "question": HIDDEN,
            "segments": (),
            "ground_truth": None,
            "verdict": verdict,
            "calls": tuple(calls),
            "error": record.error.partition(":")[0],
            "reason": "",
            **dict.fromkeys(("prompt_ids", "response_ids", "response_mask", "logprobs")),
            "provenance": {
                **{
                    name: value for name, value in record.provenance.items() if name not in ("groups", "team")
                },
                _KEY: key,
                _SEALED: encrypt(record.model_dump_json(), key),
            },
        }
    )


def opened(record: Record) -> Record:
    """The record as it was before :func:`sealed`, or ``record`` itself when it is not sealed.

    Raises:
        DataError: Its sealed part is damaged.
    """
    blob, key = record.provenance.get(_SEALED), record.provenance.get(_KEY)
    if not isinstance(blob, str) or not isinstance(key, str):
        return record
    try:
        return Record.model_validate_json(decrypt(blob, key))
    except (DataError, ValidationError):
        raise DataError(f"record {record.id!r}: its sealed part is damaged") from None


def _combined(data: bytes, key: str) -> bytes:
    digest = hashlib.sha256(key.encode("utf-8")).digest()
    stream = (digest * (len(data) // len(digest) + 1))[: len(data)]
    return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(len(data))
