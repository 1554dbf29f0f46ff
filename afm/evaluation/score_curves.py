"""Curves of finished evaluations: what more rounds bring, and what a score costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afm.evaluation.charts import Curve, Series
from afm.evaluation.metrics import Metrics
from afm.evaluation.report_input import StageResult
from afm.evaluation.statistics import Interval

_AT_MOST = 4
"""Stages in one picture; it has as many colours."""


def score_curves(stages: Sequence[StageResult]) -> Iterator[Curve]:
    """pass@k over k for every stage with several rounds, then cost against score over all of them."""
    shown = stages[:_AT_MOST]
    for stage in shown:
        if stage.metrics.pass_at_k:
            yield _rounds(stage, alone=len(stages) == 1)
    budgets = tuple(
        Series(stage.name, stage.scan.tokens, stage.scan.solved)
        for stage in shown
        if stage.scan is not None and len(stage.scan.tokens) > 1
    )
    if budgets:
        yield Curve(
            "Solved within a budget",
            "agent and observed tokens of an episode",
            budgets,
            "Share of the scored episodes that passed with at most so many tokens; it ends at the share that passed at all.",
            x_from_zero=True,
            y_from_zero=True,
        )
    money = tuple(line for stage in shown if (line := _money(stage)) is not None)
    if any(len(line.x) > 1 for line in money) or len(money) > 1:
        yield Curve(
            "Cost against score",
            "USD a question",
            money,
            "pass@k for the money of k episodes, from k = 1, with its 95 % interval; further left is cheaper.",
            x_from_zero=True,
            y_from_zero=True,
            x_whole=False,
        )
        return
    points = tuple(point for stage in shown if (point := _point(stage)) is not None)
    if len(points) > 1:
        yield Curve(
            "Cost against score",
            "tokens of an episode, mean",
            points,
            "pass@1 with its 95 % interval; further left is cheaper.",
            x_from_zero=True,
            y_from_zero=True,
        )


def _rounds(stage: StageResult, *, alone: bool) -> Curve:
    metrics = stage.metrics
    ks = tuple(map(float, metrics.pass_at_k))
    ends = [metrics.pass_at_k_intervals.get(k) for k in metrics.pass_at_k]
    known = [end for end in ends if end is not None]
    whole = len(known) == len(ends)
    lines = [
        Series(
            "pass@k",
            ks,
            tuple(metrics.pass_at_k.values()),
            tuple(end.low for end in known) if whole else (),
            tuple(end.high for end in known) if whole else (),
        ),
        Series("pass^k", tuple(map(float, metrics.pass_hat_k)), tuple(metrics.pass_hat_k.values())),
        *_choices(metrics),
    ]
    name = "" if alone else f", {stage.name}"
    band = " The band is the 95 % interval of pass@k over questions." if whole else ""
    caption = f"Chance that one (pass@k) or each (pass^k) of k episodes of a question passes.{band}"
    return Curve(
        f"Rounds{name}", "episodes of a question, k", tuple(lines), caption, y_from_zero=True, y_max=1.03
    )


def _choices(metrics: Metrics) -> Iterator[Series]:
    if metrics.majority is not None:
        yield Series("majority", (float(metrics.rounds),), (metrics.majority,), points=True)
    by_method: dict[str, dict[float, Interval]] = {}
    for one in metrics.best_of:
        if one.share is not None:
            by_method.setdefault(f"judge, {one.method}", {})[float(one.k)] = one.share
    for name, shares in by_method.items():
        ks = tuple(sorted(shares))
        ends = [shares[k] for k in ks]
        values, low, high = zip(*((end.value, end.low, end.high) for end in ends), strict=True)
        yield Series(name, ks, values, low, high, points=True)


def _money(stage: StageResult) -> Series | None:
    """pass@k over the dollars of k episodes; pass@1 alone for one round."""
    metrics, usd = stage.metrics, stage.metrics.usd
    if usd is None or metrics.pass_at_1 is None:
        return None
    scores = metrics.pass_at_k_intervals or {1: metrics.pass_at_1}
    return Series(
        stage.name,
        tuple(k * usd.per_episode.value for k in scores),
        tuple(score.value for score in scores.values()),
        tuple(score.low for score in scores.values()),
        tuple(score.high for score in scores.values()),
        points=len(scores) == 1,
    )


def _point(stage: StageResult) -> Series | None:
    metrics, score = stage.metrics, stage.metrics.pass_at_1
    tokens = (metrics.agent_tokens or 0.0) + (metrics.observation_tokens or 0.0)
    if score is None or not tokens:
        return None
    return Series(stage.name, (tokens,), (score.value,), (score.low,), (score.high,), points=True)
