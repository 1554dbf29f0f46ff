"""Report the problems of a training run before it starts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm.errors import ConfigError, no_such_file
from afm.findings import Finding, Level, Report, has_gpu
from afm.memory_arithmetic import (
    Hardware,
    MemoryNeed,
    ModelShape,
    activation_bytes,
    cpu_finding,
    described,
    disk_finding,
    fsdp2_bytes,
    gpu_finding,
    model_shape,
    size_text,
)
from afm.terminal import plural
from llamafactory_patch.checks import check_data, check_model, check_output, check_trackers, stale_data
from llamafactory_patch.config import SftJob, fsdp_settings, resolve
from llamafactory_patch.engine import TOKENISED_STAGES, Arguments, load_engine, parse_arguments
from llamafactory_patch.run_folder import TOKENISED_FOLDER

if TYPE_CHECKING:
    from llamafactory_patch.data_check import DataSet

_PACKAGES = {"deepspeed": "deepspeed", "enable_liger_kernel": "liger-kernel"}
"""Packages for keys that LLaMA-Factory checks only on the GPUs of the run."""


def diagnose(
    config_path: str | Path,
    overrides: Sequence[str],
    hardware: Hardware,
    env: Mapping[str, str],
    report: Report | None = None,
) -> list[Finding]:
    """Return all findings about a training configuration without starting it; never raises."""
    report = report or Report()
    job = report.asked("keys", lambda: resolve(config_path, overrides))
    if job is None:
        return report.findings
    report.add(Finding(Level.OK, "keys", f"{len(job.config)} keys, all known"))
    report.add(*_engine_packages(job))
    report.asked("output", lambda: check_output(job))
    report.asked("model", lambda: check_model(job))
    report.asked("trackers", lambda: check_trackers(job, env))
    report.asked("fsdp", lambda: fsdp_settings(job))
    sequences, world = _sequences(job, report), _world(job, hardware)
    steps = training_steps(job.config, sequences, world)
    report.add(*_batch(job, steps, hardware))
    if steps is not None:
        report.add(*_updates(job.config, sequences, steps, world))
    shape = report.asked("model", lambda: model_shape(str(job.config.get("model_name_or_path", ""))))
    report.add(*_context(job, shape))
    if shape is None:
        text = "no estimate, because the model's config.json is not here"
        report.add(Finding(Level.WARNING, "memory", text))
        return report.findings
    report.add(_disk(job, shape, steps), *_memory(job, shape, hardware))
    return report.findings


def _sequences(job: SftJob, report: Report) -> int | None:
    """Check arguments and data with LLaMA-Factory; return the sequences of an epoch, if known."""
    arguments = report.asked("engine", lambda: _parsed(job))
    if arguments is None:
        report.asked("data", lambda: check_data(job))
        return None
    report.add(Finding(Level.OK, "engine", "LLaMA-Factory accepts the arguments"))
    sets = report.asked("data", lambda: _data_sets(job, arguments))
    if sets is None:
        return None
    report.add(*(Finding(Level.WARNING, "prompts", str(stale)) for stale in stale_data(job)))
    from llamafactory_patch.data_check import report_data

    return report_data(arguments, sets, report)


def _parsed(job: SftJob) -> Arguments:
    load_engine()
    return parse_arguments(job.config)


def _data_sets(job: SftJob, arguments: Arguments) -> list[DataSet]:
    from llamafactory_patch.data_check import read_data

    check_data(job)
    return read_data(arguments)


def prompt_summaries(job: SftJob) -> list[str]:
    """Return what training would do with the prompts of each data set.

    Raises:
        ConfigError: The model was trained with another prompt, or LLaMA-Factory would refuse the arguments.
        DataError: A whole file is broken.
    """
    if job.agent is None:
        return []
    arguments = _parsed(job)
    sets = _data_sets(job, arguments)
    from llamafactory_patch.data_check import check_records

    check_records(arguments, sets)
    return [f"{data_set.name}: {data_set.asked}" for data_set in sets if data_set.asked]


def show_examples(
    config_path: str | Path, overrides: Sequence[str], count: int, *, as_json: bool = False
) -> None:
    """Print the statistics of the training data, and ``count`` whole sequences as the trainer gets them.

    Reads the rows that a training run has stored; stores nothing.

    Raises:
        ConfigError: The configuration is wrong, its data is missing, or its rows have no labels.
        DataError: A row cannot be trained on.
    """
    job = resolve(config_path, overrides)
    check_data(job)
    arguments = _parsed(job)
    from llamafactory_patch.data_check import preparing
    from llamafactory_patch.statistics import print_examples
    from llamafactory_patch.tokenise import load_or_tokenise

    if arguments.stage not in TOKENISED_STAGES:
        raise ConfigError(f"stage: the rows of {arguments.stage!r} have no labels; nothing to show")
    data = arguments.data
    with preparing():
        made = load_or_tokenise(arguments, Path(data.tokenized_path or job.output_dir / TOKENISED_FOLDER))
    rows, prompts = made.sets["train"], made.prompts
    print_examples(rows, made.tokenizer, data.cutoff_len, count, prompts=prompts, as_json=as_json)


def obstacles(job: SftJob, env: Mapping[str, str]) -> list[str]:
    """Return the files, keys and packages that a training run lacks, without loading anything."""
    report = Report()
    for check in (check_output, check_model, check_data, lambda job: check_trackers(job, env)):
        report.asked("", partial(check, job))
    report.add(*_engine_packages(job))
    return [finding.text for finding in report.findings if finding.level is Level.ERROR]


def _engine_packages(job: SftJob) -> Iterator[Finding]:
    for key in filter(job.config.get, _PACKAGES):
        package = _PACKAGES[key]
        try:
            yield Finding(Level.OK, package, f"{metadata.version(package)} is installed")
        except metadata.PackageNotFoundError:
            here = has_gpu()
            place = "not installed" if here else "not installed here; the machine with GPUs needs it"
            text = f"{package}: {place}; pip install {package}, or remove {key}"
            yield Finding(Level.ERROR if here else Level.WARNING, package, text)
    if isinstance(settings := job.config.get("deepspeed"), str) and settings:
        absent = f": {no_such_file(settings)}; shipped: configs/deepspeed/zero2.json, zero3.json"
        try:
            dict(json.loads(Path(settings).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            fault = f" cannot be read as a JSON object: {error}" if Path(settings).exists() else absent
            yield Finding(Level.ERROR, "deepspeed", f"deepspeed: {settings}{fault}")


def _context(job: SftJob, shape: ModelShape | None) -> Iterator[Finding]:
    cutoff = int(job.config.get("cutoff_len") or 2048)
    if shape is not None and shape.max_positions:
        fits = cutoff <= shape.max_positions or job.config.get("rope_scaling")
        text = f"cutoff_len {cutoff:,}, the model has {shape.max_positions:,} positions"
        advice = "" if fits else "; lower it, or set rope_scaling=yarn"
        yield Finding(Level.OK if fits else Level.ERROR, "context", text + advice)
    if job.agent and (allowed := job.agent.limits.max_response_tokens or 0) > cutoff:
        text = f"agent {job.agent.name!r} may write {allowed:,} tokens after its prompt"
        yield Finding(Level.WARNING, "context", f"{text}, but is trained on {cutoff:,} including the prompt")


def _sequences_a_step(job: SftJob, hardware: Hardware) -> int:
    each = int(job.config.get("per_device_train_batch_size") or 8)
    return each * int(job.config.get("gradient_accumulation_steps") or 1) * _world(job, hardware)


def _world(job: SftJob, hardware: Hardware) -> int:
    return 1 if job.config.get("use_cpu") else hardware.world


def _batch(job: SftJob, steps: int | None, hardware: Hardware) -> Iterator[Finding]:
    config = job.config
    each = int(config.get("per_device_train_batch_size") or 8)
    grown = int(config.get("gradient_accumulation_steps") or 1)
    batch, world = _sequences_a_step(job, hardware), _world(job, hardware)
    text = f"{each} per device x {grown} accumulated x {world} = {plural(batch, 'sequence')} per step"
    if steps is not None:
        text += f", about {plural(steps, 'step')} ({warmup_steps(config, steps):,} of warm-up)"
    yield Finding(Level.OK, "batch", text)
    logged, saved = config.get("logging_steps", 500), config.get("save_steps", 500)
    if config.get("save_strategy", "steps") == "steps" and logged and saved % logged:
        text = f"save_steps={saved} is not a multiple of logging_steps={logged}: after a resume, one logged loss differs"
        yield Finding(Level.WARNING, "resume", text)


def _updates(config: Mapping[str, Any], sequences: int | None, steps: int, world: int) -> Iterator[Finding]:
    """Report a run that updates nothing, or less than its settings say."""
    each = config.get("per_device_train_batch_size", 8) * world
    if config.get("dataloader_drop_last") and sequences is not None and sequences < each:
        text = f"0 updates: dataloader_drop_last drops the only batch, {plural(sequences, 'sequence')} of {each:,}"
        yield Finding(Level.ERROR, "steps", f"{text}; set dataloader_drop_last=false, or add rows")
    if config.get("max_steps") == 0:
        text = "max_steps=0 does not end the run: num_train_epochs decides"
        yield Finding(Level.WARNING, "steps", f"{text}; remove it, or set max_steps=1 for a trial")
    if (warm := warmup_steps(config, steps)) >= steps and config.get("lr_scheduler_type") != "constant":
        text = f"{warm:,} of {plural(steps, 'step')} are warm-up, so the learning rate never reaches learning_rate"
        yield Finding(Level.WARNING, "steps", f"{text}; lower warmup_steps or warmup_ratio, or train longer")


def _disk(job: SftJob, shape: ModelShape, steps: int | None) -> Finding:
    trained = trained_parameters(shape, job.config)
    checkpoint = (2 if job.config.get("save_only_model") else 14) * trained
    if (kept := _checkpoints(job, steps)) is None:
        text = f"every checkpoint of {size_text(checkpoint)} is kept, and their number is unknown; set save_total_limit"
        return Finding(Level.WARNING, "disk", text)
    advice = "lower save_total_limit or set save_only_model=true (which cannot be resumed)"
    limit = int(job.config.get("save_total_limit") or kept)
    passing = ", and the next while it is written" if kept > limit else ""
    what = f"the model and {plural(min(kept, limit), 'checkpoint')}{passing}"
    here = bool(job.config.get("use_cpu")) or has_gpu()
    return disk_finding(2 * trained + kept * checkpoint, job.output_dir, what, advice, here=here)


def _checkpoints(job: SftJob, steps: int | None) -> int | None:
    """Return how many checkpoints are on the disk at once: the next is written before the oldest is deleted."""
    config, every = job.config, float(job.config.get("save_steps") or 500)
    limit = config.get("save_total_limit")
    match config.get("save_strategy", "steps"):
        case "no":
            written: int | None = 0
        case "epoch" if not config.get("max_steps", -1) > 0:
            written = -int(-float(config.get("num_train_epochs") or 3) // 1)
        case _:
            written = None if steps is None else int(1 / every if every < 1 else -(-steps // every))
    if not limit:
        return written
    return int(limit) + 1 if written is None else min(int(limit) + 1, written)


def cpu_need(config: Mapping[str, Any], shape: ModelShape) -> MemoryNeed:
    """Return the memory that training on a CPU needs."""
    return memory_need(shape, config, Sharding.NONE, 1)


def _memory(job: SftJob, shape: ModelShape, hardware: Hardware) -> Iterator[Finding]:
    if job.config.get("use_cpu"):
        need = cpu_need(job.config, shape)
        yield cpu_finding(need.total, described(need, ""), "lower per_device_train_batch_size or cutoff_len")
        return
    chosen = sharding_of(job.config)
    for kind in Sharding:
        need = memory_need(shape, job.config, kind, _world(job, hardware))
        here = kind is chosen
        advice = _advice(need, chosen) if here else ""
        yield gpu_finding(f"{kind}{' (as configured)' if here else ''}", need, hardware.gpu_gib, advice)


def _advice(need: MemoryNeed, sharding: Sharding) -> str:
    tips = ["enable_liger_kernel=true"] if need.logits > need.total / 4 else []
    if sharding is not Sharding.ZERO3_OFFLOAD:
        tips.append("deepspeed=configs/deepspeed/zero3_offload.json")
    return f"try {', '.join([*tips, 'more GPUs, a smaller cutoff_len, or LoRA'])}"


class Sharding(StrEnum):
    """How a model is distributed over GPUs."""

    NONE = "one copy per GPU"
    ZERO2 = "ZeRO-2"
    ZERO3 = "ZeRO-3"
    ZERO3_OFFLOAD = "ZeRO-3, offloaded"
    FSDP2 = "FSDP2"


def memory_need(shape: ModelShape, config: Mapping[str, Any], sharding: Sharding, gpus: int) -> MemoryNeed:
    """Estimate from the model's shape how much memory each of ``gpus`` needs for a configuration of LLaMA-Factory.

    For ZeRO, the states of parameters, gradients and AdamW follow DeepSpeed's estimators (0.19.8, ``estimate_zero2_...``
    and ``estimate_zero3_model_states_mem_needs``). The rest is in :mod:`afm.memory_arithmetic`. The estimates were never
    compared with a GPU.
    """
    rows = int(config.get("per_device_train_batch_size") or 8)
    stage = config.get("stage", "sft")
    tokens = rows * int(config.get("cutoff_len") or 2048) * (2 if stage == "dpo" else 1)
    width = 2 if config.get("bf16") or config.get("fp16") or config.get("pure_bf16") else 4
    checkpointing = not config.get("disable_gradient_checkpointing")
    activations = activation_bytes(shape, tokens, width, checkpointing=checkpointing)
    # Logits, their copy in fp32 and its gradient. Liger's fused loss never holds them all, but preferences are computed
    # from the logits of policy and reference (0.9.5, train/dpo/trainer.py).
    preferred = stage in ("dpo", "kto")
    logits = 0 if config.get("enable_liger_kernel") and not preferred else width + 4 + 4
    logits += width + 4 if _is_compared(config) else 0
    states = _states(shape, config, sharding, gpus, width) + _reference(shape, config, sharding, gpus, width)
    return MemoryNeed(states, activations, tokens * shape.vocab * logits)


def sharding_of(config: Mapping[str, Any]) -> Sharding:
    """Return how the configuration distributes the model."""
    if config.get("fsdp"):
        return Sharding.FSDP2
    settings = config.get("deepspeed")
    if not settings:
        return Sharding.NONE
    try:
        given = isinstance(settings, dict)
        zero = settings if given else json.loads(Path(settings).read_text(encoding="utf-8"))
        zero = zero["zero_optimization"]
    except (OSError, ValueError, LookupError, TypeError):
        return Sharding.NONE
    if not isinstance(zero, dict):
        return Sharding.NONE
    if zero.get("stage") == 3:
        return Sharding.ZERO3_OFFLOAD if zero.get("offload_param") else Sharding.ZERO3
    return Sharding.ZERO2 if zero.get("stage") == 2 else Sharding.NONE


def trained_parameters(shape: ModelShape, config: Mapping[str, Any]) -> int:
    """Return the number of parameters with gradients."""
    if config.get("finetuning_type", "lora") != "lora":
        return shape.parameters
    return shape.adapters(int(config.get("lora_rank") or 8), str(config.get("lora_target") or "all"))


def _is_compared(config: Mapping[str, Any]) -> bool:
    """Return whether the loss needs a reference model: in KTO, and in DPO with most losses."""
    stage = config.get("stage", "sft")
    return stage == "kto" or (stage == "dpo" and config.get("pref_loss") not in ("orpo", "simpo"))


def _reference(
    shape: ModelShape, config: Mapping[str, Any], sharding: Sharding, gpus: int, width: int
) -> int:
    """Return the bytes of the reference's weights: a second model, or none if it is the same model without adapters."""
    own = config.get("ref_model") or config.get("finetuning_type", "lora") != "lora"
    if not _is_compared(config) or not own:
        return 0
    match sharding:
        case Sharding.NONE | Sharding.ZERO2:
            return width * shape.parameters
        case Sharding.ZERO3 | Sharding.FSDP2:
            return width * shape.parameters // gpus
        case Sharding.ZERO3_OFFLOAD:
            return 0


def _states(shape: ModelShape, config: Mapping[str, Any], sharding: Sharding, gpus: int, width: int) -> int:
    trained = trained_parameters(shape, config)
    frozen = shape.parameters - trained if trained < shape.parameters else 0
    largest = 4 * shape.embedding
    match sharding:
        case Sharding.NONE:
            return 16 * trained + width * frozen
        case Sharding.ZERO2:
            return 2 * trained + 18 * trained // gpus + width * frozen
        case Sharding.ZERO3:
            return largest + 18 * trained // gpus + width * frozen // gpus
        case Sharding.ZERO3_OFFLOAD:
            return largest
        case Sharding.FSDP2:
            return fsdp2_bytes(shape, trained, gpus, width, frozen)


def training_steps(config: Mapping[str, Any], sequences: int | None, world: int) -> int | None:
    """Return the steps of the run (transformers 5.5.4, ``Trainer.set_initial_training_values``).

    Args:
        config: Configuration of LLaMA-Factory.
        sequences: Sequences of one epoch; ``None`` if unknown. Then only ``max_steps`` counts.
        world: Number of devices.
    """
    if config.get("max_steps", -1) > 0:
        return int(config["max_steps"])
    if sequences is None:
        return None
    each = config.get("per_device_train_batch_size", 8) * world
    batches = sequences // each if config.get("dataloader_drop_last") else -(-sequences // each)
    updates = max(1, -(-batches // config.get("gradient_accumulation_steps", 1)))
    return math.ceil(float(updates * config.get("num_train_epochs", 3)))


def warmup_steps(config: Mapping[str, Any], steps: int) -> int:
    """Return the warm-up steps; a setting below 1 is a share of all steps (transformers 5.5.4, ``get_warmup_steps``)."""
    ratio = config.get("warmup_ratio")
    warm = config.get("warmup_steps", 0) if ratio is None else ratio
    return int(warm) if warm >= 1 else math.ceil(steps * warm)
