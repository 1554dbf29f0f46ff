"""Which addresses a server may fetch for an agent: only public ones.

An agent writes the addresses, and pages that it reads suggest them. Without a guard, it could read services of the
machine or the cluster, or the metadata of a cloud (server-side request forgery). :func:`target_of` parses an address
strictly. :func:`check_address` checks what its name resolved to. The fetcher calls both for each connection and
connects to the address that was checked.

Lists: IANA IPv4 and IPv6 Special-Purpose Address Registries. Host syntax: WHATWG URL, section 3.5.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import unquote

from afm.errors import ToolError

MAX_URL_CHARS = 4096
DEFAULT_PORTS = frozenset({80, 443, 8080, 8443})

_SCHEME_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(?i)([a-z][a-z0-9+.-]*):/{2}([^/?#]*)([^?#]*)(\?[^#]*)?(#.*)?\Z")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f-\xa0\\\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_NUMBERS = re.compile(r"[0-9a-fx.]+\Z")
_PORT = re.compile(r"[0-9]{1,5}\Z")
_KEPT_IN_PATH = frozenset(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/?%[]|^`{}"
)
_PRIVATE_NAMES = [
    "localhost", "localdomain", "local", "lan", "home", "home.arpa", "private", "internal", "intranet",
    "corp", "svc", "consul", "in-addr.arpa", "ip6.arpa", "onion", "invalid", "test",
]  # fmt: skip
# Not covered by ``is_global``: the channel of a cloud to its machines, IETF protocol assignments, 6to4 relays.
_CLOSED_V4 = tuple(map(ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")))
_OPEN_V6 = ip_network("2000::/3")
_CLOSED_V6 = tuple(
    ip_network(network)
    for network in ("2001::/23", "2001:db8::/32", "3ffe::/16", "3fff::/20", "2620:4f:8000::/48")
)
_NAT64 = ip_network("64:ff9b::/96")
_NAT64_LOCAL = ip_network("64:ff9b:1::/48")
_COMPATIBLE = ip_network("::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)


class BlockedError(ToolError):
    """An address may not be fetched; the message tells the agent why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed address. The fetcher uses these parts and never parses the text again.

    Attributes:
        host: Lower-case ASCII name without a trailing dot, or an IP address without brackets.
        path: Path and query as sent.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def url(self) -> str:
        """The normal form, without user name and fragment."""
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port as in the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _SCHEME_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The host, if it is an IP address."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be fetched.

    Attributes:
        ports: Allowed ports of public hosts.
        trusted: ``host:port`` pairs, written as in an address, that may be fetched whatever they resolve to, such as a
            web site on this machine or in this cluster.
    """

    ports: Collection[int] = DEFAULT_PORTS
    trusted: Collection[str] = ()

    def trusts(self, target: Target) -> bool:
        """Return whether ``target`` is a trusted pair."""
        return self.trusts_pair(target.host, target.port)

    def trusts_pair(self, host: str, port: int) -> bool:
        """Return whether a host, written without brackets, and its port are a trusted pair."""
        pair = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return any(pair == trusted.lower() for trusted in self.trusted)


def target_of(url: str, policy: Policy) -> Target:
    """Parse an address as a browser does, and check everything that needs no name server.

    Raises:
        BlockedError: The address is not http or https, or is private.
    """
    if len(url) > MAX_URL_CHARS:
        raise BlockedError(f"the address has {len(url)} characters, expected at most {MAX_URL_CHARS}")
    text = url.strip(" \t\r\n")
    if _FORBIDDEN.search(text):
        raise BlockedError("the address holds blanks, control characters or a backslash")
    match = _URL.match(text)
    if match is None or match[1].lower() not in _SCHEME_PORTS:
        raise BlockedError("expected an address that begins with http:// or https://")
    scheme = match[1].lower()
    host, port = _host_and_port(match[2].rpartition("@")[2], _SCHEME_PORTS[scheme])
    target = Target(scheme, host, port, _path(match[3], match[4] or ""))
    if policy.trusts(target):
        return target
    if port not in policy.ports:
        allowed = ", ".join(map(str, sorted(policy.ports)))
        raise BlockedError(f"port {port} is not fetched, expected one of {allowed}")
    address = target.address
    if address is not None:
        check_address(address)
    else:
        _check_name(host)
    return target


def check_address(address: IPv4Address | IPv6Address) -> None:
    """Accept public unicast addresses; an IPv4 address inside an IPv6 address must be public too.

    Raises:
        BlockedError: The address, or one inside it, is private, loopback, link-local, metadata, multicast or reserved.
    """
    if isinstance(address, IPv4Address):
        special = any(address in network for network in _CLOSED_V4)
        closed = special or address.is_multicast or not address.is_global
    else:
        inner = _carried(address)
        for carried in inner:
            check_address(carried)
        tunnel = bool(inner) and not _is_isatap(address)
        outside = address not in _OPEN_V6 or any(address in network for network in _CLOSED_V6)
        closed = address.scope_id is not None or (outside and not tunnel)
    if closed:
        raise BlockedError(f"{address} is not a public address; only public web pages are fetched")


def _carried(address: IPv6Address) -> list[IPv4Address]:
    """Return the IPv4 addresses to which a gateway would forward a packet for ``address``."""
    number = int(address)
    low = IPv4Address(number & 0xFFFFFFFF)
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address.sixtofour]
    if address.teredo is not None:
        return list(address.teredo)
    if address in _NAT64 or (address in _COMPATIBLE and number > 0xFFFF):
        return [low]
    if address in _NAT64_LOCAL:
        return []
    return [low] if _is_isatap(address) else []


def _is_isatap(address: IPv6Address) -> bool:
    return (int(address) >> 32) & 0xFFFFFFFF in _ISATAP


def _host_and_port(authority: str, default: int) -> tuple[str, int]:
    bracket = re.match(r"\[([^\]]*)\](?::(.*))?\Z", authority)
    if bracket:
        return _ipv6(bracket[1]), _port(bracket[2], default)
    name, _, port = authority.partition(":")
    return _name(name), _port(port, default)


def _port(text: str | None, default: int) -> int:
    if not text:
        return default
    if not _PORT.match(text) or not 0 < int(text) < 65536:
        raise BlockedError(f"got {text[:20]!r} as a port, expected a number from 1 to 65535")
    return int(text)


def _ipv6(text: str) -> str:
    try:
        return str(IPv6Address(text)) if "%" not in text else _no_host(text)
    except ValueError:
        return _no_host(text)


def _name(text: str) -> str:
    """Return the normal form of a host name, which is compared, resolved and sent."""
    try:
        plain = unquote(text, errors="strict") if text.isascii() else text
    except UnicodeDecodeError:
        return _no_host(text)
    if not plain.isascii():
        plain = _ascii(plain)
    plain = plain.lower().removesuffix(".")
    last = plain.rpartition(".")[2]
    if last.isdecimal() or re.match(r"0x[0-9a-f]*\Z", last):
        # Decimal, octal and hexadecimal, as browsers read them. The C library would ignore everything after a blank.
        try:
            return str(IPv4Address(socket.inet_aton(plain))) if _NUMBERS.match(plain) else _no_host(text)
        except OSError:
            return _no_host(text)
    if not plain or len(plain) > 253 or not all(_LABEL.match(label) for label in plain.split(".")):
        return _no_host(text)
    return plain


def _ascii(name: str) -> str:
    """Convert an international name to ASCII (UTS 46); full-width letters and digits become plain ones."""
    import idna

    try:
        return idna.encode(idna.uts46_remap(name, std3_rules=True), uts46=True).decode()
    except (idna.IDNAError, UnicodeError):
        try:  # digits and dots are not an international name, but an address
            mapped = idna.uts46_remap(name, std3_rules=True)
        except (idna.IDNAError, UnicodeError):
            return _no_host(name)
        return mapped if mapped.isascii() else _no_host(name)


def _check_name(host: str) -> None:
    private = any(host == name or host.endswith(f".{name}") for name in _PRIVATE_NAMES)
    if private or "." not in host:
        raise BlockedError(f"{host!r} is a private name; only public web pages are fetched")


def _path(path: str, query: str) -> str:
    encoded = (path or "/").encode("utf-8", "replace") + query.encode("utf-8", "replace")
    return "".join(chr(byte) if byte in _KEPT_IN_PATH else f"%{byte:02X}" for byte in encoded)


def _no_host(text: str) -> str:
    raise BlockedError(f"got {text[:80]!r} as a host, expected a name such as en.wikipedia.org")
