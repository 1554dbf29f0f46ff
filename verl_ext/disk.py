"""Disk that a run's checkpoints take."""

from __future__ import annotations

from pathlib import Path

from afm.planning import Finding, Level, ModelShape
from afm.planning.memory import GIB, disk_finding
from verl_ext.workload import Workload

_ACTOR_BYTES = {"model": 4, "optimizer": 8, "hf_model": 4}
"""Of a parameter: fp32 shards and AdamW's two moments; ``hf_model`` is the model once more in one piece, in fp32 too."""
_CRITIC_BYTES = 12


def checkpoint_finding(load: Workload, shape: ModelShape, folder: Path, steps: int | None) -> Finding:
    """Whether the checkpoints that stand at once and the exported model fit on the disk of ``folder``."""
    if load.save_every < 1:
        text = "trainer.save_freq is off: a run that ends early is lost, and no model is exported"
        return Finding(Level.WARNING, "disk", text)
    each = sum(size for name, size in _ACTOR_BYTES.items() if name in load.saved)
    each = (each + _CRITIC_BYTES * (load.critic is not None)) * shape.parameters
    written = None if steps is None else -(-steps // load.save_every)
    # With 1 to keep, verl removes the old one only when the new one is complete.
    limit = max(2, load.kept) if load.kept else written
    if limit is None:
        text = f"every checkpoint of {each / GIB:,.1f} GiB is kept, nobody knows how many"
        return Finding(Level.WARNING, "disk", f"{text}; set trainer.max_actor_ckpt_to_keep")
    kept = limit if written is None else min(limit, written)
    what = f"the exported model and {kept} checkpoint{'s' * (kept != 1)} of {each / GIB:,.1f} GiB"
    advice = "lower trainer.max_actor_ckpt_to_keep, or choose another output_dir"
    if "hf_model" in load.saved:
        advice += ", or leave hf_model out of save_contents (afm export puts the workers' parts together)"
    return disk_finding(4 * shape.parameters + kept * each, folder, what, advice)
