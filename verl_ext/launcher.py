"""Start a reinforcement-learning run, follow it, resume it, export its model.

``python -m verl_ext.launcher [--dry-run] CONFIG [key=value ...]``, or :func:`run_rl`.
The exit status is the trainer's.
"""

from __future__ import annotations

import shlex
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from afm.agents import save_agent
from afm.errors import AfmError, ConfigError, UsageError
from afm.processes import follow_parent
from verl_ext import processes
from verl_ext.alarms import ALARMS_FILE, Action, Watch
from verl_ext.checkpoints import export_model, exported_step, resumable_step
from verl_ext.compat import CHECKPOINT_REQUEST
from verl_ext.compose import AGENT_LOOP_FILE, AGENT_LOOP_NAME, CHECKPOINT_DIR
from verl_ext.failures import forget_failures, read_verdict
from verl_ext.kept_episodes import forget_after
from verl_ext.metrics import METRICS_FILE, MetricsLog, progress_line, read_metrics
from verl_ext.plan import check_files, command, environment, total_steps, trainer_environment
from verl_ext.settings import SETTINGS_FILE, RlSettings, as_plain, load_settings
from verl_ext.trainer import ALARMED, Trainer, scratch_folder

LOG_FILE = "training.log"
PROCESS_FILE = "processes.json"
MODEL_DIR = "model"
AGENT_FILE = "agent.yaml"


def run_rl(config_path: str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> int:
    """Train as a YAML says, from the last checkpoint if there is one; returns the trainer's exit status.

    Args:
        config_path: See :class:`verl_ext.settings.RlSettings`.
        overrides: ``key=value``; keys may be dotted, values are YAML.
        dry_run: Print the resolved command, check it against verl's configuration, and start nothing.

    Raises:
        ConfigError: A setting is wrong.
        EngineError: The trainer ended well but left no model.
    """
    settings = load_settings(config_path, overrides)
    if dry_run:
        return _show(settings)
    run = Run(settings)
    return run.start()


def _show(settings: RlSettings) -> int:
    words, config = command(settings, "${RAY_SCRATCH}")
    for key, value in environment(settings).items():
        print(f"{key}={shlex.quote(value)} \\")
    print(" \\\n  ".join([shlex.join(words[:4]), *map(shlex.quote, words[4:])]))
    steps = config.trainer.total_training_steps
    try:
        check_files(settings)
    except ConfigError as error:
        print(f"warning: this would not start: {error}", file=sys.stderr)
    print(f"# verl accepts this configuration; {steps or 'all'} steps, output in {settings.output_dir}")
    return 0


class Run:
    """One run in its output folder."""

    def __init__(self, settings: RlSettings) -> None:
        self._settings = settings
        self._out = settings.output_dir.absolute()
        self._checkpoints = self._out / CHECKPOINT_DIR
        self._model = self._out / MODEL_DIR
        self._spec = settings.spec()

    def start(self) -> int:
        """Train what is left to train, then export the model."""
        check_files(self._settings)
        total = total_steps(self._settings)
        if (exported_step(self._model) or 0) >= total:
            print(f"{self._out}: already trained for {total} steps; the model is in {self._model}")
            return 0
        self._out.mkdir(parents=True, exist_ok=True)
        with scratch_folder() as scratch:
            book = processes.ProcessBook(self._out / PROCESS_FILE)
            ended = book.claim(scratch)
            if ended:
                print(f"ended {ended} processes that an earlier start left over")
            step = resumable_step(self._checkpoints)
            try:
                status = 0 if step >= total else self._train(scratch, book, step, total)
            finally:
                book.release()
        if status == 0:
            self._export()
        return status

    def _train(self, scratch: Path, book: processes.ProcessBook, step: int, total: int) -> int:
        words, _ = command(self._settings, str(scratch))
        self._write_settings()
        forget_failures(self._out)
        forget_after(self._out, step)
        metrics = MetricsLog(self._out, step)
        rows = read_metrics(self._out / METRICS_FILE)
        watch = Watch(self._settings.alarms, rows, self._out / ALARMS_FILE)
        print(f"training to step {total}" + (f", resuming after step {step}" if step else ""), flush=True)
        print(f"log: {self._out / LOG_FILE}", flush=True)
        with Trainer(words, trainer_environment(self._settings), self._out / LOG_FILE) as trainer:
            ended = trainer.follow(metrics, book, lambda row: self._report(watch, row, total))
        if ended.status == ALARMED:
            print(
                f"start again with other settings to continue from the last checkpoint in {self._checkpoints}"
            )
        elif ended.interrupted:
            print(f"stopped; start again to continue from the last checkpoint in {self._checkpoints}")
        elif ended.status != 0:
            self._explain(ended.status)
        return ended.status

    def _report(self, watch: Watch, row: Mapping[str, Any], total: int) -> bool:
        """Tell a step and its alarms; whether the run is to end."""
        print(progress_line(row, total), flush=True)
        actions = set()
        for finding in watch.look(row):
            print(f"alarm {finding.alarm} ({finding.action}): {finding.message}", file=sys.stderr, flush=True)
            actions.add(finding.action)
        if Action.CHECKPOINT in actions:
            (self._out / CHECKPOINT_REQUEST).touch()
        return Action.STOP in actions

    def _write_settings(self) -> None:
        agent = self._out / AGENT_FILE
        save_agent(self._spec, agent)
        plain = as_plain(self._settings) | {"agent": str(agent), "output_dir": str(self._out)}
        for key in ("tools", "rewards"):
            if isinstance(plain.get(key), str):
                plain[key] = str(Path(plain[key]).absolute())
        (self._out / SETTINGS_FILE).write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
        loop = {
            "name": AGENT_LOOP_NAME,
            "_target_": "verl_ext.agent_loop.AfmAgentLoop",
            "settings": str(self._out / SETTINGS_FILE),
        }
        (self._out / AGENT_LOOP_FILE).write_text(yaml.safe_dump([loop], sort_keys=False), encoding="utf-8")

    def _explain(self, status: int) -> None:
        print(f"the trainer ended with status {status}", file=sys.stderr)
        verdict = read_verdict(self._out)
        if verdict is not None:
            print(verdict, file=sys.stderr)
            return
        with (self._out / LOG_FILE).open(encoding="utf-8", errors="replace") as log:
            tail = deque(log, maxlen=25)
        print(f"last lines of {self._out / LOG_FILE}:\n" + "".join(tail), file=sys.stderr)

    def _export(self) -> None:
        step = resumable_step(self._checkpoints)
        if step == 0:
            print("no checkpoint was saved (trainer.save_freq), so there is no model to export")
            return
        export_model(self._checkpoints, step, self._model, self._spec)
        print(f"model of step {step}: {self._model}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of this module."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    flags = {word for word in words if word.startswith("--")}
    if unknown := flags - {"--dry-run"}:
        raise UsageError(f"unknown option {sorted(unknown)[0]!r}; expected --dry-run")
    rest = [word for word in words if word not in flags]
    if not rest:
        raise UsageError("usage: python -m verl_ext.launcher [--dry-run] CONFIG [key=value ...]")
    follow_parent()
    return run_rl(rest[0], rest[1:], dry_run="--dry-run" in flags)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
