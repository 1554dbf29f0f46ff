import asyncio
import json
from collections import Counter

import pytest

from afm.errors import ConfigError, DataError, EngineError
from afm.evaluation import FailurePolicy, Metrics, Sources
from afm.models.base import FinishReason, Generation, ScriptedModel
from afm.seeds import derive_seed
from afm.tools import load_tools
from afm.trajectory.io import load_records

pytestmark = pytest.mark.sandbox


class FailingModel(ScriptedModel):
    """Fails for the questions that ``fails`` picks, so many times each."""

    def __init__(self, script, fails, times):
        super().__init__(script)
        self.fails, self.times = fails, times
        self.failures = Counter()

    async def generate(self, prompt_ids, params):
        text = self.decode(prompt_ids)
        question = text.partition("\nassistant: ")[0]
        if self.fails(question) and self.failures[question] < self.times:
            self.failures[question] += 1
            raise EngineError("connection lost")
        return await super().generate(prompt_ids, params)


async def run_with(solver, model, folder, tasks, *, tools=None, retries=0, max_share=0.1, **options):
    tasks = solver.tasks(tasks) if isinstance(tasks, int) else tasks
    tools = tools or load_tools(solver.CODE_TOOL)
    options["failures"] = FailurePolicy(retries, max_share)
    return await solver.play(tasks, solver.spec(), model, tools, folder, **options)


def rows_of(solver, folder):
    records = load_records(folder / "episodes.jsonl")
    return {record.id: solver.timeless(record.model_dump(mode="json")) for record in records}


async def test_every_episode_is_a_judged_row_and_the_figures_follow(tmp_path, solver) -> None:
    seen = []
    metrics = await solver.run(tmp_path, 50, 12, on_progress=lambda *count: seen.append(count))
    records = load_records(tmp_path / "episodes.jsonl")
    with_tool = [task for task in solver.tasks(12) if solver.share_of(task.question) < 50]
    assert 0 < len(with_tool) < 12
    assert sorted(record.id for record in records) == sorted(f"{task.id}#0" for task in solver.tasks(12))
    assert metrics.pass_at_1.value == metrics.tool_use == metrics.tool_calls == len(with_tool) / 12
    assert metrics.format_valid == 1.0
    assert metrics == Metrics.model_validate_json((tmp_path / "metrics.json").read_text())
    assert (seen[0], seen[-1]) == ((0, 12), (12, 12))
    solved = next(record for record in records if record.cost.tool_calls)
    assert solved.verdict.parts == {"correct": 1.0, "format": 1.0}
    assert solved.calls[0].observation == solved.ground_truth
    assert solved.segments[1].text == f"\n<observation>\n{solved.ground_truth}\n</observation>\n"
    assert solved.seed == derive_seed(0, solved.provenance["task"], 0)


@pytest.mark.slow
async def test_rounds_have_seeds_of_their_own_and_do_not_depend_on_parallelism(tmp_path, solver) -> None:
    wide = await solver.run(tmp_path / "wide", 50, 4, rounds=3, parallel=12)
    narrow = await solver.run(tmp_path / "narrow", 50, 4, rounds=3, parallel=1)
    rows = rows_of(solver, tmp_path / "wide")
    assert rows == rows_of(solver, tmp_path / "narrow")
    assert len({row["seed"] for row in rows.values()}) == 12
    assert wide.model_copy(update={"seconds": 0}) == narrow.model_copy(update={"seconds": 0})
    assert wide.rounds == 3


@pytest.mark.slow
async def test_a_second_start_repeats_nothing_but_what_a_kill_cut_off(tmp_path, solver) -> None:
    first = await solver.run(tmp_path, 50, 8)
    file, rows = tmp_path / "episodes.jsonl", rows_of(solver, tmp_path)
    before = file.read_bytes()
    model = ScriptedModel([], name="scripted-50")  # would fail at the first generation
    assert await run_with(solver, model, tmp_path, 8) == first
    assert file.read_bytes() == before
    lines = before.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:50])
    await solver.run(tmp_path, 50, 8)
    assert rows_of(solver, tmp_path) == rows
    assert file.read_bytes().splitlines(keepends=True)[:3] == lines[:3]


async def test_two_processes_cannot_write_into_one_folder(tmp_path, solver) -> None:
    inner = []

    def try_again(done, total):
        if done == 1 and not inner:
            inner.append(asyncio.ensure_future(solver.run(tmp_path, 50, 3)))

    await solver.run(tmp_path, 50, 3, parallel=1, on_progress=try_again)
    with pytest.raises(ConfigError, match="another run is writing here"):
        await inner[0]
    assert len(load_records(tmp_path / "episodes.jsonl")) == 3


@pytest.mark.slow
async def test_a_failure_is_retried_and_one_that_stays_is_a_row_that_the_next_start_repeats(
    tmp_path, solver
) -> None:
    model = FailingModel(solver.solver(50), lambda _: True, times=1)
    metrics = await run_with(solver, model, tmp_path / "passing", 4, retries=1)
    assert (metrics.scored, metrics.errors) == (4, 0)
    broken = solver.tasks(10)[3].question
    model = FailingModel(solver.solver(100), lambda text: broken in text, times=100)
    metrics = await run_with(solver, model, tmp_path, 10, retries=1)
    assert (metrics.episodes, metrics.scored, metrics.errors) == (10, 9, 1)
    assert metrics.pass_at_1.value == 1.0
    assert [*model.failures.values()] == [2]
    row = next(record for record in load_records(tmp_path / "episodes.jsonl") if record.error)
    assert (row.question, row.stop, row.verdict) == (broken, "error", None)
    assert row.error == "EngineError: connection lost"
    good = ScriptedModel(solver.solver(100))
    metrics = await run_with(solver, good, tmp_path, 10)
    assert (metrics.episodes, metrics.scored, metrics.errors) == (10, 10, 0)
    assert len(good.params) == 2  # one question, two generations: before and behind its tool call
    ids = [record.id for record in load_records(tmp_path / "episodes.jsonl")]
    assert len(ids) == len(set(ids)) == 10


@pytest.mark.slow
async def test_too_many_failures_end_the_run_and_keep_what_is_done(tmp_path, solver) -> None:
    questions = [task.question for task in solver.tasks(10)]
    model = FailingModel(solver.solver(100), lambda text: any(q in text for q in questions[4:]), times=100)
    with pytest.raises(EngineError) as caught:
        await run_with(solver, model, tmp_path, 10, parallel=1, max_share=0.2)
    assert str(caught.value).startswith(
        "3 of 7 episodes ended without a score (3 failures of engine or tools, 0 abstentions of the reward); "
        "at most 20% of 10 may. The last one: EngineError: connection lost."
    )
    assert not (tmp_path / "metrics.json").exists()
    metrics = await run_with(solver, ScriptedModel(solver.solver(100)), tmp_path, 10)
    assert metrics.scored == 10
    model = FailingModel(solver.solver(100), lambda _: True, times=100)
    with pytest.raises(EngineError, match="20 of 20 episodes"):  # a long run ends early
        await run_with(solver, model, tmp_path / "long", 200, parallel=4, max_share=0.9)


@pytest.mark.slow
async def test_an_abstaining_reward_never_counts_as_wrong(tmp_path, solver) -> None:
    # No gold answer: the reward cannot judge.
    tasks = [task.model_copy(update={"ground_truth": []}) for task in solver.tasks(2)] + solver.tasks(4)[2:]
    model = ScriptedModel(solver.solver(100))
    metrics = await run_with(solver, model, tmp_path, tasks, retries=1, max_share=0.5)
    assert (metrics.episodes, metrics.scored, metrics.abstained, metrics.errors) == (4, 2, 2, 0)
    assert metrics.pass_at_1.value == 1.0
    with pytest.raises(EngineError, match="0 failures of engine or tools, 2 abstentions of the reward"):
        await run_with(solver, model, tmp_path, tasks, parallel=1, max_share=0.25)


async def test_an_episode_whose_tool_calls_all_failed_says_nothing_about_the_agent(tmp_path, solver) -> None:
    tools = {"code": solver.Says("code", "The server does not answer.", ok=False)}
    model = ScriptedModel(solver.solver(50))
    metrics = await run_with(solver, model, tmp_path, 6, tools=tools, max_share=1.0)
    called = sum(solver.share_of(task.question) < 50 for task in solver.tasks(6))
    assert (metrics.errors, metrics.scored) == (called, 6 - called)
    error = next(record.error for record in load_records(tmp_path / "episodes.jsonl") if record.error)
    assert "every tool call failed" in error
    assert "The server does not answer." in error


async def test_a_question_that_does_not_fit_the_context_is_not_passed(tmp_path, solver) -> None:
    lengths = sorted(len(task.question) for task in solver.tasks(8))
    model = ScriptedModel(solver.solver(0), context_tokens=lengths[-1] + len("user: \nassistant: "))
    metrics = await run_with(solver, model, tmp_path, 8)
    assert metrics.scored == 8
    assert metrics.stop_reasons == {"response_tokens": 8}
    empty = [record for record in load_records(tmp_path / "episodes.jsonl") if not record.segments]
    assert len(empty) == lengths.count(lengths[-1])


class CountingModel(ScriptedModel):
    """Knows how many generations run at once."""

    running = most = 0

    async def generate(self, prompt_ids, params):
        CountingModel.running += 1
        CountingModel.most = max(CountingModel.most, CountingModel.running)
        await asyncio.sleep(0.01)
        CountingModel.running -= 1
        return Generation(tuple(self.encode("no")), (0.0, 0.0), FinishReason.END_OF_TEXT)


async def test_no_more_episodes_are_in_flight_than_allowed(tmp_path, solver) -> None:
    await run_with(solver, CountingModel(""), tmp_path, 40, parallel=7)
    assert CountingModel.most == 7


async def test_wrong_calls_are_refused_before_anything_is_written(tmp_path, solver) -> None:
    tasks, model = solver.tasks(2), ScriptedModel(solver.solver(0))
    with pytest.raises(ConfigError, match="agent 'math' calls code, but `tools` has none"):
        await solver.play(tasks, solver.spec(), model, {}, tmp_path / "a")
    with pytest.raises(DataError, match="occurs twice"):
        await run_with(solver, model, tmp_path / "a", [*tasks, tasks[0]])
    assert not (tmp_path / "a").exists()


async def test_tokens_are_kept_on_demand(tmp_path, solver) -> None:
    await solver.run(tmp_path / "without", 100, 1)
    await solver.run(tmp_path / "with", 100, 1, keep_tokens=True)
    without, kept = (load_records(tmp_path / name / "episodes.jsonl")[0] for name in ("without", "with"))
    assert without.response_ids is None
    tokens = kept.cost.agent_tokens + kept.cost.observation_tokens
    assert len(kept.response_ids) == len(kept.response_mask) == tokens


async def test_the_manifest_says_what_the_score_depends_on(tmp_path, solver) -> None:
    servers = "http://user:secret@127.0.0.1:8000/v1,http://user:secret@127.0.0.1:8001/v1?key=secret"
    sources = Sources(model=servers, tools=solver.CODE_TOOL)
    await solver.run(tmp_path, 50, 3, sources=sources)
    text = (tmp_path / "manifest.json").read_text()
    assert "secret" not in text
    manifest = json.loads(text)
    settings = manifest["settings"]
    assert settings["agent"]["digest"] == solver.spec().digest
    assert (settings["data"]["tasks"], settings["sampling"]["max_new_tokens"]) == (3, 2000)
    assert (settings["rounds"], settings["seed"], settings["tools"]) == (1, 0, solver.CODE_TOOL)
    assert manifest["sources"]["model"] == "http://***@127.0.0.1:8000/v1,http://***@127.0.0.1:8001/v1?***"
    assert manifest["versions"]["afm"]
