"""Measure the speed of parsing trajectories in MB/s, and check that it is linear up to 10 MB, also for hostile texts.

    .venv/bin/python benchmarks/bench_parse.py --out parse.json

The rival in the same run is a regular expression over the same text that finds the closed roles and checks nothing.
Linear means that ten times the text takes at most 30 times as long. Quadratic would be 100 times; caches and Python's
garbage collector have a cost with millions of objects.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable
from pathlib import Path

from timing import environment, interleaved, report

from afm.agents import AgentSpec, load_agent
from afm.trajectory import (
    StreamParser,
    author_segments,
    observation_text,
    parse,
    render,
    structure_faults,
    validate,
)

CHUNK = 16
LIMIT = 30.0


def trajectory(spec: AgentSpec, length: int, seed: int) -> str:
    """Generate a valid response of about ``length`` characters."""
    draw = random.Random(seed)
    thought, tool = spec.thought_roles[0], next(iter(spec.tool_roles))
    parts: list[str] = []
    size = 0
    while size < length:
        call = f"<{thought}>{prose(draw, 60)}</{thought}>\n<{tool}>{prose(draw, 6)}</{tool}>"
        seen = observation_text(prose(draw, 200), spec, 16_000)
        parts += [call, seen]
        size += len(call) + len(seen)
    return "".join(parts)


def prose(draw: random.Random, words: int) -> str:
    """Generate text with comparison signs, as in code."""
    return " ".join(
        draw.choices(["alpha", "if a < b:", "x > 3", "<br>", "42", "naïve", "观察", "result"], k=words)
    )


def hostile(spec: AgentSpec, length: int) -> dict[str, str]:
    """Generate texts that are made to be slow to parse."""
    thought, tool = spec.thought_roles[0], next(iter(spec.tool_roles))
    units = {
        "only opening tags": f"<{thought}>",
        "only closing tags": f"</{thought}>",
        "empty roles": f"<{thought}></{thought}>",
        "role in role": f"<{thought}><{tool}></{thought}>",
        "unknown tags": "<x>",
        "angle brackets": "<",
        "begun tags": f"<{thought}",
    }
    texts = {name: unit * (length // len(unit)) for name, unit in units.items()}
    texts["one huge role"] = f"<{thought}>{'x' * length}</{thought}>"
    return texts


def plain_regex(spec: AgentSpec) -> Callable[[str], object]:
    """Return the rival, which finds closed roles with one lazy pattern."""
    pattern = re.compile(f"<({'|'.join(spec.roles)})>(.*?)</\\1>", re.DOTALL)
    return lambda text: [(match[1], match[2]) for match in pattern.finditer(text)]


def stream(spec: AgentSpec, text: str) -> int:
    """Feed a text in pieces of a few tokens."""
    parser = StreamParser(spec)
    return sum(len(parser.feed(text[at : at + CHUNK])) for at in range(0, len(text), CHUNK))


def candidates(spec: AgentSpec, text: str) -> dict[str, Callable[[], object]]:
    """Return the functions to time on valid text."""
    rival = plain_regex(spec)
    segments = author_segments(text, spec)
    return {
        "plain regex, unchecked": lambda: rival(text),
        "parse": lambda: parse(text, spec),
        "author_segments": lambda: author_segments(text, spec),
        "validate": lambda: validate(segments, spec),
        f"stream, {CHUNK} characters at a time": lambda: stream(spec, text),
    }


def check(spec: AgentSpec, text: str) -> None:
    """Check correctness."""
    parsed = parse(text, spec)
    assert render(parsed) == text
    assert [(step.role, step.content) for step in parsed.steps] == plain_regex(spec)(text)
    assert "".join(segment.text for segment in author_segments(text, spec)) == text


def linearity(spec: AgentSpec, length: int, runs: int, seed: int) -> dict[str, dict[str, float]]:
    """Return seconds at a tenth of ``length`` and at ``length`` for valid and hostile texts, and their ratio."""
    small = {"valid": trajectory(spec, length // 10, seed), **hostile(spec, length // 10)}
    large = {"valid": trajectory(spec, length, seed), **hostile(spec, length)}
    result = {}
    for name in small:
        work = {
            "small": lambda n=name: structure_faults(small[n], spec),
            "large": lambda n=name: structure_faults(large[n], spec),
        }
        seconds = interleaved(work, runs)
        first, second = seconds["small"]["min_s"], seconds["large"]["min_s"]
        result[name] = {"small_s": first, "large_s": second, "ratio": round(second / max(first, 1e-5), 1)}
    return result


def main() -> None:
    """Check, measure and print JSON; exit with 1 if parsing is not linear."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--smoke", action="store_true", help="a small text and two runs, only to see that it works"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    megabytes, runs = (0.2, 2) if arguments.smoke else (arguments.megabytes, arguments.runs)
    spec = load_agent("web")
    text = trajectory(spec, int(megabytes * 1e6), arguments.seed)
    check(spec, text)
    seconds = interleaved(candidates(spec, text), runs)
    size = len(text.encode()) / 1e6
    growth = linearity(spec, int(megabytes * 1e6), runs, arguments.seed)
    result = {
        "benchmark": "parse",
        "megabytes": round(size, 2),
        "runs": runs,
        "seed": arguments.seed,
        "seconds": seconds,
        "megabytes_per_s": {name: round(size / value["median_s"], 1) for name, value in seconds.items()},
        "ten_times_the_text": growth,
        "linear": all(value["ratio"] <= LIMIT for value in growth.values()),
        "environment": environment(["afm", "pydantic"]),
    }
    report(result, arguments.out)
    if not arguments.smoke and not result["linear"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
