"""One episode as the page shows it: its blocks, its verdict, its tokens, and the agent that explains its roles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, load_agent, shipped_agents
from afm.agents.load import MODEL_AGENT_FILE, MODEL_AGENTS_DIR
from afm.errors import ConfigError, DataError
from afm.evaluation.compare import agents_of
from afm.evaluation.manifest import MANIFEST_FILE, read_manifest
from afm.evaluation.page import blocks_of
from afm.models.tokenizer import IncrementalDecoder
from afm.trajectory.record import Record
from afm.trajectory.types import Author

Decode = Callable[[Sequence[int]], str]
"""Text of token ids."""

_AS_RECORDED = {"id", "agent", "model", "question", "verdict", "stop", "cost", "kept", "reason", "error"}
_MAX_TOKENS = 40_000
_FOLDERS_UP = 4


def read_episode(path: str, start: int, length: int) -> Record:
    """The record at an offset of a file.

    Raises:
        DataError: The file changed since it was indexed.
    """
    try:
        with Path(path).open("rb") as file:
            file.seek(start)
            return Record.model_validate_json(file.read(length))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise DataError(
            f"cannot be read at byte {start}: {first}; was the file changed?", path=path
        ) from None


def episode_view(record: Record, path: str) -> dict[str, Any]:
    """What the page needs of an episode, as JSON."""
    spec = agent_of(path, record.agent, record.agent_digest)
    return record.model_dump(include=_AS_RECORDED) | {
        "prompt": spec.user_message(record.question) if spec else "",
        "ground_truth": _text(record.ground_truth),
        "provenance": _text(record.provenance) if record.provenance else "",
        "blocks": list(_blocks(record, spec)),
        "has_tokens": record.response_ids is not None,
        "spec_found": spec is not None,
    }


def token_view(record: Record, decode: Decode | None, advantages: Any = None) -> list[dict[str, Any]]:
    """Each token of the response: id, text, whether it is trained on, log-probability and advantage.

    Without a tokenizer the text is the id. A character whose bytes are spread over several tokens is the text of the last
    one. An end token has the empty text.

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
    """An advantage per token from one number or a list. Anything else gives ``None``."""
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
    """The agent of an episode, from the folder of its file, a folder above it, or the shipped agents.

    The page needs its roles only. So an agent of the same name with another digest is better than no agent.
    """
    folders = Path(path).resolve().parents[:_FOLDERS_UP]
    own = f"{MODEL_AGENTS_DIR}/{name}.yaml"
    places = (MODEL_AGENT_FILE, own, f"sft/{MODEL_AGENT_FILE}", f"sft/{own}")
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
    """The agent of that name in the manifest of an evaluation, if there is one."""
    try:
        agents = agents_of(read_manifest(manifest)) if manifest.is_file() else None
    except DataError:
        return None
    return agents.specs.get(name) if agents else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)
