"""Which LLaMA-Factory this package fits, how it is imported without torchaudio, and what is mended below it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from afm.errors import EngineError, MissingExtraError

SUPPORTED = "0.9.5"
"""The one LLaMA-Factory release whose internals were read and tested."""


def check_version() -> None:
    """Refuse every LLaMA-Factory but the supported one.

    Raises:
        MissingExtraError: LLaMA-Factory is not installed.
        EngineError: Another version is installed.
    """
    try:
        found = metadata.version("llamafactory")
    except metadata.PackageNotFoundError:
        raise MissingExtraError("llamafactory", "sft") from None
    if found != SUPPORTED:
        raise EngineError(
            f"llamafactory {found} is installed, but llamafactory_patch reaches into {SUPPORTED} and would "
            f"mask wrongly in silence; install it with: pip install llamafactory=={SUPPORTED}"
        )


@contextmanager
def torchaudio_stub() -> Iterator[None]:
    """Let ``llamafactory.data.mm_plugin`` be imported where torchaudio is absent or broken.

    Symptom: ``import llamafactory.data`` fails on machines without audio (0.9.5, mm_plugin.py line 30
    imports torchaudio for every user). Cause: no CPU wheel of torchaudio fits current torch releases. The
    stub is gone afterwards, so that transformers keeps reporting torchaudio as unavailable; only audio
    inputs need the real one, and they fail loudly without it.
    """
    if _real_torchaudio():
        yield
        return
    from transformers.utils import is_torchaudio_available

    is_torchaudio_available()  # caches its answer, which must not see the stub
    stub = ModuleType("torchaudio")
    stub.__spec__ = ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = stub
    try:
        yield
    finally:
        sys.modules.pop("torchaudio", None)


def restore_numbered_cpu() -> None:
    """Let checkpoints be loaded onto the device ``cpu:0``.

    Symptom: a training of several CPU processes cannot resume, "don't know how to restore data location ...
    tagged with cpu:0". Cause: the trainer loads the optimizer onto ``args.device``, which accelerate numbers
    (transformers 5.5.4, ``Trainer._load_optimizer_and_scheduler``; accelerate 1.11.0), and torch 2.13 knows
    only the name without the number. Repeating it changes nothing.
    """
    from torch import serialization

    if not any(entry[2] is _on_numbered_cpu for entry in serialization._package_registry):
        serialization.register_package(15, lambda storage: None, _on_numbered_cpu)


def end_at_last_step() -> None:
    """Let a training that was killed behind its last step end there when it is started again.

    Symptom: started again from a checkpoint of step ``max_steps``, a training takes one step more and logs it. Cause:
    the trainer asks whether it is done only after a step (transformers 5.5.4, ``Trainer._run_epoch``). Repeating
    it changes nothing.

    Raises:
        EngineError: The trainer has no such method any more.
    """
    from transformers import Trainer

    run_epoch = getattr(Trainer, "_run_epoch", None)
    if run_epoch is None:
        raise EngineError(
            "transformers.Trainer has no _run_epoch; expected transformers 5.5, see requirements/"
        )
    if not hasattr(run_epoch, "__wrapped__"):
        Trainer._run_epoch = _ending_at_last_step(run_epoch)


def _ending_at_last_step(run_epoch: Callable[..., None]) -> Callable[..., None]:
    @wraps(run_epoch)
    def run(trainer: Any, *args: Any, **kwargs: Any) -> None:
        if 0 < trainer.state.max_steps <= trainer.state.global_step:
            trainer.control.should_training_stop = True
        else:
            run_epoch(trainer, *args, **kwargs)

    return run


def _on_numbered_cpu(storage: object, location: str) -> object | None:
    return storage if location.startswith("cpu:") else None


def _real_torchaudio() -> bool:
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):  # OSError: a wheel built for CUDA finds no libcudart
        for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
            del sys.modules[name]
        return False
    return True
