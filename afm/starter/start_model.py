"""Make a tokenizer and a tiny random model in runs/start. Skip this step if you have a model to train."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from afm.models.tiny import create_tiny_model, train_tokenizer


def main() -> None:
    """Train the tokenizer on the examples and draw the weights."""
    name = yaml.safe_load(Path("sft.yaml").read_text(encoding="utf-8"))["dataset"]
    examples = Path(f"runs/data/{name}.json")
    if not examples.is_file():
        sets = examples.with_name("dataset_info.json")
        there = " or ".join(json.loads(sets.read_text(encoding="utf-8"))) if sets.is_file() else ""
        write = f"; write `dataset: {there}` into sft.yaml, or" if there else ";"
        sys.exit(
            f"{examples} is missing{write} run `afm data prepare sft runs/kept/kept.jsonl --agent agent.yaml "
            f"--tools tools.yaml --name {name} --output-dir runs/data`"
        )
    rows = json.loads(examples.read_text(encoding="utf-8"))
    texts = [row[key] for row in rows for key in ("instruction", "output")]
    train_tokenizer(texts, "runs/start", vocab_size=512, whole_tags=True)
    print(f"runs/start: {create_tiny_model('runs/start', 'runs/start'):,} parameters")


if __name__ == "__main__":
    main()
