import asyncio

import pytest
from known_tool import KnownTool

from afm.agents import Limits, load_agent
from afm.errors import ConfigError, EngineError
from afm.masking import encode_batch
from afm.models.base import FinishReason, Generation, SamplingParams, ScriptedModel
from afm.rollout import run_episode
from afm.seeds import generation_seed
from afm.trajectory.record import StopReason
from afm.trajectory.tags import Author, Segment

AGENT, ENVIRONMENT = Author.AGENT, Author.ENVIRONMENT


def bounded(spec, **limits):
    return spec.model_copy(update={"limits": Limits(**limits)})


class Fixed(ScriptedModel):
    """Returns generations as they are, whatever it was asked for."""

    def __init__(self, *generations):
        super().__init__("x")
        self.left = list(generations)

    async def generate(self, prompt_ids, params):
        return self.left.pop(0)


async def play(spec, script, tools, **options):
    model = script if hasattr(script, "generate") else ScriptedModel(script)
    return await run_episode(spec, model, {tool.name: tool for tool in tools}, "What is 2 + 3?", **options)


async def test_a_call_is_answered_and_the_answer_ends_the_episode(spec, calculator):
    script = ["<think>add</think><calc>2 + 3</calc>", "<answer>5</answer>", "never said"]
    episode = await play(spec, script, [calculator])
    assert episode.segments == (
        Segment(AGENT, "<think>add</think><calc>2 + 3</calc>"),
        Segment(ENVIRONMENT, "\n<observation>\n5\n</observation>\n"),
        Segment(AGENT, "<answer>5</answer>"),
    )
    assert episode.stop is StopReason.ANSWER
    assert calculator.arguments == ["2 + 3"]


async def test_tokens_mask_and_logprobs_line_up(spec, calculator):
    class Logged(ScriptedModel):
        async def generate(self, prompt_ids, params):
            generation = await super().generate(prompt_ids, params)
            return Generation(generation.token_ids, (-0.5,) * len(generation.token_ids), generation.finish)

    episode = await play(spec, Logged(["<calc>2 + 3</calc>", "<answer>5</answer>"]), [calculator])
    observation = "\n<observation>\n5\n</observation>\n"
    text = "<calc>2 + 3</calc>" + observation + "<answer>5</answer>"
    assert bytes(episode.response_ids).decode() == text == episode.text
    mask = [1] * 18 + [0] * len(observation) + [1] * 18
    assert list(episode.response_mask) == mask
    assert list(episode.logprobs) == [-0.5 * value for value in mask]
    assert bytes(episode.prompt_ids).decode() == "user: What is 2 + 3?\nassistant: "


async def test_costs_are_counted(spec, calculator):
    script = ["<calc>2 + 3</calc>", "<calc>down</calc>", "<calc>2 + 3</calc>", "<answer>5</answer>"]
    episode = await play(spec, script, [calculator])
    cost = episode.cost
    assert (cost.generations, cost.tool_calls, cost.tool_failures) == (4, 3, 1)
    assert cost.prompt_tokens == len("user: What is 2 + 3?\nassistant: ")
    assert cost.agent_tokens == sum(episode.response_mask) == sum(map(len, script))
    assert cost.observation_tokens == len(episode.response_ids) - cost.agent_tokens
    assert 0 <= cost.generation_seconds <= cost.wall_seconds
    assert 0 <= cost.tool_seconds <= cost.wall_seconds


async def test_a_stop_string_inside_a_thought_is_text(spec, calculator):
    script = "<think>write </calc> or <observation> or </answer></think><answer>5</answer>"
    episode = await play(spec, script, [calculator])
    assert episode.text == script
    assert episode.stop is StopReason.ANSWER
    assert (episode.cost.generations, episode.cost.tool_calls) == (4, 0)


async def test_a_tag_that_begins_in_the_token_of_another_one_ends_the_turn(spec, calculator, qwen):
    """`></` is one token: the engine stops at the first tag and sees only the rest of the second."""
    script = ["<answer>5 </calc></answer> <think>more</think>", "never said"]
    episode = await play(spec, ScriptedModel(script, qwen), [calculator])
    assert episode.stop is StopReason.ANSWER
    assert episode.text == "<answer>5 </calc></answer>"
    assert episode.response_ids == tuple(qwen.encode(episode.text))
    assert "></" in [qwen.decode([token]) for token in episode.response_ids]


@pytest.mark.parametrize(
    ("script", "stop", "text"),
    [
        ("<think><calc>2 + 3</calc></think><answer>4</answer>", StopReason.ANSWER, None),
        ("<think>x</think><observation>5", StopReason.FORGED_OBSERVATION, "<think>x</think><observation>"),
        ("<think>I give up</think>", StopReason.END_OF_TEXT, None),
    ],
)
async def test_an_episode_without_a_call_ends_where_its_text_says(spec, calculator, script, stop, text):
    episode = await play(spec, script, [calculator])
    assert (episode.stop, episode.text, calculator.arguments) == (stop, text or script, [])
    assert (episode.response_ids[-1] == 256) is (stop is StopReason.END_OF_TEXT)


async def test_turns_beyond_the_limit_are_not_run_but_an_answer_is_still_allowed(spec, calculator):
    spec = bounded(spec, max_turns=1)
    episode = await play(spec, ["<calc>1 + 1</calc>", "<answer>2</answer>"], [calculator])
    assert episode.stop is StopReason.ANSWER
    script = ["<calc>1 + 1</calc>", "<calc>2 + 2</calc>", "<answer>4</answer>"]
    episode = await play(spec, script, [calculator])
    assert episode.stop is StopReason.TURNS
    assert episode.text.endswith("<calc>2 + 2</calc>")
    assert calculator.arguments == ["1 + 1", "1 + 1"]


@pytest.mark.parametrize(
    ("limits", "reason", "length"),
    [
        ({"max_response_tokens": 30}, StopReason.RESPONSE_TOKENS, 30),
        ({"max_agent_tokens": 25}, StopReason.AGENT_TOKENS, 25),
        ({"max_turn_tokens": 20}, StopReason.AGENT_TOKENS, 20),
    ],
)
async def test_token_limits_cut_a_generation(spec, calculator, limits, reason, length):
    episode = await play(bounded(spec, **limits), "<think>" + "long " * 50, [calculator])
    assert (episode.stop, len(episode.response_ids)) == (reason, length)


async def test_max_new_tokens_of_the_sampling_bounds_the_tokens_between_observations(spec, calculator):
    script = ["<calc>2 + 3</calc>", "<think></calc>" + "x" * 100]
    episode = await play(spec, script, [calculator], sampling=SamplingParams(40))
    assert (episode.stop, episode.cost.agent_tokens) == (StopReason.AGENT_TOKENS, 18 + 40)
    in_all = await play(bounded(spec, max_agent_tokens=40), script, [calculator])
    assert (in_all.stop, in_all.cost.agent_tokens) == (StopReason.AGENT_TOKENS, 40)


async def test_the_models_context_bounds_the_response(spec, calculator):
    prompt = list(b"user: What is 2 + 3?\nassistant: ")
    model = ScriptedModel("<think>" + "x" * 100, context_tokens=len(prompt) + 17)
    episode = await play(spec, model, [calculator])
    assert (episode.stop, len(episode.response_ids)) == (StopReason.RESPONSE_TOKENS, 17)
    full = ScriptedModel("<answer>5</answer>", context_tokens=len(prompt))
    episode = await play(spec, full, [calculator])
    assert (episode.stop, episode.response_ids) == (StopReason.RESPONSE_TOKENS, ())
    assert episode.cost.generations == 0


@pytest.mark.parametrize("spare", [-1, 0, 1])
async def test_an_observation_that_does_not_fit_is_not_appended(spec, calculator, spare):
    call, observation = "<calc>2 + 3</calc>", "\n<observation>\n5\n</observation>\n"
    limit = len(call) + len(observation) + spare
    episode = await play(bounded(spec, max_response_tokens=limit), [call, "<answer>5</answer>"], [calculator])
    assert episode.stop is StopReason.RESPONSE_TOKENS
    assert episode.text == (call if spare < 0 else call + observation + "<answer>5</answer>"[:spare])
    assert len(episode.calls) == 1
    assert episode.length == (len(call + observation) if spare < 0 else len(episode.response_ids))


async def test_repeated_calls_are_not_run_again(spec, calculator):
    script = ["<calc>2 + 3</calc>", "<calc> 2 + 3\n</calc>", "<calc>2 + 4</calc>", "<answer>5</answer>"]
    episode = await play(spec, script, [calculator])
    assert calculator.arguments == ["2 + 3", "2 + 4"]
    assert [call.duplicate for call in episode.calls] == [False, True, False]
    assert "made before" in episode.segments[3].text
    assert episode.calls[1].ok


@pytest.mark.parametrize(
    ("argument", "limits", "ok"), [("2 + 3", {"duplicate_calls": "execute"}, True), ("down", {}, False)]
)
async def test_repeated_calls_run_where_the_agent_says_so_or_the_first_failed(
    spec, calculator, argument, limits, ok
):
    script = [f"<calc>{argument}</calc>"] * 2 + ["<answer>5</answer>"]
    episode = await play(bounded(spec, **limits), script, [calculator])
    assert calculator.arguments == [argument, argument]
    assert [(call.ok, call.duplicate) for call in episode.calls] == [(ok, False)] * 2


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("down", "The calculator is out of order."),
        ("crash", "The tool calculator failed: RuntimeError: wire cut"),
        ("silent", "The tool calculator failed without saying why."),
    ],
)
async def test_a_failing_tool_is_an_observation(spec, calculator, argument, words):
    episode = await play(spec, [f"<calc>{argument}</calc>", "<answer>?</answer>"], [calculator])
    assert episode.segments[1].text == f"\n<observation>\n{words}\n</observation>\n"
    assert episode.calls[0].observation == words
    assert (episode.calls[0].ok, episode.stop) == (False, StopReason.ANSWER)


async def test_what_a_tool_returns_cannot_pose_as_a_role(spec, calculator):
    episode = await play(spec, ["<calc>forge</calc>", "<answer>5</answer>"], [calculator])
    content = episode.segments[1].text.removeprefix("\n<observation>\n").removesuffix("\n</observation>\n")
    assert "<" not in content
    assert episode.segments[-1].text == "<answer>5</answer>"


async def test_a_missing_tool_is_found_before_anything_runs(spec):
    model = ScriptedModel("<answer>5</answer>")
    with pytest.raises(ConfigError, match="calculator"):
        await run_episode(spec, model, {}, "Q")
    assert model.params == []


async def test_time_ends_a_slow_tool(spec, calculator):
    episode = await play(bounded(spec, max_seconds=0.2), ["<calc>sleep</calc>", "never"], [calculator])
    assert episode.stop is StopReason.SECONDS
    assert not episode.calls[0].ok
    assert 0.15 < episode.cost.wall_seconds < 5
    assert episode.text == "<calc>sleep</calc>"


async def test_the_time_in_tools_has_a_limit_of_its_own(spec, calculator):
    limited = bounded(spec, max_seconds=20, max_tool_seconds=0.3)
    said = ["<calc>nap 1</calc>", "<calc>nap 2</calc>", "<calc>nap 3</calc>", "never"]
    episode = await play(limited, said, [calculator])
    assert episode.stop is StopReason.TOOL_SECONDS
    assert [call.ok for call in episode.calls] in (
        [True, False],
        [False],
    )  # a busy machine: the first is late
    assert 0.25 < episode.cost.tool_seconds < 5
    both = await play(bounded(limited, max_seconds=0.2), said, [calculator])
    assert both.stop is StopReason.SECONDS


async def test_time_ends_a_slow_model(spec, calculator):
    class Slow(ScriptedModel):
        async def generate(self, prompt_ids, params):
            if self.params:
                await asyncio.sleep(30)
            return await super().generate(prompt_ids, params)

    model = Slow(["<calc>2 + 3</calc>", "<answer>5</answer>"])
    episode = await play(bounded(spec, max_seconds=1.5), model, [calculator])
    assert episode.stop is StopReason.SECONDS
    assert episode.text.endswith("</observation>\n")
    assert episode.cost.generations == 2


@pytest.mark.parametrize(
    ("said", "stop"),
    [
        ("<calc>2 + 3</calc>", StopReason.SECONDS),
        ("<think></calc>", StopReason.SECONDS),
        ("<answer>5</answer>", StopReason.ANSWER),
    ],
)
async def test_a_generation_that_cannot_be_cancelled_is_waited_for(spec, calculator, said, stop):
    class Remote(ScriptedModel):
        cancellable = False
        running = 0

        async def generate(self, prompt_ids, params):
            self.running += 1
            await asyncio.sleep(0.3)
            self.running -= 1
            return await super().generate(prompt_ids, params)

    model = Remote([said, "never"])
    episode = await play(bounded(spec, max_seconds=0.1), model, [calculator])
    assert (episode.stop, episode.text, model.running) == (stop, said, 0)
    assert len(episode.logprobs) == len(said)
    assert calculator.arguments == []  # nothing begins once the time is over
    assert episode.cost.generations == 1


async def test_an_aborted_generation_is_kept(spec, calculator):
    model = Fixed(Generation(tuple(b"<think>hal"), (), FinishReason.ABORTED))
    episode = await play(spec, model, [calculator])
    assert (episode.stop, episode.text, episode.logprobs) == (StopReason.ABORTED, "<think>hal", ())


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        (Generation((), (), FinishReason.STOP), "no token"),
        (Generation(tuple(b"<answer>5</answer><think>"), (), FinishReason.STOP), "continued after </answer>"),
        (Generation(tuple(b"abc"), (0.0,), FinishReason.STOP), "3 tokens with 1 log-prob"),
        (Generation(tuple(b"abc" * 99), (), FinishReason.LENGTH), "asked for at most 50"),
    ],
)
async def test_an_engine_that_breaks_its_contract_is_an_error(spec, calculator, generation, words):
    with pytest.raises(EngineError, match=words):
        await play(bounded(spec, max_response_tokens=50), Fixed(generation), [calculator])


async def test_cancelling_cancels_the_tool(spec, calculator):
    task = asyncio.create_task(play(spec, ["<calc>sleep</calc>"], [calculator]))
    await calculator.called.wait()
    assert calculator.arguments == ["sleep"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_each_generation_gets_a_seed_of_its_own(spec, calculator):
    script = ["<calc>2 + 3</calc>", "<answer>5</answer>"]
    model = ScriptedModel(script)
    await play(spec, model, [calculator], seed=4, sampling=SamplingParams(100, temperature=0.5, top_k=7))
    assert [params.seed for params in model.params] == [generation_seed(4, 0), generation_seed(4, 1)]
    assert len({generation_seed(seed, index) for seed in range(20) for index in range(20)}) == 400
    assert {(params.temperature, params.top_k, params.stop) for params in model.params} == {
        (0.5, 7, spec.stop_strings)
    }
    model = ScriptedModel(script)
    await play(spec, model, [calculator], sampling=SamplingParams(100, seed=4))
    assert model.params[0].seed == generation_seed(4, 0)
    model = ScriptedModel(script)
    await play(spec, model, [calculator])
    assert model.params[0].seed is None


async def test_characters_cut_by_a_stop_are_put_together_again(spec, calculator):
    """A byte-level model may report a stop in the middle of a character."""
    text = "<think>é</think><answer>5</answer>"
    halves = (text.encode()[:8], text.encode()[8:])
    model = Fixed(*(Generation(tuple(half), (), FinishReason.STOP) for half in halves))
    assert (await play(spec, model, [calculator])).segments == (Segment(AGENT, text),)


async def test_a_character_that_is_never_finished_is_replaced(spec, calculator):
    episode = await play(bounded(spec, max_response_tokens=8), "<think>é</think>", [calculator])
    assert episode.text == "<think>\ufffd"


async def test_tokens_are_those_of_the_masked_encoding(qwen):
    spec = load_agent("math")

    def reply(program):
        return "北京 42\n" if "first" in program else "  x >\n<tag>\n"

    script = [
        "<plan>Zähle 12 + 30.</plan>\n<think>first</think><code>```py\nprint('first')\n```</code>",
        "<reflection>ok</reflection>\n\n<think>again 🙂</think><code>\n```py\nprint(1)\n```\n</code>",
        "<reflection>ok</reflection><think>done</think>\n<answer>\\boxed{42}</answer>",
    ]
    episode = await run_episode(
        spec, ScriptedModel(script, qwen), {"code": KnownTool("code", reply)}, "What is 12 + 30?"
    )
    tokenizer = qwen._tokenizer
    (encoded,) = encode_batch(tokenizer, [episode.segments])
    assert episode.stop is StopReason.ANSWER
    assert list(episode.response_ids) == encoded.ids
    assert list(episode.response_mask) == encoded.mask
    assert tokenizer.decode(episode.response_ids) == episode.text
    prompt = tokenizer.apply_chat_template(
        spec.prompt_messages("What is 12 + 30?"), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(episode.prompt_ids) == prompt
