"""Findings as a table on a terminal, as lines elsewhere, as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from afm.planning import Finding, Level, failed
from afm.terminal import visible

if TYPE_CHECKING:
    from rich.console import Console

_WORDS = {Level.OK: "ok", Level.WARNING: "warn", Level.ERROR: "fail"}
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def print_json(what: str, findings: Sequence[Finding]) -> None:
    """One object: what was looked at, whether it would go well, and every finding."""
    rows = [
        {"status": _WORDS[one.level], "subject": one.subject, "why": one.why, "next_step": one.next_step}
        for one in findings
    ]
    print(json.dumps({"checked": what, "ok": not failed(findings), "findings": rows}, indent=2))


def print_table(findings: Sequence[Finding], console: Console | None = None) -> None:
    """All findings in their order, and how many there are of each kind."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False)
    if not console.is_terminal:
        for finding in findings:
            print(finding)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, ratio in (("", None), ("what", None), ("why", 3), ("next step", 2)):
        table.add_column(name, ratio=ratio, no_wrap=ratio is None, overflow="fold")
    for one in findings:
        state = Text(_WORDS[one.level], _STYLES[one.level])
        table.add_row(
            state, visible(one.subject), Text(visible(one.why)), Text(visible(one.next_step), "bold")
        )
    console.print(table)
    counts = Counter(one.level for one in findings)
    told = ", ".join(f"{counts[level]} {word}" for level, word in _WORDS.items() if counts[level])
    console.print(Text(told, _STYLES[max(counts, key=list(_WORDS).index)] if counts else ""))
