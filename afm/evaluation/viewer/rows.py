"""What the index takes from one line of a file: a sound row, its answer, its verdict, and the sums of a file."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from dataclasses import dataclass
from typing import Any

from afm.evaluation.viewer.episodes import agent_of
from afm.trajectory.answer import answer_content, read_answer
from afm.trajectory.types import Author, Segment

_MAX_SUM = 1 << 62
LINE_CHARS = 120
"""Of answers in lists."""


def read_row(line: bytes) -> dict[str, Any] | None:
    """The episode of a line, ``None`` where it holds none."""
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return row if _is_sound(row) else None


def _is_sound(row: Any) -> bool:
    """Whether what the index reads of a line has the types of an episode; nothing else of it is looked at."""
    if not isinstance(row, dict) or not isinstance(row.get("segments"), list):
        return False
    parts = (row.get("verdict") or {}, row.get("cost") or {})
    if not all(isinstance(part, dict) for part in parts) or not isinstance(row.get("calls") or [], list):
        return False
    verdict, cost = parts
    figures = (verdict.get("score"), cost.get("agent_tokens"), cost.get("wall_seconds"))
    return all(figure is None or is_storable(figure) for figure in figures)


def is_storable(figure: Any) -> bool:
    """Whether SQLite has room for a figure."""
    return isinstance(figure, float) or (isinstance(figure, int) and abs(figure) < 1 << 63)


@dataclass(slots=True)
class FileSums:
    """What a file's line in the table of files adds up, of the episodes of one piece."""

    episodes: int = 0
    scored: int = 0
    passed: int = 0
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    agent: str = ""
    model: str = ""

    def add(self, row: dict[str, Any]) -> None:
        """Add one sound row."""
        score, cost = (row.get("verdict") or {}).get("score"), row.get("cost") or {}
        self.episodes += 1
        if score is not None and not row.get("error"):
            self.scored += 1
            self.passed += score >= 1 - 1e-9
        self.calls += len(row.get("calls") or ())
        self.tokens += int(tokens) if math.isfinite(tokens := cost.get("agent_tokens") or 0) else 0
        seconds = cost.get("wall_seconds") or 0.0
        self.seconds += seconds if math.isfinite(seconds) else 0.0
        self.agent = self.agent or storable(str(row.get("agent") or ""))
        self.model = self.model or storable(str(row.get("model") or ""))

    def save(self, connection: sqlite3.Connection, number: int) -> None:
        """Add to what the table has; agent and model are those of the first episode."""
        figures = (
            self.episodes,
            self.scored,
            self.passed,
            self.calls,
            min(self.tokens, _MAX_SUM),
            self.seconds,
        )
        connection.execute(
            "UPDATE files SET episodes = episodes + ?, scored = scored + ?, passed = passed + ?, calls = calls + ?, "
            "tokens = tokens + ?, seconds = seconds + ?, agent = iif(agent = '', ?, agent), "
            "model = iif(model = '', ?, model) WHERE id = ?",
            (*figures, self.agent, self.model, number),
        )


def answer_line(row: dict[str, Any], path: str) -> str:
    """The answer in the last text that the agent wrote; empty without one, and where the agent is not known."""
    texts = (
        part
        for part in reversed(row["segments"])
        if isinstance(part, dict) and part.get("author") == Author.AGENT
    )
    text = str(next(texts, {}).get("text") or "")
    spec = agent_of(path, str(row.get("agent")), str(row.get("agent_digest"))) if text else None
    if spec is None:
        return ""
    content = answer_content((Segment(Author.AGENT, text),), spec)
    return "" if content is None else "; ".join(read_answer(content, spec)) or content


def expected_line(ground_truth: Any) -> str:
    """A ground truth that fits into a line of a table: texts and numbers, or a list of them."""
    parts = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    simple = all(isinstance(part, str | int | float) for part in parts)
    return "; ".join(str(part)[:LINE_CHARS] for part in parts[:20]) if simple else ""


def one_line(text: str, chars: int = LINE_CHARS) -> str:
    """The beginning of a text without line breaks, as SQLite can hold it; an ellipsis where it was longer."""
    line = " ".join(text[: 8 * chars].split())
    return storable(line if len(line) <= chars and len(text) <= 8 * chars else f"{line[: chars - 1]}…")


def storable(text: str) -> str:
    """Half surrogate pairs, which JSON can hold and SQLite cannot, as question marks."""
    return text.encode("utf-8", "replace").decode()


def verdict_word(verdict: dict[str, Any] | None, *, kept: bool) -> str:
    """What a filter calls a verdict: passed, partly, failed, abstained, dropped or unjudged."""
    if not kept:
        return "dropped"
    if verdict is None:
        return "unjudged"
    score = verdict.get("score")
    if score is None:
        return "abstained"
    return "passed" if score >= 1 else "partly" if score > 0 else "failed"


def question_key(question: str) -> int:
    """Equal for equal questions, whatever their white space; fits into SQLite's integers."""
    digest = hashlib.blake2b(" ".join(question.split()).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
