"""The hyper-parameters of our recipes beside those AFM published: ``python -m llamafactory_patch.parity``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from afm.errors import ConfigError
from afm.planning import recipe_hardware
from llamafactory_patch.config import resolve

_UNSAID = "-"


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyper-parameters of one training; ``None`` where a source is silent."""

    learning_rate: float | None = None
    batch: int | None = None
    epochs: float | None = None
    cutoff_len: int | None = None
    warmup: float | None = None
    schedule: str | None = None
    nodes: int | None = None


_WEB = Settings(1.4e-5, 128, 4, 32768, 0.1, None, 1)
SCRIPTS = {
    "web_agent_qwen2.5_7b": _WEB,
    "web_agent_qwen2.5_32b": _WEB,
    "mhqa_agent_qwen2.5_3b": Settings(1e-5, 128, 4, 5120, 0.03, None, 1),
    "mhqa_agent_qwen2.5_7b": Settings(2e-5, 32, 4, 5120, 0.03, None, 1),
    "code_agent_qwen2.5_7b": Settings(3e-5, 32, 2, 32768, None, None, 1),
    "code_agent_qwen2.5_32b": Settings(1.4e-5, 64, 2, 32768, None, None, 2),
}
"""The published training scripts (commit 8f94516); 8 GPUs a node, one row a device."""

_WEB_PAPER = Settings(1.4e-5, 256, 2.5)
PAPER = {
    "web_agent_qwen2.5_7b": _WEB_PAPER,
    "web_agent_qwen2.5_32b": _WEB_PAPER,
    "code_agent_qwen2.5_7b": Settings(1.4e-5, 32, 2, None, 0.1, "cosine"),
    "code_agent_qwen2.5_32b": Settings(1.4e-5, 64, 2, None, 0.1, "cosine"),
}
"""The paper (arXiv 2508.13167)."""

_LABELS = {
    "learning_rate": "learning rate",
    "batch": "batch (sequences a step)",
    "epochs": "epochs",
    "cutoff_len": "cutoff (tokens)",
    "warmup": "warm-up (share of steps)",
    "schedule": "schedule",
    "nodes": "nodes x 8 GPUs",
}


def our_settings(config_file: Path) -> Settings:
    """What a recipe trains with on the hardware that its header names.

    Raises:
        ConfigError: The header names none, or the recipe is wrong.
    """
    hardware = recipe_hardware(config_file)
    if hardware is None:
        raise ConfigError(
            f"{config_file}: expected a line `# Hardware: N nodes x M GPUs of G GB` in its header"
        )
    config = resolve(config_file).config
    rows = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    return Settings(
        learning_rate=config["learning_rate"],
        batch=rows * hardware.world,
        epochs=config["num_train_epochs"],
        cutoff_len=config["cutoff_len"],
        warmup=config.get("warmup_steps"),
        schedule=config["lr_scheduler_type"],
        nodes=hardware.nodes,
    )


def parity_page(configs: Path) -> str:
    """The whole page of the docs, in Markdown."""
    lines = [
        "# Our SFT recipes beside AFM's",
        "",
        "Generated from `configs/sft/*.yaml`: `python -m llamafactory_patch.parity > docs/sft_parity.md`.",
        f"`{_UNSAID}`: the source does not say. **Bold**: the sources differ; the recipes follow the published",
        "scripts, and the header of each configuration has the overrides that make it the paper's.",
        "",
        "| recipe | setting | ours | published script | paper |",
        "|---|---|---|---|---|",
        *(row for name in SCRIPTS for row in _rows(name, our_settings(configs / f"{name}.yaml"))),
        "",
        "All of them: full parameters, bf16, ZeRO-3, AdamW, template `qwen`, no loss on observations. Not in any source: Liger's fused",
        "loss where the cut-off is 32,768, and states in main memory for the 32B web agent on one node.",
    ]
    return "\n".join(lines) + "\n"


def _rows(name: str, ours: Settings) -> Iterator[str]:
    script, paper = SCRIPTS[name], PAPER.get(name, Settings())
    for field, label in _LABELS.items():
        values = [getattr(source, field) for source in (ours, script, paper)]
        said = {value for value in values if value is not None}
        cells = [
            _UNSAID if value is None else f"{value:g}" if isinstance(value, float) else str(value)
            for value in values
        ]
        if len(said) > 1:
            cells = [f"**{cell}**" if cell != _UNSAID else cell for cell in cells]
        yield f"| `{name}` | {label} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(parity_page(Path("configs/sft")))
