"""Compare the speed of encoding trajectories with masks, without masks, and with a marker search.

    .venv/bin/python benchmarks/bench_masking.py --tokenizer /models/Qwen2.5-7B-Instruct --out masking.json

Rivals, in the same run on the same rows:
- stock: only the tokenizer, one call for all rows, no masks; the target is at most 1.5 times its time;
- stock, row by row: only the tokenizer, one call per row, as data processors commonly do;
- marker search: encode, then search for the tokens of the observation's markers, as published systems do.
Before measuring, each way of masking is checked for rows whose trained tokens are not exactly the agent's text.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import environment, interleaved, report

from afm.agents import AgentSpec, load_agent
from afm.choices import Boundary
from afm.masking import MaskedIds, encode_batch
from afm.trajectory import author_segments

WORDS = ["the", "of", "and", "search", "result", "page", "because", "number", "function", "return", "station"]
WORDS += [
    "1987",
    "42",
    "3.14",
    "therefore",
    "https://example.org/wiki/Station_42",
    "(see",
    "table)",
    "观察",
    "naïve",
]
JOINTS = ("", "\n", "\n\n")
TARGET = 1.5
LEAK_CHARS = 100
"""Longer than all white space around observations, and shorter than any observation."""


@dataclass(frozen=True)
class Row:
    """A response, and the part that the agent wrote."""

    text: str
    agent_text: str


def make_rows(count: int, spec: AgentSpec, seed: int) -> list[Row]:
    """Generate rows of web research of about 2,000 tokens; white space around observations varies as in real data."""
    draw = random.Random(seed)
    return [make_row(draw, spec) for _ in range(count)]


def make_row(draw: random.Random, spec: AgentSpec) -> Row:
    """Generate a response with five tool calls."""
    thought, tool = spec.thought_roles[0], next(iter(spec.tool_roles))
    text = agent = ""
    for _ in range(5):
        call = f"<{thought}>{prose(draw, 60)}</{thought}>\n<{tool}>{prose(draw, 6)}</{tool}>"
        seen = f"<{spec.observation_role}>\n{prose(draw, 200)}\n</{spec.observation_role}>"
        text += call + draw.choice(JOINTS) + seen + draw.choice(JOINTS)
        agent += call
    end = (
        f"<{thought}>{prose(draw, 40)}</{thought}>\n<{spec.answer_role}>{prose(draw, 3)}</{spec.answer_role}>"
    )
    return Row(text + end, agent + end)


def prose(draw: random.Random, words: int) -> str:
    """Generate text."""
    return " ".join(draw.choices(WORDS, k=words))


def marker_search(tokenizer: Any, rows: Sequence[Row], role: str) -> list[MaskedIds | None]:
    """Mask between the tokens of two markers; return ``None`` for rows with unpaired markers."""
    begin = tokenizer.encode(f"<{role}", add_special_tokens=False)
    end = tokenizer.encode(f"{role}>\n\n", add_special_tokens=False)
    return [search_one(tokenizer.encode(row.text, add_special_tokens=False), begin, end) for row in rows]


def search_one(ids: list[int], begin: list[int], end: list[int]) -> MaskedIds | None:
    """Mask everything inside observations, including markers."""
    mask = [1] * len(ids)
    inside, position = False, 0
    while position < len(ids):
        marker = end if inside else begin
        if ids[position : position + len(marker)] == marker:
            inside = not inside
            mask[position : position + len(marker)] = [0] * len(marker)
            position += len(marker)
            continue
        mask[position] = 0 if inside else 1
        position += 1
    return None if inside else MaskedIds(ids, mask)


def wrong_rows(tokenizer: Any, masked: Sequence[MaskedIds | None], rows: Sequence[Row]) -> dict[str, int]:
    """Count rows that were dropped, rows that train on text other than the agent's, and those with an observation."""
    counts = {"rows": len(rows), "dropped": sum(item is None for item in masked), "inexact": 0, "leaking": 0}
    for item, row in zip(masked, rows, strict=True):
        if item is None:
            continue
        trained = tokenizer.decode([token for token, kept in zip(item.ids, item.mask, strict=True) if kept])
        counts["inexact"] += trained != row.agent_text
        counts["leaking"] += len(trained) > len(row.agent_text) + LEAK_CHARS
    return counts


def load_tokenizer(folder: Path | None, rows: Sequence[Row]) -> tuple[Any, str]:
    """Load the tokenizer in ``folder``, or train a small one on the rows."""
    from transformers import AutoTokenizer

    if folder is not None:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True), folder.name
    from afm.models.tiny import train_tokenizer

    with tempfile.TemporaryDirectory() as out:
        train_tokenizer((row.text for row in rows[:50]), out, vocab_size=2000)
        return AutoTokenizer.from_pretrained(out, local_files_only=True), "small BPE trained on the rows"


def default_tokenizer() -> Path | None:
    """Return the folder of the Qwen2.5 tokenizer in the shared data, if any."""
    shared = os.environ.get("AFM_SHARED_DATA")
    folder = Path(shared) / "tokenizers/qwen2.5" if shared else None
    return folder if folder is not None and folder.is_dir() else None


def candidates(tokenizer: Any, rows: Sequence[Row], spec: AgentSpec) -> dict[str, Callable[[], object]]:
    """Return the functions to time. Ours starts from the text, so its time includes finding the authors."""
    texts = [row.text for row in rows]
    role = str(spec.observation_role)

    def ours(boundary: Boundary) -> Callable[[], list[MaskedIds]]:
        return lambda: encode_batch(tokenizer, [author_segments(text, spec) for text in texts], boundary)

    return {
        "stock": lambda: tokenizer(texts, add_special_tokens=False, return_attention_mask=False),
        "stock, row by row": lambda: [tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "marker search": lambda: marker_search(tokenizer, rows, role),
        **{f"ours, {boundary.value}": ours(boundary) for boundary in Boundary},
    }


def main() -> None:
    """Check, measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", type=Path, default=default_tokenizer(), help="folder of a fast tokenizer"
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--smoke", action="store_true", help="few rows and two runs, only to see that it works"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    count, runs = (40, 2) if arguments.smoke else (arguments.rows, arguments.runs)
    spec = load_agent("web")
    rows = make_rows(count, spec, arguments.seed)
    tokenizer, name = load_tokenizer(arguments.tokenizer, rows)
    segments = [author_segments(row.text, spec) for row in rows]
    split = encode_batch(tokenizer, segments)
    correctness = {
        "ours, split": wrong_rows(tokenizer, split, rows),
        "marker search": wrong_rows(
            tokenizer, marker_search(tokenizer, rows, str(spec.observation_role)), rows
        ),
    }
    if correctness["ours, split"]["inexact"]:
        raise SystemExit(f"ours masks wrongly, so its speed means nothing: {correctness['ours, split']}")
    seconds = interleaved(candidates(tokenizer, rows, spec), runs)
    stock = seconds["stock"]["median_s"]
    result = {
        "benchmark": "masking",
        "tokenizer": name,
        "rows": count,
        "tokens_per_row": round(sum(len(item.ids) for item in split) / count),
        "runs": runs,
        "seed": arguments.seed,
        "correctness": correctness,
        "seconds": seconds,
        "times_stock": {key: round(value["median_s"] / stock, 2) for key, value in seconds.items()},
        "target_times_stock": TARGET,
        "environment": environment(["transformers", "tokenizers", "afm"]),
    }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
