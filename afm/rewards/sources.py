"""Which scorer judges the answers of which data source (AFM, section on rewards), and scorers of your own.

A scorer of your own is a class by its dotted name in a reward YAML, never in a row of data.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import cast

from afm.errors import ConfigError, suggestion
from afm.rewards.base import Scorer

SCORERS = ("math", "exact_match", "f1", "substring", "choice", "code_tests", "judge", "t_eval", "agent_h")

BY_SOURCE: dict[str, str] = {
    **dict.fromkeys(("math_dapo", "aime24", "aime25", "math", "math500", "gsm8k", "amc23"), "math"),
    **dict.fromkeys(("olympiadbench", "skywork_math", "retool", "mini_math", "gms8k"), "math"),
    **dict.fromkeys(("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa"), "exact_match"),
    **dict.fromkeys(("musique", "bamboogle", "mercury", "tq", "mini_wiki"), "exact_match"),
    **dict.fromkeys(("livecodebench*", "lcbv4", "lcbv5", "skywork", "skywork_livecodebench*"), "code_tests"),
    **dict.fromkeys(("codecontests*", "codeforces*"), "code_tests"),
    "gpqa*": "choice",
    "t_eval*": "t_eval",
    "agent_h*": "agent_h",
    **dict.fromkeys(("search", "gaia*", "hle*", "webwalker*", "browsecomp*"), "judge"),
    # As the examples of verl call their data.
    **dict.fromkeys(("openai/gsm8k", "lighteval/math", "digitallearninggmbh/math-lighteval"), "math"),
    **dict.fromkeys(("huggingfaceh4/math-500", "math_dapo_reasoning", "numina_*"), "math"),
    "searchr1_*": "exact_match",
}


def scorer_name(data_source: str, table: Mapping[str, str]) -> str:
    """Name of the scorer for ``data_source``; letter case does not matter, ``*`` in the table stands for anything.

    Raises:
        ConfigError: The table has no such source.
    """
    key = data_source.lower()
    name = table.get(key)
    if name is None:
        patterns = [pattern for pattern in table if "*" in pattern and fnmatchcase(key, pattern)]
        if not patterns:
            raise ConfigError(
                f"no reward for data_source {data_source!r}: {suggestion(key, table)}; "
                "or name one under `by_source` in the reward YAML"
            )
        name = table[max(patterns, key=len)]
    return checked_name(name, f"data_source {data_source!r}", own=True)


def checked_name(name: str, place: str, *, own: bool = False) -> str:
    """``name``, when it is a scorer of this version.

    Args:
        own: Whether the dotted name of a class is allowed. Only a reward YAML may name one, rows may not.

    Raises:
        ConfigError: It is not; the message begins with ``place``.
    """
    if name in SCORERS or (own and "." in name.strip(".")):
        return name
    raise ConfigError(f"{place}: reward {name!r} is unknown, {suggestion(name, SCORERS)}")


def open_scorer(name: str) -> Scorer:
    """An instance of the class ``name``, made without arguments.

    Raises:
        ConfigError: It cannot be imported, or is no scorer (see :class:`afm.rewards.base.Scorer`).
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        scorer = getattr(importlib.import_module(module_name), class_name, None)
    except Exception as error:  # whatever a module does when it is loaded
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"reward {name!r} cannot be imported: {reason}; is its folder on PYTHONPATH?"
        ) from error
    if not isinstance(scorer, type) or not all(
        callable(getattr(scorer, method, None)) for method in ("judge", "close")
    ):
        raise ConfigError(f"reward {name!r}: expected a class with async methods judge(sample) and close()")
    return cast("Scorer", scorer())
