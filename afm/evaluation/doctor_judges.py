"""The judges that an evaluation asks when its episodes are done: those that choose, and those that judge again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from afm.evaluation.config import EvalConfig
from afm.evaluation.measures import Method
from afm.planning import Finding, Level
from afm.rewards.judge_endpoint import JudgeEndpoint
from afm.tools.health import unanswered


def further_judges(config: EvalConfig, questions: int) -> Iterator[Finding]:
    """What ``best_of`` and ``agreement`` need: rounds, an endpoint that answers, and its key."""
    best_of, why_not = config.choosing()
    if why_not:
        yield Finding(Level.WARNING, "best_of", f"left out: {why_not}")
    if best_of is not None:
        graded = config.rounds if Method.SCORE in best_of.methods else 0
        listed = sum(config.rounds // k for k in best_of.sizes) if Method.LIST in best_of.methods else 0
        yield from _endpoint("best_of", best_of.judge, questions * (graded + listed))
    again, why_not = config.agreeing()
    if why_not:
        yield Finding(Level.WARNING, "agreement", f"left out: {why_not}")
    if again is not None:
        episodes = min(again.episodes or questions * config.rounds, questions * config.rounds)
        for judge in again.judges:
            calls = episodes * again.repeats * (2 if judge.control else 1)
            yield from _endpoint("agreement", judge, calls)


def _endpoint(subject: str, judge: JudgeEndpoint, calls: int) -> Iterator[Finding]:
    place = judge.place()
    if place.url is None:
        return
    text = f"{place.model} at {place.url}, at most {calls:,} calls"
    if place.api_key is None:
        advice = f"export {judge.key_variable} if it needs one"
        yield Finding(Level.WARNING, subject, f"{text}, asked without a key; {advice}")
    else:
        yield Finding(Level.OK, subject, text)
    if why_not := asyncio.run(unanswered(place.url)):
        # Episodes and scores are there by then, and `afm eval choose` or `agree` makes up for it.
        told = f"nobody answers at {place.url} ({why_not}); start it, or mend its address"
        yield Finding(Level.ERROR, subject, told)
