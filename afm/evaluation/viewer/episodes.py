"""One episode for the page (blocks, verdict, tokens, messages), and the parts of an episode that the index holds."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from afm.agents import AgentSpec, load_agent, shipped_agents
from afm.agents.load import MODEL_AGENT_FILE, MODEL_AGENTS_DIR
from afm.errors import ConfigError, DataError
from afm.evaluation.compare import agents_of
from afm.evaluation.manifest import MANIFEST_FILE, read_manifest
from afm.evaluation.page import blocks_of, shortened
from afm.models.tokenizer import IncrementalDecoder
from afm.rewards.text_match import gold_answers
from afm.terminal import plural
from afm.trajectory.answer import answer_content, read_answer
from afm.trajectory.io import explain
from afm.trajectory.record import Record
from afm.trajectory.tags import Author, Segment

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""

_AS_RECORDED = dict.fromkeys(("id", "agent", "model", "question", "stop", "reason", "error"), True) | {
    "verdict": {"score", "parts", "evidence"},
    "cost": {"generations", "agent_tokens", "observation_tokens"}
    | {"tool_calls", "tool_failures", "tool_seconds", "wall_seconds"},
}
_MAX_TOKENS = 40_000
_MAX_MESSAGES = 500
_FOLDERS_UP = 4


def read_episode(path: str, start: int, length: int) -> Record:
    """Read the record at an offset of a file.

    Raises:
        DataError: The file changed since it was indexed.
    """
    try:
        with Path(path).open("rb") as file:
            file.seek(start)
            return Record.model_validate_json(file.read(length).removeprefix(BOM_UTF8))
    except ValidationError as error:
        changed = "; the file may have changed since it was indexed"
        message = explain(error, path) + (changed if error.errors()[0]["type"] == "json_invalid" else "")
        raise DataError(message, path=path, line=1 + Path(path).read_bytes()[:start].count(b"\n")) from None
    except OSError as error:
        raise DataError(f"cannot be read at byte {start}: {error.strerror}", path=path) from None


def episode_view(record: Record, path: str) -> dict[str, Any]:
    """Return what the page shows of an episode, as JSON."""
    spec = agent_of(path, record.agent, record.agent_digest)
    return record.model_dump(include=_AS_RECORDED) | {
        "prompt": spec.user_message(record.question) if spec else "",
        "ground_truth": "" if record.ground_truth is None else _text(record.ground_truth),
        "expected": expected_line(record.ground_truth),
        "provenance": _text(_without_messages(record.provenance)) if record.provenance else "",
        "messages": [
            {"speaker": speaker, "text": shortened(text)}
            for speaker, text in _first(messages_of(record.provenance))
        ],
        "blocks": list(_blocks(record, spec)),
        "has_tokens": record.response_ids is not None,
        "spec_found": spec is not None,
    }


def token_view(record: Record, decode: Decode | None, advantages: Any = None) -> list[dict[str, Any]]:
    """Return each token of the response: id, text, whether it is trained on, log-probability and advantage.

    Without a tokenizer the text is the id. If the bytes of a character are spread over several tokens, the last of them
    has the character. An end token has an empty text.

    Args:
        advantages: One number for all tokens of the agent, or a list with one number per token.
    """
    ids = (record.response_ids or ())[:_MAX_TOKENS]
    mask, logprobs = record.response_mask or (), record.logprobs or ()
    each = _for_each(advantages, len(ids))
    decoder = IncrementalDecoder(decode) if decode else None
    return [
        {
            "id": token,
            "text": decoder.feed([token]) if decoder else f"{token} ",
            "trained": bool(mask[at]) if at < len(mask) else None,
            "logprob": logprobs[at] if at < len(logprobs) and (at >= len(mask) or mask[at]) else None,
            "advantage": each[at] if at >= len(mask) or mask[at] else None,
        }
        for at, token in enumerate(ids)
    ]


def _for_each(numbers: Any, tokens: int) -> list[float | None]:
    """Return an advantage per token from one number or a list, ``None`` for anything else."""
    several = numbers if isinstance(numbers, list) else [numbers] * tokens
    known = [_finite(number) for number in several[:tokens]]
    return known + [None] * (tokens - len(known))


def _finite(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _blocks(record: Record, spec: AgentSpec | None) -> Iterator[dict[str, Any]]:
    calls = iter(record.calls)
    tools = spec.tool_roles if spec else {}
    for block in blocks_of(record, spec):
        shown = asdict(block)
        if block.author is Author.AGENT and block.role in tools and (call := next(calls, None)) is not None:
            shown |= {"tool": call.tool, "seconds": call.seconds, "ok": call.ok, "duplicate": call.duplicate}
        yield shown


@lru_cache(maxsize=256)
def agent_of(path: str, name: str, digest: str) -> AgentSpec | None:
    """Return the agent of an episode, from the folder of its file, a folder above it, or the shipped agents.

    The page only needs its roles. So an agent of the same name with another digest is better than no agent.
    """
    folders = Path(path).resolve().parents[:_FOLDERS_UP]
    own = f"{MODEL_AGENTS_DIR}/{name}.yaml"
    places = (MODEL_AGENT_FILE, own, f"{name}.yaml", f"sft/{MODEL_AGENT_FILE}", f"sft/{own}")
    candidates = [folder / place for folder in folders for place in places]
    own_spec = _of_evaluation(Path(path).with_name(MANIFEST_FILE), name)
    specs = [] if own_spec is None else [own_spec]
    shipped = (name,) if name in shipped_agents() else ()
    for source in (*(file for file in candidates if file.is_file()), *shipped):
        try:
            spec = load_agent(source)
        except ConfigError:
            continue
        if spec.name == name:
            specs.append(spec)
    return next((spec for spec in specs if spec.digest == digest), specs[0] if specs else None)


def _of_evaluation(manifest: Path, name: str) -> AgentSpec | None:
    """Return the agent of that name in the manifest of an evaluation, if there is one."""
    try:
        agents = agents_of(read_manifest(manifest)) if manifest.is_file() else None
    except DataError:
        return None
    return agents.specs.get(name) if agents else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)


_MAX_SUM = 1 << 62
_OF_LOGS = "react"
"""The shipped agent that logs are converted to, and that agents of logs extend."""
LINE_CHARS = 120
"""Limit on the characters of answers in lists."""


def read_row(line: bytes) -> dict[str, Any] | None:
    """Return the episode of a line, or ``None`` if the line is not an episode."""
    try:
        row = json.loads(line.removeprefix(BOM_UTF8).decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return row if _is_sound(row) else None


def _is_sound(row: Any) -> bool:
    """Whether the parts that the index reads have the types of an episode. Other parts are not checked."""
    if not isinstance(row, dict) or not isinstance(row.get("segments"), list):
        return False
    parts = (row.get("verdict") or {}, row.get("cost") or {})
    if not all(isinstance(part, dict) for part in parts) or not isinstance(row.get("calls") or [], list):
        return False
    verdict, cost = parts
    figures = (verdict.get("score"), cost.get("agent_tokens"), cost.get("wall_seconds"))
    return all(figure is None or is_storable(figure) for figure in figures)


def is_storable(figure: Any) -> bool:
    """Whether SQLite can hold a figure."""
    return isinstance(figure, float) or (isinstance(figure, int) and abs(figure) < 1 << 63)


@dataclass(slots=True)
class FileSums:
    """Sums over the episodes of a piece of a file, for its row in the table of files."""

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
        """Add the sums to the table. Agent and model are those of the first episode."""
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


def _first(messages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the messages that a page shows, and a note if the file has more."""
    more = sum(1 for speaker, _ in messages[_MAX_MESSAGES:] if speaker)
    note = f"{plural(more, 'more message')} left out. The file of the episode has all of them."
    return messages[:_MAX_MESSAGES] + ([("", note)] if more else [])


def messages_of(provenance: Any) -> list[tuple[str, str]]:
    """Return speaker and text of each message of a team's members, or of the chats of a program.

    An evaluated team or program has only its answer in the segments. Its other messages are in the provenance. A note
    without a speaker begins each of several chats. It replaces the messages with which an earlier chat begins as well.
    """
    if not isinstance(provenance, dict):
        return []
    team = provenance.get("team")
    said = [
        (str(message.get("member")), str(message.get("text") or ""))
        for message in _dicts(team.get("messages") if isinstance(team, dict) else None)
    ]
    earlier: list[tuple[str, list[tuple[str, str]]]] = []
    chats = _dicts(provenance.get("trajectories"))
    for chat in chats:
        label, speaker = str(chat.get("name")), str(chat.get("member") or chat.get("name"))
        own = [message for each in _dicts(chat.get("messages")) for message in _said(each)]
        shared, first = max(
            ((len(commonprefix([own, other])), name) for name, other in earlier),  # noqa: RUF071 - lists
            key=lambda pair: pair[0],
            default=(0, ""),
        )
        earlier.append((label, own))
        if len(chats) > 1:
            said.append(("", _chat_note(chat, shared, first)))
        for role, text in own[shared:]:
            said.append((speaker if role == "assistant" else f"{role} to {speaker}", text))
    return [(speaker, text) for speaker, text in said if text]


def _said(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Return role and text of a chat message. A completion has two."""
    if "completion" in message:
        return [("prompt", _text(message.get("prompt"))), ("assistant", _text(message["completion"]))]
    content = message.get("content")
    calls = [json.dumps(call, ensure_ascii=False) for call in _dicts(message.get("tool_calls"))]
    text = "\n".join([_text(content) if content else "", *calls]).strip()
    return [(str(message.get("role")), text)] if text else []


def _chat_note(chat: dict[str, Any], shared: int, first: str) -> str:
    member, reason = chat.get("member"), chat.get("reason")
    note = f"Conversation {chat.get('name')}{f' of {member}' if member else ''}"
    note += f" ({reason})." if reason else "."
    if not shared:
        return note
    messages = "message is that" if shared == 1 else f"{shared} messages are those"
    return f"{note} Its first {messages} of conversation {first}, shown above."


def _without_messages(provenance: dict[str, Any]) -> dict[str, Any]:
    """Return a provenance with a number in place of each list of messages that :func:`messages_of` returns."""

    def counted(part: Any) -> Any:
        known = isinstance(part, dict) and isinstance(part.get("messages"), list)
        return part | {"messages": len(part["messages"])} if known else part

    parts: dict[str, Callable[[Any], Any]] = {
        "team": counted,
        "trajectories": lambda chats: [*map(counted, _dicts(chats))] or chats,
    }
    return {key: parts[key](value) if key in parts else value for key, value in provenance.items()}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def answer_line(row: dict[str, Any], path: str) -> str:
    """Return the answer in the last text of the agent. Empty without one. An unknown agent is read as ``react``."""
    texts = (
        part
        for part in reversed(row["segments"])
        if isinstance(part, dict) and part.get("author") == Author.AGENT
    )
    text = str(next(texts, {}).get("text") or "")
    spec = agent_of(path, str(row.get("agent")), str(row.get("agent_digest"))) if text else None
    spec = spec or load_agent(_OF_LOGS)
    content = answer_content((Segment(Author.AGENT, text),), spec)
    return "" if content is None else "; ".join(read_answer(content, spec)) or content


def expected_line(ground_truth: Any) -> str:
    """Return the gold answers of a ground truth as one line. Empty without any, as for tests of a program."""
    try:
        return "; ".join(gold_answers(ground_truth))
    except (DataError, RecursionError):
        return ""


def one_line(text: str, chars: int = LINE_CHARS) -> str:
    """Return the beginning of a text without line breaks, in a form that SQLite can hold. An ellipsis marks a cut."""
    line = " ".join(text[: 8 * chars].split())
    return storable(line if len(line) <= chars and len(text) <= 8 * chars else f"{line[: chars - 1]}…")


def storable(text: str) -> str:
    """Replace lone surrogates, which SQLite cannot hold, with question marks."""
    return text.encode("utf-8", "replace").decode()


def verdict_word(verdict: dict[str, Any] | None, *, kept: bool) -> str:
    """Return the word for a verdict in filters: passed, partly, failed, abstained, dropped or unjudged."""
    if not kept:
        return "dropped"
    if verdict is None:
        return "unjudged"
    score = verdict.get("score")
    if score is None:
        return "abstained"
    return "passed" if score >= 1 else "partly" if score > 0 else "failed"


def question_key(question: str) -> int:
    """Return a 64-bit key that is equal for equal questions, whatever their white space."""
    digest = hashlib.blake2b(" ".join(question.split()).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
