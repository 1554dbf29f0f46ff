"""Run a job of several stages that survives ``kill -9``: finished stages are never run again.

A stage leaves its mark only after it returned, so an interrupted stage starts again and continues from
whatever rows or checkpoints it keeps itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afm.runs.folder import SETTINGS_FILE, RunFolder
from afm.runs.journal import Journal, read_rows

STAGES_FILE = "stages.jsonl"


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a job.

    Attributes:
        name: Key under which its end is remembered.
        title: What a person reads.
        run: Does the work; the text it returns is shown behind the title when it is done.
    """

    name: str
    title: str
    run: Callable[[], str]


@dataclass(frozen=True, slots=True)
class FinishedStage:
    """A stage that is done, as remembered on disk."""

    name: str
    seconds: float
    note: str


def run_stages(
    stages: Sequence[Stage],
    out_dir: Path,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
) -> list[FinishedStage]:
    """Run what is not finished yet, in order.

    Args:
        settings: What the results depend on; JSON-ready. A folder made with other settings is refused.
        say: Receives one line at the beginning and one at the end of each stage.

    Raises:
        ConfigError: ``out_dir`` holds a run with other settings.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    log = out_dir / STAGES_FILE
    RunFolder(out_dir).claim(
        settings, [out_dir / SETTINGS_FILE]
    )  # at once: a stage leaves rows before its mark
    finished = {stage.name: stage for stage in read_stages(log)}
    for number, stage in enumerate(stages, start=1):
        head = f"[{number}/{len(stages)}] {stage.title}"
        if stage.name in finished:
            say(f"{head}: done before ({finished[stage.name].note})")
            continue
        say(head)
        begun = time.monotonic()
        note = stage.run()
        done = FinishedStage(stage.name, round(time.monotonic() - begun, 1), note)
        with Journal(log, sync=True) as journal:
            journal.append_row(asdict(done))
        finished[stage.name] = done
        say(f"      {note} ({done.seconds:.0f} s)")
    return [finished[stage.name] for stage in stages]


def read_stages(log: Path) -> list[FinishedStage]:
    """Finished stages in the order they ended; a half-written last line is ignored."""
    return [FinishedStage(**row) for _, row in read_rows(log, {"name": str, "note": str})]
