"""Redaction of the values of secret environment variables, in all their encodings."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote

_SHORTEST = 8
_HIDDEN = "[secret]"
# A word in a variable's name. A prefix may be attached, as in PGPASSWORD, but not to KEY and PAT, because of MONKEY.
_WORD = re.compile(
    r"(?:[A-Z]*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|CREDENTIAL|APIKEY|ACCESSKEY|SECRETKEY|PRIVATEKEY)"
    r"|KEY|PAT|PASS|O?AUTH|AUTHORIZATION|BEARER|JWT|COOKIE)S?[0-9]*"
)
# A variable whose name ends like this holds the place of a secret, not the secret.
_PLACE = re.compile(r"(?:FILE|PATH|DIR|FOLDER|HOME|SOCK|SOCKET|URL|URI|ENDPOINT|HOST|PORT|NAME)S?[0-9]*")
# Programs get these as usual, and they are not secret.
_ORDINARY = frozenset(
    [
        "HOME",
        "HOSTNAME",
        "LANG",
        "LOGNAME",
        "PATH",
        "PWD",
        "PYTHONPATH",
        "SHELL",
        "TERM",
        "TMPDIR",
        "TZ",
        "USER",
    ]
)
_SCHEME = re.compile(r"(?:Basic|Bearer|Token)\s+(?=\S)", re.IGNORECASE)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^\s/?#]*)@")


class Secrets:
    """Hides the secrets in this process's environment, in plain and encoded form.

    It hides values of at least 8 characters: those of variables with secret names (``GITHUB_TOKEN``, ``SMTP_PASS``,
    ``AWS_SECRET_ACCESS_KEY``), those of ``others``, and the passwords in the addresses of any variable. It also finds
    them URL-encoded, escaped for JSON or HTML, and in base64, even in the middle of other encoded text.

    Args:
        others: Names of further variables whose values are secret.
    """

    def __init__(self, others: Iterable[str] = ()) -> None:
        values = _values(os.environ, frozenset(others))
        forms = {form for value in values for form in _forms(value) if len(form) >= _SHORTEST}
        self._forms = sorted(forms, key=lambda form: (-len(form), form))

    def hidden(self, text: str) -> str:
        """Return ``text`` with ``[secret]`` in place of each secret."""
        for form in self._forms:
            text = text.replace(form, _HIDDEN)
        return text

    def hidden_within(self, value: Any) -> Any:
        """Return ``value`` as JSON types, without secrets in any of its texts or keys."""
        if isinstance(value, str):
            return self.hidden(value)
        if isinstance(value, Mapping):
            return {self.hidden(str(key)): self.hidden_within(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden_within(inner) for inner in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        return self.hidden(str(value))


def _values(environment: Mapping[str, str], others: frozenset[str]) -> Iterator[str]:
    for name, value in environment.items():
        yield from _passwords(value)
        if not (_is_secret(name) or name in others - _ORDINARY):
            continue
        yield value
        stripped = value.strip()
        yield _SCHEME.sub("", stripped, count=1) if _SCHEME.match(stripped) else stripped
        yield unicodedata.normalize("NFC", "\n".join(line.rstrip() for line in stripped.splitlines()))
        if name.upper().endswith("S"):  # the value is a list
            yield from re.split(r"[,;\s]+", stripped)


def _is_secret(name: str) -> bool:
    separated = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()  # authToken: AUTH_TOKEN
    words = [word for word in re.split(r"[^A-Z0-9]+", separated) if word]
    if not words or _PLACE.fullmatch(words[-1]):
        return False
    password = words[-1] == "PWD" and len(words) > 1  # PWD itself is the working directory
    return password or any(map(_WORD.fullmatch, words))


def _passwords(value: str) -> Iterator[str]:
    """Yield the passwords in addresses: ``scheme://user:password@host`` or ``https://token@host``."""
    for address in _ADDRESS.finditer(value):
        user, colon, password = address[1].partition(":")
        if not colon and not address[0].lower().startswith("http"):
            continue
        secret = password if colon else user
        yield secret
        yield unquote(secret)


def _forms(secret: str) -> Iterator[str]:
    """Yield the forms of a secret, each of which would reveal it in a text."""
    yield secret
    yield secret.replace("\n", "\r\n")
    raw = secret.encode("utf-8", "surrogateescape")
    for encoded in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        yield encoded
        yield re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), encoded)
    for ascii_only in (True, False):
        once = json.dumps(secret, ensure_ascii=ascii_only)[1:-1]
        yield once
        yield once.replace("/", "\\/")
        yield json.dumps(once, ensure_ascii=ascii_only)[1:-1]  # JSON within JSON
    yield html.escape(secret)
    yield html.escape(secret, quote=False)
    if len(raw) >= _SHORTEST:
        yield raw.hex()
        yield from _base64(raw)


def _base64(raw: bytes) -> Iterator[str]:
    for encode in (base64.standard_b64encode, base64.urlsafe_b64encode):
        whole = encode(raw).decode()
        yield whole
        yield whole.rstrip("=")
        yield "\n".join(whole[start : start + 76] for start in range(0, len(whole), 76))
        for before in range(
            3
        ):  # after this many bytes of a group of three, the characters without neighbouring bits
            first = -(-before * 8 // 6)
            yield encode(bytes(before) + raw).decode()[first : (before + len(raw)) * 8 // 6]
