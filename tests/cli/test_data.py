import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from afm.cli.data import app
from afm.trajectory import load_records

ROOT = Path(__file__).parents[2]


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.sandbox
def test_from_a_world_to_training_files(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "with blanks"

    said = run("world", "--out", folder / "world", "--train", 12, "--rl", 8, "--heldout", 4)
    assert f"{folder}/world/heldout.jsonl: 4 problems" in said

    said = run("distill", folder / "world/train.jsonl", "--out", folder / "distill", "--seed", 1)
    assert " of 12 trajectories kept" in said
    kept = load_records(folder / "distill/trajectories.jsonl")

    said = run("filter", folder / "distill/trajectories.jsonl", "-o", folder / "good")
    assert f"{folder}/good: {len(kept)} of {len(kept)} kept" in said
    assert [record.id for record in load_records(folder / "good/kept.jsonl")] == [
        record.id for record in kept
    ]

    run("prepare", "sft", folder / "good/kept.jsonl", "--out", folder / "sft")
    assert [row["output"] for row in json.loads((folder / "sft/math_agent_sft.json").read_text())] == [
        record.text for record in kept
    ]

    run("prepare", "rl", folder / "world/rl.jsonl", "-o", folder / "rl.parquet", "--split", "rl")
    assert pq.read_table(folder / "rl.parquet").num_rows == 8


def test_help_needs_no_heavy_package():
    heavy = "{'torch', 'transformers', 'pyarrow', 'numpy', 'pandas', 'ray'}"
    code = f"import sys, afm.cli.data; print(sorted({heavy} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
