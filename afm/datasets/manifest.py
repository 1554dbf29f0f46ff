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
from afm.errors import ConfigError

_SHOWN_CHARS = 60


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def claim_folder(
    file: Path, settings: Mapping[str, Any], results: Iterable[Path], option: str = "--out"
) -> None:
    """Write down in ``file`` what a run depends on, or check that its folder holds a run with the same settings.

    A folder claims nothing until it holds a result: a run that was refused, or died before its first one, leaves it to
    other settings. Call it while holding the run's lock.

    Args:
        results: Files that are not empty once the run has a result.
        option: What chooses the folder, for the message.

    Raises:
        ConfigError: It holds results of other settings.
    """
    now = json.loads(json.dumps(dict(settings)))
    if file.exists() and any(path.is_file() and path.stat().st_size for path in results):
        before = json.loads(file.read_text(encoding="utf-8"))
        changes = [
            f"{key}: {_short(before.get(key))} -> {_short(now.get(key))}"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if changes:
            raise ConfigError(
                f"{file.parent} holds a run with other settings ({', '.join(changes)}); choose another {option}, "
                "or delete the folder to start over"
            )
        return
    replace_text(file, json.dumps(now, indent=2, ensure_ascii=False) + "\n")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


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
