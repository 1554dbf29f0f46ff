"""What the recipes need on 1, 2 and 8 nodes: ``python -m verl_ext.planning [key=value ...] > docs/planning.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from afm.configuration import apply_overrides, validated
from afm.errors import AfmError, ConfigError
from afm.planning import ModelShape, model_shape
from afm.planning.memory import GIB, MemoryNeed, fits
from afm.planning.speed import Assumptions
from verl_ext.compose import compose, overrides_of
from verl_ext.gpu_memory import host_bytes, kv_cache, phases
from verl_ext.plan import check
from verl_ext.settings import load_settings
from verl_ext.splits import split_findings
from verl_ext.step_time import step_time
from verl_ext.workload import Workload, workload_of

RECIPES = {
    "mhqa_ppo_3b": "Qwen/Qwen2.5-3B-Instruct",
    "mhqa_ppo_7b": "Qwen/Qwen2.5-7B-Instruct",
    "web_dapo_7b": "Qwen/Qwen2.5-7B-Instruct",
    "code_dapo_7b": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "web_dapo_32b": "Qwen/Qwen2.5-32B-Instruct",
    "code_dapo_32b": "Qwen/Qwen2.5-Coder-32B-Instruct",
    "code_dapo_32b_long": "Qwen/Qwen2.5-Coder-32B-Instruct",
}
"""Each recipe and the model that its SFT model was made of."""
NODES = (1, 2, 8)
_PHASES = ("rollout", "weights to engine", "log-probs", "reference", "critic update", "actor update")
_COLUMNS = (
    *("recipe", "nodes", *_PHASES, "CPU a node", "tokens an engine", "episodes at once"),
    *("rollout min", "training min", "steps", "hours", "GPU hours"),
)


class PageAssumptions(Assumptions):
    """Those of the arithmetic, and the GPUs."""

    gpus: int = Field(default=8, ge=1, description="GPUs of a node.")
    gpu_gib: float = Field(default=80.0, gt=0, description="Memory of a GPU in GiB.")


@dataclass(frozen=True, slots=True)
class _Recipe:
    name: str
    config: Any
    shape: ModelShape

    def on(self, nodes: int, given: PageAssumptions) -> Workload:
        self.config.trainer.nnodes = nodes
        self.config.trainer.n_gpus_per_node = given.gpus
        return workload_of(self.config, given.gpu_gib)


def planning_page(configs: Path, given: PageAssumptions) -> str:
    """The whole page of the docs, in Markdown.

    Raises:
        ConfigError: A recipe is wrong.
        MissingExtraError: verl is not installed.
    """
    recipes = [_recipe(configs, name, model) for name, model in RECIPES.items()]
    lines = [*_INTRODUCTION, *_assumptions(given), "", *_TOKENS]
    lines += [_tokens(recipe, given) for recipe in recipes]
    lines += ["", *_needs_text(given), _row(_COLUMNS), _row("---" for _ in _COLUMNS)]
    lines += [_row(_cells(recipe, nodes, given)) for recipe in recipes for nodes in NODES]
    return "\n".join([*lines, "", *_FORMULAS]) + "\n"


_INTRODUCTION = [
    "# What reinforcement learning needs: tokens, memory, GPU hours",
    "",
    "Generated from `configs/rl/*.yaml`: `python -m verl_ext.planning > docs/planning.md`. **All of it is arithmetic that was",
    "never compared with GPUs**: memory to see what cannot fit, hours to see the order of magnitude. `afm doctor",
    "configs/rl/X.yaml model=DIR [--nodes N --gpus N --gpu-gib G]` prints the same for one configuration, beside everything",
    "else that can be checked ([rl.md](rl.md#before-a-run)).",
    "",
    "## Assumptions",
    "",
    "Change them on the command line, for example `python -m verl_ext.planning train_mfu=0.25 gpu_gib=141 bandwidth_tb_s=4.8`.",
    "",
    "| assumption | value | meaning |",
    "|---|---|---|",
]
_TOKENS = [
    "## Tokens of a step",
    "",
    "| recipe | prompt + response | samples a step | M sampled by the agent | M trained on |",
    "|---|---|---|---|---|",
]
_FORMULAS = [
    "## Formulas",
    "",
    "P parameters, E those of the embedding, N GPUs, T tokens of a pass on one GPU (`ppo_max_token_len_per_gpu`), h hidden size, L layers,",
    "V vocabulary. Code: `afm/planning/memory.py`, `afm/planning/speed.py`, `verl_ext/gpu_memory.py`, `verl_ext/step_time.py`.",
    "",
    "- **Actor update**: parameters, gradients and AdamW in fp32, sharded: 16 P / N; the largest module unsharded: 4 E; with checkpointing",
    "  2 L T h and one layer, 2 T (8 h + 4 m) + 8 T h with m intermediate features; logits in bf16 and their gradient, 4 T V (an entropy bonus",
    "  adds 4 T V, `use_fused_kernels` removes them). Offloading to the CPU frees the other phases, not this one: verl brings",
    "  everything back before an update. `fsdp_config.offload_policy` keeps the 16 P / N on the CPU.",
    "- **Log-probs**: 4 P / N + 4 E, one layer, logits with their softmax and product 6 T V. **Critic update**: as the actor's, without logits.",
    "- **Rollout**: `gpu_memory_utilization` of a GPU. A token takes 4 L x head size x key-value heads / tensor parallel (at least one head)",
    "  on each GPU; what the weights (2 P / tensor parallel) leave is divided by it.",
    "- **Weights to engine**: the trainer's 4 P / N, a bucket of 2 GiB, and the engine's weights; its whole share where",
    "  it does not sleep (`free_cache_engine: false`).",
    "- **Training time**: forward 2 P FLOPs a token (without the input embedding) and 2 L x heads x head size x length for attention; an update",
    "  costs four forward passes (one is recomputed), log-probs, reference and values one each; by N x peak x MFU.",
    "- **Rollout time**: a decoding step reads the weights and every cached token, or computes, whichever takes longer; prompts and observations",
    "  are read once at the prefill's MFU; all of it times `tail`.",
    "- **Not counted**: tools and judges that episodes wait for (often most of a web agent's time), moving weights and optimizer, saving,",
    "  activation of the engine, communication.",
]


def _needs_text(given: PageAssumptions) -> list[str]:
    return [
        f"## Memory and time on nodes of {given.gpus} GPUs of {given.gpu_gib:g} GiB",
        "",
        "GiB of each GPU by phase, of each node's CPU, tokens in the cache of one rollout engine, episodes of full length in all engines at",
        "once, minutes of a step, and the whole training. **Bold**: more than 92 % of a GPU, so not possible without another",
        "setting (`offload_policy`, `use_fused_kernels`, sequence parallelism, shorter batches). `-`: there is no such phase.",
        "`code_dapo_32b_long` goes on after the 40 steps of `code_dapo_32b`, so 80 of its 120 steps are left.",
        "",
    ]


def _recipe(configs: Path, name: str, model: str) -> _Recipe:
    shape = model_shape(model)
    if shape is None:
        raise ConfigError(f"{name}: the shape of {model} is not known")
    config = compose(overrides_of(load_settings(configs / f"{name}.yaml", [f"model={model}"])))
    return _Recipe(name, config, shape)


def _assumptions(given: PageAssumptions) -> Iterator[str]:
    for name, field in type(given).model_fields.items():
        yield f"| `{name}` | {getattr(given, name):g} | {field.description} |"


def _tokens(recipe: _Recipe, given: PageAssumptions) -> str:
    load = recipe.on(max(NODES), given)
    time = step_time(load, recipe.shape, given)
    cells = [f"`{recipe.name}`", f"{load.prompt:,} + {load.response:,}", f"{load.batch} x {load.samples}"]
    cells += [f"{time.sampled / 1e6:.1f}", f"{time.trained / 1e6:.1f}"] if time else ["-", "-"]
    return _row(cells)


def _cells(recipe: _Recipe, nodes: int, given: PageAssumptions) -> Iterator[str]:
    load, shape = recipe.on(nodes, given), recipe.shape
    yield f"`{recipe.name}`"
    yield str(nodes)
    if fault := _fault(recipe, load):
        yield from [fault, *[""] * (len(_COLUMNS) - 3)]
        return
    needs, cache = phases(load, shape), kv_cache(load, shape)
    for phase in _PHASES:
        yield _gib(needs.get(phase), given)
    yield f"{host_bytes(load, shape) / GIB:,.0f}"
    yield f"{max(0, cache.tokens) / 1e6:.2f} M"
    yield f"{cache.sequences * load.engines:,}"
    time = step_time(load, shape, given)
    if time is None or load.steps is None:
        yield from ["-"] * 5
        return
    hours = time.seconds * load.steps / 3600
    yield f"{time.rollout_s / 60:,.1f}"
    yield f"{time.training_s / 60:,.1f}"
    yield f"{load.steps:,}"
    yield f"{hours:,.0f}"
    yield f"{hours * load.gpus:,.0f}"


def _fault(recipe: _Recipe, load: Workload) -> str | None:
    """Why a recipe cannot run on so many GPUs."""
    try:
        check(recipe.config)
    except ConfigError as error:
        return str(error)
    faults = [finding.text for finding in split_findings(load, recipe.shape) if finding.level == "error"]
    return "; ".join(faults) or None


def _gib(need: MemoryNeed | None, given: PageAssumptions) -> str:
    if need is None:
        return "-"
    text = f"{need.total / GIB:.0f}"
    return text if fits(need.total, given.gpu_gib) else f"**{text}**"


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> str:
    """The page with the assumptions that ``key=value`` words change.

    Raises:
        UsageError: An assumption is unknown, or its value impossible.
    """
    changed: dict[str, Any] = {}
    apply_overrides(changed, arguments)
    given = validated(PageAssumptions, changed, "assumptions", overrides=arguments)
    return planning_page(Path("configs/rl"), given)


if __name__ == "__main__":
    try:
        sys.stdout.write(main(sys.argv[1:]))
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
