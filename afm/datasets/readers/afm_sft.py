"""AFM's SFT sets: alpaca rows ``{instruction, input, output, system}``, as in PersonalAILab/AFM-*-SFT-Dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import AlpacaRow, Reader, shown, text
from afm.errors import DataError


def _read(row: Mapping[str, Any], default: str) -> AlpacaRow:
    texts = {key: row.get(key) for key in ("input", "system")}
    for key, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise DataError(f"`{key}`: expected a text, got {shown(value)}")
    text(row, "instruction")
    text(row, "output")
    return AlpacaRow(
        instruction=row["instruction"],
        input=texts["input"] or "",
        output=row["output"],
        system=texts["system"] or None,
    )


AFM_SFT = Reader("afm_sft", "", _read)
