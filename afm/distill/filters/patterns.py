"""Patterns of secrets and personal data."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pattern:
    """One kind of sensitive text.

    Attributes:
        hints: A text that contains none of these cannot match. This plain search is much faster than the expression.
        valid: Decides about a match, for example by its check digits.
    """

    kind: str
    regex: re.Pattern[str]
    hints: tuple[str, ...] = ()
    valid: Callable[[str], bool] = bool

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the spans of all valid matches."""
        if self.hints and not any(hint in text for hint in self.hints):
            return
        for match in self.regex.finditer(text):
            if self.valid(match[0]):
                yield match.span()


def luhn(text: str) -> bool:
    """Return whether the digits in ``text`` pass the check of payment cards (ISO/IEC 7812-1, annex B)."""
    digits = [int(character) for character in reversed(text) if character.isdigit()]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return bool(digits) and (sum(digits[::2]) + sum(doubled)) % 10 == 0


def iban(text: str) -> bool:
    """Return whether ``text`` has the length for its country and valid check digits (ISO 13616, ISO 7064 MOD 97-10)."""
    letters = "".join(text.split())
    if f"{letters[:2]}{len(letters)}" not in _IBAN_LENGTHS:
        return False
    turned = letters[4:] + letters[:4]
    return int("".join(str(int(character, 36)) for character in turned)) % 97 == 1


def _card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return re.fullmatch(_CARD_NUMBERS, digits) is not None and len(set(digits)) > 2 and luhn(digits)


def _phone(text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15 and _THOUSANDS.fullmatch(text) is None


def _public_address(text: str) -> bool:
    """Return whether ``text`` is a public IP address. Well-known ones and those that look like versions are excluded."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if address.version == 6:
        return address.is_global
    return address.is_global and sum(byte > 9 for byte in address.packed) >= 2 and any(address.packed[1:3])


def _social_security(text: str) -> bool:
    """Return whether the number can belong to a person. Three well-known ones come from advertisements."""
    return text not in ("078-05-1120", "123-45-6789", "219-09-9999")


def _random_enough(text: str) -> bool:
    """Return whether a value mixes kinds of characters, unlike words and placeholders."""
    value = text.split("=" if "=" in text else ":", 1)[-1].strip(" \"'")
    kinds = (str.islower, str.isupper, str.isdigit)
    mixed = sum(any(kind(character) for character in value) for kind in kinds) >= 2
    return mixed and len(set(value)) >= 8 and _PLACEHOLDER.search(value) is None


def _last_part_mixed(text: str) -> bool:
    """Return whether the value at the end has letters and digits, unlike names of variables and words."""
    value = re.split(r"[\s:=\"']+", text.rstrip("=\"'"))[-1]
    return (
        any(map(str.isdigit, value))
        and any(map(str.isalpha, value))
        and len(set(value)) >= 8
        and _PLACEHOLDER.search(value) is None
    )


def _mixed_with_digits(text: str) -> bool:
    """Return whether digits and letters of both cases mix, as in random tokens, unlike slugs and names of modules."""
    tail = text[4:]  # after the prefix that all tokens of a service share
    return (
        all(any(map(kind, tail)) for kind in (str.islower, str.isupper, str.isdigit)) and len(set(tail)) >= 12
    )


_PLACEHOLDER = re.compile(r"(?i)your|example|placeholder|changeme|x{6}")
_CREDENTIAL = (
    r"(?:password|passwd|secret(?:[_-](?:access[_-])?key)?|api[_-]?key"
    r"|(?:access|api|auth|bot|gateway|refresh|server)[_-]?token)"
)
"""Names of secrets. More words may precede them, as in ``OPENAI_API_KEY``."""
_CARD_NUMBERS = (
    r"4\d{12}(?:\d{3})?|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}|35[2-8]\d{13}"
    r"|6(?:011|2\d\d|4[4-9]\d|5\d\d)\d{12}"
)
"""Visa, Mastercard, American Express, Diners Club, JCB, Discover and UnionPay."""
_THOUSANDS = re.compile(r"\+\d{1,3}(?:[ .]\d{3})*[ .]000")
_IBAN_LENGTHS = frozenset(
    re.findall(
        r"\w+",
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 FI18 FO18 FR27 "
        "GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 "
        "MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 "
        "TN24 TR26 UA29 VA22 VG24 XK20",
    )
)
"""Length for each country (the registry of ISO 13616)."""
_TOP_LEVEL = (
    r"(?:com|org|net|edu|gov|mil|int|info|biz|app|dev|online|cloud|tech|xyz|site|shop|museum|mobi|jobs|travel|email|agency|academy"
    r"|company|consulting|digital|engineering|foundation|international|media|solutions|technology|university|berlin|london|paris|nyc"
    r"|xn--[a-z0-9-]{2,59}|[^\W\d_]{2})"
)
"""Countries in any script, and other common domains. With any word, ``a@b.shape`` would be an e-mail address."""

SECRETS = (
    Pattern("private key", re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----"), ("PRIVATE KEY",)),
    Pattern("AWS key", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), ("AKIA", "ASIA")),
    Pattern(
        "GitHub token",
        re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{22,255})\b"),
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    ),
    Pattern("GitLab token", re.compile(r"\bglpat-[\w-]{20,255}"), ("glpat-",)),
    Pattern("model API key", re.compile(r"\bsk-(?:[a-z]+-){0,2}[\w-]{20,255}"), ("sk-",), _random_enough),
    Pattern("Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{30,255}\b"), ("hf_",)),
    Pattern(
        "Google key",
        re.compile(r"\b(?:AIza[\w-]{35}|GOCSPX-[\w-]{28}|ya29\.[\w-]{30,512})"),
        ("AIza", "GOCSPX-", "ya29."),
    ),
    Pattern(
        "Slack token",
        re.compile(r"\b(?:xox[abeoprs]-[\w-]{10,255}|xapp-\d-[\w-]{20,255}|hooks\.slack\.com/services/T\w{1,20}/B\w{1,20}/\w{20})"),
        ("xox", "xapp-", "hooks.slack.com"),
    ),
    Pattern(
        "Stripe key",
        re.compile(r"\b(?:[rs]k_live_[A-Za-z0-9]{20,255}|whsec_[A-Za-z0-9]{24,255})"),
        ("k_live_", "whsec_"),
    ),
    Pattern(
        "service token",
        re.compile(
            r"\b(?:SG\.[\w-]{22}\.[\w-]{43}|dop_v1_[0-9a-f]{64}|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|gsk_[A-Za-z0-9]{40,255}"
            r"|xai-[A-Za-z0-9]{60,255}|pplx-[A-Za-z0-9]{40,255}|r8_[A-Za-z0-9]{37}|tvly-[\w-]{28,255}|hv[bs]\.[\w-]{24,255}"
            r"|dapi[0-9a-f]{32}|AccountKey=[A-Za-z0-9+/]{60,100}=|jina_[A-Za-z0-9]{24}[\w-]{8,255}|(?:AC|SK)[0-9a-f]{32}\b)"
        ),
        ("SG.", "dop_v1_", "shp", "gsk_", "xai-", "pplx-", "r8_", "tvly-", "hvs.", "hvb.", "dapi", "AccountKey=", "jina_", "AC", "SK"),
    ),
    Pattern(
        "chat service token",
        re.compile(
            r"(?<![A-Za-z0-9])(?:bot\d{6,12}:[\w-]{35}|\d{6,12}:AA[\w-]{33}|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,45})(?![\w-])"
            r"|\bdiscord(?:app)?\.com/api/webhooks/\d{15,22}/[\w-]{60,90}"
        ),
        (":", ".", "/"),
        _mixed_with_digits,
    ),
    Pattern(
        "authorization header",
        re.compile(
            r"(?i)\b(?:authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?(?:bearer|basic|token)\s|x-api-key[\"']?\s{0,4}[:=])\s{0,4}[\"']?"
            r"[\w.~+/-]{20,2000}"
        ),
        ("uthorization", "UTHORIZATION", "-Key", "-key", "-KEY"),
        _last_part_mixed,
    ),
    Pattern("package index token", re.compile(r"\b(?:npm_[A-Za-z0-9]{36}\b|pypi-[\w-]{50,255})"), ("npm_", "pypi-")),
    Pattern("signed token", re.compile(r"\beyJ[\w-]{10,300}+\.eyJ[\w-]{10,2000}+\.[\w-]{10}"), ("eyJ",)),
    Pattern("address with password", re.compile(r"://[^\s/:@]{0,64}:[^\s/:@]{3,64}@[\w.-]+"), ("://",)),
    Pattern(
        "credential",
        re.compile(rf"(?i)(?<![^\W_]){_CREDENTIAL}[\"']?\s{{0,4}}[:=]\s{{0,4}}[\"'][^\s\"']{{12,128}}[\"']"),
        valid=_random_enough,
    ),
    Pattern(
        "credential in a setting",
        re.compile(
            rf"(?i)(?<![^\W_])(?:{_CREDENTIAL}(?:=| = )[\w.~+/!@#%^*-]{{16,128}}+"
            r"|(?-i:(?:[A-Z0-9]{1,64}_)?TOKEN)[\"']?\]?(?: ?[=,] ?|: | )[\"']?[0-9a-f]{32,128}+)(?![\w(\[])"
        ),
        ("=", "TOKEN"),
        _last_part_mixed,
    ),
)  # fmt: skip
PERSONAL = (
    Pattern(
        "e-mail",
        re.compile(rf"(?i)\b[\w.%+-]{{1,64}}@(?:(?:[^\W_]|-){{1,63}}\.){{1,5}}{_TOP_LEVEL}\b(?!\.\w|\()"),
        ("@",),
        lambda text: not re.search(r"(?i)[@.]example\.(?:com|org|net)$|^git@", text),
    ),
    Pattern(
        "phone",
        re.compile(
            r"(?<![\w+)\].-])(?:\+[1-9]\d{0,2}(?>(?:[ .-]?\(?\d{1,4}\)?){2,6})|\(\d{3}\) ?\d{3}-\d{4}|\d{3}-\d{3}-\d{4})(?![\w.-]?\d)"
        ),
        ("+", "-"),
        _phone,
    ),
    Pattern(
        "payment card",
        re.compile(
            r"(?<![\w.,-])(?<!\d{4} )(?:\d{13,16}|(?:\d{4}[ -]){3}\d{4}|3[47]\d\d[ -]\d{6}[ -]\d{5}|3[068]\d\d[ -]\d{6}[ -]\d{4})(?![\w.,-]?\d| \d{4}\b)"
        ),
        valid=_card,
    ),
    Pattern(
        "account number",
        re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"),
        valid=iban,
    ),
    Pattern(
        "IP address",
        re.compile(
            r"(?<![\w.:/-])(?<!version )(?<!Version )(?<!release )(?<!ection )(?:\d{1,3}(?:\.\d{1,3}){3}(?![\w-]|\.\d|/\d)"
            r"|[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:-]))"
        ),
        (".", ":"),
        _public_address,
    ),
    Pattern(
        "social security number",
        re.compile(r"(?<![\w.,+-])(?!000|666|9)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\w-]|[.,]\d)"),
        ("-",),
        _social_security,
    ),
)
