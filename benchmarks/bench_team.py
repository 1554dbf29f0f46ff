"""Compare a team of models with one model on the same questions: score, tokens, tool calls and dollars.

The model is the one that `afm quickstart --world wiki` trained. The members of the team (planner, searcher, reflector,
verifier, writer) are one model of the same size. It learns the part of each member on the training questions of the
quickstart, and our model server serves it over HTTP. Both answer the held-out questions with real searches. The report is
that of `afm report TEAM MODEL`.

    afm quickstart --world wiki
    python benchmarks/bench_team.py runs/quickstart-wiki --out runs/bench_team
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from afm.cli.recipes import wiki_server
from afm.datasets.encyclopaedia.relations import find_fact, read_chain
from afm.distill.event_log import EventKind, read_events
from afm.processes import tied_environment

ROOT = Path(__file__).resolve().parents[1]
STEPS, BATCH, LEARNING_RATE = 2000, 32, 1.5e-3
PRICES = "{prompt: 0.1, completion: 0.4}"
"""Invented prices in US dollars per million tokens, the same for both, which have the same size."""
GOOD = {"grade": "good"}
REFLECTION = dict.fromkeys(("information_conflict", "tool_effectiveness", "trajectory_monitoring"), GOOD)
CHECK = {"findings": "Stated.", "score": 4}
TOPIC = "{{ goal }}{% if findings %} of {{ findings[-1].text }}{% endif %}"
PROMPTS = {
    "planner": (
        "Plan.",
        "{{ question }}",
        "Search for the {{ reply.steps | map(attribute='goal') | join(', then the ') }}.",
    ),
    "searcher": (
        "Search.",
        f"{{% if calls_left %}}{TOPIC}{{% else %}}{{{{ goal }}}}: {{{{ results[-1].text }}}}{{% endif %}}",
        "",
    ),
    "reflector": ("Reflect.", "Well?", "One more."),
    "writer": ("Write.", "{{ findings[-1].text }}", ""),
    "verifier": ("Check.", "{{ answer }}", ""),
}
Lesson = tuple[str, str, dict[str, Any]]
"""System text, user text, and the reply as JSON."""


def lessons(events: Path) -> Iterator[Lesson]:
    """Yield the part of every member in each task that the quickstart's team worked on."""
    questions: dict[str, str] = {}
    results: dict[str, list[str]] = {}
    for event in read_events(events):  # the events of several tasks are interleaved
        task = f"{event.task_id}/{event.attempt}"
        match event.kind:
            case EventKind.TASK:
                questions[task] = event.meta["task"]["question"]
            case EventKind.TOOL_RESULT:
                results.setdefault(task, []).append(event.content)
            case EventKind.FINAL if task in results:
                yield from parts(questions[task], results.pop(task))


def parts(question: str, found: Sequence[str]) -> Iterator[Lesson]:
    """Yield the prompt and the reply of each member."""
    chain = read_chain(question)
    assert chain is not None
    goals = [f"{chain.asks[0]} of {chain.start}", *chain.asks[1:]]
    yield "Plan.", question, {"steps": goals}
    name = chain.start
    for number, (goal, asks, text) in enumerate(zip(goals, chain.asks, found, strict=False)):
        topic = f"{goal} of {name}" if number else goal
        yield "Search.", topic, {"tool": "wiki_search", "argument": topic}
        fact = find_fact(text, asks, name)
        if fact is None:
            return
        name = fact.gives
        yield "Search.", f"{goal}: {text}", {"finding": name}
    yield "Reflect.", "Well?", REFLECTION
    yield "Write.", name, {"answer": name}
    yield "Check.", name, CHECK


def teach(start: Path, taught: Sequence[Lesson], out: Path) -> float:
    """Train a model that plays all members, from the weights in ``start``; return the last loss."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (STEPS - step) / (0.7 * STEPS))
    )
    order = random.Random(0)
    for step in range(STEPS):
        ids, labels = batch([encoded(tokenizer, lesson) for lesson in order.sample(taught, BATCH)])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"  step {step} of {STEPS}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return float(loss.item())


def encoded(tokenizer: Any, lesson: Lesson) -> tuple[list[int], int]:
    """Return the ids of the whole chat, and the length of the prompt."""
    chat = [{"role": "system", "content": lesson[0]}, {"role": "user", "content": lesson[1]}]
    prompt = tokenizer(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))[
        "input_ids"
    ]
    return [*prompt, *tokenizer(json.dumps(lesson[2]) + "<|im_end|>")["input_ids"]], len(prompt)


def batch(rows: Sequence[tuple[list[int], int]]) -> tuple[Any, Any]:
    """Return padded ids and labels; only replies have labels."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for place, (row, begin) in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        labels[place, begin : len(row)] = torch.tensor(row[begin:])
    return ids, labels


def write_team(out: Path, url: str) -> Path:
    """Write the team's YAML, which extends the shipped one, and the prompts of its members."""
    members = {}
    for name, (system, user, says) in PROMPTS.items():
        file = out / f"{name}.yaml"
        file.write_text(json.dumps({"system": system, "user": user, "says": says}))
        members[name] = {"model": "tiny", "prompt": str(file)}
    searcher = members.pop("searcher") | {"tools": ["wiki_search"]}
    prices = {"prompt": 0.1, "completion": 0.4}
    team = {
        "extends": str(ROOT / "configs/distill/mhqa.yaml"),
        "name": "tiny",
        "tools": str(ROOT / "configs/tiny/tools/wiki_rag.yaml"),
        "endpoints": {"teacher": {"url": url, "requests_per_minute": None, "tokens_per_minute": None}},
        "models": {
            "tiny": {
                "endpoint": "teacher",
                "name": "members",
                "temperature": 0.0,
                "max_tokens": 128,
                "price": prices,
            }
        },
        "members": members,
        "tool_agents": {"searcher": searcher},
        "limits": {"calls_per_step": 1, "shown_results": 1},
        "budget": {"usd": None},
    }
    file = out / "team.yaml"
    file.write_text(json.dumps(team, indent=1))
    return file


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """Run our model server on a free port; yield its address."""
    words = [
        sys.executable,
        "-P",
        "-m",
        "tool_servers",
        "model",
        f"--model={model}",
        "--name=members",
        "--port=0",
    ]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            words, env=tied_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as server,
    ):
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip().removeprefix("listening on ")
        finally:
            server.terminate()


def afm(*words: object) -> None:
    """Run an ``afm`` command."""
    subprocess.run([sys.executable, "-m", "afm.cli.main", *map(str, words)], check=True)


def main() -> None:
    """Train the members once, then evaluate both and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished `afm quickstart --world wiki`")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_team"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--questions", type=int, default=200, help="number of the 200 held-out questions")
    options = parser.parse_args()
    run, out = options.run.resolve(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "members/config.json").exists():
        taught = list(lessons(run / "distill/events.jsonl"))
        print(f"{len(taught):,} lessons")
        print(f"loss {teach(run / 'sft', taught, out / 'members'):.4f}")
    common = [ROOT / "configs/tiny/eval/mhqa_world.yaml", f"data={run / 'world/heldout.jsonl'}"]
    common += [f"prices={PRICES}", f"rounds={options.rounds}", f"limit={options.questions}"]
    with (
        wiki_server(run / "world/index", out / "wiki.log"),
        served(out / "members", out / "model.log") as url,
    ):
        team = write_team(out, f"{url}/v1")
        afm("eval", *common, f"team={team}", f"output_dir={out / 'team'}")
        afm("eval", *common, f"model={run / 'rl'}", f"output_dir={out / 'model'}")
    afm("eval", "compare", out / "team", out / "model")
    afm("report", out / "team", out / "model", "--out", out / "report.html")


if __name__ == "__main__":
    main()
