"""What ``TINY=1`` adds to `afm reproduce`: a local Hub with generated repositories, servers for the tools, a new model.

The repositories have the published layouts: AFM's SFT sets (alpaca JSON), RL sets (parquet), prompts (constants of
Python files) and benchmark files. Questions come from the generated worlds. A CPU can train on them in a minute.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from afm.cli.recipes import build_wiki_index, environment, loopback_server, wiki_server
from afm.cli.reproduce_stages import Reproduction
from afm.configuration import read_file
from afm.datasets import Task
from afm.datasets.mini_world import WorldSplit
from afm.datasets.rl_files import answers_of
from afm.runs.folder import sha256_of

_VOCABULARY, _HEADS = 1024, 4
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


@contextmanager
def serving(run: Reproduction, stage: str, hub: Path) -> Iterator[None]:
    """Run a stage's servers on the loopback during the block, and set their addresses in the environment."""
    with ExitStack() as stack:
        if stage == "download":
            url = stack.enter_context(hub_server(hub / "repositories"))
            stack.enter_context(
                environment({"HF_ENDPOINT": url, "GITHUB_RAW_ENDPOINT": url, "HF_HUB_OFFLINE": "0"})
            )
        elif stage in ("rl", "eval") and run.agent.short == "mhqa":
            index = build_wiki_index(hub / "world/corpus.jsonl", hub / "index")
            stack.enter_context(wiki_server(index, hub / "wiki_server.log"))
        elif stage in ("rl", "eval") and run.agent.short == "web":
            stack.enter_context(_web(hub))
        yield


@contextmanager
def _web(hub: Path) -> Iterator[None]:
    """Run a small web site, a search server over its pages, and a page server that may read it."""
    from afm.datasets.encyclopaedia import Encyclopaedia, site_server

    site = site_server(Encyclopaedia(PAGES, seed=WORLD_SEED, brief=True))
    threading.Thread(target=site.serve_forever, daemon=True).start()
    place = f"127.0.0.1:{site.server_port}"
    settings = {
        "web_search": {"page_url": f"http://{place}/wiki/{{title}}"},
        "crawl_page": {"trusted": [place], "workers": 1},
    }
    variables = {
        "WEB_SEARCH_METHOD_TYPE": "local",
        "WEB_PAGE_STORE": str(hub / "world/corpus.jsonl"),
        "SERVER_HOST": "127.0.0.1",
    }
    ports = {"web_search": "WEBSEARCH_PORT", "crawl_page": "CRAWL_PAGE_PORT"}
    with ExitStack() as stack:
        stack.callback(site.server_close)
        stack.callback(site.shutdown)
        stack.enter_context(environment(variables))
        for name, port in ports.items():
            config = hub / f"{name}.yaml"
            config.write_text(yaml.safe_dump(settings[name]), encoding="utf-8")
            url = stack.enter_context(loopback_server(name, [f"--config={config}"], hub / f"{name}.log"))
            stack.enter_context(environment({port: url.rpartition(":")[2]}))
        yield


def make_start_model(run: Reproduction) -> None:
    """Train a tokenizer on the SFT rows, and create a model with random weights, unless they exist."""
    from afm.models.tiny import create_tiny_model, train_tokenizer

    if run.start.exists():
        return
    rows = json.loads((run.data / "sft" / f"{run.agent.name}_sft.json").read_text(encoding="utf-8"))
    texts = [text for row in rows for text in (row["instruction"], row["output"])]
    unfinished = run.start.with_name("start.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    train_tokenizer(texts, unfinished, vocab_size=_VOCABULARY, whole_tags=True)
    create_tiny_model(unfinished, unfinished, heads=_HEADS)
    unfinished.rename(run.start)


_API = re.compile(r"/api/datasets/([^/?]+/[^/?]+)")
_RESOLVED = re.compile(r"^/datasets/([^/]+/[^/]+)/resolve/[^/]+/")


class _HubHandler(SimpleHTTPRequestHandler):
    """A request handler that serves the folders of ``directory`` as repositories of a Hub."""

    def do_GET(self) -> None:
        listed = _API.match(self.path)
        if listed is None:
            super().do_GET()
            return
        repository = Path(self.directory) / unquote(listed[1])
        files = [_hub_entry(path, repository) for path in _files(repository)]
        answer = {"id": unquote(listed[1]), "private": False, "tags": [], "siblings": files}
        body = json.dumps(answer | {"sha": _commit(repository)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def translate_path(self, path: str) -> str:
        """Return the path of a file in its repository, for any commit."""
        return super().translate_path(_RESOLVED.sub(r"/\1/", path))

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def hub_server(folder: Path) -> Iterator[str]:
    """Serve ``folder/OWNER/NAME`` as the Hub does, and as GitHub below ``/OWNER/NAME/COMMIT/``; yield the address."""
    handler = partial(_HubHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _files(repository: Path) -> list[Path]:
    return sorted(path for path in repository.rglob("*") if path.is_file())


def _hub_entry(path: Path, repository: Path) -> dict[str, object]:
    """Return the entry of a file, as the Hub's API lists large files."""
    size, name = path.stat().st_size, path.relative_to(repository).as_posix()
    lfs = {"sha256": sha256_of(path), "size": size, "pointerSize": 134}
    return {"rfilename": name, "size": size, "blobId": "0" * 40, "lfs": lfs}


def _commit(repository: Path) -> str:
    """Return a commit id of 40 hexadecimal digits that changes with the files."""
    seen = hashlib.sha1(usedforsecurity=False)
    for path in _files(repository):
        seen.update(path.relative_to(repository).as_posix().encode() + path.read_bytes())
    return seen.hexdigest()


def make_repositories(agent: str, folder: Path, configs: Path) -> Path:
    """Write the repositories of an agent's list of sets below ``folder``, and the list with the checksums of these files.

    Every call writes the same bytes, so a lock of them stays valid. Existing files are not changed.

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
    kept = {name: dict(entry) for name, entry in sets.items() if not entry.get("optional")}
    questions = _questions(agent, folder / "world")
    for entry in kept.values():
        place = folder / "repositories" / entry["repository"]
        if entry.get("kind") == "github":
            place /= entry["revision"]
            entry["pinned"] = [
                _make_file(agent, file["name"], entry, place, questions) for file in entry["pinned"]
            ]
        elif entry["repository"].endswith("-SFT-Dataset"):
            _write(place / "sft.json", json.dumps(_sft_rows(agent, questions[:SFT_ROWS]), indent=1).encode())
        elif entry["repository"].endswith("-RL-Dataset"):
            _write_parquet(place / "rl.parquet", _rl_rows(agent, questions[SFT_ROWS : SFT_ROWS + RL_ROWS]))
    _write(listed, json.dumps({"sets": kept}, indent=1).encode())
    _write(folder / _DONE, b"{}")
    return listed


def _questions(agent: str, folder: Path) -> list[Task]:
    """Return enough tasks for all files. For the encyclopaedia, also write its corpus to ``folder``."""
    count = SFT_ROWS + RL_ROWS + 2 * BENCHMARK_ROWS  # of each kind of task
    if agent == "code":
        from afm.datasets.mini_world import generate

        tasks = list(generate(WorldSplit.TRAIN, count, seed=WORLD_SEED))
        return [_program(task) if number % 2 else task for number, task in enumerate(tasks)]
    from afm.datasets import read_tasks
    from afm.datasets.encyclopaedia import Encyclopaedia, write_encyclopaedia

    world = Encyclopaedia(PAGES, seed=WORLD_SEED, brief=True)
    write_encyclopaedia(folder, world, sizes={WorldSplit.TRAIN: count}, seed=WORLD_SEED, hops=(1,))
    return list(read_tasks(folder / "train.jsonl"))


def _program(task: Task) -> Task:
    """Return the task as one that asks for a program. The published code sets mix both kinds."""
    number = int(hashlib.sha256(task.id.encode()).hexdigest(), 16) % 50
    tests = {"inputs": [f"{n}\n" for n in (1, 5, 9)], "outputs": [f"{n + number}\n" for n in (1, 5, 9)]}
    text = f"Read a number and print the number plus {number}."
    return Task(id=task.id, question=text, ground_truth=json.dumps(tests), data_source="codeforces")


def _make_file(
    agent: str, name: str, entry: dict[str, Any], place: Path, questions: Sequence[Task]
) -> dict[str, Any]:
    """Write one file of the GitHub project, and return its entry in the list."""
    held_out = questions[SFT_ROWS + RL_ROWS :]
    path = place / name
    if path.suffix == ".py":
        _write(path, "".join(_constants(agent, name, entry)).encode())
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
        rows = [
            _benchmark_row(path.stem, number, task) for number, task in enumerate(held_out[:BENCHMARK_ROWS])
        ]
        text = json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
        _write(path, text.encode())
    return {"name": name, "size": path.stat().st_size, "checksum": sha256_of(path)}


def _constants(agent: str, file: str, entry: dict[str, Any]) -> Iterator[str]:
    for prompt in entry.get("prompts", ()):
        if prompt["file"] == file:
            text = _RULES[agent] if _QUESTION in prompt.get("form", _QUESTION) else _JUDGED
            yield f"{prompt['constant']} = {text!r}\n"


def _benchmark_row(name: str, number: int, task: Task) -> dict[str, Any]:
    """Return a row of the benchmark file ``name``."""
    row = {"question": task.question, "answer": _answer(task)}
    match name:
        case "gaia_dev_103":
            return {"id": number, "task_id": task.id, "Level": 1, "Annotator_Metadata": {"Steps": "1"}} | row
        case "hle_test":
            texts = {"answer_type": "exactMatch", "rationale": "", "raw_subject": "", "category": "Other"}
            return {"id": number} | texts | row
        case "webwalker_main":
            info = {"domain": "wiki", "difficulty_level": "easy", "lang": "en", "type": "single_source"}
            return {"root_url": f"http://example.org/{number}", "info": info} | row
        case "browsecomp":
            return row | {"topic": "Other"}
        case _:
            return row | {"answer": answers_of(task.ground_truth), "data_source": "nq"}


def _answer(task: Task) -> str:
    return answers_of(task.ground_truth)[0]


def _prompt(agent: str, task: Task) -> str:
    mark = "Task" if agent == "code" else "Question"
    return f"{_RULES[agent]}\n\n{mark}: {task.question}"


def _sft_rows(agent: str, tasks: Sequence[Task]) -> list[dict[str, str]]:
    """Return SFT rows with short trajectories in the order of roles that the agent requires."""
    rows = []
    for task in tasks:
        steps = _program_steps(task) if agent == "code" else _search_steps(agent, task)
        output = "\n".join(f"<{role}>{text}</{role}>" for role, text in steps)
        rows.append({"instruction": _prompt(agent, task), "input": "", "output": output})
    return rows


def _program_steps(task: Task) -> list[tuple[str, str]]:
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


def _search_steps(agent: str, task: Task) -> list[tuple[str, str]]:
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
        "prompt": [{"role": "user", "content": _prompt("code", task)}],
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
        "prompt": [{"role": "user", "content": _prompt(agent, task)}],
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
