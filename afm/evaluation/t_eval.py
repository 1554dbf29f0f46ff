"""T-Eval's figures out of the mean scores of its data sources."""

from __future__ import annotations

from collections.abc import Mapping

ABILITIES = ("instruct", "plan", "reason", "retrieve", "understand", "review")


def t_eval_scores(by_source: Mapping[str, float]) -> dict[str, float]:
    """Score of every ability that was measured: the mean of its forms, JSON and text; and of all six, ``overall`` as published.

    Where abilities are missing their mean is called ``mean``, because it is another figure.
    """
    found = {}
    for ability in ABILITIES:
        forms = [
            by_source[name] for form in ("json", "str") if (name := f"t_eval_{ability}_{form}") in by_source
        ]
        if forms:
            found[ability] = sum(forms) / len(forms)
    name = "overall" if len(found) == len(ABILITIES) else "mean"
    return {**found, name: sum(found.values()) / len(found)} if found else {}
