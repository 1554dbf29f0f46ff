"""What would go wrong with a training, told before anything costs time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from afm.errors import AfmError, ConfigError
from llamafactory_patch.compat import check_version
from llamafactory_patch.config import SftJob, check_sources, fsdp_settings, resolve
from llamafactory_patch.memory import (
    MemoryNeed,
    ModelShape,
    Sharding,
    memory_need,
    model_shape,
    trained_parameters,
)
from llamafactory_patch.trackers import check_trackers

GIB = 1024**3
_SAMPLED_ROWS = 200


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """Where the training is meant to run."""

    nodes: int = 1
    gpus: int = 8
    gpu_gib: float = 80.0

    @property
    def world(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus


def diagnose(
    config_path: str | Path, overrides: Sequence[str], hardware: Hardware, env: Mapping[str, str]
) -> list[Finding]:
    """Everything that can be said about a training configuration without starting it; no error is raised."""
    try:
        job = resolve(config_path, overrides)
    except AfmError as error:
        return [Finding(Level.ERROR, "keys", str(error))]
    findings = [Finding(Level.OK, "keys", f"{len(job.config)} keys, all known")]
    findings += _checked("engine", check_version, "the supported LLaMA-Factory is installed")
    findings += _engine_packages(job)
    findings += _checked("model and data", lambda: check_sources(job), "model and data set are named")
    findings += _checked("trackers", lambda: check_trackers(job, env), "trackers can log in")
    findings += _checked("fsdp", lambda: fsdp_settings(job), "") if job.config.get("fsdp_config") else []
    rows = _data_rows(job)
    findings += _data(job, rows)
    shape = model_shape(str(job.config.get("model_name_or_path", "")))
    findings += _context(job, shape)
    findings += _steps(job, rows, hardware)
    if shape is None:
        findings.append(Finding(Level.WARNING, "memory", "the model's config.json is not here; no estimate"))
        return findings
    return [*findings, *_disk(job, shape), *_memory(job, shape, hardware)]


def _checked(subject: str, check: Any, fine: str) -> list[Finding]:
    try:
        check()
    except AfmError as error:
        return [Finding(Level.ERROR, subject, str(error))]
    return [Finding(Level.OK, subject, fine)] if fine else []


def _engine_packages(job: SftJob) -> Iterator[Finding]:
    settings = job.config.get("deepspeed")
    if not settings:
        return
    try:
        yield Finding(Level.OK, "deepspeed", f"{metadata.version('deepspeed')} is installed")
    except metadata.PackageNotFoundError:
        yield Finding(Level.ERROR, "deepspeed", "not installed; pip install deepspeed==0.19.8, or deepspeed=")
    if isinstance(settings, str):
        try:
            json.loads(Path(settings).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            yield Finding(Level.ERROR, "deepspeed", f"{settings} cannot be read as JSON: {error}")


def _data_files(job: SftJob) -> Iterator[Path]:
    folder = Path(str(job.config.get("dataset_dir", "data")))
    names = job.config.get("dataset") or []
    try:
        index = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for name in names.split(",") if isinstance(names, str) else names:
        file = index.get(str(name).strip(), {}).get("file_name")
        if isinstance(file, str):
            yield folder / file


def _data_rows(job: SftJob) -> list[Any] | None:
    """All rows of the training files; ``None`` when one is absent or no JSON."""
    rows: list[Any] = []
    for file in _data_files(job):
        try:
            text = file.read_text(encoding="utf-8")
            rows += (
                [json.loads(line) for line in text.splitlines() if line]
                if file.suffix == ".jsonl"
                else json.loads(text)
            )
        except (OSError, ValueError, TypeError):
            return None
    return rows or None


def _data(job: SftJob, rows: list[Any] | None) -> Iterator[Finding]:
    for file in _data_files(job):
        if not file.exists():
            yield Finding(Level.ERROR, "data", f"{file} is missing, though dataset_info.json names it")
    if rows is not None:
        yield Finding(Level.OK, "data", f"{len(rows):,} rows")
        yield from _lengths(job, rows)


def _lengths(job: SftJob, rows: list[Any]) -> Iterator[Finding]:
    """Tokens of a sample of rows against ``cutoff_len``."""
    file = Path(str(job.config.get("model_name_or_path"))).expanduser() / "tokenizer.json"
    cutoff = int(job.config.get("cutoff_len") or 2048)
    if not file.is_file():
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    step = max(1, len(rows) // _SAMPLED_ROWS)
    texts = [" ".join(_texts(row)) for row in islice(rows, 0, None, step)]
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    long = sum(length > cutoff for length in lengths)
    said = f"{long} of {len(lengths)} sampled rows are longer than cutoff_len={cutoff:,} (longest {max(lengths):,} tokens)"
    yield Finding(
        Level.WARNING if long else Level.OK, "lengths", said + ("; they will be cut" if long else "")
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


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


def _steps(job: SftJob, rows: list[Any] | None, hardware: Hardware) -> Iterator[Finding]:
    config = job.config
    world = 1 if config.get("use_cpu") else hardware.world
    each = int(config.get("per_device_train_batch_size") or 8)
    grown = int(config.get("gradient_accumulation_steps") or 1)
    batch = each * grown * world
    text = f"{each} a device x {grown} accumulated x {world} = {batch} sequences a step"
    if config.get("max_steps", -1) > 0:
        text += f", {config['max_steps']:,} steps"
    elif rows is not None:
        steps = max(1, int(len(rows) / batch * float(config.get("num_train_epochs") or 3)))
        warm = float(config.get("warmup_steps") or 0)
        text += f", about {steps:,} steps ({round(steps * warm if warm < 1 else warm):,} of warm-up)"
    yield Finding(Level.OK, "batch", text)
    logged, saved = config.get("logging_steps", 500), config.get("save_steps", 500)
    if config.get("save_strategy", "steps") == "steps" and logged and saved % logged:
        text = f"save_steps={saved} is no multiple of logging_steps={logged}: after a resume one logged loss differs"
        yield Finding(Level.WARNING, "resume", text)


def _disk(job: SftJob, shape: ModelShape) -> Iterator[Finding]:
    trained = trained_parameters(shape, job.config)
    model = 2 * trained
    checkpoint = model if job.config.get("save_only_model") else model + 12 * trained
    kept = int(job.config.get("save_total_limit") or 2) + 1  # the next one is written before the oldest goes
    need = model + kept * checkpoint
    folder = job.output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = (
        f"{need / GIB:,.1f} GiB for the model and {kept} checkpoints, {free / GIB:,.1f} GiB free at {folder}"
    )
    short = "; lower save_total_limit or set save_only_model=true (which cannot be resumed)"
    yield Finding(Level.OK if need < free else Level.ERROR, "disk", text + ("" if need < free else short))


def _memory(job: SftJob, shape: ModelShape, hardware: Hardware) -> Iterator[Finding]:
    chosen = sharding_of(job)
    for kind in Sharding:
        need = memory_need(shape, job.config, kind, 1 if job.config.get("use_cpu") else hardware.world)
        here = kind is chosen
        fits = need.total < 0.92 * hardware.gpu_gib * GIB  # the rest is the driver's and fragmentation
        level = Level.WARNING if here and not fits and not job.config.get("use_cpu") else Level.OK
        advice = "" if fits or not here else _advice(need, chosen)
        mark = " (as configured)" if here else ""
        over = "" if fits else f", more than {hardware.gpu_gib:g}"
        yield Finding(level, "memory", f"{kind}{mark}: {described(need)}{over}{advice}")


def sharding_of(job: SftJob) -> Sharding:
    """How the configuration spreads the model."""
    if job.config.get("fsdp"):
        return Sharding.FSDP2
    settings = job.config.get("deepspeed")
    if not settings:
        return Sharding.NONE
    try:
        zero = (
            settings if isinstance(settings, dict) else json.loads(Path(settings).read_text(encoding="utf-8"))
        )
        zero = zero["zero_optimization"]
    except (OSError, ValueError, KeyError):
        return Sharding.NONE
    if zero.get("stage") == 3:
        return Sharding.ZERO3_OFFLOAD if zero.get("offload_param") else Sharding.ZERO3
    return Sharding.ZERO2 if zero.get("stage") == 2 else Sharding.NONE


def described(need: MemoryNeed) -> str:
    """A need in GiB and its parts."""
    parts = (need.states, need.activations, need.logits)
    states, activations, logits = (f"{part / GIB:.1f}" for part in parts)
    return f"{need.total / GIB:.1f} GiB a GPU = states {states} + activations {activations} + logits {logits}"


def _advice(need: MemoryNeed, sharding: Sharding) -> str:
    tips = ["enable_liger_kernel=true"] if need.logits > need.total / 4 else []
    if sharding is not Sharding.ZERO3_OFFLOAD:
        tips.append("deepspeed=configs/deepspeed/zero3_offload.json")
    return f"; try {', '.join([*tips, 'more GPUs, a smaller cutoff_len, or LoRA'])}"


def hardware_from(env: Mapping[str, str], nodes: int | None, gpus: int | None, gpu_gib: float) -> Hardware:
    """The options given, else what the environment says about the job, else one node of eight GPUs.

    Raises:
        ConfigError: A variable is no number.
    """
    try:
        return Hardware(
            nodes or int(env.get("NNODES", "1")), gpus or int(env.get("NPROC_PER_NODE", "8")), gpu_gib
        )
    except ValueError:
        raise ConfigError(
            f"NNODES={env.get('NNODES')!r}, NPROC_PER_NODE={env.get('NPROC_PER_NODE')!r}: expected numbers"
        ) from None
