"""The agent loop of a harness: real programs ask a real tiny model, and verl gets their trajectories."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from extras import needs

from afm.errors import ConfigError
from afm.trajectory import read_records
from verl_ext.kept_episodes import episodes_file

needs("verl", "uvicorn")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
AGENT = {"extends": "math", "prompt": "", "question_format": "{question}"}
ROW = {
    "uid": "u1",
    "session_id": 2,
    "global_steps": 4,
    "data_source": "mini_math",
    "reward_model": {"ground_truth": "25"},
    "extra_info": {"index": "q7", "question": "12+13?"},
    "raw_prompt": [{"role": "user", "content": "another prompt, Question: 12+13?"}],
}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
CLIENT = """
import json, os, sys, time, urllib.request
task = json.load(sys.stdin)
def ask(*messages, **more):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = json.dumps({"model": os.environ["AFM_MODEL"], "messages": messages, "max_tokens": 8, **more}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]
def user(text):
    return {"role": "user", "content": text}
"""
TWO_TURNS = """
first = user(task["question"])
said = ask(first)
ask(first, said, user("and now?"))
print("some log")
print(25)
"""
FORKS = """
first = user(task["question"])
said = ask(first)
ask(first, said, user("and now?"))
ask(first, said, user("or so?"))
ask(user("another conversation"))
print(25)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    from afm.models.tiny import create_tiny_model

    folder = tmp_path_factory.mktemp("model")
    create_tiny_model(tokenizer_dir, folder, seed=0, hidden_size=32, layers=1)
    return folder


def cpu_server(model: Path, tokenizer: Any, *, response: int) -> Any:
    """Make the CPU rollout server of a run in this process."""
    from verl_ext.rollout_cpu import CpuServer

    rollout = SimpleNamespace(
        engine_kwargs={}, response_length=response, prompt_length=64, ignore_eos=False, max_num_seqs=8, seed=0
    )
    return CpuServer(rollout, SimpleNamespace(local_path=str(model), path=str(model), tokenizer=tokenizer))


def loop_of(
    settings: Path,
    servers: Any,
    tokenizer: Any,
    model: Path,
    *,
    kind: str = "HarnessAgentLoop",
    response: int = 200,
) -> Any:
    """Make an agent loop as verl does."""
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from verl_ext import agent_loop, harness_loop

    agent_loop.surroundings.cache_clear()
    harness_loop._RUNNERS.clear()
    rollout = {"name": "afm_cpu", "prompt_length": 64, "response_length": response, "n": 8}
    rollout |= {"max_model_len": None, "agent": {"num_workers": 1}}
    actor = {"rollout": rollout, "model": {"path": str(model)}}
    config = OmegaConf.create({"actor_rollout_ref": actor, "data": {}, "trainer": {"nnodes": 1}})
    kinds = {"HarnessAgentLoop": harness_loop.HarnessAgentLoop, "AfmAgentLoop": agent_loop.AfmAgentLoop}
    return (kinds | {"in turns": loop_in_turns(agent_loop.AfmAgentLoop)})[kind](
        trainer_config=DictConfigWrap(config),
        server_manager=servers,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        settings=str(settings),
    )


def loop_in_turns(loop: type) -> type:
    """Make our loop write observations as turns of the role ``tool``, with the gateway's renderer."""
    from afm.harness import ChatRenderer
    from verl_ext.training_sample import ServerModel

    class TurnsModel(ServerModel):
        def encode(self, text: str) -> list[int]:
            content = text.removeprefix("\n<observation>\n").removesuffix("\n</observation>\n")
            chat = [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a"},
                {"role": "tool", "content": content},
            ]
            ids = ChatRenderer(self.tokenizer).new_ids(chat, (), sampled=1, last_id=None)
            assert ids is not None
            return ids

    class LoopInTurns(loop):
        def _model(self, codec: Any, request: str) -> Any:
            model = super()._model(codec, request)
            model.__class__ = TurnsModel
            return model

    return LoopInTurns


@pytest.fixture(scope="module")
def servers(model_dir: Path, tokenizer: Any) -> Any:
    return cpu_server(model_dir, tokenizer, response=200)


@pytest.fixture
def make_loop(tmp_path: Path, model_dir: Path, servers: Any, tokenizer: Any) -> Callable[..., Any]:
    def make(program: str = "", **more: Any) -> Any:
        (tmp_path / "agent.yaml").write_text(yaml.safe_dump(AGENT))
        (tmp_path / "program.py").write_text(CLIENT + textwrap.dedent(program))
        harness = {"command": ["python", "program.py"], "timeout_s": 60, "retries": 0}
        settings = {"agent": str(tmp_path / "agent.yaml"), "output_dir": str(tmp_path)}
        settings["harness"] = harness | more.pop("harness", {})
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump(settings | more))
        return loop_of(path, servers, tokenizer, model_dir)

    return make


@pytest.fixture
def play(make_loop: Any) -> Callable[..., Any]:
    async def run(program: str, row: dict[str, Any] = ROW, **settings: Any) -> Any:
        return await make_loop(program, **settings).run(dict(SAMPLING), **row)

    return run


def facts(output: Any) -> dict[str, Any]:
    return dict(output.extra_fields["reward_extra_info"])


async def test_a_program_is_trained_on_what_its_model_sampled(
    play: Any, tokenizer: Any, tmp_path: Path
) -> None:
    [output] = await play(TWO_TURNS, episodes_per_step=1000)
    asked = "<|im_start|>user\n12+13?<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_ids == tokenizer.encode(asked, add_special_tokens=False)
    text, mask = tokenizer.decode(output.response_ids), output.response_mask
    assert "and now?" in text
    assert len(output.response_logprobs) == len(mask) == len(output.response_ids)
    assert sum(mask) == sum(value != 0 for value in output.response_logprobs)
    assert 2 <= sum(mask) <= 16
    assert mask[0] == mask[-1] == 1
    assert (output.reward_score, output.num_turns) == (1.0, 3)
    got = facts(output)
    assert [got[key] for key in ("acc", "correct", "format", "token_drift", "trajectories")] == [
        1,
        1,
        1,
        0,
        1,
    ]
    assert (got["agent_tokens"], got["answered"], got["harness_retries"]) == (sum(mask), 1, 0)
    [record] = read_records(episodes_file(tmp_path, 4))
    [trajectory] = record.provenance["trajectories"]
    assert [trajectory[key] for key in ("name", "reason", "parent", "turns")] == ["0", "first", "", 2]
    assert [message["role"] for message in trajectory["messages"]] == ["user", "assistant"] * 2


async def test_each_history_is_a_sequence_of_the_same_episode(play: Any) -> None:
    """Two continuations share turn 1, which is trained once, in the first of them."""
    outputs = await play(FORKS)
    assert [output.extra_fields["credit"] for output in outputs] == [1.0, 1.0, 1.0]
    assert len({str(facts(output)) for output in outputs}) == 1
    got = facts(outputs[0])
    assert (got["tool_calls"], got["used_tool"]) == (0, 0)
    assert (got["trajectories"], got["branches"], got["token_drift"]) == (3, 2, 0)
    assert got["agent_tokens"] == sum(sum(output.response_mask) for output in outputs)
    first, second, third = outputs
    assert first.prompt_ids == second.prompt_ids != third.prompt_ids
    shared = next(at for at, bit in enumerate(first.response_mask) if not bit)
    assert second.response_mask[:shared] == [0] * shared
    by_turn = await play(FORKS, harness={"credit": "by_turn"})
    assert [output.extra_fields["credit"] for output in by_turn] == [0.5, 0.25, 0.25]
    [last] = await play(FORKS, harness={"credit": "last"})
    assert (last.prompt_ids, last.response_ids) == (third.prompt_ids, third.response_ids)


async def test_a_program_judges_itself_where_the_recipe_says_so(play: Any) -> None:
    """Its file may hold more than a number. Without a number there is no score."""
    own = "ask(user('q')); open(os.environ['AFM_VERDICT'], 'w').write('{}')"
    harness = {"reward": "harness"}
    [output] = await play(
        own.format('{"score": 0.25, "parts": {"correct": 1, "style": 0.5}}'), harness=harness
    )
    got = facts(output)
    assert (output.reward_score, got["score"], got["acc"], got["style"]) == (0.25, 0.25, 1, 0.5)
    for text, message in (
        ("{}", "gave no score"),
        ('{"score": NaN}', "finite number"),
        ("[1]", "verdict file (AFM_VERDICT) is invalid"),
    ):
        [output] = await play(own.replace("'{}'", repr(text)), harness=harness)
        assert message in output.extra_fields["abstained"]
        assert set(output.response_mask) == {0}


MEMBERS = """
url = os.environ["OPENAI_BASE_URL"]
for name in ("planner", "writer", "planner"):
    os.environ["OPENAI_BASE_URL"] = url.replace("/v1", f"/agent/{name}/v1")
    ask(user(task["question"]), user(name))
open(os.environ["AFM_VERDICT"], "w").write('{"answer": "25", "members": {"writer": 0.5}}')
"""


async def test_a_programs_members_have_their_own_part(play: Any) -> None:
    """The planner has no verdict, so it gets the episode's. Its two conversations are one part."""
    outputs = await play(MEMBERS, harness={"by_member": "own"})
    parts = [output.extra_fields["member"] for output in outputs]
    assert [(part["member"], part["score"], part["own"]) for part in parts] == [
        ("planner", 1, 1),
        ("writer", 1, 0.5),
        ("planner", 1, 1),
    ]
    assert parts[0] == parts[2]
    assert parts[0]["words"] != parts[1]["words"]


async def test_a_teams_conversations_are_sequences_of_its_members(play: Any, tmp_path: Path) -> None:
    """A random model gives no usable reply, so the planner is asked three times, and then the team gives up."""
    (tmp_path / "short.yaml").write_text("system: Plan.\nuser: '{{ question }}'\n")
    planner = {"model": "strong", "prompt": "short.yaml"}
    entry = {"class_name": "calculator.Calculator", "tool_schema": {"function": {"name": "code"}}}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    shipped = {"extends": str(ROOT / "configs/distill/math.yaml"), "members": {"planner": planner}}
    shipped |= {"models": {"strong": {"max_tokens": 16}}, "tools": "tools.yaml"}
    (tmp_path / "team.yaml").write_text(yaml.safe_dump(shipped))
    harness = {"command": [], "team": "team.yaml", "by_member": "difference", "timeout_s": 3600}
    outputs = await play("", harness=harness)
    assert [output.extra_fields["member"]["member"] for output in outputs] == ["planner"] * 3
    assert all(set(output.response_mask) == {1} for output in outputs)
    assert {output.reward_score for output in outputs} == {0.0}
    got = facts(outputs[0])
    assert (got["trajectories"], got["token_drift"], got["answered"]) == (3, 0, 0)
    assert outputs[0].extra_fields["abstained"] == ""


@pytest.mark.parametrize(
    ("program", "by_member", "message"),
    [
        (MEMBERS.replace('"members": {"writer": 0.5}', '"parts": {}'), "own", "gave no `members`"),
        (TWO_TURNS, "difference", "a request has no member"),
    ],
)
async def test_credit_that_cannot_be_had_has_no_score_and_says_why(
    play: Any, program: str, by_member: str, message: str
) -> None:
    outputs = await play(program, harness={"by_member": by_member})
    assert all(message in output.extra_fields["abstained"] for output in outputs)
    assert all(set(output.response_mask) == {0} for output in outputs)


@pytest.mark.parametrize(
    ("program", "fact", "message"),
    [
        ("ask(user('q')); time.sleep(60)", "harness_timeout", "did not end within"),
        ("ask(user('q')); raise SystemExit('lost')", "harness_crashed", "status 1: lost"),
        ("ask(user('q')); print('x' * 9_000_000)", "harness_output", "max_output_bytes"),
        ("print(25)", "harness_silent", "never asked the model"),
    ],
)
async def test_a_program_that_fails_is_retried_and_never_scored(
    play: Any, program: str, fact: str, message: str
) -> None:
    output = await play(program, harness={"retries": 1, "timeout_s": 5.0 if "sleep" in program else 60.0})
    output = output[0] if isinstance(output, list) else output
    got = facts(output)
    assert (got[fact], got["harness_retries"], got["abstained"], got["acc"]) == (2, 1, 1, 0)
    assert message in output.extra_fields["abstained"]
    assert output.extra_fields["failed"] == ""
    assert set(output.response_mask) == {0}


async def test_a_second_attempt_counts_alone(play: Any, tmp_path: Path) -> None:
    """The first attempt crashed after its first request, and nothing is trained on it."""
    mark = tmp_path / "crashed"
    program = f"ask(user('q'))\nif not os.path.exists({str(mark)!r}):\n    open({str(mark)!r}, 'w'); os.abort()\nprint(25)"
    [output] = await play(program, harness={"retries": 1})
    got = facts(output)
    assert (output.reward_score, got["harness_crashed"], got["harness_retries"], got["trajectories"]) == (
        1,
        1,
        1,
        1,
    )


async def test_equal_seeds_give_equal_episodes_in_any_company(make_loop: Any) -> None:
    import asyncio

    from verl_ext import agent_loop

    async def episodes() -> list[Any]:
        agent_loop._DRAWS.clear()
        loop = make_loop(TWO_TURNS)
        rows = [ROW | {"session_id": number} for number in range(3)]
        outputs = await asyncio.gather(*(loop.run(dict(SAMPLING), **row) for row in rows))
        return [output.response_ids for [output] in outputs]

    first = await episodes()
    assert await episodes() == first
    assert len({tuple(ids) for ids in first}) == 3


def test_settings_that_say_nothing_are_refused(make_loop: Any) -> None:
    from verl_ext.settings import load_episode_settings

    with pytest.raises(ConfigError, match=r"harness.*remove `agents` and `tools`"):
        load_episode_settings(make_loop(TWO_TURNS, tools={"tools": []})._settings)
    with pytest.raises(ConfigError, match=r"harness\.command: .*a list of words"):
        load_episode_settings(make_loop(TWO_TURNS, harness={"command": "python x.py"})._settings)


def test_an_episode_counts_the_calls_of_all_its_trajectories() -> None:
    from afm.harness.credit import Credit
    from afm.harness.episode import HarnessEpisode, OwnVerdict
    from afm.harness.history import Branch, Sampled, SampledTurn
    from afm.models.base import FinishReason
    from afm.trajectory.record import Verdict
    from verl_ext.harness_loop import as_episode, share_out
    from verl_ext.training_sample import training_sample

    def trajectory(name: str, call: int, tools: int) -> Sampled:
        turn = SampledTurn(0, 2, call, FinishReason.STOP, True, tools)
        return Sampled(name, Branch.FIRST, "", (1,), (5, 6), (1, 1), (0.0, 0.0), (turn,), ())

    episode = HarnessEpisode(
        (trajectory("a", 0, 3), trajectory("b", 1, 0)), OwnVerdict(), "25", "", {"done": 1}
    )
    model: Any = SimpleNamespace(
        decode=lambda ids: "x", drift=lambda played: 0, weight_versions=[0], preempted=-1
    )
    verdict = Verdict(score=1.0, parts={"correct": 1.0, "format": 1.0})
    options: dict[str, Any] = {"data_source": "math", "question_index": "q", "score_seconds": 0.0}
    samples = [
        training_sample(as_episode(episode, each, model), verdict, model, **options)
        for each in episode.trajectories
    ]
    for sample in share_out(episode, samples, Credit.ALL, {}):
        assert (facts(sample)["tool_calls"], facts(sample)["used_tool"]) == (3, 1)


def test_each_episode_counts_once_in_its_group() -> None:
    """Question a: episodes scored 1, 0, 0, the first with three sequences; question b: 0.5 and 1.

    a: mean 1/3, std sqrt(((2/3)^2 + (1/3)^2 + (1/3)^2) / 2) = 0.57735; A = (1 - 1/3) / std = 1.1547, -0.57735 twice.
    Counted by sequence it would be mean 3/5. b: mean 0.75, std 0.353553; A = -0.70711 and 0.70711.
    """
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    keys = ["a_0_0", "a_1_0", "b_1_0", "a_0_2", "b_0_0", "a_0_1", "a_2_0"]
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 1.0, 0.0])
    mask = torch.tensor([[1, 0, 1]] * 7)
    rewards = torch.zeros(7, 3)
    rewards[:, -1] = scores
    uids = np.array([key[0] for key in keys], dtype=object)
    data = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": uids}
    )
    done = compute_advantage_for_multi_trajectories(data, keys, "grpo", num_repeat=3)
    expected = [1.1547, -0.57735, 0.70711, 1.1547, -0.70711, 1.1547, -0.57735]
    for values, advantage in zip(done.batch["advantages"].tolist(), expected, strict=True):
        assert values == pytest.approx([advantage, 0.0, advantage], abs=1e-4)


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that half knows a sum, with its observation in tags and as a turn, so that its episodes differ."""
    from reciting import learn_by_heart
    from reciting_agent import recited

    from afm.models.tiny import create_tiny_model, train_tokenizer

    folder = tmp_path_factory.mktemp("agent")
    in_tags = [recited(*pair) for pair in SUMS]
    in_turns = [
        [(turn_of(text), False) if "<observation>" in text else (text, own) for text, own in pieces]
        for pieces in in_tags
    ]
    texts = ["".join(text for text, _ in pieces) for pieces in in_tags + in_turns]
    train_tokenizer(texts * 5, folder, vocab_size=320)
    create_tiny_model(folder, folder, hidden_size=48, layers=1, heads=2, mlp=96)
    learn_by_heart(folder, [in_tags[0], in_turns[0]], loss=0.005)
    limits = {"max_turns": 2, "max_turn_tokens": 60, "max_response_tokens": 400}
    (folder / "math.yaml").write_text(yaml.safe_dump(AGENT | {"limits": limits}))
    entry = {"class_name": "calculator.Calculator", "tool_schema": {"function": {"name": "code"}}}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return folder


SUMS = ((12, 13), (7, 5))
"""A known and an unknown one."""


def turn_of(observation: str) -> str:
    content = observation.split("\n")[2]
    return f"<|im_end|>\n<|im_start|>tool\n{content}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("protocol", ["completions", "chat"])
async def test_our_agent_as_an_outside_program_gives_the_same_samples_and_advantages(
    tmp_path: Path, guessing: Path, protocol: str
) -> None:
    """4 episodes of a known and 4 of an unknown sum.

    Tokens, masks, log-probabilities, rewards and advantages are compared bit by bit.
    """
    from outside_agent import __file__ as program
    from transformers import AutoTokenizer

    from verl_ext import agent_loop

    tokenizer = AutoTokenizer.from_pretrained(guessing)
    agent, tools = str(guessing / "math.yaml"), str(guessing / "tools.yaml")
    common = {"agent": agent, "rewards": {"formula": "correct"}, "seed": 3}
    command = ["python", program, agent, tools, protocol]
    own_kind = "AfmAgentLoop" if protocol == "completions" else "in turns"
    ways = {
        own_kind: common | {"tools": tools},
        "HarnessAgentLoop": common | {"harness": {"command": command, "retries": 0, "timeout_s": 600}},
    }
    rows = [
        ROW
        | {"uid": f"u{first}", "session_id": number, "reward_model": {"ground_truth": str(first + second)}}
        | {"extra_info": {"index": f"q{first}", "question": f"{first}+{second}?"}}
        for first, second in SUMS
        for number in range(4)
    ]
    server = cpu_server(guessing, tokenizer, response=400)
    played: dict[str, list[Any]] = {}
    for kind, settings in ways.items():
        agent_loop._DRAWS.clear()
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump(settings))
        loop = loop_of(path, server, tokenizer, guessing, kind=kind, response=400)
        outputs = [await loop.run(dict(SAMPLING), **row) for row in rows]
        played[kind] = [output[0] if isinstance(output, list) else output for output in outputs]
        assert [output.extra_fields["abstained"] for output in played[kind]] == [""] * len(rows)
    own, outside = played[own_kind], played["HarnessAgentLoop"]
    for ours, theirs in zip(own, outside, strict=True):
        assert tokenizer.decode(theirs.response_ids) == tokenizer.decode(ours.response_ids)
        assert (theirs.prompt_ids, theirs.response_ids) == (ours.prompt_ids, ours.response_ids)
        assert theirs.response_mask == ours.response_mask
        assert theirs.response_logprobs == ours.response_logprobs
        assert theirs.reward_score == ours.reward_score
        assert facts(theirs)["token_drift"] == facts(ours)["token_drift"] == 0
        assert facts(theirs)["trajectories"] == 1
    assert {output.reward_score for output in own} == {0.0, 1.0}
    assert len({tuple(output.response_ids) for output in own}) > 4
    observed = [output for output in own if 0 in output.response_mask]
    assert observed  # a tool was called
    assert all(
        ("<|im_start|>tool" in tokenizer.decode(each.response_ids)) is (protocol == "chat")
        for each in observed
    )
    advantages = [advantages_of(outputs, rows) for outputs in (own, outside)]
    assert advantages[0] == advantages[1]
    assert any(advantages[0])


def advantages_of(outputs: list[Any], rows: list[dict[str, Any]]) -> list[float]:
    """Return the advantage of each sample's first token, by verl's GRPO."""
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    rewards = torch.tensor([[output.reward_score] for output in outputs])
    tensors = {"token_level_rewards": rewards, "response_mask": torch.ones(len(outputs), 1)}
    uids = np.array([row["uid"] for row in rows], dtype=object)
    data = DataProto.from_dict(tensors, non_tensors={"uid": uids})
    keys = [f"{row['uid']}_{row['session_id']}_0" for row in rows]
    done = compute_advantage_for_multi_trajectories(data, keys, "grpo", num_repeat=4)
    values: list[float] = done.batch["advantages"][:, 0].tolist()
    return values


async def test_an_evaluation_plays_the_same_program(tmp_path: Path, model_dir: Path) -> None:
    """The program answers the first question and fails at the second, which gets no score instead of 0."""
    from afm.evaluation.config import load_config
    from afm.evaluation.job import run_job
    from afm.trajectory.io import read_records as records_of

    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(AGENT))
    program = (
        "ask(user(task['question']))\nif task['question'] == '2+2?': raise SystemExit('lost')\nprint(25)"
    )
    (tmp_path / "program.py").write_text(CLIENT + program)
    rows = [
        {"question": f"{a}+{b}?", "ground_truth": str(a + b), "id": f"q{a}"} for a, b in ((12, 13), (2, 2))
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "sums", "agent": "agent.yaml", "model": str(model_dir), "data": str(tmp_path / "tasks.jsonl"),
        "data_source": "mini_math", "output_dir": str(tmp_path / "out"), "max_failed_share": 1.0, "retries": 0,
        "harness": {"command": ["python", "program.py"], "retries": 0},
        "sampling": {"max_new_tokens": 8},
    }  # fmt: skip
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(config))
    metrics = await run_job(load_config(tmp_path / "eval.yaml"))
    records = {record.id: record for record in records_of(tmp_path / "out/episodes.jsonl")}
    solved, failed = records["q12#0"], records["q2#0"]
    assert (solved.answer, solved.verdict.score, solved.cost.generations) == ("25", 1.0, 1)
    assert solved.provenance["trajectories"][0]["messages"][0]["content"] == "12+13?"
    assert (failed.verdict, failed.error) == (
        None,
        "RefusedError: harness: the program ended with status 1: lost",
    )
    assert metrics.model_dump()  # written, with the failure counted


@pytest.mark.proof
@pytest.mark.sandbox
@pytest.mark.parametrize("sandbox", [False, True])
def test_two_steps_of_afm_rl_train_the_model_behind_a_bare_program(
    tmp_path: Path, model_dir: Path, sandbox: bool
) -> None:
    """Runs the recipe's program with the package `openai`, and in the jail a program that needs no package.

    A random model solves nothing, so the reward is for a short episode. In the jail, half of the episodes have two trajectories.
    """
    from safetensors.torch import load_file

    from afm.agents import load_agent
    from afm.datasets import Task
    from afm.datasets.rl_files import write_rl
    from verl_ext.launcher import run_rl
    from verl_ext.metrics import read_metrics

    agent = load_agent(str(ROOT / "configs/tiny/agents/math.yaml"))
    tasks = [
        Task(id=f"q{a}", question=f"{a}+1?", ground_truth=str(a + 1), data_source="mini_math")
        for a in range(8)
    ]
    write_rl(tasks, agent, tmp_path / "rl.parquet")
    overrides = [
        f"model={model_dir}", f"train_files={tmp_path}/rl.parquet", f"output_dir={tmp_path}/run",
        "rewards={formula: overlong, overlong: {max_tokens: 160, buffer_tokens: 160}}",
        "verl.data.train_batch_size=2", "verl.algorithm.filter_groups.enable=false",
        "verl.actor_rollout_ref.actor.ppo_mini_batch_size=2", "verl.actor_rollout_ref.rollout.n=4",
        "verl.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "verl.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "verl.trainer.total_training_steps=2", "verl.trainer.save_freq=2",
    ]  # fmt: skip
    if sandbox:
        program = (
            TWO_TURNS + "if len(said['content'] or '') % 2: ask(user('another conversation'))\nprint(25)\n"
        )
        (tmp_path / "program.py").write_text(CLIENT + program)
        overrides += [
            f"harness.command=[python, {tmp_path}/program.py]", "harness.sandbox=true", "harness.credit=by_turn",
        ]  # fmt: skip
    assert run_rl(ROOT / "configs/tiny/rl/math_harness.yaml", overrides) == 0
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["token_drift"], row["abstained_samples"], row["failed_episodes"]) == (0, 0, 0)
        counts = [row[f"program_{name}"] for name in ("timeouts", "crashes", "floods", "silences", "retries")]
        assert counts == [0] * 5
        assert (row["trajectories"] > 1) is sandbox
        assert row["probs_diff_max"] < 1e-3
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model_dir, tmp_path / "run/model")
    )
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.proof
@pytest.mark.sandbox
def test_two_steps_of_afm_rl_train_a_team(tmp_path: Path, model_dir: Path) -> None:
    """A random model gives no usable reply, so the planner is asked three times, each time in a new conversation.

    The score is only the overlong part. The planner says something else in each episode, so it is trained.
    """
    from safetensors.torch import load_file

    from afm.agents import load_agent
    from afm.datasets import Task
    from afm.datasets.rl_files import write_rl
    from verl_ext.launcher import run_rl
    from verl_ext.metrics import read_metrics

    agent = load_agent(str(ROOT / "configs/tiny/agents/math.yaml"))
    tasks = [
        Task(id=f"q{a}", question=f"{a}+1?", ground_truth=str(a + 1), data_source="mini_math")
        for a in range(8)
    ]
    write_rl(tasks, agent, tmp_path / "rl.parquet")
    overrides = [
        f"model={model_dir}", f"train_files={tmp_path}/rl.parquet", f"output_dir={tmp_path}/run",
        "rewards={formula: overlong, overlong: {max_tokens: 160, buffer_tokens: 160}}",
        "limits.max_response_tokens=64", "episodes_per_step=4",
        "verl.data.train_batch_size=2", "verl.algorithm.filter_groups.enable=false",
        "verl.actor_rollout_ref.actor.ppo_mini_batch_size=2", "verl.actor_rollout_ref.rollout.n=2",
        "verl.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "verl.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "verl.trainer.total_training_steps=2", "verl.trainer.save_freq=2",
    ]  # fmt: skip
    assert run_rl(ROOT / "configs/tiny/rl/math_team.yaml", overrides) == 0
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["token_drift"], row["abstained_samples"], row["failed_episodes"]) == (0, 0, 0)
        assert row["trajectories"] == 3
    record = next(iter(read_records(episodes_file(tmp_path / "run", 1))))
    assert [each["member"] for each in record.provenance["trajectories"]] == ["planner"] * 3
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model_dir, tmp_path / "run/model")
    )
    assert any((before[name] != after[name]).any() for name in before)


def test_a_recipe_with_a_harness_composes_for_estimators_that_count_episodes(model_dir: Path) -> None:
    """The watch over the run's processes takes every key of its section, so no other key may be in it."""
    from verl_ext.command import command
    from verl_ext.ray_watch import RayWatch
    from verl_ext.settings import load_settings

    recipe = ROOT / "configs/tiny/rl/math_harness.yaml"
    settings = load_settings(recipe, [f"model={model_dir}", "harness.credit=by_turn"])
    _, config = command(settings, "/tmp/ray")
    RayWatch(Path("/nowhere"), **config.trainer.afm)
    assert config.trainer.harness_credit == "by_turn"
    sequences = load_settings(recipe, [f"model={model_dir}", "verl.algorithm.adv_estimator=rloo"])
    with pytest.raises(ConfigError, match=r"rloo treats each trajectory.*use grpo or gae"):
        command(sequences, "/tmp/ray")
    by_token = ["verl.algorithm.adv_estimator=gae", "harness.credit=by_turn"]
    with pytest.raises(ConfigError, match=r"by_turn divides the single advantage.*use all or last"):
        command(load_settings(recipe, [f"model={model_dir}", *by_token]), "/tmp/ray")
    for words in (
        ["harness.by_member=own", by_token[0]],
        ["harness.by_member=own", "verl.actor_rollout_ref.rollout.n=1"],
    ):
        with pytest.raises(ConfigError, match=r"harness\.by_member: own compares the episodes of a question"):
            command(load_settings(recipe, [f"model={model_dir}", *words]), "/tmp/ray")
