"""The agent loop as verl calls it: stock base class, scripted servers, real tool, sandbox and reward."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from extras import needs

from afm.errors import AfmError, DataError, EngineError
from afm.sandbox.slots import own_cores, share_cores
from afm.trajectory import read_records
from verl_ext.kept_episodes import episodes_file

needs("verl")

CODE = "<plan>Run it.</plan><think>12+13.</think><code>\n```py\nprint(12+13)\n```\n</code>"
OBSERVED = "\n<observation>\n25\n</observation>\n"
ANSWER = "<reflection>25.</reflection><think>Done.</think><answer>\\boxed{25}</answer>"
AGENT = {"extends": "math", "prompt": "", "question_format": "{question}"}
TOOLS = {"tools": [{"class_name": "afm.tools.code.CodeTool", "tool_schema": {"function": {"name": "code"}}}]}
SHORT = "<plan>p</plan><|im_end|>"
SOLVED = "<plan>p</plan><think>t</think><answer>\\boxed{25}</answer>"
ROW = {
    "uid": "u1",
    "session_id": 2,
    "global_steps": 4,
    "data_source": "mini_math",
    "reward_model": {"ground_truth": "25"},
    "extra_info": {"index": "q7", "question": "12+13?"},
    "raw_prompt": [{"role": "user", "content": "another prompt, Question: 12+13?"}],
}
SAMPLING = {"temperature": 0.9, "top_p": 1.0, "top_k": -1, "logprobs": True}


@pytest.fixture
def make_loop(tmp_path: Path, tokenizer: Any) -> Callable[..., Any]:
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from verl_ext.agent_loop import AfmAgentLoop, surroundings

    def make(servers: Any, *, prompt_length: int = 64, workers: int = 1, nodes: int = 1, **more: Any) -> Any:
        settings = {"limits": {"max_turns": 2, "max_response_tokens": 200}, "output_dir": str(tmp_path)}
        for name, content in (("agent", AGENT), ("tools", TOOLS)):
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
            settings[name] = str(tmp_path / f"{name}.yaml")
        path = tmp_path / "settings.yaml"
        surroundings.cache_clear()
        path.write_text(yaml.safe_dump(settings | more))
        rollout = {"name": "afm_cpu", "prompt_length": prompt_length, "response_length": 200}
        rollout |= {"max_model_len": None, "agent": {"num_workers": workers}}
        actor = {"rollout": rollout, "model": {"path": "none"}}
        config = OmegaConf.create({"actor_rollout_ref": actor, "data": {}, "trainer": {"nnodes": nodes}})
        return AfmAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=servers,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            settings=str(path),
        )

    return make


@pytest.fixture
def play(make_loop: Any, scripted: Any, said: Any) -> Callable[..., Any]:
    """Play one episode with texts or outputs of a server, and return the episode's output and the server."""

    async def run(*outputs: Any, row: dict[str, Any] = ROW, **settings: Any) -> tuple[Any, Any]:
        servers = scripted([said(output) if isinstance(output, str) else output for output in outputs])
        return await make_loop(servers, **settings).run(dict(SAMPLING), **row), servers

    return run


def failures(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.sandbox
async def test_a_tool_episode_is_trained_on_exactly_as_sampled(play: Any, said: Any, tokenizer: Any) -> None:
    versions = {"min_global_steps": 3, "max_global_steps": 3}
    texts = (CODE, ANSWER + "<|im_end|>")
    output, servers = await play(*(said(text, extra_fields=versions) for text in texts))
    asked = "<|im_start|>user\n12+13?<|im_end|>\n<|im_start|>assistant\n"
    prompt, code, observed, answer = (
        tokenizer.encode(text, add_special_tokens=False) for text in (asked, CODE, OBSERVED, texts[1])
    )
    kept = len(output.response_ids) - len(code) - len(observed)
    assert output.prompt_ids == prompt
    assert output.response_ids == [*code, *observed, *answer[:kept]]
    assert output.response_mask == [1] * len(code) + [0] * len(observed) + [1] * kept
    assert output.response_logprobs == [-0.5] * len(code) + [0.0] * len(observed) + [-0.5] * kept
    assert servers.requests[1]["prompt"] == [*prompt, *code, *observed]
    stored = output.as_dict()  # verl's own
    assert stored["rm_scores"].tolist() == [0.0] * (len(output.response_ids) - 1) + [1.0]
    assert stored["rollout_log_probs"].tolist() == output.response_logprobs
    facts = output.extra_fields["reward_extra_info"]
    assert [facts[key] for key in ("acc", "correct", "format", "tool_calls", "abstained")] == [1, 1, 1, 1, 0]
    assert facts["response_tokens"] == len(output.response_ids)
    assert output.extra_fields.items() >= (versions | {"question_index": "q7"}).items()
    params = servers.requests[0]["params"]
    assert (params["temperature"], params["top_k"], params["max_tokens"]) == (0.9, -1, 200)
    assert set(params["stop"]) == {"</code>", "</answer>", "<observation>"}
    unmasked, _ = await play(*texts, mask_observations=False)
    assert unmasked.response_mask == [1] * len(output.response_ids)


@pytest.mark.sandbox
async def test_rows_of_programs_and_of_mathematics_are_solved_in_one_run(
    play: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Rows have the published layout. If the agent `code` took all of them, the boxed answer would score 0."""
    program = SOLVED.replace("\\boxed{25}", "\n```py\nprint(int(input()) * 2)\n```\n")
    tests = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})
    code_row = ROW | {"data_source": "codeforces", "ability": "code", "reward_model": {"ground_truth": tests}}
    math_row = ROW | {"data_source": "math_dapo", "ability": "math"}
    agents = {
        "code": {"agent": "code", "abilities": ["code"], "prompt": "row"},
        "math": {"data_sources": ["math_dapo"], "limits": {"max_turns": 1}},
    }
    seen = []
    for row, text in ((code_row, program), (math_row, SOLVED), (code_row, SOLVED)):
        output, _ = await play(text, row=row, agents=agents, episodes_per_step=100)
        asked = tokenizer.decode(output.prompt_ids)
        agent = output.extra_fields["reward_extra_info"]["agent"]
        seen.append((agent, output.reward_score, "another prompt" in asked))
    assert seen == [("code", 1.0, True), ("math", 1.0, False), ("code", 0.0, True)]
    records = list(read_records(episodes_file(tmp_path, 4)))
    assert [record.agent for record in records] == [agent for agent, *_ in seen]
    assert [record.provenance["route"] for record in records] == [agent for agent, *_ in seen]
    with pytest.raises(AfmError, match=r"no entry of `agents` takes rows of data_source 'mini_math'"):
        await play(agents=agents)


async def test_a_prompt_that_is_too_long_or_absent_is_refused(play: Any) -> None:
    with pytest.raises(
        AfmError, match=r"task q7: the prompt has \d+ tokens, more than data.max_prompt_length \(8\)"
    ):
        await play(prompt="row", prompt_length=8)
    with pytest.raises(AfmError, match="task q7: prompt=row, but the row holds no prompt"):
        await play(row=ROW | {"raw_prompt": None}, prompt="row")


async def test_workers_of_a_node_share_its_cores(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    try:
        await play("<plan>p</plan><think>t</think><answer>1</answer>", workers=8, nodes=3)
        assert own_cores() == 4  # eight workers on three nodes: three on the fullest
    finally:
        share_cores(1)
    assert own_cores() == 12


async def test_equal_samples_have_equal_seeds_and_different_ones_differ(play: Any) -> None:
    async def seed(**changes: Any) -> int:
        _, servers = await play(SHORT, row=ROW | changes)
        return int(servers.requests[0]["params"]["seed"])

    from verl_ext import agent_loop

    agent_loop._DRAWS.clear()
    first = await seed()
    assert await seed() == first
    again = await seed(uid="u2")  # the same question, drawn once more in this step
    assert again != first
    assert await seed(uid="u2") == again
    agent_loop._DRAWS.clear()  # as in the next run, whose uids are others
    assert [await seed(uid="u3"), await seed(uid="u4")] == [first, again]
    assert len({first, await seed(session_id=3), await seed(global_steps=5)}) == 3


async def test_a_sample_without_a_score_is_left_out_of_the_loss(play: Any, said: Any, tokenizer: Any) -> None:
    """The reward abstained on one episode. The other was aborted before its first token."""
    abstained, _ = await play(SOLVED, row=ROW | {"reward_model": {"ground_truth": {"tests": 3}}})
    assert "gold" in abstained.extra_fields["abstained"] or "target" in abstained.extra_fields["abstained"]
    aborted, _ = await play(said("", stop_reason="aborted"))
    assert aborted.response_ids == [tokenizer.eos_token_id]
    assert aborted.extra_fields["stop"] == "aborted"
    for output in (abstained, aborted):
        assert set(output.response_mask) == {0}
        assert output.extra_fields["reward_extra_info"]["abstained"] == 1.0
        assert output.reward_score == 0.0


async def test_a_reward_that_is_infinite_abstains(play: Any) -> None:
    rewards = {"by_source": {"mini_math": "endless_scorer.Endless"}}
    output, _ = await play("<plan>p</plan><think>t</think><answer>1</answer>", rewards=rewards)
    reported = r"endless_scorer.py:\d+: Endless.judge returned the score inf .* expected a number from 0 to 1"
    assert re.search(reported, output.extra_fields["abstained"])
    assert set(output.response_mask) == {0}
    assert output.extra_fields["reward_extra_info"]["abstained"] == 1.0


async def test_with_full_determinism_an_episode_asks_under_the_same_name_again(
    make_loop: Any, scripted: Any, said: Any
) -> None:
    async def name(deterministic: bool, **changes: Any) -> str:
        servers = scripted([said(SHORT)])
        loop = make_loop(servers)
        loop.rollout_config.full_determinism = deterministic
        await loop.run(dict(SAMPLING), **ROW | changes)
        return str(servers.requests[0]["id"])

    assert await name(True) == await name(True)
    assert await name(True) != await name(True, session_id=3)
    assert await name(False) != await name(False)


def count_failures(loop: Any) -> Any:
    """Configure the sampler that drops failed episodes, as `afm rl` does."""
    from omegaconf import OmegaConf

    path = {"trainer": {"v1": {"sampler": {"custom_sampler": {"path": "pkg://verl_ext.sampler"}}}}}
    loop.config = OmegaConf.merge(loop.config, path)
    return loop


async def test_a_failed_episode_is_a_sample_without_a_score_and_is_listed(
    make_loop: Any, scripted: Any, tokenizer: Any, tmp_path: Path
) -> None:
    row = {key: value for key, value in ROW.items() if key not in ("extra_info", "raw_prompt")}
    with pytest.raises(DataError, match="question"):  # with verl's sampler, which would train on it
        await make_loop(scripted([])).run(dict(SAMPLING), **row)
    (tmp_path / "failures.jsonl").unlink()
    output = await count_failures(make_loop(scripted([]))).run(dict(SAMPLING), **row)
    assert (output.response_ids, output.response_mask) == ([tokenizer.eos_token_id], [0])
    assert output.extra_fields["failed"].startswith("episode 4/u1/2: DataError: expected `question`")
    assert output.extra_fields["reward_extra_info"]["abstained"] == 1.0
    assert output.as_dict()["rm_scores"].tolist() == [0.0]
    [listed] = failures(tmp_path)
    assert (listed["step"], listed["episode"], listed["fatal"]) == (4, "4/u1/2", False)
    assert "Traceback" in listed["traceback"]


async def test_an_error_of_the_engine_ends_the_run_loudly_and_is_written_down(
    make_loop: Any, scripted: Any, tmp_path: Path
) -> None:
    for sampler in (lambda loop: loop, count_failures):
        with pytest.raises(EngineError, match="server died"):
            await sampler(make_loop(scripted([RuntimeError("server died")]))).run(dict(SAMPLING), **ROW)
    rows = failures(tmp_path)
    assert [(row["error"], row["fatal"]) for row in rows] == [("EngineError", True)] * 2
    assert all("server died" in row["message"] and "12+13?" in row["prompt"] for row in rows)


@pytest.mark.sandbox
async def test_a_response_ends_with_the_agents_last_token(play: Any, said: Any, tokenizer: Any) -> None:
    output, _ = await play(CODE, said("", stop_reason="aborted"))
    assert tokenizer.decode(output.response_ids) == CODE
    assert set(output.response_mask) == {1}
    assert len(output.response_logprobs) == len(output.response_ids)
    assert output.extra_fields["reward_extra_info"]["tool_calls"] == 1.0


@pytest.mark.parametrize(
    ("text", "reason", "kind", "limits"),
    [
        ("<plan>p</plan><observation>", "completed", "void", {}),
        ("<plan>p</plan><think>t", "aborted", "failed", {}),
        ("<plan>no end", "completed", "truncated", {"max_agent_tokens": "all of it"}),
    ],
)
async def test_episodes_without_a_proper_end_are_left_out_when_asked(
    play: Any, said: Any, text: str, reason: str, kind: str, limits: dict[str, Any]
) -> None:
    answer = said(text, stop_reason=reason)
    bounds = {"max_turns": 2, "max_response_tokens": 200} | {key: len(answer.token_ids) for key in limits}

    async def sample(*left_out: str) -> Any:
        return (await play(answer, limits=bounds, leave_out=list(left_out)))[0]

    out = await sample(kind)
    assert set(out.response_mask) == {0}
    assert out.extra_fields["abstained"].startswith(f"left out: {kind}")
    for kept in (await sample(), await sample(*({"void", "failed", "truncated"} - {kind}))):
        assert set(kept.response_mask) == {1}
        assert kept.extra_fields["abstained"] == ""


async def test_a_validation_counts_episodes_without_a_proper_end(
    make_loop: Any, scripted: Any, said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls the loop as verl's worker does. Only the worker knows whether it is a validation."""
    import pickle
    from types import SimpleNamespace

    from verl_ext import patches

    class Worker:
        async def _run_agent_loop(
            self, sampling: Any, trajectory: Any, *, agent_name: str, **row: Any
        ) -> Any:
            return await loop.run(sampling, **row)

    module: Any = SimpleNamespace(AgentLoopWorker=Worker, __name__="verl")
    monkeypatch.setattr(patches, "_original", None)
    patches.mark_validation.apply(module)
    patches.mark_validation.apply(module)
    pickle.dumps(Worker._run_agent_loop)  # by its name: Ray sends anything else as a copy
    loop = make_loop(scripted([said(SHORT)] * 2), leave_out=["void"])
    run = Worker()._run_agent_loop
    outputs = [
        await run(dict(SAMPLING), {"validate": validate}, agent_name="afm_agent", **ROW)
        for validate in (True, False)
    ]
    assert [out.extra_fields["abstained"] != "" for out in outputs] == [False, True]
    records = read_records(episodes_file(tmp_path, 4))
    assert [record.provenance.get("validation", False) for record in records] == [True, False]


async def test_a_share_of_the_episodes_is_kept_to_be_read(
    make_loop: Any, scripted: Any, said: Any, tmp_path: Path
) -> None:
    kept = []
    for step, (per_step, batch) in enumerate(((0, 4), (8, 4), (8, 64))):
        loop = make_loop(scripted([said(SHORT)] * 64), episodes_per_step=per_step)
        loop.config.data = {"train_batch_size": batch}
        for session in range(64):
            await loop.run(dict(SAMPLING), **(ROW | {"session_id": session, "global_steps": step}))
        file = episodes_file(tmp_path, step)
        kept.append(list(read_records(file)) if file.exists() else [])
    assert [len(records) for records in kept[:2]] == [0, 64]
    assert 1 <= len(kept[2]) <= 24
    assert kept[1][0].provenance == {"task": "q7", "step": 1}
    assert kept[1][0].text.startswith("<plan>p</plan>")


@pytest.mark.slow
async def test_an_episode_that_ran_out_of_time_is_dumped_with_its_state(play: Any, tmp_path: Path) -> None:
    slow = CODE.replace("print(12+13)", "import time; time.sleep(60)")
    await play(slow, limits={"max_tool_seconds": 1.0}, episodes_per_step=0)
    [record] = read_records(tmp_path / "stuck.jsonl")
    assert record.stop == "tool_seconds"
    assert "time.sleep(60)" in record.calls[-1].argument
    assert record.calls[-1].seconds > 0.9


def test_an_observation_that_did_not_fit_counts_towards_the_length_of_a_response() -> None:
    """3 of 10 tokens are written and the next observation has 8, so the response reached its limit."""
    from afm.agents import load_agent
    from afm.datasets import Task
    from afm.rollout import Episode
    from afm.trajectory.record import Cost, StopReason
    from verl_ext.agent_loop import _sample

    stop = StopReason.RESPONSE_TOKENS
    episode = Episode((1,), (2, 3, 4), (1, 1, 1), (0.0,) * 3, (), (), stop, Cost(), unfit_tokens=8)
    task = Task(id="t", question="q", ground_truth="a", data_source="search")
    sample = _sample(load_agent("web"), task, episode)
    assert (sample.agent_tokens, sample.response_tokens) == (3, 11)
