"""Run a job of several stages that survives ``kill -9``: finished stages are never run again.

A stage leaves its mark only after it returned, so an interrupted stage starts again and continues from
whatever rows or checkpoints it keeps itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import ConfigError

SETTINGS_FILE = "settings.json"
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
    _claim(out_dir / SETTINGS_FILE, settings)
    log = out_dir / STAGES_FILE
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
        _append(log, done)
        finished[stage.name] = done
        say(f"      {note} ({done.seconds:.0f} s)")
    return [finished[stage.name] for stage in stages]


def read_stages(log: Path) -> list[FinishedStage]:
    """Finished stages in the order they ended; a half-written last line is ignored."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    return [FinishedStage(**json.loads(line)) for line in lines if line.endswith("\n")]


def _claim(path: Path, settings: Mapping[str, Any]) -> None:
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    if not path.exists():
        scratch = path.with_suffix(".new")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(text)
    different = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    if different:
        changes = ", ".join(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in different)
        raise ConfigError(
            f"{path.parent} holds a run with other settings ({changes}); "
            "choose another --out, or delete the folder to start over"
        )


def _append(log: Path, stage: FinishedStage) -> None:
    row = json.dumps({"name": stage.name, "seconds": stage.seconds, "note": stage.note})
    with log.open("ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(row.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
