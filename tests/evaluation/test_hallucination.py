from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.agents.load import without_tools
from afm.datasets import write_tasks
from afm.errors import ConfigError
from afm.evaluation import Metrics, read_manifest, summarise
from afm.evaluation.report import write_run_report
from afm.evaluation.wording import hallucination_words
from afm.models.base import ScriptedModel

ROOT = Path(__file__).resolve().parents[2]
MATH = load_agent("math")
BARE = without_tools(MATH)
SAID = "<think>t</think>\n<answer>\\boxed{1}</answer>"
CALLED = "<plan>p</plan><think>t</think><code>print(1)</code>"


def test_rates_are_shares_of_episodes_and_of_calls(record) -> None:
    texts = [
        f"{CALLED}\n<observation>\n1\n</observation>\n<reflection>r</reflection>{SAID}",  # one call
        f"{CALLED}<calculator>1</calculator><calculator>2</calculator>",  # a call and two of no tool
        f"<plan>p</plan>{SAID}",
        f"<plan>p</plan>{SAID}",
    ]
    metrics = summarise((record(str(i), 1.0, text=text) for i, text in enumerate(texts)), spec=MATH)
    assert metrics.tool_format_without_tool is None
    assert metrics.invented_tool == 1 / 4
    assert metrics.invented_tool_calls == 2 / 4


def test_without_tools_every_form_of_a_call_is_one_too_many(record) -> None:
    texts = [SAID, "<code>print(1)</code>", "Action: add\nAction Input: 1", f"<plan>p</plan>{SAID}"]
    rows = [record(str(i), 0.0, text=text) for i, text in enumerate(texts)]
    metrics = summarise(rows, spec=BARE, original=MATH)
    assert (metrics.tool_format_without_tool, metrics.invented_tool) == (2 / 4, 2 / 4)
    assert metrics.invented_tool_calls == 1.0
    assert hallucination_words(metrics) == "no tool offered: 50.0 % of the episodes have the form of a call"


def test_episodes_that_failed_do_not_count_and_those_without_a_verdict_do(record) -> None:
    rows = [
        record("a", 1.0, text=SAID),
        record("b", None, text="<calculator>1</calculator>"),
        record("c", None, text="<calculator>1</calculator>", error="EngineError: gone"),
    ]
    assert summarise(rows, spec=MATH).invented_tool == 1 / 2


def test_without_an_agent_or_an_episode_nothing_is_measured(record) -> None:
    for metrics in (summarise([record("a", 1.0, text=SAID)]), summarise([], spec=MATH)):
        assert (metrics.tool_format_without_tool, metrics.invented_tool) == (None, None)
        assert hallucination_words(metrics) == ""
    silent = summarise([record("a", 1.0, text=SAID)], spec=MATH)
    assert (silent.invented_tool, silent.invented_tool_calls) == (0.0, None)
    assert hallucination_words(silent) == "0.0 % of the episodes call a tool that is not offered"


async def run_bare(solver, out):
    """Half of the questions get a tool's tag, though none is offered."""
    return await solver.play(solver.tasks(8), BARE, hallucinating(solver), {}, out, original=MATH)


def hallucinating(solver):
    chosen = {task.question for task in solver.tasks(8)[:4]}

    def speak(text):
        prompt = text.removeprefix("user: ").partition("\nassistant: ")[0]
        asked = prompt.rpartition("Question: ")[2]
        return f"<code>print(1)</code>\n{SAID}" if asked in chosen else SAID

    return ScriptedModel(speak)


async def test_an_evaluation_without_tools_counts_them_and_the_report_says_so(tmp_path, solver) -> None:
    out, said = tmp_path / "run" / "eval", "no tool offered: 50.0 % of the episodes have the form of a call"
    metrics = await run_bare(solver, out)
    assert (metrics.tool_format_without_tool, metrics.tool_calls, metrics.format_valid) == (0.5, 0.0, 0.5)
    assert metrics == Metrics.model_validate_json((out / "metrics.json").read_text())
    manifest = read_manifest(out / "manifest.json")
    assert (manifest.spec, manifest.agents.originals) == (BARE, {BARE.name: MATH})
    page = write_run_report(out, tmp_path / "page.html").read_text()
    assert '<td data-label="Invented tool">50.0\xa0%</td>' in page
    assert said[1:] in page
    (out / "metrics.json").unlink()  # the same rates in an unfinished run and in a resumed one
    assert said[1:] in write_run_report(out, tmp_path / "page.html").read_text()
    lines = (out / "episodes.jsonl").read_text().splitlines(keepends=True)
    (out / "episodes.jsonl").write_text("".join(lines[:3]))
    resumed = await run_bare(solver, out)
    assert (resumed.tool_format_without_tool, resumed.invented_tool_calls) == (0.5, 1.0)
    tools = {"code": solver.Says("code")}
    with pytest.raises(ConfigError, match=r"agent\.digest"):  # the same questions with their tools
        await solver.play(solver.tasks(8), MATH, hallucinating(solver), tools, out)


def test_the_command_asks_the_same_questions_without_tools(afm, tmp_path, solver, tiny_model) -> None:
    data, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    write_tasks(solver.tasks(4), data)
    words = ["without_tools=true", "tools=nowhere.yaml", "limits.max_response_tokens=12"]
    files = [f"model={tiny_model}", f"data={data}", f"output_dir={out}"]
    done = afm("eval", "configs/tiny/eval/math_world.yaml", *words, *files)
    assert "  no tool offered: 0.0 % of the episodes have the form of a call" in done.stdout
    manifest = read_manifest(out / "manifest.json")
    assert manifest.spec.name == "math_without_tools"
    assert manifest.agents.originals[manifest.spec.name].tool_roles, "the agent as it was with its tools"
    assert (manifest.settings["tools"], manifest.settings["data"]["tasks"]) == (None, 4)
