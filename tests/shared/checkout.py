"""A working folder as the tutorials find it: the checkout, and what the quickstart would have left in ``runs/``."""

import json
from pathlib import Path

from afm.agents import load_agent, save_agent
from afm.datasets import write_tasks
from afm.datasets.mini_world import WorldSplit, generate
from afm.models.tiny import create_tiny_model, train_tokenizer
from afm.runs.folder import sha256_of, write_manifest

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = {".git", ".venv", ".venv-docs", "runs", "outputs", "site"}
TEXT = "<plan>Add.</plan>\n<think>Run it.</think>\n<code>\n```py\nprint(57 + 38)\n```\n</code>\n<observation>\n95\n</observation>\n<answer>\\boxed{95}</answer>"


def make_checkout(place: Path) -> Path:
    """Links to everything of the project, and a random model in place of the trained one."""
    for one in ROOT.iterdir():
        if one.name not in HIDDEN:
            (place / one.name).symlink_to(one)
    run = place / "runs/quickstart"
    tasks = list(generate(WorldSplit.HELDOUT, 4, seed=0))
    (run / "world").mkdir(parents=True)
    write_tasks(tasks, run / "world/heldout.jsonl")
    train_tokenizer([f"{TEXT} {task.question}" for task in tasks] * 20, run / "start", vocab_size=400)
    create_tiny_model(run / "start", run / "start", hidden_size=64, layers=1, heads=2, mlp=64)
    (run / "rl").symlink_to(run / "start")
    save_agent(load_agent(ROOT / "configs/tiny/agents/math.yaml"), run / "start/agent.yaml")
    (run / "data").mkdir()
    row = {"instruction": "What is 57 + 38?", "input": "", "output": TEXT}
    (run / "data/math.json").write_text(json.dumps([row] * 8), encoding="utf-8")
    info = {"math": {"file_name": "math.json"}}
    write_manifest(
        run / "data/math.manifest.json",
        counts={"rows": 8},
        spec=load_agent("math"),
        outputs={"math.json": sha256_of(run / "data/math.json")},
    )
    (run / "data/dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return place
