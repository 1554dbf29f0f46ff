"""Draw the picture at the top of the README from `quickstart_record.json`: scores before and after RL, and an episode.

    .venv/bin/python benchmarks/draw_readme.py --out docs/images

`quickstart.svg` is for wide screens. `quickstart_narrow.svg` is for narrow screens and drawn larger, so that its text is
readable. Both follow the reader's light or dark mode.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from afm.agents import RoleKind, load_agent
from afm.trajectory import parse

RECORD = Path(__file__).with_name("quickstart_record.json")
SANS, CODE = 7.4, 7.9
"""Mean width of a character of each font."""
COLUMN = 98
# The colours of `afm view`.
STYLE = """
  svg { --ink: #1c2330; --soft: #5b6675; --line: #dfe3e9; --page: #fff; --agent: #2458d3; --tool: #f1f3f5; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6eaf0; --soft: #9aa6b5; --line: #2b333e; --page: #181e26; --agent: #7aa8ff; --tool: #2b333e; }
  }
  text { fill: var(--ink); font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
  .title { font-weight: 600; font-size: 15px; } .soft { fill: var(--soft); font-size: 13px; } .end { text-anchor: end; }
  .large { font-size: 26px; font-weight: 700; fill: var(--agent); } .middle { text-anchor: middle; }
  .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; } .role { fill: var(--agent); }
  .grid { stroke: var(--line); } .other { stroke: var(--soft); stroke-width: 1.5; opacity: .55; }
  .first { stroke: var(--agent); stroke-width: 3.5; } .dot { fill: var(--agent); }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text with its baseline at ``y``."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a straight line."""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>'


def scores(record: dict[str, Any], left: float, top: float, width: float, height: float) -> Iterator[str]:
    """Draw accuracy after SFT and RL on an axis from 0 to 1: the first seed with numbers, the others thin."""

    def level(share: float) -> float:
        return top + 52 + (1 - share) * (height - 110)

    yield text(left, top + 18, f"Right answers to {record['questions']} new problems", "title")
    for share in (0, 0.5, 1):
        yield line(left + 34, level(share), left + width, level(share), "grid")
        yield text(left + 26, level(share) + 5, f"{share:.0%}", "soft end")
    before, after = left + 34 + 0.28 * (width - 34), left + 34 + 0.74 * (width - 34)
    first, *others = record["seeds"]
    for seed in [*others, first]:
        kind = "first" if seed is first else "other"
        yield line(before, level(seed["after_sft"]), after, level(seed["after_rl"]), kind)
    for x, share, side in ((before, first["after_sft"], -46), (after, first["after_rl"], 46)):
        yield f'<circle cx="{x:g}" cy="{level(share):g}" r="6" class="dot"/>'
        yield text(x + side, level(share) + 9, f"{share:.2f}".lstrip("0"), "large middle")
    for x, word in ((before, "after SFT"), (after, "after RL")):
        yield text(x, level(0) + 22, word, "middle")
    seeds = ", ".join(str(seed["seed"]) for seed in others)
    yield text(left, level(0) + 46, f"Blue: seed {first['seed']}. Grey: seeds {seeds}. 2 CPU cores.", "soft")


def episode(record: dict[str, Any], left: float, top: float, width: float) -> Iterator[str]:
    """Draw the question and each role with its text; text of the environment has a grey background."""
    shown = record["episode"]
    yield text(left, top + 18, shown["title"], "title")
    y = top + 44
    for words in wrapped(shown["question"], int(width / SANS)):
        yield text(left, y, words)
        y += 19
    y += 6
    spec = load_agent("math")
    for step in parse(shown["response"], spec).steps:
        environment = spec.roles[step.role].kind is RoleKind.OBSERVATION
        content = step.content.strip().removeprefix("```py\n").removesuffix("\n```")
        if environment:
            yield f'<rect x="{left - 8:g}" y="{y - 17:g}" width="{width + 8:g}" height="25" rx="4" fill="var(--tool)"/>'
            yield text(left + width - 8, y, "from the sandbox: no loss", "soft end")
        yield text(left, y, step.role, "code soft" if environment else "code role")
        for words in wrapped(content, int((width - COLUMN) / CODE)):
            yield text(left + COLUMN, y, words, "code")
            y += 20
        y += 7


def wrapped(words: str, most: int) -> Iterator[str]:
    """Wrap text at ``most`` characters."""
    row = ""
    for word in words.split():
        if row and len(row) + 1 + len(word) > most:
            yield row
            row = word
        else:
            row = f"{row} {word}".strip()
    yield row


def picture(record: dict[str, Any], *, narrow: bool) -> str:
    """Return the whole SVG."""
    width, height = (330, 632) if narrow else (880, 330)
    if narrow:
        parts = [*scores(record, 14, 10, 302, 290), *episode(record, 14, 338, 302)]
    else:
        parts = [*scores(record, 20, 12, 370, 310), *episode(record, 450, 12, 410)]
    shown = 1.4 if narrow else 1  # narrow screens show the picture at its own width
    size = f'width="{shown * width:g}" height="{shown * height:g}"'
    seeds = record["seeds"][0]
    title = f"Right answers rise from {seeds['after_sft']:.2f} after SFT to {seeds['after_rl']:.2f} after RL"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="var(--page)"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RECORD.parents[1] / "docs/images")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name, narrow in (("quickstart", False), ("quickstart_narrow", True)):
        path = options.out / f"{name}.svg"
        path.write_text(picture(record, narrow=narrow), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
