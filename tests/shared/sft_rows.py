"""Rows of fine-tuning data sets, and what their index says of them."""

import json
from pathlib import Path
from typing import Any

CALL = "<think>Use the tool.</think><code>print(17+25)</code>"
SEEN = "\n<observation>\n42\n</observation>\n"
_ASKED = {"prompt": "instruction", "query": "input"}
PAIRS = {"ranking": True, "columns": _ASKED | {"chosen": "chosen", "rejected": "rejected"}}
"""What the index says of rows with a chosen and a rejected response."""
FEEDBACK = {"columns": _ASKED | {"response": "output", "kto_tag": "good"}}
"""What the index says of responses marked as desired or not."""


def alpaca(*responses: str) -> list[dict[str, str]]:
    """A row for each response."""
    return [
        {"instruction": f"Question {n}?", "input": "", "output": text} for n, text in enumerate(responses)
    ]


def pairs(*both: tuple[Any, Any]) -> list[dict[str, Any]]:
    """A row for each pair of a chosen and a rejected response."""
    return [
        {"instruction": f"Question {n}?", "input": "", "chosen": chosen, "rejected": rejected}
        for n, (chosen, rejected) in enumerate(both)
    ]


def bad_rows(folder: Path) -> list[dict[str, Any]]:
    """The report of bad rows of a data set in ``folder``."""
    return [json.loads(line) for line in (folder / "out/bad_rows.jsonl").read_text("utf-8").splitlines()]
