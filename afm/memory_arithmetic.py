"""Hardware of a training run, the shape of its model, and the memory that follows from both.

Fine-tuning and reinforcement learning share these formulas. They have not been compared with measurements on a GPU.
Activations assume attention that does not store its scores (flash, sdpa).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import ConfigError, json_word
from afm.findings import Finding, Level
from afm.terminal import plural

_HEADER = re.compile(r"^# Hardware: (\d+) nodes? x (\d+) GPUs? of (\d+) Gi?B", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Identical nodes with identical GPUs."""

    nodes: int = 1
    gpus: int = 8
    gpu_gib: float = 80.0

    @property
    def world(self) -> int:
        """Number of GPUs on all nodes."""
        return self.nodes * self.gpus

    def __str__(self) -> str:
        """Return ``2 nodes x 8 GPUs of 80 GiB``."""
        return f"{plural(self.nodes, 'node')} x {plural(self.gpus, 'GPU')} of {self.gpu_gib:g} GiB"


def recipe_hardware(config_file: Path) -> Hardware | None:
    """Read the line ``# Hardware: N nodes x M GPUs of G GB`` in a recipe's header, if there is one.

    Vendors write GB for what is about as many GiB: an H100 "of 80 GB" has 79.6 GiB.
    """
    try:
        header = _HEADER.search(config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return Hardware(int(header[1]), int(header[2]), float(header[3])) if header else None


def hardware_from(
    env: Mapping[str, str], config_file: Path, nodes: int | None, gpus: int | None, gpu_gib: float | None
) -> Hardware:
    """Return the hardware from the options, else from the environment, else from the recipe's header.

    Raises:
        ConfigError: A variable is not a positive number.
    """
    written = recipe_hardware(config_file) or Hardware()
    return Hardware(
        nodes or positive_variable(env, "NNODES", written.nodes),
        gpus or positive_variable(env, "NPROC_PER_NODE", written.gpus),
        gpu_gib or written.gpu_gib,
    )


def positive_variable(env: Mapping[str, str], name: str, default: int) -> int:
    """Return a count from the environment, or ``default`` if the variable is unset or empty.

    Raises:
        ConfigError: It is not a positive whole number.
    """
    text = env.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name}={text}: expected a positive whole number")
    return int(text)


LAYER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder (Llama, Qwen2, Qwen3)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    qkv_bias: bool
    head_norms: bool
    max_positions: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output width of the linear modules of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        shapes += [(self.hidden, self.mlp), (self.hidden, self.mlp), (self.mlp, self.hidden)]
        return dict(zip(LAYER_MODULES, shapes, strict=True))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        layer = sum(inputs * outputs for inputs, outputs in self.linears.values()) + 2 * self.hidden
        layer += (
            self.heads + 2 * self.kv_heads
        ) * self.head_dim * self.qkv_bias + 2 * self.head_dim * self.head_norms
        return self.layers * layer + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def embedding(self) -> int:
        """Number of parameters of the embedding, the largest single module."""
        return self.vocab * self.hidden

    def adapters(self, rank: int, targets: str) -> int:
        """Return the parameters of LoRA adapters of ``rank`` on ``targets`` (``all``, or module names with commas)."""
        names = LAYER_MODULES if targets == "all" else [name.strip() for name in targets.split(",")]
        linears = self.linears
        return self.layers * sum(rank * sum(linears[name]) for name in names if name in linears)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A tokenizer's folder has at least one of these files."""


def missing_model_files(folder: Path) -> list[str]:
    """List what a model's folder lacks: configuration, weights or tokenizer."""
    needed = {
        "config.json": ("config.json",),
        "weights": ("*.safetensors", "pytorch_model*.bin"),
        "tokenizer": TOKENIZER_FILES,
    }
    return [
        f"{name} ({' or '.join(patterns)})"
        for name, patterns in needed.items()
        if not any(file for pattern in patterns for file in folder.glob(pattern))
    ]


def model_shape(name_or_folder: str) -> ModelShape | None:
    """Return the shape of a model in a folder, or of Qwen2.5 1.5B, 3B, 7B, 32B or Llama-2 7B by name; else ``None``.

    Raises:
        ConfigError: The folder's ``config.json`` is broken.
    """
    file = Path(name_or_folder).expanduser() / "config.json"
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: not JSON: {error}; copy the model again") from None
        if not isinstance(config, dict):
            raise ConfigError(
                f"{file}: got {json_word(config)}, expected a model's settings as a JSON object"
            )
        return _shape_of(config)
    if re.fullmatch(r"meta-llama/Llama-2-7b(?:-chat)?-hf", name_or_folder):
        return _LLAMA_2_7B
    known = re.fullmatch(r"Qwen/Qwen2\.5-(?:Coder-)?(1\.5|3|7|32)B(?:-Instruct)?", name_or_folder)
    return _QWEN[known[1]] if known else None


def _shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if any(not isinstance(config.get(key), int) for key in needed) or config.get("num_experts"):
        return None
    kind = str(config.get("model_type"))
    heads = config["num_attention_heads"]
    return ModelShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        head_norms=kind == "qwen3",
        max_positions=int(config.get("max_position_embeddings") or 0),
    )


def _qwen(
    hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool
) -> ModelShape:
    return ModelShape(hidden, layers, heads, kv_heads, 128, mlp, vocab, tied, True, False, 32768)


_QWEN = {
    "1.5": _qwen(1536, 28, 12, 2, 8960, 151936, True),
    "3": _qwen(2048, 36, 16, 2, 11008, 151936, True),
    "7": _qwen(3584, 28, 28, 4, 18944, 152064, False),
    "32": _qwen(5120, 64, 40, 8, 27648, 152064, False),
}
_LLAMA_2_7B = ModelShape(4096, 32, 32, 32, 128, 11008, 32000, False, False, False, 4096)


GIB = 1024**3
_MIB = 1024**2
_USABLE = 0.92
"""Usable share of a GPU's memory. The driver and fragmentation take the rest."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each GPU.

    Attributes:
        states: Parameters, gradients, optimizer.
        engine: What a rollout engine on the same GPU holds at the same time.
    """

    states: int
    activations: int = 0
    logits: int = 0
    engine: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.states + self.activations + self.logits + self.engine


def described(need: MemoryNeed, where: str = " a GPU") -> str:
    """Return a need and its parts as text, in one unit."""
    parts = {"states": need.states, "activations": need.activations, "logits": need.logits}
    if need.engine:
        parts["rollout engine"] = need.engine
    unit, name, digits = (GIB, "GiB", 1) if need.total >= GIB else (_MIB, "MiB", 0)
    sizes = {part: round(size / unit, digits) for part, size in parts.items()}
    listed = " + ".join(f"{part} {size:.{digits}f}" for part, size in sizes.items())
    return f"{sum(sizes.values()):.{digits}f} {name}{where} = {listed}"


def size_text(size: float) -> str:
    """Return bytes in GiB, or small ones in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / _MIB:,.0f} MiB"


def activation_bytes(shape: ModelShape, tokens: int, width: int, *, checkpointing: bool) -> int:
    """Return the bytes that a forward pass of ``tokens`` on one GPU keeps for the backward pass, and of the current layer.

    Args:
        width: Bytes per number.
        checkpointing: Whether only the input of each layer is kept, and one layer at a time is recomputed.
    """
    layer = layer_bytes(shape, tokens, width)
    if not checkpointing:
        return shape.layers * layer
    return shape.layers * tokens * shape.hidden * width + layer


def layer_bytes(shape: ModelShape, tokens: int, width: int) -> int:
    """Return the bytes that one layer holds while ``tokens`` pass through it."""
    return tokens * (width * (8 * shape.hidden + 4 * shape.mlp) + 8 * shape.hidden)


def fsdp2_bytes(shape: ModelShape, trained: int, gpus: int, width: int, frozen: int = 0) -> int:
    """Return the bytes of parameters, gradients and AdamW in fp32, sharded over ``gpus``, and of the largest module unsharded.

    Args:
        width: Bytes per frozen parameter.
    """
    return 4 * shape.embedding + 16 * trained // gpus + width * frozen // gpus


def fits(need_bytes: float, gpu_gib: float) -> bool:
    """Return whether it fits on a GPU, with room for the driver and fragmentation."""
    return need_bytes < _USABLE * gpu_gib * GIB


def gpu_finding(what: str, need: MemoryNeed, gpu_gib: float, advice: str) -> Finding:
    """Check that ``what`` fits on a GPU. Without advice, it is an alternative that need not fit."""
    text = f"{what}: {described(need)}"
    if fits(need.total, gpu_gib):
        return Finding(Level.OK, "memory", text)
    text += f", more than {_USABLE * gpu_gib:.1f} GiB ({_USABLE:.0%} of the {gpu_gib:g} GiB of a GPU)"
    level = Level.WARNING if advice else Level.OK
    return Finding(level, "memory", f"{text}; {advice}" if advice else text)


BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""CPU flags of processors with bfloat16 instructions. Others emulate bfloat16, which is slower than float32."""
_CPU_FLAGS = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)
_FREE_MEMORY = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)


def multiplies_bfloat16(cpu_info: str | None = None) -> bool:
    """Return whether the processor has instructions for bfloat16.

    Args:
        cpu_info: Text of ``/proc/cpuinfo``; by default that of this computer.
    """
    flags = _CPU_FLAGS.search(_read("/proc/cpuinfo") if cpu_info is None else cpu_info)
    return flags is not None and not BFLOAT16_FLAGS.isdisjoint(flags[1].split())


def rl_in_bfloat16() -> tuple[str, ...]:
    """Return the overrides of ``afm rl`` for bfloat16 and short rows on a CPU, none without instructions for bfloat16.

    For rows of 150 tokens, the plain attention takes less time than the fused one, and its scores are small.
    """
    actor = "verl.actor_rollout_ref"
    overrides = (
        f"{actor}.model.override_config.attn_implementation=eager",
        f"{actor}.actor.fsdp_config.mixed_precision.param_dtype=bf16",
        f"+{actor}.rollout.engine_kwargs.afm_cpu.dtype=bfloat16",
    )
    return overrides if multiplies_bfloat16() else ()


def free_bytes() -> int | None:
    """Return the memory that processes can still allocate on this computer, or ``None`` if Linux does not report it."""
    free = _FREE_MEMORY.search(_read("/proc/meminfo"))
    return int(free[1]) * 1024 if free else None


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError:
        return ""


def cpu_finding(need_bytes: int, text: str, advice: str) -> Finding:
    """Check that ``need_bytes`` fit in the free memory of this computer."""
    free = free_bytes()
    if free is None:
        return Finding(Level.OK, "memory", text)
    text = f"{text}; {free / GIB:.1f} GiB are free here"
    enough = need_bytes < free
    return Finding(Level.OK if enough else Level.ERROR, "memory", text + ("" if enough else f"; {advice}"))


def disk_finding(need_bytes: float, folder: Path, what: str, advice: str, *, here: bool = True) -> Finding:
    """Check that ``what`` fits on the disk of ``folder``, which need not exist yet.

    Args:
        here: The run can start on this machine. Otherwise a full disk here is only a warning.
    """
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    text = f"{size_text(need_bytes)} for {what}, {free / GIB:,.1f} GiB free at {there}"
    if need_bytes < free:
        return Finding(Level.OK, "disk", text)
    text += "" if here else ". The run needs GPUs, which this machine lacks, so check the disk where it runs"
    return Finding(Level.ERROR if here else Level.WARNING, "disk", f"{text}; {advice}")
