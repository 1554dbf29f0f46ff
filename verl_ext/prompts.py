"""The prompts of a run: those of its rows, held against what its model was trained with, and kept for its export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from afm.agents import PromptMode
from afm.agents.prompt_record import PROMPT_FILE, PromptRecord, RunPrompts, run_prompts
from afm.agents.prompt_source import Messages, row_messages
from afm.errors import ConfigError, DataError
from afm.rollout.routes import Route, Routes
from verl_ext.rows import question_is_unclear, rows_of
from verl_ext.settings import SETTINGS_FILE, RlSettings


@dataclass(frozen=True, slots=True)
class RlPrompts:
    """What the training rows of a run are asked with, by key in ``agents:`` (empty where all have one agent)."""

    by_agent: Mapping[str, RunPrompts]

    @property
    def record(self) -> PromptRecord:
        """What the model of the run is trained with, by this run and before it."""
        every = list(self.by_agent.values())
        asked = reduce(PromptRecord.plus, (prompts.asked for prompts in every))
        return asked.after(every[0].trained)

    def __str__(self) -> str:
        return "; ".join(
            f"{name}: {prompts}" if name else str(prompts) for name, prompts in self.by_agent.items()
        )


def rl_prompts(settings: RlSettings) -> RlPrompts:
    """The prompts of the training rows; those of the validation are checked, too.

    Raises:
        ConfigError: The model was trained with another prompt, and ``prompt_check`` is on; or a file cannot be read.
        DataError: A row has no prompt; with file and row.
    """
    routes = settings.routes()

    def asked(route: Route, files: Sequence[str]) -> RunPrompts:
        rows = _asked(files, routes, route)
        return run_prompts(route.prompt, route.spec, rows, settings.model, check=settings.prompt_check)

    for route in routes:
        asked(route, settings.val_files)
    return RlPrompts({route.name: asked(route, settings.train_files) for route in routes})


def keep_prompts(prompts: RlPrompts, out: Path, step: int) -> dict[str, str]:
    """Write the record of a run into its folder, and the files that ``prompt`` names.

    Args:
        step: Of the checkpoint that the run goes on from.

    Returns:
        What the settings that its workers read are to say as ``prompt``, by key in ``agents:``.

    Raises:
        ConfigError: The steps before were asked with another prompt.
    """
    kept = {name: str(entry.source.kept_in(out)) for name, entry in prompts.by_agent.items()}
    file = out / SETTINGS_FILE
    before = yaml.safe_load(file.read_text(encoding="utf-8")) if step and file.is_file() else {}
    for name, now in kept.items() if before else ():
        earlier = _earlier(before, name)
        if Path(earlier).name != Path(now).name:
            raise ConfigError(
                f"prompt: {out} holds a run up to step {step} with prompt {earlier}, and this one says "
                f"{prompts.by_agent[name].source}; choose another output_dir"
            )
    prompts.record.save(out / PROMPT_FILE)
    return kept


def _earlier(settings: Mapping[str, Any], name: str) -> str:
    entry = (settings.get("agents") or {}).get(name) or {}
    return str(entry.get("prompt") or settings.get("prompt") or PromptMode.OWN.value)


def _asked(files: Sequence[str], routes: Routes, route: Route) -> Iterator[tuple[str, str, Messages | None]]:
    """The rows of one agent, with their own prompts.

    Raises:
        DataError: With ``own`` or a file, a row's question cannot be told from its instruction.
    """
    wanted = ("data_source", "ability", "prompt", "question", "extra_info")
    from_rows = route.prompt.mode is PromptMode.ROW
    for file in files:
        for number, row in enumerate(rows_of(Path(file), wanted), 1):
            if routes.find(row.get("data_source") or "", row.get("ability") or "") is route:
                if not from_rows and question_is_unclear(row):
                    raise DataError(
                        "the row has no `question`, and several lines of its prompt begin with Question: or Task:, so a part "
                        "of the question could be asked; add extra_info.question, or say prompt=row",
                        path=file,
                        line=number,
                    )
                yield f"{file}:{number}", "?", row_messages(row.get("prompt")) if from_rows else None
