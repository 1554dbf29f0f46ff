import asyncio
import csv
from pathlib import Path

import pytest

from afm.cli.report import report
from afm.evaluation.config import load_config
from afm.evaluation.job import load_tasks, sources_of
from afm.models.base import ScriptedModel
from afm.trajectory.io import load_records
from afm.trajectory.record import encrypt, opened

ROOT = Path(__file__).resolve().parents[2]
SECRETS = ("lighthouse of Almar", "Ottilie Brand", "the keeper's diary")
ROWS = [
    (f"Who kept the lighthouse of Almar in {year}?", f"Ottilie Brand {year}") for year in (1871, 1872, 1873)
]


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "browsecomp"
    place.mkdir()
    with (place / "test_set.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["problem", "answer", "problem_topic", "canary"])
        for number, (question, answer) in enumerate(ROWS):
            canary = f"canary {number}"
            table.writerow([encrypt(question, canary), encrypt(answer, canary), "History", canary])
    return place


def keeper(text):
    """Searches once and knows the answer to all questions but the last."""
    question = text.partition("lighthouse of Almar in ")[2][:4]
    if "</observation>" not in text.rpartition("\nassistant: ")[2]:
        return f"<think>Look for the lighthouse of Almar.</think><web_search>Almar {question}</web_search>"
    answer = "nobody" if question == "1873" else f"Ottilie Brand {question}"
    return (
        f"<think>It says so.</think><suggested_answer>{answer}</suggested_answer><think>Sure?</think>"
        f"<double_check>Yes.\nScore: 4</double_check><think>Yes.</think><answer>{answer}</answer>"
    )


def settings(folder, out, *more):
    words = ["model=scripted", f"data={folder}", f"output_dir={out}", "rounds=2", *more]
    return load_config(ROOT / "configs/eval/browsecomp.yaml", words)


@pytest.fixture
def run(solver):
    """Plays an evaluation as its settings say; every page that is searched holds the answer."""

    async def play(config):
        route = config.routes().first
        tools = {
            name: solver.Says(name, "the keeper's diary, found by") for name in ("web_search", "crawl_page")
        }
        options = {"limits": route.limits, "rounds": config.rounds, "sources": sources_of(config)}
        options |= {"rewards": config.rewards, "keep_tokens": True}
        tasks, out = load_tasks(config), config.output_dir
        return await solver.play(tasks, route.declared, ScriptedModel(keeper), tools, out, **options)

    return play


def on_disk(folder):
    """Every byte below a folder, as text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return "\n".join(path.read_bytes().decode("utf-8", "replace") for path in files)


@pytest.fixture(autouse=True)
def no_judge(monkeypatch):
    monkeypatch.delenv("GRM_BASE_URL", raising=False)


async def test_episodes_are_sealed_and_open_to_what_happened(tmp_path, folder, run) -> None:
    out = tmp_path / "out"
    metrics = await run(settings(folder, out))
    assert (metrics.episodes, metrics.scored, metrics.rounds) == (6, 6, 2)
    assert metrics.pass_at_1.value == pytest.approx(2 / 3)
    assert metrics.format_valid == 1.0
    assert (metrics.tool_calls, metrics.tool_failure_rate) == (1.0, 0.0)
    stored = on_disk(out)
    assert [secret for secret in SECRETS if secret in stored] == []
    assert "History" not in stored
    records = load_records(out / "episodes.jsonl")
    assert {opened(record).provenance["groups"]["problem_topic"] for record in records} == {"History"}
    assert {record.question for record in records} == {"(sealed)"}
    assert sorted(record.verdict.score for record in records) == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    plain = {(one.question, one.ground_truth[0]) for one in map(opened, records)}
    assert plain == set(ROWS)
    assert all(one.response_ids and "keeper's diary" in one.text for one in map(opened, records))


async def test_a_sealed_run_goes_on_where_it_ended_with_the_same_figures(tmp_path, folder, run) -> None:
    whole = await run(settings(folder, tmp_path / "whole"))
    await run(settings(folder, tmp_path / "cut"))
    lines = (tmp_path / "cut/episodes.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut/episodes.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:99])
    (tmp_path / "cut/metrics.json").unlink()
    again = await run(settings(folder, tmp_path / "cut"))
    assert again.model_dump(exclude={"seconds"}) == whole.model_dump(exclude={"seconds"})
    assert [secret for secret in SECRETS if secret in on_disk(tmp_path / "cut")] == []


async def test_report_and_viewer_show_nothing_of_it(tmp_path, folder, run) -> None:
    from afm.evaluation.viewer.index import EpisodeIndex

    out = tmp_path / "out"
    await run(settings(folder, out))
    await asyncio.to_thread(report, [out])
    assert (out / "report.html").stat().st_size > 1000
    list(EpisodeIndex(out, tmp_path / "out/index.sqlite").refresh())
    assert [secret for secret in SECRETS if secret in on_disk(out)] == []
