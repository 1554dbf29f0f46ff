"""What must never be written down: the values of secret environment variables, however they are written."""

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
# A word of a variable's name; run together they count as well, as in PGPASSWORD, but not KEY and PAT: MONKEY, KEYBOARD.
_WORD = re.compile(
    r"(?:[A-Z]*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|CREDENTIAL|APIKEY|ACCESSKEY|SECRETKEY|PRIVATEKEY)"
    r"|KEY|PAT|PASS|O?AUTH|AUTHORIZATION|BEARER|JWT|COOKIE)S?[0-9]*"
)
# A variable whose name ends so says where a secret is, not what it is.
_PLACE = re.compile(r"(?:FILE|PATH|DIR|FOLDER|HOME|SOCK|SOCKET|URL|URI|ENDPOINT|HOST|PORT|NAME)S?[0-9]*")
# Programs are told these as a matter of course, and they tell nothing.
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
    """Hides secrets of this process's environment, as they are and in the forms that programs and servers give them.

    Hidden are values of at least 8 characters: of variables with secret names (``GITHUB_TOKEN``, ``SMTP_PASS``,
    ``AWS_SECRET_ACCESS_KEY``), of ``others``, and passwords in addresses that any variable holds. Each is also hidden
    when it is URL-encoded, escaped for JSON or HTML, or in base64, there also in the middle of other text.

    Args:
        others: Names of more variables whose values are secret.
    """

    def __init__(self, others: Iterable[str] = ()) -> None:
        values = _values(os.environ, frozenset(others))
        forms = {form for value in values for form in _forms(value) if len(form) >= _SHORTEST}
        self._forms = sorted(forms, key=lambda form: (-len(form), form))

    def hidden(self, text: str) -> str:
        """``text`` with ``[secret]`` in place of each."""
        for form in self._forms:
            text = text.replace(form, _HIDDEN)
        return text

    def hidden_within(self, value: Any) -> Any:
        """``value`` as JSON can hold it, without secrets in any of its texts or keys."""
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
        if name.upper().endswith("S"):  # several of them
            yield from re.split(r"[,;\s]+", stripped)


def _is_secret(name: str) -> bool:
    words = [word for word in re.split(r"[^A-Z0-9]+", _separated(name)) if word]
    if not words or _PLACE.fullmatch(words[-1]):
        return False
    password = words[-1] == "PWD" and len(words) > 1  # alone it is the working directory
    return password or any(map(_WORD.fullmatch, words))


def _separated(name: str) -> str:
    """``authToken`` as ``AUTH_TOKEN``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def _passwords(value: str) -> Iterator[str]:
    """Those in addresses: ``scheme://user:password@host``, or ``https://token@host``."""
    for address in _ADDRESS.finditer(value):
        user, colon, password = address[1].partition(":")
        if not colon and not address[0].lower().startswith("http"):
            continue
        secret = password if colon else user
        yield secret
        yield unquote(secret)


def _forms(secret: str) -> Iterator[str]:
    """How a secret may be written; each of them somewhere in a text gives it away."""
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
        for before in range(3):  # behind that many bytes of a group of three: what no neighbour changes
            first = -(-before * 8 // 6)
            yield encode(bytes(before) + raw).decode()[first : (before + len(raw)) * 8 // 6]
