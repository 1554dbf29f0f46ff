"""Plant forty faults, one at a time, and check that the tests catch each.

    .venv/bin/python benchmarks/plant_faults.py --out planted.json

There are ten faults for each of the four kernels: text, endpoints, runs and play. The tree is copied to a temporary folder for
each kernel, so the working tree is unchanged. A fault replaces one line. The tests of that file (``TESTS``) then run up to
their first failure; without a fault, they must pass. Prints a Markdown table. Exit status 1 if a fault is not caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from timing import REPO, environment, report

KERNELS = ("text", "endpoints", "runs", "play")
LIMIT_S = 900
"""Tests that take longer count as hanging, which also catches the fault."""

TAGS, OBSERVATION, MASKING = "afm/trajectory/tags.py", "afm/trajectory/observation.py", "afm/masking.py"
PACE, BUDGET, CONNECTIONS = "afm/endpoints/pace.py", "afm/endpoints/budget.py", "afm/endpoints/connections.py"
CHAT, CHAT_ONLY, OPENAI = "afm/endpoints/chat.py", "afm/models/chat_only.py", "afm/models/openai.py"
FOLDER, JOURNAL, ATOMIC = "afm/runs/folder.py", "afm/runs/journal.py", "afm/runs/atomic.py"
LOOP, EPISODE, PLAY = "afm/rollout/episode_loop.py", "afm/rollout/transcript.py", "afm/play.py"

TESTS = {
    TAGS: ("tests/trajectory/test_parse.py", "tests/trajectory/test_stream.py"),
    OBSERVATION: ("tests/trajectory/test_observation.py",),
    MASKING: ("tests/test_masking.py",),
    PACE: ("tests/endpoints/test_pace.py",),
    BUDGET: ("tests/endpoints/test_budget.py",),
    CONNECTIONS: ("tests/endpoints/test_connections.py", "tests/endpoints/test_chat.py"),
    CHAT: ("tests/endpoints/test_chat.py",),
    CHAT_ONLY: ("tests/rollout/test_chat_only.py",),
    OPENAI: ("tests/models/test_openai.py",),
    FOLDER: ("tests/runs/test_folder.py",),
    JOURNAL: ("tests/runs/test_journal.py",),
    ATOMIC: ("tests/runs/test_atomic.py",),
    LOOP: ("tests/rollout/test_episode_loop.py",),
    EPISODE: ("tests/rollout/test_episode_loop.py", "tests/rollout/test_transcript.py"),
    PLAY: ("tests/test_play.py", "tests/evaluation/test_run.py"),
}
"""The tests that must catch the faults in a file."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of one file, and its replacement.

    Attributes:
        line: Line without indentation; it must occur exactly once in the file.
    """

    kernel: str
    file: str
    line: str
    faulty: str

    def plant(self, tree: Path) -> str:
        """Change the file in ``tree``; return its previous text."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        places = [number for number, line in enumerate(lines) if line.strip() == self.line]
        if len(places) != 1:
            raise SystemExit(
                f"{self.file}: expected one line {self.line!r}, found {len(places)}; update the table in {__file__}"
            )
        [place] = places
        lines[place] = lines[place].replace(self.line, self.faulty)
        path.write_text("\n".join(lines), encoding="utf-8")
        return text


FAULTS = (
    Fault(
        "text",
        TAGS,
        "close = text.find(closing, inside) if role not in unclosed else -1",
        "close = text.find(closing, inside + 1) if role not in unclosed else -1",
    ),
    Fault("text", TAGS, "position = inside", "return"),
    Fault("text", TAGS, "before = text[agent_from:start].rstrip()", "before = text[agent_from:start]"),
    Fault(
        "text",
        TAGS,
        "pending += text[agent_from + len(before) : stop]",
        "pending = text[agent_from + len(before) : stop]",
    ),
    Fault(
        "text",
        TAGS,
        'bracket = window.rfind("<", max(at, len(window) - longest + 1))',
        'bracket = window.rfind("<", max(at, len(window) - longest + 2))',
    ),
    Fault("text", TAGS, "self._carry_at += keep", "self._carry_at += at"),
    Fault(
        "text",
        OBSERVATION,
        "head, tail = (room + 1) // 2, room // 2",
        "head, tail = room // 2, room // 2",
    ),
    Fault(
        "text",
        OBSERVATION,
        "names = sorted({*roles, *_TEMPLATE_TAGS}, key=lambda name: (-len(name), name))",
        "names = sorted({*_TEMPLATE_TAGS}, key=lambda name: (-len(name), name))",
    ),
    Fault(
        "text",
        MASKING,
        "return bisect_right(offsets, start, key=end), bisect_left(offsets, stop, key=begin)",
        "return bisect_left(offsets, start, key=end), bisect_left(offsets, stop, key=begin)",
    ),
    Fault("text", MASKING, 'changed["prepend_scheme"] = "never"', 'changed["prepend_scheme"] = "first"'),
    Fault(
        "endpoints",
        PACE,
        "if self._requests is not None and len(self._sent) >= self._requests:",
        "if self._requests is not None and len(self._sent) > self._requests:",
    ),
    Fault("endpoints", PACE, "self._used += tokens - sent.tokens", "self._used += tokens"),
    Fault(
        "endpoints",
        BUDGET,
        "if self._in_flight and self._limits.allows(total):",
        "if self._in_flight:",
    ),
    Fault("endpoints", BUDGET, "count.add(most, -1)", "pass"),
    Fault(
        "endpoints",
        CONNECTIONS,
        'return text.replace(key, "***") if key else text',
        "return text",
    ),
    Fault(
        "endpoints",
        CONNECTIONS,
        "return sorted(in_turn, key=lambda replica: (replica.resting, replica.in_flight))",
        "return sorted(in_turn, key=lambda replica: (replica.in_flight, replica.resting))",
    ),
    Fault(
        "endpoints",
        CHAT,
        "return min(prompt, self.total_tokens), max(0, self.total_tokens - prompt)",
        "return min(prompt, self.total_tokens), self.total_tokens",
    ),
    Fault(
        "endpoints",
        CHAT_ONLY,
        "room = params.max_new_tokens - (finish is FinishReason.END_OF_TEXT)",
        "room = params.max_new_tokens",
    ),
    Fault(
        "endpoints",
        OPENAI,
        "if (ids and ids[-1] in self._end_ids) or isinstance(reason, int):",
        "if ids and ids[-1] in self._end_ids:",
    ),
    Fault("endpoints", OPENAI, '"top_k": params.top_k or -1,', '"top_k": params.top_k,'),
    Fault(
        "runs",
        FOLDER,
        "if file.exists() and any(path.is_file() and path.stat().st_size for path in results):",
        "if file.exists():",
    ),
    Fault("runs", FOLDER, "if time.monotonic() >= deadline:", "if wait_s >= 0:"),
    Fault("runs", FOLDER, 'flat |= flatten(value, f"{prefix}{name}.")', 'flat |= flatten(value, f"{name}.")'),
    Fault("runs", FOLDER, "for key in sorted({*old, *new})", "for key in sorted(new)"),
    Fault("runs", JOURNAL, "return begin + line_feed + 1", "return begin + line_feed"),
    Fault("runs", JOURNAL, 'if row["key"] not in self._rows:', "if row:"),
    Fault("runs", JOURNAL, "if _row(partial) is not None:", "if partial:"),
    Fault(
        "runs",
        JOURNAL,
        "self._file.truncate(end)  # the next line would continue what was written of this one",
        "pass",
    ),
    Fault(
        "runs",
        ATOMIC,
        "_sync(temporary)  # before the rename: else the new name may outlive its content",
        "pass",
    ),
    Fault("runs", ATOMIC, "for temporary, path in reversed(complete):", "for temporary, path in complete:"),
    Fault("play", LOOP, "if room.tokens < 1:", "if room.tokens < 0:"),
    Fault(
        "play",
        LOOP,
        "if len(self._transcript.ids) + len(ids) > self._budget.response:",
        "if len(self._transcript.ids) + len(ids) >= self._budget.response:",
    ),
    Fault(
        "play",
        LOOP,
        "if self._limits.max_turns is not None and len(self._calls) >= self._limits.max_turns:",
        "if self._limits.max_turns is not None and len(self._calls) > self._limits.max_turns:",
    ),
    Fault("play", LOOP, "if index + 1 < len(events):", "if index + 2 < len(events):"),
    Fault(
        "play",
        LOOP,
        "return generation if count is None else generation.stopped(count)",
        "return generation",
    ),
    Fault(
        "play",
        LOOP,
        "left = max(0.0, self._limits.max_tool_seconds - sum(call.seconds for call in self._calls))",
        "left = self._limits.max_tool_seconds",
    ),
    Fault(
        "play",
        EPISODE,
        'text = "".join(self._agent_text) + self._decoder.finish()',
        'text = "".join(self._agent_text)',
    ),
    Fault(
        "play",
        PLAY,
        "if record.calls and not any(call.ok for call in record.calls):",
        "if record.calls and not all(call.ok for call in record.calls):",
    ),
    Fault(
        "play",
        PLAY,
        "return isinstance(error, EngineError | ToolsDownError) and not isinstance(error, lasting)",
        "return isinstance(error, EngineError | ToolsDownError)",
    ),
    Fault(
        "play",
        PLAY,
        "stop=stop_after_attempt(self.failures.retries + 1),",
        "stop=stop_after_attempt(self.failures.retries),",
    ),
)


def plant_all(kernel: str, folder: Path) -> list[dict[str, str]]:
    """Return each fault of a kernel with the test that catches it, or an empty text."""
    tree = copy_tree(folder / kernel)
    faults = [fault for fault in FAULTS if fault.kernel == kernel]
    tests = sorted({test for fault in faults for test in TESTS[fault.file]})
    if failure := first_failure(tree, tests):
        raise SystemExit(f"{kernel}: {failure} fails without a fault; fix it first")
    rows = []
    for fault in faults:
        before = fault.plant(tree)
        caught = first_failure(tree, TESTS[fault.file])
        (tree / fault.file).write_text(before, encoding="utf-8")
        print(
            f"{kernel}: {fault.line} -> {fault.faulty}: {caught or 'NOT CAUGHT'}", file=sys.stderr, flush=True
        )
        rows.append(
            {
                "kernel": kernel,
                "file": fault.file,
                "line": fault.line,
                "faulty": fault.faulty,
                "caught": caught,
            }
        )
    return rows


def copy_tree(tree: Path) -> Path:
    """Copy the existing files that git does not ignore to ``tree``."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (REPO / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, tree / name)
    return tree


def first_failure(tree: Path, tests: Sequence[str]) -> str:
    """Return the first of ``tests`` that fails in ``tree``, or an empty text.

    Writes no bytecode, because Python does not recompile a changed file with the same second and size.
    """
    environ = {
        "AFM_SHARED_DATA": str(REPO.parent / "shared"),
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    try:
        result = subprocess.run(
            command, cwd=tree, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if result.returncode == 0:
        return ""
    failed = re.search(r"^FAILED \S*/(\S+?\.py::\w+)", result.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"{' '.join(command)}: the tests do not run\n{result.stdout}{result.stderr}")
    return failed[1]


def table(rows: list[dict[str, str]]) -> str:
    """Return the faults as a Markdown table."""
    lines = ["| kernel | file | instead of | planted | caught by |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row[key]}`".replace("|", "\\|") for key in ("file", "line", "faulty"))
        lines.append(f"| {row['kernel']} | {' | '.join(cells)} | {row['caught'] or '**nothing**'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--processes", type=int, default=2, help="kernels at the same time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        found = pool.map(lambda kernel: plant_all(kernel, Path(folder)), options.kernels)
        rows = [row for kernel in found for row in kernel]
    print(table(rows))
    caught = sum(bool(row["caught"]) for row in rows)
    print(f"\n{caught} of {len(rows)} caught")
    if options.out is not None:
        report({"environment": environment(["pytest"]), "faults": rows}, options.out)
    sys.exit(caught < len(rows))


if __name__ == "__main__":
    main()
