"""Figures and results in words, for reports and the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from afm.evaluation.metrics import Metrics
from afm.evaluation.page import plural
from afm.evaluation.paired import CostRow, Difference, Per, Quantity, Savings
from afm.evaluation.prices import Usd
from afm.evaluation.report_input import PublishedFigure, ReportInput, StageDifference, StageResult
from afm.evaluation.statistics import Agreement, Interval
from afm.evaluation.tallies import BestOf

_SURE = 0.05
_IN_HEADLINE = 3


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share as percent: ``0.875`` is ``87.5 %``."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def points(value: float) -> str:
    """Format a difference of shares in percentage points, with its sign."""
    text = f"{100 * value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def number(value: float | None) -> str:
    """Format a figure with about two digits after the point. One below 0.000001 has a power of ten."""
    if value is None:
        return "–"
    if 0 < abs(value) < 0.1:
        text = f"{value:.2g}"
        if abs(value) < 1e-6:
            text = text.replace("e-0", "e-")
        elif "e" in text:  # below 0.0001, where Python writes a power of ten
            text = f"{value:.{1 - math.floor(math.log10(abs(value)))}f}".rstrip("0")
    elif abs(value) >= 100:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"−{text[1:]}" if value < 0 else text


def figure(value: float | None, share: bool) -> str:
    """Format a share as percent, a whole number without digits after the point, anything else as a number."""
    if share or value is None:
        return percent(value)
    return f"{value:,.0f}".replace("-", "−") if value == int(value) else number(value)


def metric_lines(metrics: Metrics) -> Iterator[str]:
    """Yield a line for each result that has no column in the table of a report."""
    if metrics.pass_at_k:
        yield rounds_words(metrics)
    yield from judged_lines(metrics)
    for name, shares, labels in (("T-Eval", metrics.t_eval, {}), ("Agent-H", metrics.agent_h, _AGENT_H)):
        if shares:
            listed = (f"{labels.get(key, key)} {percent(share)}" for key, share in shares.items())
            yield f"{name}: {', '.join(listed)}"
    yield from cost_lines(metrics)
    if metrics.unseen_argument_errors:
        yield unseen_words(metrics)
    called = metrics.tool_format_without_tool is not None or bool(metrics.invented_tool)
    if called and (hallucination := hallucination_words(metrics)):
        yield hallucination
    yield from (f"agent {name}: {_agent_words(part)}" for name, part in metrics.by_agent.items())
    for field, scores in ({"source": metrics.by_source} | metrics.by_group).items():
        if scores:
            listed = (f"{ours(score)} for {name}" for name, score in scores.items())
            yield f"by {field}, pass@1: {'; '.join(listed)}"


_AGENT_H = {
    "h_react": "H_ReAct",
    "h_general": "H_General",
    "h_score": "H_Score",
    "invented_tool": "calls of tools that were not offered",
    "called_when_asked": "called when asked",
}


def judged_lines(metrics: Metrics) -> Iterator[str]:
    """Yield best-of-k, next to a random choice and an oracle, and the agreement of judges."""
    yield from map(_best_of_words, metrics.best_of)
    for k in sorted({best.k for best in metrics.best_of}):
        oracle = metrics.pass_at_k_intervals.get(k)
        chance = metrics.pass_at_1.value if metrics.pass_at_1 else None
        yield (
            f"to compare with best-of-{k}: pass@{k} {ours(oracle) if oracle else '–'}, random choice {percent(chance)}, "
            f"majority vote of {metrics.rounds} rounds {percent(metrics.majority)}"
        )
    yield from (f"judges: {_agreement_words(pair)}" for pair in metrics.agreement)


def cost_lines(metrics: Metrics) -> Iterator[str]:
    """Yield the cost per solved episode, and the cost in dollars where it is known."""
    if metrics.per_solved:
        yield _solved_words(metrics.per_solved)
    if metrics.usd:
        yield f"cost: {money_words(metrics.usd)}"


def rounds_words(metrics: Metrics) -> str:
    """Return avg@k and some pass@k of several rounds."""
    shown = [k for k in metrics.pass_at_k if k > 1 and (k & (k - 1) == 0 or k == metrics.rounds)]
    parts = [f"avg@{metrics.rounds} {percent(metrics.avg_at_k)}"]
    parts += [f"pass@{k} {percent(metrics.pass_at_k[k])}" for k in shown]
    if metrics.rounds in metrics.pass_hat_k:
        parts.append(f"pass^{metrics.rounds} {percent(metrics.pass_hat_k[metrics.rounds])}")
    if metrics.majority is not None:
        parts.append(f"majority vote {percent(metrics.majority)}")
    return f"{metrics.rounds} rounds: {', '.join(parts)}"


def _best_of_words(choice: BestOf) -> str:
    """Return one best-of-k and the choices behind it."""
    share = ours(choice.share) if choice.share else "no choice"
    parts = [f"{choice.name} by {choice.judge}: {share} of {choice.questions:,} questions"]
    if choice.abstained:
        parts.append(f"no verdict in {choice.abstained:,} of {choice.abstained + choice.asked:,} requests")
    if choice.places:
        parts.append(
            "chosen by position: "
            + ", ".join(f"{percent(part, 0)} at {place}" for place, part in choice.places.items())
        )
    return "; ".join(parts)


def _agreement_words(pair: Agreement) -> str:
    """Return the agreement of two judges in a sentence."""
    if pair.agreed is None:
        return f"{pair.first} and {pair.second} have no episode with verdicts of both"
    kappa = "not defined (all verdicts are the same)" if pair.kappa is None else f"{pair.kappa:.2f}"
    if pair.kappa_interval is not None:
        kappa += f" ({pair.kappa_interval.low:.2f} to {pair.kappa_interval.high:.2f})"
    lost = f"; in {pair.abstained:,} more, one of them gave no verdict" if pair.abstained else ""
    return (
        f"{pair.first} and {pair.second} agree on {ours(pair.agreed)} of {plural(pair.episodes, 'episode')} "
        f"({plural(pair.questions, 'question')}) that need a judge; Cohen's kappa {kappa}; correct only by {pair.first} "
        f"{pair.only_first:,}, only by {pair.second} {pair.only_second:,}{lost}"
    )


def _solved_words(cost: Mapping[str, float]) -> str:
    """Return the calls and tokens per solved episode in a sentence."""
    if "agent_tokens" not in cost:
        return f"per solved episode, with the failed ones included: {number(cost['tool_calls'])} tool calls; tokens are not known"
    tokens = cost["agent_tokens"] + cost["observation_tokens"]
    return (
        f"per solved episode, with the failed ones included: {number(cost['tool_calls'])} tool calls and {number(tokens)} "
        f"tokens ({number(cost['agent_tokens'])} written by the agent)"
    )


def dollars(value: float) -> str:
    """Format an amount with at least three significant digits: ``0.00123 USD``."""
    places = 2 if value >= 1 or value <= 0 else min(12, 2 - math.floor(math.log10(value)))
    return f"{value:,.{places}f} USD"


def money_words(usd: Usd) -> str:
    """Return the dollars per episode and per solved task in a sentence."""
    mean, solved = usd.per_episode, usd.per_solved
    paid = {name: part for name, part in usd.parts.items() if part}
    parts = ", ".join(f"{name} {dollars(part)}" for name, part in paid.items()) if len(paid) > 1 else ""
    text = (
        f"{dollars(mean.value)} per episode ({_between(mean.low, mean.high)}{f'; {parts}' if parts else ''})"
    )
    if solved is None:
        text += ", no task solved"
    else:
        text += f", {dollars(solved.value)} per solved task ({_between(solved.low, solved.high)})"
    return text + ("; without the judge, which has no price" if usd.judge_unpriced else "")


def _between(low: float, high: float | None) -> str:
    end = "no upper end" if high is None else dollars(high)
    return f"{dollars(low).removesuffix(' USD') if high is not None else dollars(low)} to {end}"


def unseen_words(metrics: Metrics) -> str:
    """Return the share of invalid arguments in calls of tools that were new to the agent."""
    shares = dict(metrics.unseen_argument_errors)
    whole = shares.pop("all")
    by_role = ", ".join(f"{role} {percent(share)}" for role, share in shares.items())
    return f"{percent(whole)} of the calls of unseen tools have an invalid argument ({by_role})"


def hallucination_words(metrics: Metrics) -> str:
    """Return the calls of tools that were not offered, in a sentence. Empty where they were not counted."""
    if metrics.tool_format_without_tool is not None:
        return f"no tool offered: {percent(metrics.tool_format_without_tool)} of the episodes have the form of a call"
    if metrics.invented_tool is None:
        return ""
    calls = metrics.invented_tool_calls
    share = "" if calls is None else f" ({percent(calls)} of the calls)"
    return f"{percent(metrics.invented_tool)} of the episodes call a tool that is not offered{share}"


def cut(text: str, length: int) -> str:
    """Return ``text`` on one line, cut after ``length`` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= length else f"{flat[:length].rstrip()} ..."


def ours_words(row: PublishedFigure) -> str:
    """Return our figure next to a published one, with its interval, or why it is missing."""
    return row.missing if row.ours is None else ours(row.ours)


def ours(figure: Interval) -> str:
    """Format a share with its interval."""
    return f"{percent(figure.value)} ({percent(figure.low)} to {percent(figure.high)})"


def _agent_words(part: Metrics) -> str:
    """Return the figures of one agent of several."""
    score = part.pass_at_1
    return (
        f"{ours(score) if score else 'no score'} of {plural(part.questions, 'question')}, format valid {percent(part.format_valid)}, "
        f"tool calls {number(part.tool_calls)}, agent tokens {number(part.agent_tokens)}"
    )


def stops_words(stops: Counter[str]) -> str:
    """Return how episodes ended, the most frequent way first: ``answer 12, turn limit 3``."""
    return ", ".join(f"{stop_word(stop)} {count:,}" for stop, count in stops.most_common())


_STOPS = {
    "turns": "turn limit",
    "agent_tokens": "limit of agent tokens",
    "response_tokens": "limit of response tokens",
    "seconds": "time limit",
    "tool_seconds": "limit of tool time",
}


def stop_word(stop: str) -> str:
    """Return a stop reason in words: ``turns`` is ``turn limit``."""
    return _STOPS.get(stop, stop.replace("_", " "))


def headline(run: ReportInput) -> str:
    """Return the result of a report in one sentence."""
    if len(run.differences) == 1:
        difference = run.differences[0]
        before, after = run.stage(difference.before), run.stage(difference.after)
        change = difference.result.difference
        if before.metrics.pass_at_1 and after.metrics.pass_at_1 and (change.low > 0 or change.high < 0):
            verb = "rose" if change.value > 0 else "fell"
            return f"pass@1 {verb} from {_scored(before)} to {_scored(after)}."
        return f"pass@1 shows no clear difference: {_scored(before)}, {_scored(after)}."
    scores = [_scored(stage) for stage in run.stages if stage.metrics.pass_at_1]
    if not scores and run.health:
        reward = run.health[0]
        return f"{reward.name}: {number(reward.first)} at the first step, {number(reward.last)} at the last. Not evaluated here."
    more = f" and {len(scores) - _IN_HEADLINE} more" if len(scores) > _IN_HEADLINE else ""
    return f"pass@1: {', '.join(scores[:_IN_HEADLINE])}{more}." if scores else "Nothing has been scored yet."


def _scored(stage: StageResult) -> str:
    """Return ``49.0 % after SFT``. A name that is not a time is in parentheses: ``49.0 % (base)``."""
    score = stage.metrics.pass_at_1
    name = stage.name if stage.name.startswith("after ") else f"({stage.name})"
    return f"{percent(score.value if score else None)} {name}"


def _possessor(name: str) -> str:
    return name if name.startswith("after ") else f"of {name}"


def difference_words(difference: StageDifference) -> str:
    """Return the paired difference as a paragraph."""
    result = difference.result
    change = result.difference
    clear = change.low > 0 or change.high < 0
    before, after = _possessor(difference.before), _possessor(difference.after)
    size = f"{abs(100 * change.value):.1f} points {'higher' if change.value > 0 else 'lower'} than {before if before.startswith('after ') else f'that {before}'}"
    text = (
        f"On the same {plural(result.questions, 'question')}, pass@1 {after} is "
        f"{size if change.value else f'equal to pass@1 {before}'} (95 % interval {points(change.low)} to {points(change.high)}, "
        f"bootstrap over questions). {plural(result.gained, 'question')} went better and {result.lost:,} worse: {p_words(result)}."
    )
    if not clear:
        text += " The interval includes zero, so the difference is not clear."
    elif result.p_value >= _SURE:
        text += " The exact test is less certain than the interval, so treat this difference with care."
    if result.by_source:
        parts = "; ".join(f"{name} {source_words(part)}" for name, part in result.by_source.items())
        text += f" By source, with Holm's correction: {parts}."
    return text


@dataclass(frozen=True, slots=True)
class CostCells:
    """A row of :class:`Savings` in words. Intervals are empty where unknown."""

    label: str
    team: str
    model: str
    difference: str
    difference_range: str
    saving: str
    saving_range: str


def cost_cells(row: CostRow) -> CostCells:
    """Format a row of the table of savings."""
    change, saving = row.difference, row.saving
    difference = saved = "–"
    changes = saves = ""
    if change is not None:
        unit = " points" if row.quantity is Quantity.SCORE else ""
        difference = f"{_signed(row, change.value)}{unit}"
        changes = f"{_signed(row, change.low).removesuffix(' USD')} to {_signed(row, change.high)}"
    if saving is not None:
        saved = _share(saving.value)
        saves = f"{'no lower end' if saving.low is None else _share(saving.low)} to {_share(saving.high)}"
    label = row.quantity if row.per is Per.TASK else f"{row.quantity} per {row.per}"
    team, model = _figure(row, row.team), _figure(row, row.model)
    return CostCells(label, team, model, difference, changes, saved, saves)


def _figure(row: CostRow, value: float | None) -> str:
    if value is None:
        return "–"
    if row.quantity is Quantity.SCORE:
        return percent(value)
    return dollars(value) if row.quantity is Quantity.DOLLARS else number(value)


def _signed(row: CostRow, value: float) -> str:
    if row.quantity is Quantity.SCORE:
        return points(value)
    return f"{'−' if value < 0 else '+'}{_figure(row, abs(value))}"


def _share(value: float) -> str:
    return f"{100 * value:,.{1 if abs(value) < 10 else 0}f} %".replace("-", "−")


def savings_words(table: Savings) -> str:
    """Return what the model saves, in a sentence."""
    named = [
        (name, table.row(quantity, Per.SOLVED).saving)
        for name, quantity in (("tokens", Quantity.TOKENS), ("tool calls", Quantity.CALLS))
    ]
    parts = [
        f"{_share(abs(saving.value))} {'fewer' if saving.value >= 0 else 'more'} {name}"
        for name, saving in named
        if saving is not None
    ]
    needs = f" The model needs {' and '.join(parts)} per solved task." if parts else ""
    return f"{table.team} (team) and {table.model} (model) on the same {plural(table.questions, 'question')}.{needs}"


def p_words(result: Difference) -> str:
    """Return the p-value with its test, and the p-value after Holm's correction."""
    corrected = (
        "" if result.p_holm is None else f", corrected for several comparisons (Holm) {_p(result.p_holm)}"
    )
    return f"{_p(result.p_value)} ({result.test}){corrected}"


def source_words(result: Difference) -> str:
    """Return the difference on one data source."""
    change = result.difference
    p = result.p_value if result.p_holm is None else result.p_holm
    return f"{points(change.value)} points ({points(change.low)} to {points(change.high)}, {plural(result.questions, 'question')}, {_p(p)})"


def _p(value: float) -> str:
    return "p < 0.0001" if value < 0.0001 else f"p = {value:.2g}"
