"""Generate trajectories and event logs for ``bench_pipeline.py`` from a seed, each with a known result."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from afm.agents import AgentSpec, load_agent
from afm.trajectory import author_segments
from afm.trajectory.record import CallRecord, Cost, Record, Verdict

AGENT = "wiki"
_SYLLABLES = ("ba", "do", "fi", "ka", "lu", "me", "no", "pi", "ra", "su", "ti", "vo")
_WORDS = [first + second + third for first in _SYLLABLES for second in _SYLLABLES for third in _SYLLABLES]
_FATES = (
    "kept",
    "simple",
    "repeats",
    "wrong",
    "no reflection",
    "twin",
    "corrected",
    "kept",
    "kept",
    "malformed",
)
"""The purpose of each of ten rows."""
_TWIN_OF = 5


class Rows:
    """Rows by number; row ``n`` does not depend on the others.

    Args:
        words: Words per observation; the rest of a row has a fixed size.
    """

    def __init__(self, seed: int, words: int = 40) -> None:
        self._seed = seed
        self._words = words
        self._spec = load_agent(AGENT)

    def write(self, path: Path, count: int) -> int:
        """Write rows 0 to ``count`` - 1 as JSON lines; return the number of bytes."""
        with path.open("wb") as file:
            for number in range(count):
                file.write(self.record(number).model_dump_json().encode() + b"\n")
        return path.stat().st_size

    def record(self, number: int) -> Record:
        """Generate one row."""
        fate = _FATES[number % len(_FATES)]
        source = number - _TWIN_OF if fate == "twin" else number
        text = _trajectory(random.Random(f"{self._seed}:{source}"), fate, self._words)
        return _record(number, text, self._spec, wrong=fate == "wrong")


def _trajectory(draw: random.Random, fate: str, words: int) -> str:
    def some(count: int) -> str:
        return " ".join(draw.choices(_WORDS, k=count))

    def search(query: str) -> str:
        found = f"<observation>{some(words)}</observation>"
        return f"<think>{some(15)}</think><wiki_search>{query}</wiki_search>\n{found}\n"

    def check(score: int) -> str:
        suggested = f"<suggested_answer>{some(3)}</suggested_answer>"
        checked = f"<double_check>{some(12)}\nScore: {score}</double_check>"
        return f"<think>{some(10)}</think>{suggested}<think>{some(10)}</think>{checked}"

    queries = [some(6) for _ in range(2 if fate == "simple" else 6)]
    if fate == "repeats":
        queries[-1] = queries[0]
    text = f"<think>{some(20)}</think><plan>{some(25)}</plan>" + "".join(map(search, queries))
    if fate != "no reflection":
        text += f"<think>{some(10)}</think><reflection>{some(20)}</reflection>"
    if fate == "corrected":
        text += check(2) + search(some(6))
    text += check(4)
    thought = "" if fate == "malformed" else f"<think>{some(10)}</think>"
    return text + thought + f"<answer>{some(2)}</answer>"


def _record(number: int, text: str, spec: AgentSpec, *, wrong: bool) -> Record:
    segments = author_segments(text, spec)
    calls = [part.text for part in segments if part.author == "environment"]
    return Record(
        id=f"row-{number}",
        agent=spec.name,
        agent_digest=spec.digest,
        question=f"Question number {number}?",
        ground_truth=["x"],
        data_source="hotpotqa",
        segments=segments,
        verdict=Verdict(score=0.0 if wrong else 1.0),
        cost=Cost(tool_calls=len(calls)),
        calls=tuple(
            CallRecord(role="wiki_search", tool="wiki_search", argument="q", observation=seen, ok=True)
            for seen in calls
        ),
    )


def write_log(path: Path, count: int, seed: int) -> int:
    """Write the event log of ``count`` tasks, four interleaved as by a running team; return the number of bytes."""
    with path.open("w", encoding="utf-8") as file:
        for begin in range(0, count, 4):
            at_work = [_events(number, seed) for number in range(begin, min(begin + 4, count))]
            for lines in zip(*at_work, strict=True):
                file.writelines(lines)
    return path.stat().st_size


def _events(number: int, seed: int) -> Iterator[str]:
    """Yield the lines of a task; all tasks have the same number."""
    draw = random.Random(f"{seed}:{number}")
    task = {"id": f"task-{number}", "question": f"Question number {number}?", "ground_truth": "x"}
    place = 0

    def event(kind: str, content: str = "", **fields: object) -> str:
        nonlocal place
        line = {"id": f"task-{number}#1.{place}", "task_id": f"task-{number}", "attempt": 1, "kind": kind}
        place += 1
        return json.dumps({**line, "content": content, "time": 1.0 * place, **fields}) + "\n"

    def some(count: int) -> str:
        return " ".join(draw.choices(_WORDS, k=count))

    yield event("task", meta={"position": number, "task": task})
    yield event("message", some(20), agent="thinker")
    yield event("message", some(25), agent="planner")
    for _ in range(6):
        yield event("message", some(15), agent="thinker")
        yield event("tool_call", some(6), agent="searcher", tool="wiki_search")
        yield event("tool_result", some(40), tool="wiki_search", seconds=0.1)
    for agent, content in (
        ("reflector", some(20)),
        ("proposer", some(3)),
        ("checker", f"{some(12)}\nScore: 4"),
    ):
        yield event("message", some(10), agent="thinker")
        yield event("message", content, agent=agent)
    yield event("message", some(10), agent="thinker")
    yield event("final", some(2), agent="writer")


MEMBERS = {
    "thinker": "think",
    "planner": "plan",
    "reflector": "reflection",
    "proposer": "suggested_answer",
    "checker": "double_check",
}
"""The agent's role that each member plays."""
