"""What secrets and personal data look like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pattern:
    """One kind of sensitive text.

    Attributes:
        hints: A text without any of these holds none of the kind; a plain search is much faster.
        valid: Has the last word on a match, for example by its check digits.
    """

    kind: str
    regex: re.Pattern[str]
    hints: tuple[str, ...] = ()
    valid: Callable[[str], bool] = bool

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where it occurs."""
        if self.hints and not any(hint in text for hint in self.hints):
            return
        for match in self.regex.finditer(text):
            if self.valid(match[0]):
                yield match.span()


def luhn(text: str) -> bool:
    """Whether the digits in ``text`` pass the check of payment cards (ISO/IEC 7812-1, annex B)."""
    digits = [int(character) for character in reversed(text) if character.isdigit()]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return bool(digits) and (sum(digits[::2]) + sum(doubled)) % 10 == 0


def iban(text: str) -> bool:
    """Whether ``text`` passes the check of account numbers (ISO 7064, MOD 97-10)."""
    letters = "".join(text.split())
    turned = letters[4:] + letters[:4]
    return int("".join(str(int(character, 36)) for character in turned)) % 97 == 1


def _card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return re.fullmatch(_CARD_NUMBERS, digits) is not None and len(set(digits)) > 2 and luhn(digits)


def _phone(text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15


def _random_enough(text: str) -> bool:
    """A value in which letters and digits mix; words and placeholders do not."""
    value = text.split("=" if "=" in text else ":", 1)[-1].strip(" \"'")
    kinds = (str.islower, str.isupper, str.isdigit)
    return sum(any(kind(character) for character in value) for kind in kinds) >= 2 and len(set(value)) >= 8


_CARD_NUMBERS = r"4\d{12}(?:\d{3})?|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|6(?:011|5\d\d)\d{12}"
_TOP_LEVEL = r"(?:com|org|net|edu|gov|mil|int|info|biz|app|dev|[a-z]{2})"

SECRETS = (
    Pattern("private key", re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"), ("PRIVATE KEY",)),
    Pattern("AWS key", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), ("AKIA", "ASIA")),
    Pattern(
        "GitHub token",
        re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{22,255})\b"),
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    ),
    Pattern("GitLab token", re.compile(r"\bglpat-[\w-]{20,255}"), ("glpat-",)),
    Pattern("model API key", re.compile(r"\bsk-(?:[a-z]+-){0,2}[\w-]{20,255}"), ("sk-",), _random_enough),
    Pattern("Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{30,255}\b"), ("hf_",)),
    Pattern("Google key", re.compile(r"\bAIza[\w-]{35}"), ("AIza",)),
    Pattern("Slack token", re.compile(r"\bxox[abeoprs]-[\w-]{10,255}"), ("xox",)),
    Pattern("Stripe key", re.compile(r"\b[rs]k_live_[A-Za-z0-9]{20,255}"), ("k_live_",)),
    Pattern("package index token", re.compile(r"\b(?:npm_[A-Za-z0-9]{36}\b|pypi-[\w-]{50,255})"), ("npm_", "pypi-")),
    Pattern("signed token", re.compile(r"\beyJ[\w-]{10,300}+\.eyJ[\w-]{10,2000}+\.[\w-]{10}"), ("eyJ",)),
    Pattern("address with password", re.compile(r"://[^\s/:@]{1,64}:[^\s/:@]{3,64}@[\w.-]+"), ("://",)),
    Pattern(
        "credential",
        re.compile(
            r"(?i)\b(?:password|passwd|secret|api[_-]?key|(?:access|auth)[_-]?token)[\"']?\s{0,4}[:=]\s{0,4}"
            r"[\"'][^\s\"']{12,128}[\"']"
        ),
        valid=_random_enough,
    ),
)  # fmt: skip
PERSONAL = (
    Pattern(
        "e-mail",
        re.compile(rf"(?i)\b[a-z0-9._%+-]{{1,64}}@(?:[a-z0-9-]{{1,63}}\.){{1,5}}{_TOP_LEVEL}\b(?!\.\w|\()"),
        ("@",),
        lambda text: not re.search(r"(?i)[@.]example\.(?:com|org|net)$", text),
    ),
    Pattern(
        "phone",
        re.compile(
            r"(?<![\w+)\].-])(?:\+\d{1,3}(?>(?:[ .-]?\(?\d{1,4}\)?){2,6})|\(\d{3}\) ?\d{3}-\d{4}|\d{3}-\d{3}-\d{4})(?![\w.-]?\d)"
        ),
        ("+", "-"),
        _phone,
    ),
    Pattern("payment card", re.compile(r"(?<![\w.,-])\d(?:[ -]?\d){12,15}(?![\w.,-]?\d)"), valid=_card),
    Pattern(
        "account number",
        re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b"),
        valid=iban,
    ),
)
