"""Export of a checkpoint of any step as a Hugging Face model for `afm eval`, `afm ask` and `afm serve model`.

``afm export`` runs ``python -m verl_ext.export RUN [--step N] [--output-dir DIR] [--agent NAME] [--adapter]``.
It needs no verl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from afm.agents import AgentSpec, PromptMode, load_agent, save_agents, saved_agents
from afm.agents.prompt_record import PROMPT_FILE, PromptRecord
from afm.configuration import read_file
from afm.errors import AfmError, ConfigError, EngineError, UsageError, described
from verl_ext.checkpoints import (
    CHECKPOINT_DIR,
    EXPORT_FILE,
    SHARDS_FILE,
    TORCH_DTYPES,
    exportable_steps,
    has_parts,
)
from verl_ext.settings import SETTINGS_FILE

if TYPE_CHECKING:
    from verl_ext.rows import RlPrompts

AGENT_FILE = "agent.yaml"
"""File in the output folder of `afm rl` that holds the trained agent."""


@dataclass(frozen=True, slots=True)
class RunCheckpoints:
    """The folders of a run with checkpoints.

    Attributes:
        run: Output folder of `afm rl`. For stock verl, the folder of the checkpoints.
        checkpoints: The folder that holds ``global_step_N``.
        step: The step, if the user named its folder.
    """

    run: Path
    checkpoints: Path
    step: int | None = None


def source_of(path: Path) -> RunCheckpoints:
    """Find the checkpoints of an output folder of `afm rl`, a folder of ``global_step_N``, or one ``global_step_N``.

    Raises:
        ConfigError: The folder does not exist or holds no checkpoint.
    """
    path = path.absolute()
    step = None
    if path.name.startswith("global_step_"):
        number = path.name.removeprefix("global_step_")
        step, path = int(number) if number.isdigit() else None, path.parent
    inner = path / CHECKPOINT_DIR
    checkpoints = inner if inner.is_dir() else path
    if not any(checkpoints.glob("global_step_*")):
        expected = "expected the output_dir of an `afm rl`, or verl's folder of checkpoints (trainer.default_local_dir)"
        raise ConfigError(f"{path}: contains no checkpoint (global_step_N); {expected}")
    ours = checkpoints.name == CHECKPOINT_DIR and (checkpoints.parent / AGENT_FILE).is_file()
    return RunCheckpoints(checkpoints.parent if ours else checkpoints, checkpoints, step)


def export(
    path: Path,
    step: int | None = None,
    out: Path | None = None,
    agent: str | None = None,
    *,
    adapter: bool = False,
) -> Path:
    """Export the model of a step of a run, which may still be running or may have failed.

    Args:
        path: See :func:`source_of`.
        step: The step. The default is that of the newest complete checkpoint.
        out: Folder to write. The default is ``model_step_N`` (``adapter_step_N``) in the run's folder.
        agent: Name or YAML of the agent, for checkpoints without one.
        adapter: Write only the adapter, as peft does, instead of the model with the adapter merged in.

    Returns:
        The model's folder.

    Raises:
        ConfigError: The step or the agent is missing, or ``out`` exists.
        EngineError: The checkpoint holds no complete model.
        UsageError: ``path`` and ``step`` name different steps.
    """
    source = source_of(path)
    if step is not None and source.step not in (None, step):
        raise UsageError(
            f"{path} is step {source.step}, but --step is {step}; give the run's folder or omit --step"
        )
    step = _chosen(source, source.step if step is None else step)
    out = (out or source.run / f"{'adapter' if adapter else 'model'}_step_{step}").absolute()
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: already exists; remove it, or choose another folder with --output-dir DIR")
    specs = _agents(source.run, agent)
    out.parent.mkdir(parents=True, exist_ok=True)
    base = base_of(source.run)
    export_model(
        source.checkpoints, step, out, *specs, prompts=prompts_of(source.run), base=base, adapter=adapter
    )
    return out


def base_of(run: Path) -> Path | None:
    """Return the folder of the model that a run of `afm rl` began with, ``None`` if it is unknown."""
    file = run / SETTINGS_FILE
    if not file.is_file():
        return None
    name = str(read_file(file)["model"])
    if Path(name).is_dir():
        return Path(name).absolute()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return Path(name)


def export_model(
    checkpoints: Path,
    step: int,
    model_dir: Path,
    spec: AgentSpec,
    *others: AgentSpec,
    prompts: PromptRecord | None = None,
    base: Path | None = None,
    adapter: bool = False,
) -> None:
    """Write a checkpoint's model in Hugging Face format, with its tokenizer, its agents and its prompts, to ``model_dir``.

    verl's ``hf_model`` is copied. Without it the workers' shards are merged. The weights keep their data type (float32
    unless the run chose another), and ``config.json`` names it.

    Args:
        base: Folder of the model that a LoRA run began with.
        adapter: See :func:`export`.

    Raises:
        EngineError: The checkpoint holds no complete model, or is removed during the export.
    """
    actor = checkpoints / f"global_step_{step}" / "actor"
    temporary = model_dir.with_name(f"{model_dir.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _write_weights(actor, temporary, base, adapter=adapter)
        _check_whole(temporary)
        _name_true_dtype(temporary)
        save_agents((spec, *others), temporary)
        if prompts is not None:
            prompts.save(temporary / PROMPT_FILE)
        row = {"global_step": step, "checkpoint": str(actor / "huggingface")}
        (temporary / EXPORT_FILE).write_text(json.dumps(row) + "\n", encoding="utf-8")
        shutil.rmtree(model_dir, ignore_errors=True)
        temporary.replace(model_dir)
    except (OSError, shutil.Error) as error:
        if actor.exists():
            raise
        text = "a run keeps only its newest checkpoints (trainer.max_actor_ckpt_to_keep)"
        raise EngineError(f"{actor}: removed while it was read; {text}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_weights(actor: Path, target: Path, base: Path | None, *, adapter: bool) -> None:
    """Write configuration, tokenizer and weights to a new folder, from verl's ``hf_model`` or from the workers' shards.

    Raises:
        EngineError: The checkpoint does not hold the weights or the adapter.
    """
    source = actor / "huggingface"
    copied = any(source.glob("*.safetensors")) and not adapter
    if not copied and not (source.is_dir() and has_parts(actor)):
        raise EngineError(
            f"{actor}: no model weights: expected the shards of all workers ({SHARDS_FILE}, model_world_size_*) or "
            "huggingface/*.safetensors; copy the shards of every node here, or add model to "
            "actor_rollout_ref.actor.checkpoint.save_contents"
        )
    shutil.copytree(source, target)
    if copied:
        return
    from verl_ext.shards import write_adapter, write_model  # brings torch

    if adapter:
        write_adapter(actor, target, base)
    else:
        write_model(actor, target, base=base)


def _check_whole(folder: Path) -> None:
    """Reject incomplete weights.

    Raises:
        EngineError: A file is missing or truncated.
    """
    index = folder / "model.safetensors.index.json"
    listed = (
        set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.exists() else set()
    )
    for file in sorted({folder / name for name in listed} | set(folder.glob("*.safetensors"))):
        if not file.exists():
            raise EngineError(f"{file.name} is not in the checkpoint, though its index lists it")
        _stored_dtypes(file)


def _name_true_dtype(folder: Path) -> None:
    """Write the true data type of the weights to config.json.

    verl builds its export model in bfloat16 and fills it with the actor's weights, which are float32. config.json then
    says bfloat16, and a loader that trusts it rounds every weight.
    """
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    file = min(folder.glob("*.safetensors"))
    names = _stored_dtypes(file)
    if len(names) != 1 or not names <= TORCH_DTYPES.keys():
        raise EngineError(f"{file}: expected one floating-point type, found {sorted(names)}")
    config |= {key: TORCH_DTYPES[min(names)] for key in ("dtype", "torch_dtype") if key in config}
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _stored_dtypes(file: Path) -> set[str]:
    """Return the data types of a file's tensors.

    Raises:
        EngineError: The file is truncated: its header names more bytes than it has.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as tensors:
            return {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError:
        raise EngineError(f"{file.name} of the checkpoint is truncated; choose another step") from None


def keep_prompts(prompts: RlPrompts, out: Path, step: int) -> dict[str, str]:
    """Write the prompt record of a run and the files that ``prompt`` names into the run's folder.

    Args:
        step: Step of the checkpoint from which the run continues.

    Returns:
        The value of ``prompt`` for the settings of the workers, by key in ``agents:``.

    Raises:
        ConfigError: Earlier steps used another prompt.
    """
    kept = {name: str(entry.source.kept_in(out)) for name, entry in prompts.by_agent.items()}
    file = out / SETTINGS_FILE
    before = yaml.safe_load(file.read_text(encoding="utf-8")) if step and file.is_file() else {}
    for name, now in kept.items() if before else ():
        earlier = _earlier(before, name)
        if Path(earlier).name != Path(now).name:
            raise ConfigError(
                f"prompt: {out} holds a run up to step {step} with prompt {earlier}, but this run uses "
                f"{prompts.by_agent[name].source}; choose another output_dir"
            )
    prompts.record.save(out / PROMPT_FILE)
    return kept


def _earlier(settings: Mapping[str, Any], name: str) -> str:
    entry = (settings.get("agents") or {}).get(name) or {}
    return str(entry.get("prompt") or settings.get("prompt") or PromptMode.OWN.value)


def prompts_of(run: Path) -> PromptRecord | None:
    """Return the prompts that a run recorded, ``None`` for checkpoints of stock verl."""
    file = run / PROMPT_FILE
    return PromptRecord.load(file) if file.is_file() else None


def _chosen(source: RunCheckpoints, step: int | None) -> int:
    steps = exportable_steps(source.checkpoints)
    if not steps:
        raise ConfigError(
            f"{source.checkpoints}: contains no complete checkpoint; wait for the next one (trainer.save_freq)"
        )
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise ConfigError(
            f"{source.checkpoints}: no complete checkpoint of step {step}; complete ones: {there}"
        )
    return steps[-1] if step is None else step


def _agents(run: Path, agent: str | None) -> Sequence[AgentSpec]:
    if agent is not None:
        return (load_agent(agent),)
    saved = saved_agents(run)
    if not saved:
        raise ConfigError(
            f"{run}: no {AGENT_FILE}, so the trained agent is unknown; name it (--agent math, or a YAML)"
        )
    return saved


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of this module and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.export")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--agent")
    parser.add_argument("--adapter", action="store_true")
    options = parser.parse_args(arguments)
    print(export(options.run, options.step, options.output_dir, options.agent, adapter=options.adapter))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AfmError, OSError) as error:
        if usage := isinstance(error, UsageError):
            error.command = "afm export"
        print(f"error: {described(error)}", file=sys.stderr)
        sys.exit(2 if usage else 1)
    except KeyboardInterrupt:
        sys.exit(130)
