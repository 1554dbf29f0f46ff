"""The worker process of the math reward: ``python -m afm.rewards.verifier MEMORY_BYTES CPU_S``.

It reads ``{"gold", "answer"}`` lines and writes ``{"equal"}`` lines, or ``{"error"}`` with the type of Math-Verify's
exception. A pair that uses up CPU_S ends the process. With hostile input Math-Verify may never return, so only a worker
process may call it.

Answers are text from a model and are never evaluated as Python. Math-Verify uses only its LaTeX grammar here, not its
plain expressions, which go through sympy's ``parse_expr``.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from afm.rewards.answer_form import has_variables
from afm.rewards.equality import REPEATING, repeating_decimal, tidied
from afm.rewards.workers import limit_cpu

_PR_SET_PDEATHSIG = 1
_OPERATOR = re.compile(
    r"\\(?:int|sum|prod|lim)(?![A-Za-z])"
    r"|\\frac\s*\{\s*(?:d|\\partial)[^{}]*\}\s*\{\s*(?:d|\\partial)\s*\\?[A-Za-z]"
)
_IMAGINARY = re.compile(r"\s*\\(?:mathrm|text|operatorname)\s*\{\s*i\s*\}")
_MARKS = re.compile(r"\\.|[{}=]", re.DOTALL)
_DIGITS = 60
_EXACT, _ROUNDED = "1e-40", "1e-3"
_LONGEST = 5000


def algebra_verdict(gold: str, answer: str) -> bool:
    """Return whether Math-Verify finds the two equal, by relative difference and without unevaluated operators."""
    units = not has_variables(tidied(gold))  # Math-Verify would also drop the t of 4t
    expected, actual = _parsed(gold, units), _parsed(answer, units)
    if is_unfinished(gold, answer) or _differ_widely(expected[:1], actual[:1]):
        return False
    return bool(_verify()(expected, actual, timeout_seconds=None, allow_set_relation_comp=True))


def is_unfinished(gold: str, answer: str) -> bool:
    r"""Return whether the answer is an unevaluated integral, sum, product, limit or derivative, and ``gold`` is not.

    ``\int_0^1 \frac{dt}{1+t^2}`` for ``\frac{\pi}{4}`` only renames a variable of the question. Text before the last ``=``
    is finished work.
    """
    return _has_operator(answer) and not _has_operator(gold)


def _has_operator(text: str) -> bool:
    from math_verify.grader import is_equation, take_last_relation
    from sympy import Basic, Derivative, Integral, Limit, Product, Sum

    *expressions, normalized = _parsed(text) or [text]
    depth, last = 0, 0
    for mark in _MARKS.finditer(normalized):
        depth += (mark[0] == "{") - (mark[0] == "}")
        last = mark.end() if mark[0] == "=" and depth == 0 else last
    if _OPERATOR.search(normalized[last:]):
        return True
    value = next((expression for expression in expressions if isinstance(expression, Basic)), None)
    if value is not None and is_equation(value):
        value = take_last_relation(value).rhs
    return value is not None and value.has(Derivative, Integral, Limit, Product, Sum)


@lru_cache(maxsize=64)  # many answers to one question are compared with the same gold answer
def _parsed(text: str, units: bool = True) -> list[Any]:
    """Return what Math-Verify parses: the expression, if there is one, and its LaTeX. ``units`` are removed."""
    from math_verify import LatexExtractionConfig, parse

    rules = replace(LatexExtractionConfig().normalization_config, units=units)
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)]
    text = REPEATING.sub(
        lambda match: "\\frac{{{}}}{{{}}}".format(*repeating_decimal(match).as_integer_ratio()), tidied(text)
    )
    text = re.sub(r"(?<=\d)\s+i(?!\w)", "i", _IMAGINARY.sub(" i", text))  # else it drops "i" as a unit
    parsed: list[Any] = parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)
    return parsed


@cache
def _verify() -> Any:
    """Return Math-Verify's comparison, with differences relative to the compared values.

    Symptom: ``1/2^{99}`` equals ``1/2^{98}``. Cause: ``sympy_numeric_eq`` in ``math_verify/grader.py`` of version 0.9.0
    rounds the difference to six digits or chops it below 2^-53, however small the two are.
    """
    from math_verify import grader

    upstream = grader.sympy_numeric_eq

    def relative(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
        return upstream(a, b, float_rounding, numeric_precision) and _is_close(a, b)

    grader.sympy_numeric_eq = relative
    return grader.verify


def _is_close(a: Any, b: Any) -> bool:
    """Return whether two expressions that Math-Verify finds equal are so relative to their size, with numbers for symbols."""
    from math_verify.grader import get_pct_val
    from sympy import Float

    if a == b:
        return True
    if (a.has(Float) or b.has(Float)) and _are_close(a, b, _ROUNDED):
        return True
    return _are_close(a, b, _EXACT) or _are_close(get_pct_val(a, a), get_pct_val(b, b), _EXACT)


def _are_close(a: Any, b: Any, limit: str, digits: int = _DIGITS) -> bool:
    first, second = _value(a, digits), _value(b, digits)
    if first is None or second is None:
        return True  # nothing to measure
    from sympy import Float, Rational

    size = max(abs(first), abs(second))
    if abs(first - second) > Float(limit, digits) * size:
        return False
    if size > 10**digits and not (a.has(Float) or b.has(Float)) and size < Float(f"1e{_LONGEST}"):
        a, b = a.doit(), b.doit()
        return not (isinstance(a, Rational) and isinstance(b, Rational)) or bool(a == b)
    return True


def _differ_widely(expected: list[Any], actual: list[Any]) -> bool:
    """Return whether both are plain numbers, so far apart that Math-Verify need not simplify their difference."""
    from sympy import Basic, Rational, UnevaluatedExpr

    if all(isinstance(expression, Rational) for expression in (*expected, *actual)):
        return bool(expected != actual)
    for expression in (*expected, *actual):
        if not isinstance(expression, Basic) or expression.free_symbols or expression.has(UnevaluatedExpr):
            return False
    return bool(expected and actual) and not _are_close(expected[0], actual[0], _ROUNDED, 15)


def _value(expression: Any, digits: int) -> Any:
    """Return the value of an expression with fixed fractions for its symbols, or ``None`` if it is not a number."""
    from sympy import Derivative, Expr, Integral, Limit, Product, Rational, Sum

    if not isinstance(expression, Expr) or expression.is_Matrix:
        return None
    if expression.has(Derivative, Integral, Limit, Product, Sum):
        return None
    symbols = sorted(expression.free_symbols, key=str)
    point = {symbol: Rational(sum(map(ord, str(symbol))) % 90 + 11, 7) for symbol in symbols}
    try:
        value = expression.subs(point).evalf(digits)
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    return value if value.is_number and value.is_finite else None


def main() -> None:
    """Serve until standard input ends."""
    reply_to = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of a library must not look like a reply
    _confine(int(sys.argv[1]))
    import math_verify  # noqa: F401 - the first pair should not pay for it

    reply_to.write(b'{"ready": true}\n')
    for line in sys.stdin.buffer:
        limit_cpu(float(sys.argv[2]))
        reply = json.dumps(_reply(json.loads(line))).encode()
        limit_cpu(0)
        reply_to.write(reply + b"\n")


def _confine(memory_bytes: int) -> None:
    """Limit the memory, end with the parent process, and leave Ctrl-C to it."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)


def _reply(request: dict[str, str]) -> dict[str, object]:
    try:
        if is_unfinished(request["gold"], request["answer"]):
            return {"equal": False, "error": "an expression that was not worked out"}
        return {"equal": algebra_verdict(request["gold"], request["answer"])}
    except MemoryError:
        sys.exit("out of memory")  # the caller tries once more in a worker without full caches
    except Exception as error:  # noqa: BLE001 - whatever hostile LaTeX does to the verifier
        return {"error": type(error).__name__}


if __name__ == "__main__":
    main()
