"""What would go wrong with a training, told before anything costs time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm.agents.prompt_record import check_prompts, record_of_model
from afm.findings import Finding, Level, Report
from afm.memory_arithmetic import (
    GIB,
    Hardware,
    MemoryNeed,
    ModelShape,
    described,
    disk_finding,
    fits,
    model_shape,
)
from llamafactory_patch.checks import check_data, check_model, check_output, check_trackers
from llamafactory_patch.config import SftJob, fsdp_settings, resolve
from llamafactory_patch.engine import Arguments, load_engine, load_tools, parse_arguments
from llamafactory_patch.memory import Sharding, memory_need, sharding_of, trained_parameters

if TYPE_CHECKING:
    from llamafactory_patch.rehearsal import DataSet, Rehearsal

_LISTED_ROWS = 3
_PACKAGES = {"deepspeed": "deepspeed", "enable_liger_kernel": "liger-kernel"}
"""What keys need that LLaMA-Factory looks for on the GPUs of the training only."""


def diagnose(
    config_path: str | Path, overrides: Sequence[str], hardware: Hardware, env: Mapping[str, str]
) -> list[Finding]:
    """Everything that can be said about a training configuration without starting it; no error is raised."""
    report = Report()
    job = report.asked("keys", lambda: resolve(config_path, overrides))
    if job is None:
        return report.findings
    report.add(Finding(Level.OK, "keys", f"{len(job.config)} keys, all known"))
    report.add(*_engine_packages(job))
    report.asked("output", lambda: check_output(job))
    report.asked("model", lambda: check_model(job))
    report.asked("trackers", lambda: check_trackers(job, env))
    report.asked("fsdp", lambda: fsdp_settings(job))
    steps = training_steps(job.config, _rehearsed_rows(job, report), _world(job, hardware))
    report.add(*_batch(job, steps, hardware))
    shape = report.asked("model", lambda: model_shape(str(job.config.get("model_name_or_path", ""))))
    report.add(*_context(job, shape))
    if shape is None:
        report.add(Finding(Level.WARNING, "memory", "the model's config.json is not here; no estimate"))
        return report.findings
    report.add(_disk(job, shape, steps), *_memory(job, shape, hardware))
    return report.findings


def _rehearsed_rows(job: SftJob, report: Report) -> int | None:
    """Ask LLaMA-Factory about the arguments and the data; what the trainer gets of it, if that can be told."""
    arguments = report.asked("engine", lambda: _parsed(job))
    if arguments is None:
        report.asked("data", lambda: check_data(job))
        return None
    report.add(Finding(Level.OK, "engine", "LLaMA-Factory accepts the arguments"))
    sets = report.asked("data", lambda: _data_sets(job, arguments))
    if sets is None:
        return None
    from llamafactory_patch.rehearsal import check_silent_roles, stops_at_bad_rows

    stops = stops_at_bad_rows(arguments)
    for data_set in sets:
        report.add(*_data(data_set, stops))
    report.asked("prompts", lambda: _check_prompts(job, sets))
    report.asked("data", lambda: check_silent_roles(arguments))
    rehearsal = _rehearsed(job, report, arguments, sets)
    return _trained_rows(report, arguments, sets, rehearsal)


def _rehearsed(
    job: SftJob, report: Report, arguments: Arguments, sets: Sequence[DataSet]
) -> Rehearsal | None:
    """Send a sample of the rows the way of a training, if there is a tokenizer here to do it with."""
    from llamafactory_patch.rehearsal import rehearse, sequence_lengths

    local = [data_set for data_set in sets if data_set.sample]
    here = Path(str(job.config.get("model_name_or_path") or "-")).expanduser().is_dir()
    if not local or len(local) != len(sets) or not here:
        return None
    if report.asked("tokenizer", lambda: load_tools(arguments)) is None:
        return None
    rehearsal = report.asked("data", lambda: rehearse(arguments, sets))
    if rehearsal is not None:
        report.add(*_sample(rehearsal, arguments))
    rows = [row for data_set in sets for row in data_set.sample]
    report.add(*_lengths(arguments, sequence_lengths(arguments, rows)))
    return rehearsal


def _trained_rows(
    report: Report, arguments: Arguments, sets: Sequence[DataSet], rehearsal: Rehearsal | None
) -> int | None:
    """Sequences of one epoch, if they can be told."""
    data = arguments.data
    trained = [data_set for data_set in sets if not data_set.evaluation]
    if not trained or any(data_set.rows is None for data_set in trained):
        return None
    rows = sum(data_set.taken for data_set in trained)
    evaluated = validation_rows(rows, data.val_size)
    if evaluated:
        text = f"val_size={data.val_size} takes {evaluated:,} of {rows:,} rows away for evaluation"
        report.add(Finding(Level.OK if evaluated < rows else Level.ERROR, "data", text))
    rows = max(0, rows - evaluated)
    if rehearsal is not None:
        return -(-rows * rehearsal.sequences // rehearsal.rows)
    mixed = data.mix_strategy != "concat" and len(trained) > 1
    return None if data.packing or mixed else rows


def _parsed(job: SftJob) -> Arguments:
    load_engine()
    return parse_arguments(job.config)


def _data_sets(job: SftJob, arguments: Arguments) -> list[DataSet]:
    from llamafactory_patch.rehearsal import read_data

    check_data(job)
    return list(read_data(arguments))


def _data(data_set: DataSet, stops: bool) -> Iterator[Finding]:
    if data_set.rows is None:
        yield Finding(
            Level.WARNING, "data", f"{data_set.name}: not in local JSON files, so its rows were not read"
        )
        return
    good = data_set.rows - data_set.bad
    purpose = "evaluate" if data_set.evaluation else "train"
    yield Finding(
        Level.OK if good else Level.ERROR, "data", f"{data_set.name}: {good:,} rows to {purpose} on"
    )
    if data_set.asked and sum(data_set.asked.rows.values()):
        yield Finding(Level.OK, "prompts", f"{data_set.name}: {data_set.asked}")
    if not data_set.bad:
        return
    listed = "; ".join(data_set.listed)
    text = f"{data_set.name}: {data_set.bad:,} bad rows, {listed}{' ...' if data_set.bad > len(data_set.listed) else ''}"
    yield Finding(Level.ERROR if stops else Level.WARNING, "data", text)


def _check_prompts(job: SftJob, sets: Sequence[DataSet]) -> None:
    """Hold the prompts of the training rows against those of the model.

    Raises:
        ConfigError: It was trained with another.
    """
    base = record_of_model(str(job.config.get("model_name_or_path", "")))
    for data_set in sets:
        if data_set.asked and not data_set.evaluation and job.config.get("prompt_check", True):
            check_prompts(data_set.asked.record, base, str(job.config["model_name_or_path"]))


def prompt_words(job: SftJob) -> list[str]:
    """What becomes of the prompts of each data set, read as a training reads them.

    Raises:
        ConfigError: The model was trained with another prompt, or the training would refuse its arguments.
        DataError: A file as a whole is broken.
    """
    if job.agent is None:
        return []
    sets = _data_sets(job, _parsed(job))
    _check_prompts(job, sets)
    return [f"{data_set.name}: {data_set.asked}" for data_set in sets if data_set.asked]


def _sample(rehearsal: Rehearsal, arguments: Arguments) -> Iterator[Finding]:
    """What a training would say of the sampled rows."""
    from llamafactory_patch.rehearsal import stops_at_bad_rows

    bad = [row for row in rehearsal.bad if row.is_fault]
    if not rehearsal.sequences and rehearsal.rows:
        yield Finding(Level.ERROR, "data", "no sampled row can be trained on")
    if bad:
        listed = "; ".join(map(str, bad[:_LISTED_ROWS])) + (" ..." if len(bad) > _LISTED_ROWS else "")
        level = Level.ERROR if stops_at_bad_rows(arguments) else Level.WARNING
        yield Finding(level, "data", f"{len(bad):,} bad rows in the sample, {listed}")
    else:
        yield Finding(Level.OK, "sample", f"{rehearsal.rows:,} rows can be prepared as in a training")


def _lengths(arguments: Arguments, lengths: Sequence[int]) -> Iterator[Finding]:
    """Tokens of a sample of rows against ``cutoff_len``."""
    if not lengths:
        return
    cutoff = arguments.data.cutoff_len
    long = sum(length > cutoff for length in lengths)
    said = f"{long} of {len(lengths)} sampled rows are longer than cutoff_len={cutoff:,} (longest {max(lengths):,} tokens)"
    yield Finding(
        Level.WARNING if long else Level.OK, "lengths", said + ("; they will be cut" if long else "")
    )


def obstacles(job: SftJob, env: Mapping[str, str]) -> list[str]:
    """Files, keys and packages that a training needs and does not have; nothing is loaded to find out."""
    report = Report()
    for check in (check_output, check_model, check_data, lambda job: check_trackers(job, env)):
        report.asked("", partial(check, job))
    report.add(*_engine_packages(job))
    return [finding.text for finding in report.findings if finding.level is Level.ERROR]


def _engine_packages(job: SftJob) -> Iterator[Finding]:
    for key, package in _PACKAGES.items():
        if not job.config.get(key):
            continue
        try:
            yield Finding(Level.OK, package, f"{metadata.version(package)} is installed")
        except metadata.PackageNotFoundError:
            yield Finding(
                Level.ERROR, package, f"{package}: not installed; pip install {package}, or leave {key} out"
            )
    settings = job.config.get("deepspeed")
    if isinstance(settings, str) and settings:
        try:
            dict(json.loads(Path(settings).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            yield Finding(Level.ERROR, "deepspeed", f"{settings} cannot be read as a JSON object: {error}")


def _context(job: SftJob, shape: ModelShape | None) -> Iterator[Finding]:
    cutoff = int(job.config.get("cutoff_len") or 2048)
    if shape is not None and shape.max_positions:
        fits = cutoff <= shape.max_positions or job.config.get("rope_scaling")
        text = f"cutoff_len {cutoff:,} against {shape.max_positions:,} positions of the model"
        advice = "" if fits else "; lower it, or set rope_scaling=yarn"
        yield Finding(Level.OK if fits else Level.ERROR, "context", text + advice)
    allowed = job.agent.limits.max_response_tokens if job.agent else None
    if allowed is not None and allowed > cutoff:
        text = (
            f"agent {job.agent.name!r} may write {allowed:,} tokens after its prompt, " if job.agent else ""
        )
        yield Finding(Level.WARNING, "context", f"{text}but is trained on {cutoff:,} with the prompt")


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
    text = f"{each} a device x {grown} accumulated x {world} = {batch} sequences a step"
    if steps is not None:
        text += f", about {steps:,} steps ({warmup_steps(config, steps):,} of warm-up)"
    yield Finding(Level.OK, "batch", text)
    logged, saved = config.get("logging_steps", 500), config.get("save_steps", 500)
    if config.get("save_strategy", "steps") == "steps" and logged and saved % logged:
        text = f"save_steps={saved} is no multiple of logging_steps={logged}: after a resume one logged loss differs"
        yield Finding(Level.WARNING, "resume", text)


def _disk(job: SftJob, shape: ModelShape, steps: int | None) -> Finding:
    trained = trained_parameters(shape, job.config)
    model = 2 * trained
    checkpoint = model if job.config.get("save_only_model") else model + 12 * trained
    kept = _checkpoints(job, steps)
    if kept is None:
        text = f"every checkpoint of {checkpoint / GIB:,.1f} GiB is kept, nobody knows how many; set save_total_limit"
        return Finding(Level.WARNING, "disk", text)
    advice = "lower save_total_limit or set save_only_model=true (which cannot be resumed)"
    what = f"the model and {kept} checkpoints"
    return disk_finding(model + kept * checkpoint, job.output_dir, what, advice)


def _checkpoints(job: SftJob, steps: int | None) -> int | None:
    """How many stand on the disk at once: the next one is written before the oldest goes."""
    config = job.config
    limit = config.get("save_total_limit")
    every = float(config.get("save_steps") or 500)
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


def _memory(job: SftJob, shape: ModelShape, hardware: Hardware) -> Iterator[Finding]:
    chosen = sharding_of(job.config)
    for kind in Sharding:
        need = memory_need(shape, job.config, kind, _world(job, hardware))
        here = kind is chosen
        enough = fits(need.total, hardware.gpu_gib)
        level = Level.WARNING if here and not enough and not job.config.get("use_cpu") else Level.OK
        advice = "" if enough or not here else _advice(need, chosen)
        mark = " (as configured)" if here else ""
        over = "" if enough else f", more than {hardware.gpu_gib:g}"
        yield Finding(level, "memory", f"{kind}{mark}: {described(need)}{over}{advice}")


def _advice(need: MemoryNeed, sharding: Sharding) -> str:
    tips = ["enable_liger_kernel=true"] if need.logits > need.total / 4 else []
    if sharding is not Sharding.ZERO3_OFFLOAD:
        tips.append("deepspeed=configs/deepspeed/zero3_offload.json")
    return f"; try {', '.join([*tips, 'more GPUs, a smaller cutoff_len, or LoRA'])}"


def training_steps(config: Mapping[str, Any], sequences: int | None, world: int) -> int | None:
    """Steps of the whole training (transformers 5.5.4, ``Trainer.set_initial_training_values``).

    Args:
        config: Of LLaMA-Factory.
        sequences: Of one epoch; ``None`` if that cannot be told, and then only ``max_steps`` tells.
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
    """Steps in which the learning rate rises; below 1 it is a share (transformers 5.5.4, ``get_warmup_steps``)."""
    ratio = config.get("warmup_ratio")
    warm = config.get("warmup_steps", 0) if ratio is None else ratio
    return int(warm) if warm >= 1 else math.ceil(steps * warm)


def validation_rows(rows: int, val_size: float) -> int:
    """Rows that ``val_size`` takes away from the training (LLaMA-Factory 0.9.5, data/data_utils.py, ``split_dataset``)."""
    if val_size <= 1e-6:
        return 0
    return int(val_size) if val_size > 1 or isinstance(val_size, int) else math.ceil(rows * val_size)
