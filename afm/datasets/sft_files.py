"""Data sets for `afm sft`: alpaca JSON, conversations, and their entries in ``dataset_info.json``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec, shipped_agents
from afm.datasets.readers.row import AlpacaRow, Conversation
from afm.errors import ConfigError, DataError
from afm.runs.atomic import replace_text, replacing
from afm.runs.folder import sha256_of, write_manifest
from afm.tools.registry import Reader, faults_of
from afm.trajectory.record import Record

_INFO_FILE = "dataset_info.json"
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}


def write_sft(
    records: Iterable[Record],
    spec: AgentSpec,
    out_dir: str | Path,
    *,
    name: str,
    inputs: Iterable[Path] = (),
    readers: Mapping[str, Reader] | None = None,
) -> int:
    """Write kept trajectories as ``name.json`` (alpaca rows) and register it in ``dataset_info.json``.

    ``instruction`` is the whole user turn and ``output`` the whole response. Training derives the masks from the text and
    the agent's declaration. Other entries of an existing ``dataset_info.json`` stay.

    Args:
        inputs: Source files of the records, for the manifest.
        readers: Readers of the tools' arguments, see :func:`afm.tools.registry.faults_of`.

    Returns:
        The number of rows.

    Raises:
        DataError: A record belongs to another agent, ``spec`` or a tool rejects it, or no record is left.
    """
    check_name(name)
    out = Path(out_dir)
    target = out / f"{name}.json"
    inputs = list(inputs)

    def kept_rows() -> Iterator[dict[str, str]]:
        kept, reasons = 0, list[str]()
        for record in records:
            if record.kept:
                kept += 1
                yield _alpaca(record, spec, readers)
            else:
                reasons.append(record.reason)
        if reasons and not kept:
            state = f"all {len(reasons):,} rows have kept: false. The first reason: {reasons[0] or 'none is recorded'}"
            message = f"no trajectory was kept, so there is nothing to train on: {state}"
            raise DataError(message, path=", ".join(map(str, inputs)) or str(target))

    rows = write_array(kept_rows(), target, "holds no trajectory to train on")
    register(out, name, target.name)
    write_manifest(
        out / f"{name}.manifest.json",
        counts={"rows": rows},
        spec=spec,
        inputs=inputs,
        sources=[os.path.relpath(path, out) for path in inputs],
        outputs={target.name: sha256_of(target)},
        declaration=spec.dump(),
    )
    return rows


def write_array(rows: Iterable[Mapping[str, Any]], path: Path, without_rows: str) -> int:
    """Write one JSON array and replace ``path`` when it is complete. No rows is an error with the text ``without_rows``."""
    count = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write((",\n" if count else "[\n") + json.dumps(row, ensure_ascii=False))
            count += 1
        file.write("\n]\n")
        if not count:
            raise DataError(without_rows, path=str(path))
    return count


def write_alpaca(rows: Iterable[AlpacaRow], path: Path, name: str) -> None:
    """Write one JSON array and its entry in ``dataset_info.json``."""
    columns = dict(COLUMNS)

    def dumped() -> Iterator[dict[str, Any]]:
        for row in rows:
            if row.system is not None:
                columns["system"] = "system"
            yield row.model_dump(exclude_none=True)

    write_array(dumped(), path, "no rows to write")
    register(path.parent, name, path.name, columns)


def write_chat(rows: Iterable[Conversation], path: Path, name: str) -> None:
    """Write one JSON line per conversation, and an entry in ``dataset_info.json`` if `afm sft` can read all of them."""
    begun, trainable = False, True
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(row.model_dump_json(exclude_none=True) + "\n")
            begun, trainable = True, trainable and _is_trainable(row)
    if begun and trainable:
        register(path.parent, name, path.name, {"messages": "messages"}, "agent_flan")


def _is_trainable(row: Conversation) -> bool:
    return all(
        message.role in ("system", "user") or (message.role == "assistant" and message.loss is not None)
        for message in row.messages
    )


def _alpaca(record: Record, spec: AgentSpec, readers: Mapping[str, Reader] | None) -> dict[str, str]:
    if record.agent != spec.name:
        raise DataError(
            f"record {record.id!r} belongs to agent {record.agent!r}, expected {spec.name!r}; give --agent with the YAML "
            f"of {record.agent!r}, and make a data set for each agent"
        )
    segments = record.segments
    issues = faults_of(segments, spec, readers=readers)
    if issues:
        # Without a data source no reward judges the row. This list of filters needs none.
        own = spec.name if spec.name in shipped_agents() else "AGENT.yaml"
        filters = "" if record.data_source else f" --config configs/filters/logs.yaml --agent {own}"
        raise DataError(
            f"record {record.id!r} breaks the rules of agent {spec.name!r}: {issues[0]}. To drop these rows: "
            f"afm data filter FILE{filters} --output-dir DIR"
        )
    return {"instruction": spec.user_message(record.question), "input": "", "output": record.text}


def check_name(name: str) -> None:
    """Raise an error for a data set name that could lead out of its folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
        raise DataError(
            f"data set name {name!r}: expected letters, digits, `_`, `-` and `.`, without a folder"
        )


def register(
    folder: Path,
    name: str,
    file_name: str,
    columns: Mapping[str, str] = COLUMNS,
    formatting: str | None = None,
) -> None:
    """Register a file in the ``dataset_info.json`` of its folder. Other entries stay.

    Args:
        formatting: Layout of the rows. ``None`` is alpaca.

    Raises:
        ConfigError: ``dataset_info.json`` is broken.
    """
    info_file = folder / _INFO_FILE
    known: dict[str, Any] = {}
    if info_file.exists():
        try:
            known = json.loads(info_file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{info_file}: invalid JSON: {error}; repair or remove the file") from None
    layout = {"formatting": formatting} if formatting else {}
    known[name] = {"file_name": file_name, **layout, "columns": dict(columns)}
    replace_text(info_file, json.dumps(known, indent=2, ensure_ascii=False) + "\n")
