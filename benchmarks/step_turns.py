"""Make two runs alternate step by step, so that both run under the same load; bench_step.py loads this into verl.

``STEP_TURNS`` is a folder, ``STEP_TURNS_NAME`` the name of this run, and ``STEP_TURNS_OTHER`` that of the other.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_ext.patching import after_import

POLL_S = 0.02


class Turns:
    """This training's side of the protocol: a file that names whose turn it is."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["STEP_TURNS"])
        self._name, self._other = os.environ["STEP_TURNS_NAME"], os.environ["STEP_TURNS_OTHER"]

    def ready(self) -> None:
        """Announce that this run is ready, and wait until the other is ready too."""
        (self._folder / f"{self._name}.ready").touch()
        while not (self._folder / f"{self._other}.ready").exists():
            time.sleep(POLL_S)
        self.wait()

    def wait(self) -> None:
        """Wait until it is this run's turn."""
        while (self._folder / "turn").read_text() != self._name:
            time.sleep(POLL_S)

    def hand_over(self) -> None:
        """Give the turn to the other training."""
        new = self._folder / f"{self._name}.turn"
        new.write_text(self._other)
        new.replace(self._folder / "turn")


def take_turns(module: ModuleType) -> None:
    """Hand over after each step, where verl's timers have stopped, and continue when the turn is back."""
    trainer, turns = module.PPOTrainer, Turns()
    begin, compute = trainer.on_train_begin, trainer._compute_metrics

    def on_train_begin(self: Any) -> None:
        begin(self)
        turns.ready()

    def _compute_metrics(self: Any, *values: Any, **options: Any) -> None:
        compute(self, *values, **options)
        turns.hand_over()
        if self.global_steps < self.total_training_steps:
            turns.wait()

    trainer.on_train_begin, trainer._compute_metrics = on_train_begin, _compute_metrics


def stock_sampler(*, trainer_mode: str, sampler_kwargs: Any, **given: Any) -> Any:
    """Return verl's own replay buffer with another polling interval for finished rollouts."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    return ReplayBuffer(
        trainer_mode=trainer_mode,
        sampler_kwargs=sampler_kwargs,
        poll_interval=sampler_kwargs["poll_interval_s"],
        **given,
    )


if "STEP_TURNS" in os.environ:
    after_import("verl.trainer.ppo.v1.trainer_base", take_turns)
