"""The small file beside every output that says what it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import afm
from afm.agents import AgentSpec
from afm.datasets.atomic import replace_text


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(
    path: Path,
    *,
    counts: dict[str, int],
    inputs: Iterable[Path] | Mapping[Path, str] = (),
    spec: AgentSpec | None = None,
    seed: int | None = None,
    **facts: Any,
) -> None:
    """Write ``path`` atomically: counts, seed, agent and its digest, SHA-256 of the inputs, further facts.

    Args:
        inputs: Files, with their SHA-256 where the caller has it.
    """
    digests = inputs if isinstance(inputs, Mapping) else {file: sha256_of(file) for file in inputs}
    agent = None if spec is None else {"name": spec.name, "digest": spec.digest}
    content = {
        "afm_version": afm.__version__,
        "counts": counts,
        "seed": seed,
        "agent": agent,
        "inputs": {file.name: digest for file, digest in digests.items()},
        **facts,
    }
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
