"""Repositories in the published layouts with words of our own, small enough to train on with a CPU in a minute.

Layouts: AFM's SFT sets (alpaca JSON), RL sets (parquet), prompts (constants of Python files) and benchmark files, as its
repositories and its GitHub project hold them. Questions come from the generated worlds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from afm.configuration import read_file
from afm.datasets import Task
from afm.datasets.rl_files import answers_of

SFT_ROWS, RL_ROWS, BENCHMARK_ROWS = 24, 40, 4
PAGES = 200
WORLD_SEED = 7
_DONE = "made.json"
_QUESTION = "{question}"
_RULES = {
    "web": "Search the web, read pages, check the answer, and give it.",
    "mhqa": "Search the encyclopaedia and give the answer.",
    "code": "Solve the task with programs and give the answer.",
}
_GRADES = "Information conflict: good\nTool effectiveness: good\nTrajectory monitoring: good"
_JUDGED = "Say whether the answer to {question} is right."


def make_repositories(agent: str, folder: Path, configs: Path) -> Path:
    """Write the repositories of an agent's list of sets below ``folder``, and the list with the checksums of these files.

    Every call writes the same bytes, so a lock made of them holds; what is there is left as it is.

    Args:
        agent: ``web``, ``mhqa`` or ``code``.
        configs: The project's folder of that name.

    Returns:
        The list: ``configs/data/<agent>_agent.yaml`` with other sizes and checksums, its optional sets left out.
    """
    listed = folder / f"{agent}_agent.yaml"
    if (folder / _DONE).exists():
        return listed
    sets = read_file(configs / f"data/{agent}_agent.yaml")["sets"]
    kept = {name: dict(one) for name, one in sets.items() if not one.get("optional")}
    questions = _questions(agent, folder / "world")
    for one in kept.values():
        place = folder / "repositories" / one["repository"]
        if one.get("kind") == "github":
            place /= one["revision"]
            one["pinned"] = [_pinned(agent, file["name"], one, place, questions) for file in one["pinned"]]
        elif one["repository"].endswith("-SFT-Dataset"):
            _write(place / "sft.json", json.dumps(_sft_rows(agent, questions[:SFT_ROWS]), indent=1).encode())
        elif one["repository"].endswith("-RL-Dataset"):
            _write_parquet(place / "rl.parquet", _rl_rows(agent, questions[SFT_ROWS : SFT_ROWS + RL_ROWS]))
    _write(listed, json.dumps({"sets": kept}, indent=1).encode())
    _write(folder / _DONE, b"{}")
    return listed


def _questions(agent: str, folder: Path) -> list[Task]:
    """More than all files need; those of the encyclopaedia come with its corpus in ``folder``."""
    count = SFT_ROWS + RL_ROWS + 2 * BENCHMARK_ROWS  # of each kind of task
    if agent == "code":
        from afm.datasets.mini_world import WorldSplit, generate

        tasks = list(generate(WorldSplit.TRAIN, count, seed=WORLD_SEED))
        return [_program(task) if number % 2 else task for number, task in enumerate(tasks)]
    from afm.datasets import read_tasks
    from afm.datasets.encyclopaedia import Encyclopaedia, write_encyclopaedia
    from afm.datasets.mini_world import WorldSplit

    world = Encyclopaedia(PAGES, seed=WORLD_SEED, brief=True)
    write_encyclopaedia(folder, world, sizes={WorldSplit.TRAIN: count}, seed=WORLD_SEED, hops=(1,))
    return list(read_tasks(folder / "train.jsonl"))


def _program(task: Task) -> Task:
    """A task that wants a program: the published code sets mix both kinds."""
    number = int(hashlib.sha256(task.id.encode()).hexdigest(), 16) % 50
    tests = {"inputs": [f"{n}\n" for n in (1, 5, 9)], "outputs": [f"{n + number}\n" for n in (1, 5, 9)]}
    text = f"Read a number and print the number plus {number}."
    return Task(id=task.id, question=text, ground_truth=json.dumps(tests), data_source="codeforces")


def _pinned(
    agent: str, name: str, one: dict[str, Any], place: Path, questions: Sequence[Task]
) -> dict[str, Any]:
    """Write one file of the GitHub project, and say what it is."""
    held_out = questions[SFT_ROWS + RL_ROWS :]
    path = place / name
    if path.suffix == ".py":
        _write(path, "".join(_constants(agent, name, one)).encode())
    elif path.suffix == ".parquet":
        programs = "livecodebench" in path.name
        fitting = [task for task in held_out if (task.data_source == "codeforces") is programs]
        source = {"OlympiadBench": "olympiadbench"}.get(path.stem, path.stem)
        renamed = [
            task.model_copy(update={"data_source": "livecodebench" if programs else source})
            for task in fitting[-BENCHMARK_ROWS:]
        ]
        _write_parquet(path, _rl_rows(agent, renamed))
    else:
        rows = [_BENCHMARKS[path.stem](number, task) for number, task in enumerate(held_out[:BENCHMARK_ROWS])]
        text = json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
        _write(path, text.encode())
    content = path.read_bytes()
    return {"name": name, "size": len(content), "checksum": hashlib.sha256(content).hexdigest()}


def _constants(agent: str, file: str, one: dict[str, Any]) -> Iterator[str]:
    for prompt in one.get("prompts", ()):
        if prompt["file"] == file:
            text = _RULES[agent] if _QUESTION in prompt.get("form", _QUESTION) else _JUDGED
            yield f"{prompt['constant']} = {text!r}\n"


def _gaia(number: int, task: Task) -> dict[str, Any]:
    about = {"id": number, "task_id": task.id, "Level": 1, "Annotator_Metadata": {"Steps": "1"}}
    return about | {"question": task.question, "answer": _answer(task)}


def _hle(number: int, task: Task) -> dict[str, Any]:
    about = {
        "id": number,
        "answer_type": "exactMatch",
        "rationale": "",
        "raw_subject": "",
        "category": "Other",
    }
    return about | {"question": task.question, "answer": _answer(task)}


def _walked(number: int, task: Task) -> dict[str, Any]:
    info = {"domain": "wiki", "difficulty_level": "easy", "lang": "en", "type": "single_source"}
    about = {"root_url": f"http://example.org/{number}", "info": info}
    return about | {"question": task.question, "answer": _answer(task)}


def _browsed(_: int, task: Task) -> dict[str, Any]:
    return {"question": task.question, "answer": _answer(task), "topic": "Other"}


def _raw(_: int, task: Task) -> dict[str, Any]:
    return {"question": task.question, "answer": answers_of(task.ground_truth), "data_source": "nq"}


_BENCHMARKS: dict[str, Callable[[int, Task], dict[str, Any]]] = {
    "gaia_dev_103": _gaia,
    "hle_test": _hle,
    "webwalker_main": _walked,
    "browsecomp": _browsed,
    "nq_full": _raw,
}


def _answer(task: Task) -> str:
    return answers_of(task.ground_truth)[0]


def _asked(agent: str, task: Task) -> str:
    mark = "Task" if agent == "code" else "Question"
    return f"{_RULES[agent]}\n\n{mark}: {task.question}"


def _sft_rows(agent: str, tasks: Sequence[Task]) -> list[dict[str, str]]:
    return [
        {"instruction": _asked(agent, task), "input": "", "output": _trajectory(agent, task)}
        for task in tasks
    ]


def _trajectory(agent: str, task: Task) -> str:
    """A short one, in the order of functions that the agent's declaration asks for."""
    steps = _worked(task) if agent == "code" else _looked_up(agent, task)
    return "\n".join(f"<{role}>{text}</{role}>" for role, text in steps)


def _worked(task: Task) -> list[tuple[str, str]]:
    program = task.data_source == "codeforces"
    code = "print(int(input()) + 1)" if program else f"print({_answer(task)})"
    fenced = f"```py\n{code}\n```"
    return [
        ("plan", "Write a program."),
        ("think", "Run it."),
        ("code", f"\n{fenced}\n"),
        ("observation", "2" if program else _answer(task)),
        ("reflection", "It ran."),
        ("think", "Done."),
        ("answer", fenced if program else f"\\boxed{{{_answer(task)}}}"),
    ]


def _looked_up(agent: str, task: Task) -> list[tuple[str, str]]:
    answer, tool = _answer(task), "wiki_search" if agent == "mhqa" else "web_search"
    begun = [("think", "Look it up."), ("plan", "Search."), ("think", "Search."), (tool, task.question)]
    begun += [("observation", answer), ("think", "Found.")]
    if agent == "web":
        begun += [("suggested_answer", answer), ("think", "Check."), ("double_check", "Score: 4")]
    else:
        begun += [("reflection", _GRADES)]
    return [*begun, ("think", "Sure."), ("answer", answer)]


def _rl_rows(agent: str, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    return [_code_row(task) if agent == "code" else _question_row(agent, task) for task in tasks]


def _code_row(task: Task) -> dict[str, Any]:
    gold = task.ground_truth if isinstance(task.ground_truth, str) else _answer(task)
    source = "math_dapo" if task.data_source == "mini_math" else task.data_source
    create = {"create_kwargs": {"ground_truth": gold}}
    info = {"index": task.id, "need_tools_kwargs": True, "split": "train", "tools_kwargs": {"code": create}}
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": _asked("code", task)}],
        "ability": "coding" if gold.startswith("{") else "fact-reasoning",
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": info,
    }


def _question_row(agent: str, task: Task) -> dict[str, Any]:
    answers, source = answers_of(task.ground_truth), "nq" if agent == "mhqa" else "search"
    create = {"ground_truth": answers, "question": task.question, "data_source": source}
    tools = ["wiki_search"] if agent == "mhqa" else ["web_search", "crawl_page"]
    info = {
        "need_tools_kwargs": True,
        "index": f"{source}-{task.id}",
        "tools_kwargs": {tool: {"create_kwargs": create} for tool in tools},
        "question": task.question,
        "answer": answers,
    }
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": _asked(agent, task)}],
        "reward_model": {"ground_truth": json.dumps({"target": answers, "question": task.question})},
        "extra_info": info,
    }


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
