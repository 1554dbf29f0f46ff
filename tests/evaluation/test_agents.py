import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from afm.errors import ConfigError
from afm.evaluation import Conditions, evaluate
from afm.evaluation.config import EvalConfig, load_config
from afm.evaluation.doctor import diagnose
from afm.evaluation.job import load_tasks, row_agents, sources_of
from afm.evaluation.manifest import read_manifest
from afm.evaluation.metrics import Metrics
from afm.evaluation.report import write_run_report
from afm.evaluation.viewer.episodes import agent_of
from afm.findings import Level
from afm.models.base import SamplingParams, ScriptedModel
from afm.trajectory.io import load_records

ROOT = Path(__file__).resolve().parents[2]
AGENTS = (
    "{code: {data_sources: [codeforces]}, math: {agent: math, abilities: [math], limits: {max_turns: 1}}}"
)
TESTS = json.dumps({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "6\n"]})
DOUBLE = "<plan>p</plan><think>t</think><answer>\n```py\nprint(2 * int(input()))\n```\n</answer>"
BOXED = "<plan>p</plan><think>t</think><answer>\\boxed{4}</answer>"


def row(index: int, question: str, source: str, ability: str, gold: str) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Solve it.\n\nQuestion: {question}"}],
        "ability": ability,
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": {"index": str(index), "split": "test", "question": question, "answer": [gold]},
    }


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    rows = [
        row(0, "Print twice the number.", "codeforces", "code", TESTS),
        row(1, "What is 2 + 2?", "math_dapo", "math", "4"),
        row(2, "What is 2 + 3?", "math_dapo", "math", "5"),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    return tmp_path / "mixed.parquet"


def settings(mixed: Path, agents: str = AGENTS, *words: str) -> EvalConfig:
    path = mixed.with_name("eval.yaml")
    path.write_text(
        f"name: mixed\nagent: code\nagents: {agents}\ntools: {ROOT}/configs/tools/code_executor.yaml\n"
    )
    given = ["model=http://127.0.0.1:1", f"data={mixed}", f"output_dir={mixed.with_name('out')}"]
    return load_config(path, [*given, *words])


async def run(config: EvalConfig, speak: Any) -> Metrics:
    tasks = load_tasks(config)
    agents = row_agents(config, tasks)
    first = agents.routes.first
    sources, sampling = sources_of(config), SamplingParams(max_new_tokens=500)
    conditions = Conditions(sampling, limits=first.limits, sources=sources, row_agents=agents)
    model, tools, reward = (
        ScriptedModel(speak, name="scripted"),
        agents.tools[first.name],
        agents.rewards[first.name],
    )
    try:
        return await evaluate(tasks, first.declared, model, tools, reward, config.output_dir, conditions)
    finally:
        await agents.close()


def answer(text: str) -> str:
    return DOUBLE if "twice" in text else BOXED


@pytest.mark.sandbox
async def test_each_row_is_solved_by_its_own_agent_and_figures_are_by_agent(mixed: Path) -> None:
    config = settings(mixed)
    metrics = await run(config, answer)
    assert {name: (part.questions, part.passed_without_tool) for name, part in metrics.by_agent.items()} == {
        "code": (1, 1.0),
        "math": (2, 0.5),
    }
    assert metrics.pass_at_1 is not None
    assert metrics.pass_at_1.value == pytest.approx(2 / 3)
    records = {record.id: record for record in load_records(config.output_dir / "episodes.jsonl")}
    routes = {name: (one.agent, one.provenance["route"]) for name, one in records.items()}
    assert routes == {"0#0": ("code", "code"), "1#0": ("math", "math"), "2#0": ("math", "math")}
    manifest = read_manifest(config.output_dir / "manifest.json")
    assert list(manifest.agents.specs) == ["code", "math"]
    assert manifest.settings["agents"]["math"]["tasks"] == 2
    for record in records.values():
        shown = agent_of(str(config.output_dir / "episodes.jsonl"), record.agent, record.agent_digest)
        assert shown is not None
        assert shown.digest == record.agent_digest
    page = write_run_report(config.output_dir, mixed.with_name("report.html"))
    text = page.with_suffix(".md").read_text()
    assert "The agents code, math, run out" in text
    assert "agent math: 50.0 % (" in text
    assert "of 2 questions" in text


@pytest.mark.sandbox
async def test_a_run_goes_on_where_it_ended_and_not_with_another_map(mixed: Path) -> None:
    config = settings(mixed)
    whole = await run(config, answer)
    episodes = config.output_dir / "episodes.jsonl"
    lines = episodes.read_text().splitlines(keepends=True)
    episodes.write_text("".join(lines[:2]))  # killed before the third
    asked: list[str] = []
    again = await run(config, lambda text: asked.append(text) or answer(text))
    assert len(asked) == 1
    others = {"by_agent", "seconds", "usd"}
    assert again.model_dump(exclude=others) == whole.model_dump(exclude=others)
    assert again.by_agent["math"].pass_at_1 == whole.by_agent["math"].pass_at_1
    other = settings(mixed, AGENTS.replace("abilities: [math]", "data_sources: [math_dapo]"))
    with pytest.raises(ConfigError, match=r"other settings \(agents\.math\.abilities: \['math'\] -> \[\]"):
        await run(other, answer)
    tighter = settings(mixed, AGENTS.replace("max_turns: 1", "max_turns: 2"))
    with pytest.raises(ConfigError, match=r"\(agents\.math\.limits\.max_turns: 1 -> 2\)"):
        await run(tighter, answer)


def test_doctor_names_questions_that_their_agent_can_never_solve(mixed: Path) -> None:
    path = settings(mixed).output_dir.with_name("eval.yaml")
    words = [f"data={mixed}", f"output_dir={mixed.with_name('out')}"]

    def errors(*more: str) -> list[str]:
        found = diagnose(path, [*words, *more])
        return [one.text for one in found if one.level is Level.ERROR and one.subject != "model"]

    assert errors() == []
    [text] = errors("agents=null")
    assert text.startswith(
        "2 questions of data_source 'math_dapo' can never be solved: agent 'code' answers with a"
    )
    [text] = errors("agents.math.abilities=[maths]")
    assert "no entry of `agents` takes rows of data_source 'math_dapo' and ability 'math' (2 rows)" in text
