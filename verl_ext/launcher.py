"""Start, follow and resume a reinforcement-learning run, and export its model.

The entry points are ``python -m verl_ext.launcher [--dry-run] CONFIG [key=value ...]`` and :func:`run_rl`. The exit
status is that of the trainer.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from afm.agents import MODEL_AGENTS_DIR, save_agents
from afm.errors import AfmError, UsageError, described
from afm.findings import Finding, Level, has_gpu, refuse_errors
from afm.harness.settings import anchor_harness
from afm.presets import preset_lines
from afm.processes import follow_parent
from verl_ext.alarms import ALARMS_FILE, AlarmAction, RaisedAlarm, Watch, little_signal
from verl_ext.checkpoints import (
    CHECKPOINT_DIR,
    CHECKPOINT_REQUEST,
    exported_step,
    incomplete_after,
    resumable_step,
    saved_step,
)
from verl_ext.command import command, ensure_ray_token, environment, total_steps, trainer_environment
from verl_ext.compose import AGENT_LOOP_FILE, AGENT_LOOP_NAME, engine_of
from verl_ext.doctor import start_findings
from verl_ext.engines import SHOW_WEIGHTS
from verl_ext.export import AGENT_FILE, base_of, export_model, keep_prompts, prompts_of
from verl_ext.failures import (
    forget_failures,
    forget_losses,
    killed,
    loss_in_log,
    node_of_trainer,
    read_loss,
    read_verdict,
)
from verl_ext.kept_episodes import forget_after
from verl_ext.metrics import METRICS_FILE, MetricsLog, progress_line, read_metrics
from verl_ext.processes import ALARMED, ProcessBook, Trainer, scratch_folder
from verl_ext.ray_watch import TrainerPatience
from verl_ext.rows import rl_prompts
from verl_ext.settings import SETTINGS_FILE, RlSettings, as_plain, load_settings

LOG_FILE = "training.log"
PROCESS_FILE = "processes.json"
MODEL_DIR = "model"
_LOOPS = {False: "verl_ext.agent_loop.AfmAgentLoop", True: "verl_ext.harness_loop.HarnessAgentLoop"}
"""The agent loop of a run, by whether the run has a harness."""
_LOG_TAIL = 1 << 16
"""Bytes at the end of the log that are searched for the reason of a failure."""


_REFUSED = (
    "error: the Ray cluster {} rejected the token; expected the token that its head was started with; set RAY_AUTH_MODE=token "
    "and RAY_AUTH_TOKEN_PATH to a copy of the head's file (docs/tutorials/nodes.md)"
)

_OVERLOADED = (
    "error: Ray did not start on this machine within the 30 s that it allows itself: other jobs use its cores, or its "
    "disk is full; run the same command again when it is idle (log: {})"
)


def run_rl(config_path: str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> int:
    """Train with the settings of a YAML, from the last checkpoint if there is one, and return the trainer's exit status.

    Args:
        config_path: See :class:`verl_ext.settings.RlSettings`.
        overrides: ``key=value`` words. Keys may be dotted, values are YAML.
        dry_run: Start nothing. Print the resolved command, check it against verl's configuration, and report what is missing.

    Raises:
        ConfigError: A setting is wrong.
        EngineError: The trainer succeeded but left no model.
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
    for line in preset_lines(settings.published or {}):
        print(f"# {line}")
    steps = config.trainer.total_training_steps
    print(
        f"# verl accepts this configuration; {steps or 'all'} steps, output in {settings.output_dir}",
        flush=True,
    )
    if settings.platform == "gpu" and not has_gpu():
        print("warning: the recipe needs a GPU, and this machine has none (no nvidia-smi)", file=sys.stderr)
    findings = start_findings(settings, here=True)
    _warn(findings)
    missing = [f.text for f in findings if f.level is Level.ERROR] or _wrong_prompts(settings)
    for text in missing:
        print(f"error: this would not start: {text}", file=sys.stderr)
    return 1 if missing else 0


def _warn(findings: Iterable[Finding]) -> None:
    for text in (finding.text for finding in findings if finding.level is Level.WARNING):
        print(f"warning: {text}", file=sys.stderr)


def _wrong_prompts(settings: RlSettings) -> list[str]:
    try:
        print(f"# {rl_prompts(settings)}")
    except AfmError as error:
        return [str(error)]
    return []


class Run:
    """A run in its output folder."""

    def __init__(self, settings: RlSettings) -> None:
        self._settings = settings
        self._out = settings.output_dir.absolute()
        self._checkpoints = self._out / CHECKPOINT_DIR
        self._model = self._out / MODEL_DIR
        self._routes = settings.routes()
        self._stopped_by: RaisedAlarm | None = None

    def start(self) -> int:
        """Train the remaining steps, export the model, and return the trainer's exit status."""
        # A machine without GPUs may start a run on the nodes of a cluster, where other packages are installed.
        findings = start_findings(self._settings, here=has_gpu())
        refuse_errors(findings)
        _warn(findings)
        total = total_steps(self._settings)
        if (exported_step(self._model) or 0) >= total:
            print(f"{self._out}: already trained for {total} steps; the model is in {self._model}")
            return 0
        self._prompts = rl_prompts(self._settings)
        print(self._prompts, flush=True)
        self._out.mkdir(parents=True, exist_ok=True)
        with scratch_folder() as scratch:
            book = ProcessBook(self._out / PROCESS_FILE)
            ended = book.claim(scratch)
            if ended:
                print(f"ended {ended} processes of an earlier start")
            step = resumable_step(self._checkpoints)
            for later, lack in incomplete_after(self._checkpoints, step).items():
                print(f"the checkpoint of step {later} is incomplete and is skipped: it lacks {lack}")
            try:
                status = self._complete(step) if step >= total else self._train(scratch, book, step, total)
            finally:
                book.release()
        if status == 0:
            self._export()
            if text := little_signal(read_metrics(self._out / METRICS_FILE)):
                print(f"warning: {text}", file=sys.stderr)
        return status

    def _complete(self, step: int) -> int:
        """Copy the metrics of a trainer that finished its last step after its launcher had ended."""
        MetricsLog(self._out, step)
        return 0

    def _train(self, scratch: Path, book: ProcessBook, step: int, total: int) -> int:
        words, config = command(self._settings, str(scratch), total)
        self._write_settings(keep_prompts(self._prompts, self._out, step))
        forget_failures(self._out, step)
        forget_losses(self._out)
        forget_after(self._out, step, validated_again=bool(config.trainer.val_before_train))
        metrics = MetricsLog(self._out, step)
        rows = read_metrics(self._out / METRICS_FILE)
        alarms = self._settings.alarms
        if self._settings.weight_proof and engine_of(self._settings) not in SHOW_WEIGHTS:
            alarms = alarms.without_weights()
        watch = Watch(alarms, rows, self._out / ALARMS_FILE)
        print(f"training to step {total}" + (f", resuming after step {step}" if step else ""), flush=True)
        print(f"log: {self._out / LOG_FILE}", flush=True)
        log = self._out / LOG_FILE
        begin = log.stat().st_size if log.exists() else 0
        if self._settings.ray_address is None:
            ensure_ray_token()
        with Trainer(words, trainer_environment(self._settings), self._out / LOG_FILE) as trainer:
            patience = TrainerPatience(
                self._out,
                start_timeout_s=self._settings.start_timeout_s,
                loss_grace_s=self._settings.loss_grace_s,
            )
            ended = trainer.follow(metrics, book, lambda row: self._report(watch, row, total), patience)
            if ended.interrupted:
                print("stopping the trainer, which takes a few seconds", flush=True)
        if ended.status == ALARMED:
            print(
                f"an alarm stopped the run; start it again with other settings to continue from the checkpoint of step "
                f"{resumable_step(self._checkpoints)} in {self._checkpoints}"
            )
        elif ended.interrupted:
            print(f"stopped; {self._goes_on()}")
        elif ended.status != 0:
            self._explain(ended.status, begin)
        elif (reached := self._reached()) < total:
            print(self._ended_early(reached, total), file=sys.stderr)
        return ended.status

    def _reached(self) -> int:
        return max((row["step"] for row in read_metrics(self._out / METRICS_FILE)), default=0)

    def _ended_early(self, reached: int, total: int) -> str:
        saved = saved_step(self._checkpoints)
        lost = f"; the last checkpoint is of step {saved} (trainer.save_freq)" if saved < reached else ""
        return (
            f"warning: the run ended after step {reached} of {total}: verl dropped rows, for example by "
            f"data.filter_overlong_prompts, so its epochs have fewer steps; for more steps, add rows or raise trainer.total_epochs{lost}"
        )

    def _report(self, watch: Watch, row: Mapping[str, Any], total: int) -> bool:
        """Print a step and its alarms, and return whether the run ends here: an alarm stops it and its checkpoint is saved.

        The trainer saves a step before it reports it, so an alarm gets its checkpoint at the end of the next step.
        """
        print(progress_line(row, total), flush=True)
        raised = watch.look(row)
        for alarm in raised:
            print(f"alarm {alarm.alarm} ({alarm.action}): {alarm.message}", file=sys.stderr, flush=True)
        stops = [alarm for alarm in raised if alarm.action is AlarmAction.STOP]
        if stops and self._stopped_by is None:
            self._stopped_by = stops[0]
        if row["step"] >= total:
            return False  # nothing is left to stop
        if self._stopped_by and saved_step(self._checkpoints) >= self._stopped_by.step:
            return True
        if self._stopped_by or any(alarm.action is AlarmAction.CHECKPOINT for alarm in raised):
            (self._out / CHECKPOINT_REQUEST).touch()
        if stops:
            text = "the run ends after the current step, once its checkpoint is saved"
            print(f"alarm {stops[0].alarm}: {text}", file=sys.stderr, flush=True)
        return False

    def _write_settings(self, prompts: Mapping[str, str]) -> None:
        folder = self._out / MODEL_AGENTS_DIR
        shutil.rmtree(folder, ignore_errors=True)
        save_agents(self._routes.specs, self._out)
        plain = as_plain(self._settings) | {
            "agent": str(self._out / AGENT_FILE),
            "output_dir": str(self._out),
            "prompt": prompts.get("", "own"),
        }
        several = len(self._routes.specs) > 1
        for route in self._routes if self._settings.agents else ():
            name = f"{MODEL_AGENTS_DIR}/{route.declared.name}.yaml" if several else AGENT_FILE
            plain["agents"][route.name] |= {
                "agent": str(self._out / name),
                "limits": route.limits.model_dump(mode="json"),
                "prompt": prompts[route.name],
            }
        for part in (plain, *plain.get("agents", {}).values()):
            for key in ("tools", "rewards"):
                if isinstance(part.get(key), str):
                    part[key] = str(Path(part[key]).absolute())
        anchor_harness(plain, Path())
        (self._out / SETTINGS_FILE).write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
        loop = {
            "name": AGENT_LOOP_NAME,
            "_target_": _LOOPS[self._settings.harness is not None],
            "settings": str(self._out / SETTINGS_FILE),
        }
        (self._out / AGENT_LOOP_FILE).write_text(yaml.safe_dump([loop], sort_keys=False), encoding="utf-8")

    def _explain(self, status: int, begin: int) -> None:
        """Print why the trainer ended: the loss in one sentence, or the trainer's own reason, or the last lines of its log.

        Args:
            begin: Offset in bytes at which this start's part of the log begins.
        """
        log = self._out / LOG_FILE
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - _LOG_TAIL))
            tail = file.read().decode("utf-8", errors="replace")
        verdict = read_verdict(self._out)
        lost = read_loss(self._out) or (
            None if verdict else loss_in_log(tail, node_of_trainer(self._out)) or killed(status)
        )
        if "ray.exceptions.AuthenticationError" in tail:
            print(_REFUSED.format(self._settings.ray_address), file=sys.stderr)
            return
        if "The current node timed out during startup" in tail:
            print(_OVERLOADED.format(log), file=sys.stderr)
            return
        if lost is not None:
            print(f"{lost}; {self._goes_on(lost)}", file=sys.stderr)
            return
        print(f"the trainer ended with status {status}", file=sys.stderr)
        lines = "".join(tail.splitlines(keepends=True)[-25:])
        print(verdict or f"last lines of {log}:\n{lines}", file=sys.stderr)

    def _goes_on(self, lost: str = "") -> str:
        step = resumable_step(self._checkpoints)
        reached = self._reached()
        before = "once the node is replaced, " if "the node" in lost else ""
        if step == 0:
            return f"no checkpoint was saved yet: {before}the same command starts from the beginning"
        again = f" and repeats {reached - step} of the finished steps" if reached > step else ""
        return f"the last checkpoint is of step {step}: {before}the same command continues with step {step + 1}{again}"

    def _export(self) -> None:
        step = resumable_step(self._checkpoints)
        if step == 0:
            print("no checkpoint was saved (trainer.save_freq), so there is no model to export")
            return
        specs, prompts = self._routes.specs, prompts_of(self._out)
        export_model(self._checkpoints, step, self._model, *specs, prompts=prompts, base=base_of(self._out))
        print(f"model of step {step}: {self._model}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of this module and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest = [word for word in words if word != "--dry-run"]
    if not rest:
        raise UsageError("usage: python -m verl_ext.launcher [--dry-run] CONFIG [key=value ...]")
    follow_parent()
    return run_rl(rest[0], rest[1:], dry_run="--dry-run" in words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AfmError as error:
        if usage := isinstance(error, UsageError):
            error.command = "afm rl"
        print(f"error: {described(error)}", file=sys.stderr)
        sys.exit(2 if usage else 1)
    except KeyboardInterrupt:
        sys.exit(130)
