import ast
import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import notebook
import pytest

import afm
from afm.errors import AfmError, ConfigError, EngineError
from afm.trajectory.record import Record, StopReason
from afm.trajectory.tags import Author, Segment

ROOT = Path(__file__).resolve().parent.parent
WRONG = r"<plan>Guess.</plan><think>Perhaps.</think><answer>\boxed{90}</answer>"
TASK = afm.Task(id="t", question="57 + 38?", ground_truth="95", data_source="mini_math")


def test_every_public_name_is_there_and_known_to_type_checkers() -> None:
    tree = ast.parse(Path(afm.__file__).read_text("utf-8"))
    typed = {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("afm.")
        for alias in node.names
    }
    assert typed == {name: f"afm.{module}" for name, module in afm._HOMES.items()}
    assert all(getattr(afm, name).__doc__ for name in typed)
    assert set(typed) <= set(dir(afm))
    with pytest.raises(AttributeError, match="no attribute 'aks'"):
        _ = afm.aks


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/python.md").read_text("utf-8")
    assert [name for name in afm._HOMES if f"`{name}`" not in page] == []


def test_importing_afm_imports_nothing_of_it() -> None:
    code = "import afm, sys; print([name for name in sys.modules if name.startswith('afm.')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.slow
@pytest.mark.sandbox
def test_the_page_shows_what_its_cells_print_in_a_running_event_loop() -> None:
    page = notebook.PAGE.read_text("utf-8")
    shown = [cell.output for cell in notebook.cells(page) if cell.is_code]
    assert notebook.run_page() == shown


def test_the_notebook_is_the_page() -> None:
    page = notebook.PAGE.read_text("utf-8")
    assert notebook.NOTEBOOK.read_text("utf-8") == notebook.notebook(page), (
        "run `python benchmarks/notebook.py`"
    )


async def _thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_run_works_without_an_event_loop() -> None:
    assert afm.run(_thread_name()) == "afm-api"


async def test_run_works_inside_a_running_event_loop() -> None:
    assert afm.run(_thread_name()) == "afm-api"


def test_run_inside_its_own_loop_is_an_error_and_no_deadlock() -> None:
    async def nested() -> None:
        afm.run(_thread_name())

    with pytest.raises(RuntimeError, match="write `await` there"):
        afm.run(nested())


def test_an_error_reaches_the_caller() -> None:
    with pytest.raises(EngineError, match="used up"):
        afm.ask(afm.load_agent("math"), afm.ScriptedModel([]), "1 + 1?", tools={"code": None})  # type: ignore[dict-item]


def test_an_interrupt_ends_the_coroutine_before_it_is_raised() -> None:
    code = (
        "import afm, asyncio, os, signal, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "async def work():\n"
        "    try:\n"
        "        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "        await asyncio.sleep(60)\n"
        "    finally:\n"
        "        print('cleaned up', flush=True)\n"
        "try:\n"
        "    afm.run(work())\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    began = time.monotonic()
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.splitlines() == ["cleaned up", "interrupted"]
    assert time.monotonic() - began < 20


def test_a_text_is_scored_with_its_task_and_not_without() -> None:
    agent = afm.load_agent("math")
    assert afm.score(agent, WRONG, TASK).parts == {"correct": 0.0, "format": 1.0}
    with pytest.raises(ConfigError, match=r"expected score\(agent, text, task\)"):
        afm.score(agent, WRONG)


def test_a_missing_tool_is_named() -> None:
    with pytest.raises(ConfigError, match="agent 'math' calls code"):
        afm.ask(afm.load_agent("math"), afm.ScriptedModel(WRONG), "1 + 1?", tools={})


def record(*parts: tuple[str, str], stop: StopReason = StopReason.ANSWER) -> Record:
    segments = tuple(Segment(Author(author), text) for author, text in parts)
    return Record(id="r", agent="math", agent_digest="", question="?", segments=segments, stop=stop)


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (" Paris ", "Paris"),
        ("\n```py\nprint(1)\n```\n", "print(1)"),
        (" ", None),
    ],
)
def test_the_answer_of_a_record(content: str, answer: str | None) -> None:
    text = f"<think>x</think><answer>{content}</answer>"
    assert record(("agent", text)).answer == answer
    assert record(("agent", text), stop=StopReason.TURNS).answer is None
    assert (
        record(("agent", "<think>x</think>"), ("environment", f"<answer>{content}</answer>")).answer is None
    )


def test_what_a_record_shows_of_itself() -> None:
    shown = repr(record(("agent", WRONG)))
    assert shown == "Record(id='r', agent='math', answer='90', steps=3, calls=0, score=None, stop='answer')"


def test_an_agent_is_loaded_from_the_folder_of_its_model(tmp_path: Path) -> None:
    from afm.agents import save_agent

    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    save_agent(afm.load_agent("wiki"), tmp_path / "model/agent.yaml")
    assert afm.load_agent(tmp_path) == afm.load_agent("wiki")


def test_wrong_values_are_errors_of_the_framework_that_say_what_was_expected() -> None:
    with pytest.raises(
        AfmError, match=r"task: id: missing, but required; expected Task\(id=\.\.\., question=\.\.\.\)"
    ):
        afm.Task(question="")
    with pytest.raises(AfmError, match=r"task: question: got '' \(text\), expected at least 1 character"):
        afm.Task(id="1", question="")
    with pytest.raises(AfmError, match="got int, expected the text of a response"):
        afm.parse(5, afm.load_agent("math"))
    with pytest.raises(AfmError, match=r"got 'math', expected an agent, for example load_agent\('math'\)"):
        afm.parse("<answer>1</answer>", "math")


MODEL = afm.ScriptedModel([])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda out: afm.ask("maths", MODEL, "?"), "agent 'maths' is not shipped"),
        (lambda out: afm.ask(MODEL, "math", "?"), r"agent: got ScriptedModel\(.*expected an agent, or what afm.load_agent"),
        (lambda out: afm.ask("math", "runs/rl", "?"), r"model: got 'runs/rl' \(str\), expected a model, for example afm.load_model"),
        (lambda out: afm.ask("math", MODEL, 5), "task: question: got 5"),
        (lambda out: afm.ask("math", MODEL, "?", tools="code.yaml"), r"tools: got 'code.yaml' .*afm.load_tools\("),
        (lambda out: afm.score("math", WRONG, TASK, reward="math"), r"reward: got 'math' .*afm.load_reward\("),
        (lambda out: afm.score("math", WRONG, "57 + 38?"), r"task: got '57 \+ 38\?' \(str\), expected afm.Task\("),
        (lambda out: afm.score("math", 90, TASK), r"response: got 90 \(int\), expected a record, or the text"),
        (lambda out: afm.mask("math", 90, None), r"response: got 90 \(int\), expected a record, or the text"),
        (lambda out: afm.evaluate("math", MODEL, ["57 + 38?"], out), "tasks: got .*a text alone has no gold answer"),
        (lambda out: afm.evaluate("math", MODEL, [], out), r"tasks: got none, expected at least one afm.Task\("),
        (lambda out: afm.evaluate("math", MODEL, out / "no.jsonl", out), "no.jsonl: no such file"),
        (lambda out: afm.evaluate("math", MODEL, [TASK], out, reward="math"), r"reward: got 'math' .*afm.load_reward\("),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_with_what_to_write(
    call: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(AfmError, match=message):
        call(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_agents_are_taken_by_name_and_tasks_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(TASK.model_dump_json(), encoding="utf-8")
    tools = {"code": None}
    assert afm.score("math", WRONG, TASK).parts == {"correct": 0.0, "format": 1.0}
    metrics = afm.evaluate(
        "math", afm.ScriptedModel(WRONG), tmp_path / "tasks.jsonl", tmp_path / "run", tools=tools
    )
    assert metrics.questions == 1
