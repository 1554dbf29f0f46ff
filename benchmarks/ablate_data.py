"""Measure the effect of the filters: fine-tune on equally many raw, filtered, and enriched and upsampled recordings.

    .venv/bin/python benchmarks/ablate_data.py --seeds 0 1 2 --out runs/ablation-data

A careless scripted team that checks its answers (agent `wiki`) works on questions of the generated encyclopaedia with real
searches. Its recordings become three sets. Raw: all that ended with an answer. Filtered: those that pass the filters
complexity, format, repetition and quality. Enriched: the same with reflection enrichment and error-correction upsampling.
For each seed, the same number of rows is drawn from each set. The same model is fine-tuned on each for the same number of
steps and evaluated on the same held-out questions, whose entities occur in no other set. The model can already search and
copy: it was trained once, from random weights, on recordings of another team (agent `mhqa`) on other questions. Finished
runs are not repeated. `--out` gets `summary.json` and `table.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from timing import environment, report

CONFIGS = Path(__file__).resolve().parent.parent / "configs/tiny"
FILTERED: list[dict[str, Any]] = [
    {"complexity": {"min_calls": 1}},
    {"format": {}},
    {"repetition": {}},
    {"quality": {}},
]
ENRICHED: list[dict[str, Any]] = [
    *FILTERED,
    {"reflection": {"role": "reflection", "keep_without": 0.3}},
    {"correction": {"times": 3}},
]
SETS: dict[str, list[dict[str, Any]]] = {"raw": [], "filtered": FILTERED, "enriched": ENRICHED}
FROM_MEMORY = 0.15
FLAWS = {"misread": 0.3, "overlooked": 0.5, "repeated": 0.15, "unchecked": 0.1}


@dataclass(frozen=True)
class Size:
    """Sizes of a run; a step has 8 packed sequences of ``cutoff`` tokens."""

    pages: int = 4_000
    base_tasks: int = 12_000
    base_steps: int = 2_600
    tasks: int = 6_000
    rows: int = 2_800
    steps: int = 600
    held_out: int = 200
    cutoff: int = 256


SMOKE = Size(pages=400, base_tasks=60, base_steps=2, tasks=120, rows=30, steps=2, held_out=4)


def afm(*words: str) -> None:
    """Run ``afm``; if it fails, end this program."""
    subprocess.run([sys.executable, "-m", "afm.cli.main", *words], check=True, stdout=sys.stderr)


def claim(out: Path, size: Size) -> None:
    """Record the size of the runs in a folder; refuse runs of another size."""
    file, content = out / "size.json", json.dumps(asdict(size), indent=2) + "\n"
    if file.exists() and file.read_text("utf-8") != content:
        raise SystemExit(f"{file}: the runs there have another size; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(content, encoding="utf-8")


def make_world(folder: Path, size: Size) -> None:
    """Write the pages, their index, and three sets of questions about different entities."""
    from afm.datasets.encyclopaedia import Encyclopaedia, write_encyclopaedia
    from afm.datasets.mini_world import WorldSplit

    if (folder / "index").exists():
        return
    sizes = {WorldSplit.TRAIN: size.base_tasks, WorldSplit.RL: size.tasks, WorldSplit.HELDOUT: size.held_out}
    world = Encyclopaedia(size.pages, seed=0, brief=True)
    write_encyclopaedia(folder, world, sizes=sizes, seed=0, hops=[1, 2])
    words = [sys.executable, "-m", "tool_servers.wiki_search.build", str(folder / "corpus.jsonl")]
    subprocess.run([*words, f"--output-dir={folder / 'index'}"], check=True, stdout=sys.stderr)


def record(tasks: Path, agent: str, out: Path) -> None:
    """Let the team of ``agent`` work on the tasks, without filters."""
    from afm.agents import load_agent
    from afm.datasets import read_tasks
    from afm.distill.run import distill
    from afm.distill.scripted_teams import Flaws, ScriptedWikiTeam
    from afm.tools import load_tools

    if (out / "manifest.json").exists():
        return
    spec = load_agent(CONFIGS / f"agents/{agent}.yaml")
    tools = load_tools(CONFIGS / "tools/wiki_rag.yaml")
    careful = agent == "mhqa"
    p_direct = dict.fromkeys((1, 2), 0.0 if careful else FROM_MEMORY)
    team = ScriptedWikiTeam(spec, p_direct=p_direct, flaws=Flaws() if careful else Flaws(**FLAWS))
    asyncio.run(distill(list(read_tasks(tasks)), spec, tools, out, team=team, filters=(), max_parallel=8))


def split_sets(recorded: Path, out: Path) -> dict[str, list[dict[str, str]]]:
    """Return the three sets as training rows."""
    from afm.agents import load_agent
    from afm.distill.filters.registry import FilterPlan
    from afm.distill.filters.run import filter_files
    from afm.trajectory.io import RecordWriter, load_records
    from afm.trajectory.record import StopReason

    spec = load_agent(CONFIGS / "agents/wiki.yaml")
    raw = out / "raw/kept.jsonl"
    if not raw.exists():
        scratch = out / "raw/new.jsonl"
        scratch.unlink(missing_ok=True)
        with RecordWriter(scratch) as writer:
            for name in ("trajectories.jsonl", "dropped.jsonl"):
                for row in load_records(recorded / name):
                    if row.stop is StopReason.ANSWER:  # the raw set includes rows that the merge refuses
                        writer.write(row.model_copy(update={"kept": True, "reason": ""}))
        scratch.rename(raw)
    found = {}
    for name, stages in SETS.items():
        if stages:
            filter_files(
                [raw], FilterPlan.model_validate({"stages": stages}), spec, out / name, picture=False
            )
        rows = load_records(out / name / "kept.jsonl")
        found[name] = [
            {"instruction": spec.user_message(row.question), "input": "", "output": row.text} for row in rows
        ]
    return found


def write_rows(rows: list[dict[str, str]], folder: Path, name: str) -> None:
    """Write a data set of LLaMA-Factory."""
    from afm.datasets.sft_files import register

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    register(folder, name, f"{name}.json")


def train(model: Path, agent: str, data: Path, name: str, out: Path, seed: int, size: Size) -> None:
    """Fine-tune ``model``, unless that is finished."""
    steps = size.base_steps if agent == "mhqa" else size.steps
    words = [f"agent={CONFIGS / f'agents/{agent}.yaml'}", f"model_name_or_path={model}", f"output_dir={out}"]
    words += [f"dataset_dir={data}", f"dataset={name}", f"seed={seed}", f"max_steps={steps}", "threads=1"]
    words += [f"cutoff_len={size.cutoff if agent == 'mhqa' else 2 * size.cutoff}"]
    words += [] if agent == "mhqa" else ["per_device_train_batch_size=4", "learning_rate=1.0e-3"]
    afm("sft", "--quiet", str(CONFIGS / "sft/mhqa.yaml"), *words)


def make_base(out: Path, sets: dict[str, list[dict[str, str]]], size: Size) -> Path:
    """Train the model that all fine-tunings start from."""
    from afm.agents import load_agent
    from afm.datasets.sft_files import write_sft
    from afm.models.tiny import create_tiny_model, train_tokenizer
    from afm.trajectory.io import load_records

    start, data = out / "start", out / "data"
    if not (start / "config.json").exists():
        records = load_records(out / "base_team/trajectories.jsonl")
        write_sft(records, load_agent(CONFIGS / "agents/mhqa.yaml"), data, name="base")
        rows = json.loads((data / "base.json").read_text("utf-8")) + sets["raw"]
        texts = (text for row in rows for text in (row["instruction"], row["output"]))
        train_tokenizer(texts, start, vocab_size=1024, whole_tags=True)
        create_tiny_model(start, start, seed=0, heads=4)
    train(start, "mhqa", data, "base", out / "base", 0, size)
    return out / "base"


def evaluate(model: Path, agent: str, questions: Path, out: Path, seed: int) -> dict[str, Any]:
    """Return the metrics of a model on the held-out questions at temperature 1."""
    if not (out / "metrics.json").exists():
        words = [f"model={model}", f"data={questions}", f"agent={CONFIGS / f'agents/{agent}.yaml'}"]
        afm("eval", str(CONFIGS / "eval/mhqa_world.yaml"), *words, f"output_dir={out}", f"seed={seed}")
    return dict(json.loads((out / "metrics.json").read_text("utf-8")))


def one(
    name: str, seed: int, rows: list[dict[str, str]], base: Path, out: Path, size: Size
) -> dict[str, Any]:
    """Train on ``size.rows`` rows of a set, and evaluate."""
    run = out / name / f"seed{seed}"
    drawn = random.Random(f"{name}/{seed}").sample(rows, size.rows)
    write_rows(drawn, run / "data", "rows")
    train(base, "wiki", run / "data", "rows", run / "sft", seed, size)
    found = evaluate(run / "sft", "wiki", out / "world/heldout.jsonl", run / "eval", seed)
    return {
        "set": name,
        "seed": seed,
        "of": len(rows),
        "characters_a_row": round(statistics.mean(len(row["output"]) for row in drawn)),
        "pass_at_1": found["pass_at_1"],
        "format_valid": found["format_valid"],
        "tool_calls": found["tool_calls"],
    }


def differences(runs: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Compare each set with the raw one on the same questions: mean over seeds, with the 95 % interval over questions."""
    from afm.evaluation import paired_difference
    from afm.trajectory.io import load_records

    seeds = sorted({run["seed"] for run in runs})

    def episodes(name: str) -> list[Any]:
        return [row for seed in seeds for row in load_records(out / name / f"seed{seed}/eval/episodes.jsonl")]

    found = []
    for name in list(SETS)[1:]:
        change = paired_difference(episodes("raw"), episodes(name)).difference
        found.append({"set": name, "value": change.value, "low": change.low, "high": change.high})
    return found


def table(runs: list[dict[str, Any]], changes: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table with a line per set."""
    seeds = sorted({run["seed"] for run in runs})
    yield f"| set | rows to draw from | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | minus raw (95 %) | format valid | tool calls |"
    yield "|---|---|" + "---|" * (len(seeds) + 4)
    for name in SETS:
        mine = sorted((run for run in runs if run["set"] == name), key=lambda run: run["seed"])
        scores = [run["pass_at_1"]["value"] for run in mine]
        change = next((row for row in changes if row["set"] == name), None)
        minus = f"{change['value']:+.3f} ({change['low']:.3f} to {change['high']:.3f})" if change else ""
        means = [statistics.mean(run[key] for run in mine) for key in ("format_valid", "tool_calls")]
        yield (
            f"| {name} | {mine[0]['of']:,} | {' | '.join(f'{score:.3f}' for score in scores)} "
            f"| {statistics.mean(scores):.3f} | {minus} | {means[0]:.3f} | {means[1]:.2f} |"
        )


def main() -> None:
    """Record, filter, train, evaluate and print."""
    from afm.cli.recipes import wiki_server

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--smoke", action="store_true", help="very few steps, only to see that it works")
    parser.add_argument("--rows", type=int, help="rows to draw from each set")
    parser.add_argument("--steps", type=int, help="steps of each fine-tuning")
    parser.add_argument("--only-sets", action="store_true", help="record and filter, but do not train")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation-data"), help="folder of the runs")
    arguments = parser.parse_args()
    given = {key: value for key in ("rows", "steps") if (value := getattr(arguments, key)) is not None}
    size, out = replace(SMOKE if arguments.smoke else Size(), **given), arguments.out.resolve()
    claim(out, size)
    make_world(out / "world", size)
    with wiki_server(out / "world/index", out / "server.log"):
        record(out / "world/rl.jsonl", "wiki", out / "team")
        sets = split_sets(out / "team", out / "sets")
        if arguments.only_sets:
            return
        record(out / "world/train.jsonl", "mhqa", out / "base_team")
        base = make_base(out, sets, size)
        before = evaluate(base, "mhqa", out / "world/heldout.jsonl", out / "base_eval", 0)
        runs = [
            one(name, seed, rows, base, out, size) for seed in arguments.seeds for name, rows in sets.items()
        ]
    changes = differences(runs, out)
    lines = "\n".join(table(runs, changes)) + "\n"
    (out / "table.md").write_text(lines, encoding="utf-8")
    print(lines, file=sys.stderr)
    result = {
        "benchmark": "ablate_data",
        "flaws": FLAWS | {"from_memory": FROM_MEMORY},
        "rows": size.rows,
        "steps": size.steps,
    }
    result |= {"base": before["pass_at_1"], "runs": runs, "minus_raw": changes}
    report(result | {"environment": environment(["torch", "llamafactory", "afm"])}, out / "summary.json")


if __name__ == "__main__":
    main()
