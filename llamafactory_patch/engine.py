"""Load LLaMA-Factory: one version, without torchaudio, and with fixes for three bugs in its dependencies.

LLaMA-Factory's own code trains unchanged.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import wraps
from hashlib import sha256
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from afm.errors import AfmError, ConfigError, EngineError, MissingExtraError, suggestion
from llamafactory_patch.settings import SftSettings, split_config

SUPPORTED = "0.9.5"
"""The only supported release of LLaMA-Factory; this package depends on its internals."""

TOKENISED_STAGES = ("sft", "dpo", "kto", "rm")
"""Stages whose rows this package tokenises; LLaMA-Factory tokenises those of the others."""

_HARDWARE_KEYS = frozenset(
    {"deepspeed", "enable_liger_kernel", "fsdp", "fsdp_config", "pure_bf16", "resume_from_checkpoint", "tf32"}
)
"""Keys that LLaMA-Factory accepts only on the GPUs of the run."""

_REFUSED = {
    "pt": "pre-training trains on every token of a text",
    "rm": "a reward model scores whole responses, so single tokens have no loss",
    "ppo": "LLaMA-Factory's PPO samples responses without tools; use `afm rl` for agents",
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The parsed arguments of LLaMA-Factory, and the settings of this package."""

    model: Any
    data: Any
    training: Any
    finetuning: Any
    sft: SftSettings

    @property
    def stage(self) -> str:
        """The stage of the run."""
        return str(self.finetuning.stage)


def load_engine() -> None:
    """Import LLaMA-Factory and register the chat template of Agent-FLAN with it; safe to repeat.

    Raises:
        MissingExtraError: LLaMA-Factory is not installed.
        EngineError: Its version is not supported.
    """
    try:
        version = metadata.version("llamafactory")
    except metadata.PackageNotFoundError:
        raise MissingExtraError("llamafactory", "sft") from None
    if version != SUPPORTED:
        raise EngineError(
            f"llamafactory {version} is installed, but llamafactory_patch was tested with {SUPPORTED} and might "
            f"mask wrongly without an error; install it with: pip install llamafactory=={SUPPORTED}"
        )
    with _torchaudio_stub():
        importlib.import_module("llamafactory.data")
    from llamafactory_patch.conversations import register_agent_flan

    register_agent_flan()


def mend_trainer() -> None:
    """Fix, in this process, the three bugs that make a resumed training differ from an uninterrupted one."""
    restore_numbered_cpu()
    group_by_length_again()
    end_at_last_step()


def parse_arguments(config: Mapping[str, Any]) -> Arguments:
    """Parse a configuration as a run with one process on a CPU does.

    Raises:
        ConfigError: LLaMA-Factory would refuse the configuration.
    """
    from llamafactory.data.template import TEMPLATES
    from llamafactory.hparams import get_train_args

    stock, own = split_config(config)
    stock = {key: value for key, value in stock.items() if key not in _HARDWARE_KEYS}
    with tempfile.TemporaryDirectory() as empty, quiet():
        try:
            model, data, training, finetuning, _ = get_train_args(
                {**stock, "use_cpu": True, "output_dir": empty}
            )
        except AfmError:
            raise
        except (ValueError, TypeError, AssertionError, ImportError, NotImplementedError, OSError) as error:
            raise ConfigError(str(error)) from None
    if data.template is not None and data.template not in TEMPLATES:
        raise ConfigError(
            f"template: LLaMA-Factory has no {data.template!r}; {suggestion(data.template, TEMPLATES)}"
        )
    arguments = Arguments(model, data, training, finetuning, own)
    _check_mask(arguments)
    return arguments


def _check_mask(arguments: Arguments) -> None:
    """Refuse the author mask where it would have no effect or be wrong."""
    stage = arguments.stage
    if stage in TOKENISED_STAGES and arguments.data.streaming:
        raise ConfigError(
            "streaming: rows are tokenised and stored before the run, which reads them from the disk and needs "
            "no more memory than with streaming; remove the key"
        )
    if not arguments.sft.ignore_observation:
        return
    if stage in _REFUSED:
        raise ConfigError(f"ignore_observation needs stage sft, dpo or kto, got {stage!r}: {_REFUSED[stage]}")
    if stage == "dpo" and getattr(arguments.finetuning, "ld_alpha", None) is not None:
        raise ConfigError(
            "ignore_observation does not work with ld_alpha, which needs all tokens of a response"
        )
    if arguments.data.train_on_prompt:
        raise ConfigError("ignore_observation trains on the agent's text only; set train_on_prompt=false")


def load_tools(arguments: Arguments) -> tuple[dict[str, Any], Any]:
    """Return ``tokenizer`` and ``processor`` of a training run, and its template. They are shared; do not change them.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or its chat template is not the configured one.
    """
    from llamafactory_patch.masks import check_chat_template

    model = asdict(arguments.model)
    for name in ("cache_dir", "block_diag_attn"):  # no effect on the tokenizer
        model.pop(name, None)
    asked = repr([model, *(getattr(arguments.data, name) for name in _OF_THE_TEMPLATE)])
    key = (asked, tokenizer_digest(str(arguments.model.model_name_or_path)))
    tools, template = _tools[key] = _tools.pop(key) if key in _tools else _load_tools(arguments)
    for oldest in list(_tools)[:-_KEPT_TOOLS]:
        del _tools[oldest]
    if arguments.sft.match_chat_template:
        check_chat_template(template, tools["tokenizer"])
    return tools, template


_OF_THE_TEMPLATE = (
    *("template", "tool_format", "default_system", "enable_thinking", "preserve_thinking", "train_on_prompt"),
    "mask_history",
)
_TOKENIZER_FILES = ("*token*.json", "*token*.py", "vocab*", "merges.txt", "*.model", "*.tiktoken")
_tools: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {}
"""The tools used last, because loading a large vocabulary takes seconds and memory."""
_KEPT_TOOLS = 3


def _load_tools(arguments: Arguments) -> tuple[dict[str, Any], Any]:
    from llamafactory.data import get_template_and_fix_tokenizer
    from llamafactory.data.template import TEMPLATES
    from llamafactory.model import load_tokenizer

    shared = TEMPLATES.copy()
    with quiet():
        try:
            tools = load_tokenizer(arguments.model)
            # It writes options such as default_system into the template, where the next configuration would find them.
            TEMPLATES.update(deepcopy(shared))
            return dict(tools), get_template_and_fix_tokenizer(tools["tokenizer"], arguments.data)
        except (OSError, ValueError, KeyError) as error:
            name = arguments.model.model_name_or_path
            raise ConfigError(f"{name}: its tokenizer cannot be used: {error}") from None
        finally:
            TEMPLATES.update(shared)


def tokenizer_digest(name: str) -> str:
    """Return a digest of the files of a local tokenizer, so that its folder may move; for others, the name."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    digest = sha256()
    for path in sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()[:16]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence log messages up to level ERROR."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _torchaudio_stub() -> Iterator[None]:
    """Let ``llamafactory.data.mm_plugin`` be imported where torchaudio is absent or broken.

    Symptom: ``import llamafactory.data`` fails on machines without audio (0.9.5, mm_plugin.py line 30
    imports torchaudio for every user). Cause: no CPU wheel of torchaudio fits current torch releases. The stub is removed
    afterwards, so transformers still reports torchaudio as unavailable. Only audio inputs need the real package, and they
    fail with an error without it.
    """
    if _real_torchaudio():
        yield
        return
    from transformers.utils import is_torchaudio_available

    is_torchaudio_available()  # caches its answer before the stub exists
    stub = ModuleType("torchaudio")
    stub.__spec__ = ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = stub
    try:
        yield
    finally:
        sys.modules.pop("torchaudio", None)


def _real_torchaudio() -> bool:
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):  # OSError: a wheel built for CUDA finds no libcudart
        for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
            del sys.modules[name]
        return False
    return True


def restore_numbered_cpu() -> None:
    """Let checkpoints be loaded onto the device ``cpu:0``.

    Symptom: a run with several CPU processes cannot resume: "don't know how to restore data location ...
    tagged with cpu:0". Cause: the trainer loads the optimizer onto ``args.device``, which accelerate numbers
    (transformers 5.5.4, ``Trainer._load_optimizer_and_scheduler``; accelerate 1.11.0), but torch 2.13 knows only the
    name without the number. Safe to repeat.
    """
    from torch import serialization

    if not any(entry[2] is _on_numbered_cpu for entry in serialization._package_registry):
        serialization.register_package(15, lambda storage: None, _on_numbered_cpu)


def _on_numbered_cpu(storage: object, location: str) -> object | None:
    return storage if location.startswith("cpu:") else None


def group_by_length_again() -> None:
    """Let a resumed training group rows by length as an uninterrupted one does.

    Symptom: a run with ``train_sampling_strategy: group_by_length`` that resumes after its first epoch trains on some rows
    twice, and on others not. Cause: ``LengthGroupedSampler`` draws from the global generator (transformers 5.5.4,
    ``Trainer._get_train_sampler``), whose state depends on what ran before. Safe to repeat.
    """
    import torch
    from transformers import Trainer
    from transformers.trainer_pt_utils import LengthGroupedSampler

    original = Trainer._get_train_sampler

    @wraps(original)
    def sampler_of(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        sampler = original(trainer, *args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            generator = sampler.generator = torch.Generator().manual_seed(trainer.args.seed)
            sampler.set_epoch = lambda epoch: generator.manual_seed(trainer.args.seed + epoch)
        return sampler

    if not hasattr(original, "__wrapped__"):
        Trainer._get_train_sampler = sampler_of


def end_at_last_step() -> None:
    """Let a run that was killed after its last step end there when it resumes.

    Symptom: a run that resumes from a checkpoint of step ``max_steps`` takes one more step and logs it. Cause: the
    trainer checks whether it is done only after a step (transformers 5.5.4, ``Trainer._run_epoch``). Safe to repeat.

    Raises:
        EngineError: The trainer does not have this method.
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
