import json
from pathlib import Path

import pytest

from afm.agents import PromptSource, load_agent
from afm.datasets import Task
from afm.errors import ConfigError, UsageError
from afm.evaluation import Conditions, Sources
from afm.evaluation.benchmarks import PUBLISHED_REMARKS
from afm.evaluation.config import load_config
from afm.evaluation.doctor import diagnose
from afm.evaluation.job import sources_of
from afm.evaluation.report import write_run_report
from afm.findings import Level
from afm.models.base import SamplingParams, ScriptedModel
from afm.rollout import PublishedProtocol
from afm.trajectory.io import load_records

ROOT = Path(__file__).resolve().parents[2]
WEB = load_agent("web").model_copy(update={"prompt": "", "question_format": "{question}"})
TASKS = [Task(id=name, question=f"of {name}?", ground_truth=name, data_source="nq") for name in ("a", "b")]


def speak(text):
    """About `a`: suggests x, then a, then searches on. About `b`: never says a word that is a step."""
    if "of b?" in text:
        return "<think>hm"
    said = text.count("</suggested_answer>")
    if said < 2:
        return f"<think>{said}</think><suggested_answer>{'xa'[said]}</suggested_answer>"
    return f"<think>more</think><web_search>query {text.count('found')}</web_search>"


@pytest.fixture
def run(solver, tmp_path):
    """Plays both tasks into ``tmp_path / name``."""

    async def play(name, protocol=None, **options):
        tools = {tool: solver.Says(tool, "found") for tool in ("web_search", "crawl_page")}
        limits = WEB.limits.model_copy(update={"max_turns": 4, "max_response_tokens": 4000})
        options |= {"limits": limits, "protocol": protocol, "keep_tokens": True}
        options |= {"rewards": {"formula": "correct"}}
        return await solver.play(TASKS, WEB, ScriptedModel(speak), tools, tmp_path / name, **options)

    return play


async def test_the_last_suggested_answer_is_judged_and_its_origin_recorded(tmp_path, run) -> None:
    assert (await run("ours")).pass_at_1.value == 0.0
    metrics = await run("published", PublishedProtocol(max_steps=4, max_errors=3))
    assert (metrics.pass_at_1.value, metrics.scored) == (0.5, 2)
    first, second = sorted(load_records(tmp_path / "published/episodes.jsonl"), key=lambda record: record.id)
    assert (first.verdict.score, first.stop) == (1.0, "turns")
    facts = first.provenance["protocol"]
    assert (facts["answer_from"], facts["steps"], facts["attempts"]) == ("last suggested answer", 4, 1)
    # Without an answer there are three attempts of three forgotten generations each, all of them paid for.
    facts = second.provenance["protocol"]
    assert (facts["answer_from"], facts["attempts"], facts["errors"]) == (None, 3, 3)
    assert (second.verdict.score, second.cost.generations) == (0.0, 9)
    with pytest.raises(ConfigError, match=r"other settings \(protocol"):
        await run("published")


async def test_the_report_tells_what_is_left_of_the_differences(tmp_path, run) -> None:
    sources = Sources(benchmark="gaia", reward={"formula": "correct"})
    await run("ours", sources=sources)
    await run("published", PublishedProtocol(max_steps=4), sources=sources)
    protocols, texts = {}, {}
    for name in ("ours", "published"):
        page = write_run_report(tmp_path / name, tmp_path / f"{name}.html")
        assert json.loads(page.with_suffix(".json").read_text())["stages"][0]["published"]["departures"]
        protocols[name] = json.loads((tmp_path / name / "manifest.json").read_text())["sources"]["benchmark"]
        texts[name] = page.with_suffix(".md").read_text()
    left = set(protocols["published"]["departures"])
    gone = {text.partition(":")[0] for text in protocols["ours"]["departures"] if text not in left}
    assert gone == {"suggested answers", "full context", "steps", "repeats", "attempts"}
    assert "judge's text: ours here, AFM's published; set rewards.judge.prompt=FILE" in left
    assert protocols["published"]["remarks"] == list(PUBLISHED_REMARKS)
    assert "Its stop list lacks suggested answers" in texts["published"]
    assert "published: as AFM's script plays its web agent" in texts["published"]
    assert "as AFM's script" not in texts["ours"]


async def test_the_report_shows_no_prompt_and_no_limit_that_did_not_hold(tmp_path, run) -> None:
    text = tmp_path / "words.txt"
    text.write_text("Words of mine.\n\n{question}")
    prompt = PromptSource.load(text)
    await run("out", PublishedProtocol(max_steps=4), prompt=prompt)
    file = write_run_report(tmp_path / "out", tmp_path / "page.html")
    page, summary = file.read_text(), file.with_suffix(".md").read_text()
    assert "The whole prompt" not in page
    assert "The prompt is the question alone" not in page
    assert "its format is valid" not in page, "the formula of this run is the answer alone"
    assert f"- Prompt: text of a file (digest {prompt.recorded['digest']})" in summary
    assert "- Limits: 4 steps, 4,000 tokens of context" in summary


def test_with_the_users_texts_nothing_differs_but_the_questions(tmp_path) -> None:
    from afm.evaluation.manifest import make_manifest

    (tmp_path / "judge.txt").write_text("{question} {gt_answer} {pred_answer}")
    (tmp_path / "web.txt").write_text("user\n\nSearch.\n\n{question}")
    words = ["model=http://127.0.0.1:1", "protocol=published", f"prompt={tmp_path / 'web.txt'}"]
    words += [f"rewards={ROOT / 'configs/rewards/eval_judge_published.yaml'}"]
    words += [f"rewards.judge.prompt={tmp_path / 'judge.txt'}"]
    config = load_config(ROOT / "configs/eval/gaia.yaml", words)
    route, protocol = config.routes().first, config.published_protocol()
    assert protocol == PublishedProtocol()
    conditions = Conditions(
        SamplingParams(4096, temperature=1.0, top_p=0.9, top_k=20),
        limits=route.limits,
        rounds=5,
        sources=sources_of(config),
        prompt=config.prompt_source(route),
        protocol=protocol,
    )
    manifest = make_manifest(TASKS, route.declared, "m", conditions)
    facts = manifest.sources["benchmark"]
    assert facts["departures"] == ["questions: 2 here, 103 published"]
    assert (facts["published"]["temperatures"], facts["published_scores"]["pass@3"]) == ([1.0], 69.9)
    digest = manifest.settings["reward"]["judge"]["prompt"]
    (tmp_path / "judge.txt").write_text("Well? {question} {gt_answer} {pred_answer}")
    assert sources_of(config).reward["judge"]["prompt"] != digest


def test_the_doctor_names_what_differs(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("LIVECODEBENCH_DATA_PATH", raising=False)

    def diagnosed(name, file, text):
        (tmp_path / file).write_text(text)
        words = [f"data={tmp_path / file}", f"output_dir={tmp_path / 'out'}"]
        found = diagnose(ROOT / f"configs/eval/{name}.yaml", words)
        (one,) = (one for one in found if one.subject == "benchmark")
        return one.level, one.text

    rows = [{"question": f"Who is {name}?", "answer": name, "task_id": name} for name in "ab"]
    level, text = diagnosed("gaia", "gaia_dev_103.json", json.dumps(rows))
    assert level is Level.OK
    assert text.startswith("gaia, not as published: ")
    assert "suggested answers: never count as the answer here" in text
    cases = json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}])
    problem = {
        "question_id": "a",
        "question_content": "Say it.",
        "public_test_cases": cases,
        "metadata": "{}",
    }
    level, text = diagnosed("livecodebench_v5", "lcb.jsonl", json.dumps(problem) + "\n")
    assert level is Level.WARNING
    assert "tests: only samples for 1 of 1 problems" in text


def test_an_agent_that_the_script_cannot_run_is_refused() -> None:
    config = load_config(ROOT / "configs/eval/nq.yaml", ["model=m", "protocol=published"])
    with pytest.raises(ConfigError, match="protocol: got published, but agent 'mhqa' suggests no answers"):
        config.published_protocol()
    with pytest.raises(UsageError, match=r"protocol: got 'publishd' .*, expected 'ours' or 'published'"):
        load_config(ROOT / "configs/eval/gaia.yaml", ["model=m", "protocol=publishd"])
