"""Sessions keep the ids that were sampled, whatever a program does with its history."""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording_model import RecordingModel, wrong_tokens

from afm.errors import EngineError, RefusedError
from afm.harness import Branch, ChatRenderer, ModelRequest, RequestRefusedError, Session, SessionLimits
from afm.models.tokenizer import ChatTokenizer

SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Looks up.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Ilm"}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def chat(session: Session, messages: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """The history with the reply."""
    reply = await session.ask(ModelRequest(messages=messages, **options))
    return [*messages, reply.choices[0].message]


def reasons(session: Session) -> list[Branch]:
    return [trajectory.reason for trajectory in session.trajectories()]


STEPS = ("continue", "other words", "fork", "two", "trim", "edit", "reorder", "summarise", "tools", "new")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 99)), max_size=12),
    seed=st.integers(0, 999),
)
def test_whatever_is_done_to_a_history_no_token_is_trained_that_was_not_sampled(
    codec: ChatTokenizer, steps: list[tuple[str, int]], seed: int
) -> None:
    """A model of random ids: halves of characters, end tokens in odd places, blanks, special tokens."""
    model = RecordingModel(codec, seed=seed)
    session = Session("key", model, ChatRenderer(codec))

    async def play() -> None:
        seen = [await chat(session, [{"role": "system", "content": "Be brief."}, user("Begin.")])]
        for number, (step, at) in enumerate(steps):
            history, options = list(seen[-1]), {}
            place = at % len(history)
            if step == "other words":
                history = [reworded(message) for message in history]
            elif step == "fork":
                history = list(seen[at % len(seen)])
            elif step == "two":
                options = {"n": 2}
            elif step == "trim" and len(history) > 2:
                del history[place]
            elif step == "edit":
                history[place] = {**history[place], "content": f"changed {number}"}
            elif step == "reorder":
                history[place], history[-1] = history[-1], history[place]
            elif step == "summarise":
                history = [user("In short: nothing.")]
            elif step == "tools":
                options = {"tools": [SEARCH]}
            elif step == "new":
                history = []
            seen.append(await chat(session, [*history, user(f"step {number}")], **options))

    asyncio.run(play())
    assert wrong_tokens(session, model) == 0


def reworded(message: dict[str, Any]) -> dict[str, Any]:
    """The same message, as another client would send it."""
    return {**message, "content": message["content"], "refusal": None, "name": None, "audio": None}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda history: [*history, user("More.")], None),
        (lambda history: history[:5], Branch.FORK),
        (lambda history: history[:3], Branch.FORK),
        (lambda history: [*history[:4], user("Otherwise.")], Branch.FORK),
        (lambda history: [history[0], *history[3:], user("More.")], Branch.TRIMMED),
        (lambda history: [history[0], *history[3:5], *history[1:3], *history[5:]], Branch.REORDERED),
        (lambda history: [*history[:4], {**history[4], "content": "No."}, *history[5:]], Branch.EDITED),
        (lambda history: [history[0], user("It was said: One."), *history[3:]], Branch.EDITED),
        (lambda history: [history[0], user("Something else.")], Branch.NEW),
    ],
)
async def test_what_a_program_does_to_its_history_is_named(recording, opened, change, reason) -> None:
    model = recording("One.", "Two.", "Three.", "Four.")
    session, history = opened(model), [{"role": "system", "content": "Count."}]
    for question in ("First?", "Second?", "Third?"):
        history = await chat(session, [*history, user(question)])

    await chat(session, change(history))

    assert reasons(session) == [Branch.FIRST, *([reason] if reason else [])]
    assert wrong_tokens(session, model) == 0


async def test_a_fork_shares_its_prefix_and_trains_it_once(recording, opened) -> None:
    model = recording("One.", "Two.", "Three.")
    session = opened(model)
    history = await chat(session, [user("First?")])
    await chat(session, [*history, user("Second?")])
    await session.ask(ModelRequest(messages=[*history, user("Third?")]))

    first, second = session.trajectories()
    assert (first.parent, second.parent, second.reason) == ("", "0", Branch.FORK)
    assert [turn.trained for turn in first.turns + second.turns] == [True, True, False, True]
    shared = first.turns[0].end
    assert first.prompt_ids == second.prompt_ids
    assert first.response_ids[:shared] == second.response_ids[:shared]
    assert (sum(first.response_mask[:shared]), sum(second.response_mask[:shared])) == (shared, 0)


async def test_other_tools_and_refused_templates_begin_anew(recording, opened, codec) -> None:
    model = recording("One.", "Two.", "Three.")
    session = opened(model)
    history = await chat(session, [user("First?")])
    await chat(session, [*history, user("Second?")], tools=[SEARCH])
    assert reasons(session) == [Branch.FIRST, Branch.TOOLS]

    twice = codec.backend.chat_template.replace(
        "message['content']", "message['content'] + message['content']"
    )
    session._history._renderer._tokenizer = shown_by(codec, twice)
    await chat(session, [*history, user("Third?")])
    assert reasons(session) == [Branch.FIRST, Branch.TOOLS, Branch.TEMPLATE]
    assert wrong_tokens(session, model) == 0


def shown_by(codec: ChatTokenizer, template: str) -> ChatTokenizer:
    """The same tokenizer with another chat template."""
    backend = copy.copy(codec.backend)
    backend.chat_template = template
    return ChatTokenizer(backend, codec.end_ids)


async def test_a_reply_is_known_again_without_its_blanks_with_its_stop_string_and_with_other_spelling(
    recording, opened
) -> None:
    model = recording("  Look.\n", "Seen.", f"Calling. {CALL}{CALL}", "So it is.<end>", "Done.")
    session = opened(model)
    history = await chat(session, [user("First?")])
    history[-1]["content"] = "Look."
    history = await chat(session, [*history, user("Second?")], tools=[])
    # Tools are a part of the prompt: with them another conversation begins.
    history = await chat(session, [user("Search!")], tools=[SEARCH])
    calls = history[-1]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["search", "search"]
    assert calls[0]["id"] != calls[1]["id"]
    for call in calls:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
        call["id"] = f"renamed {call['id']}"
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "A river."} for call in calls]
    history = await chat(session, [*history, *results], tools=[SEARCH], stop=("<end>",))
    assert history[-1]["content"] == "So it is."
    history[-1]["content"] = "So it is.<end>"
    await chat(session, [*history, user("Good.")], tools=[SEARCH])

    assert reasons(session) == [Branch.FIRST, Branch.NEW]
    assert wrong_tokens(session, model) == 0


async def test_a_reply_that_is_not_over_is_continued_by_its_ids(recording, opened) -> None:
    model = recording("One<a> or", " and two<a>", " and three.", "Four.")
    session = opened(model)
    history = await chat(session, [user("Count.")], stop=("<a>",))
    for text in ("One<a>", "One<a> and two<a>"):
        history = [user("Count."), {"role": "assistant", "content": text}]
        reply = await session.ask(ModelRequest(messages=history, stop=("<a>",), continued=True))
    assert reply.choices[0].text == " and three."
    history[-1]["content"] += reply.choices[0].text
    await chat(session, [*history, user("More.")])

    [trajectory] = session.trajectories()
    ends = [(turn.begin, turn.end) for turn in trajectory.turns]
    assert ends[0][1] == ends[1][0] < ends[1][1] == ends[2][0] < ends[2][1] < ends[3][0]
    assert wrong_tokens(session, model) == 0
    unknown = [user("Count."), {"role": "assistant", "content": "Zero"}]
    with pytest.raises(RequestRefusedError, match="not a reply of this session"):
        await session.ask(ModelRequest(messages=unknown, continued=True))


async def test_a_text_continues_by_what_it_begins_with_and_ids_by_ids(recording, opened, codec) -> None:
    model = recording("One.<a>", " Two.", " Three.", " Four.")
    session = opened(model)
    reply = await session.ask(ModelRequest(prompt="Count:", stop=("<a>",)))
    text = f"Count:{reply.choices[0].text}<a> And?"
    await session.ask(ModelRequest(prompt=text))
    assert model.sampled[1][0] == (*model.sampled[0][0], *model.sampled[0][1], *codec.encode(" And?"))
    ids = [*model.sampled[1][0], *model.sampled[1][1], 5, 6]
    await session.ask(ModelRequest(prompt=ids))
    await session.ask(ModelRequest(prompt="Something else"))

    assert reasons(session) == [Branch.FIRST, Branch.NEW]
    assert wrong_tokens(session, model) == 0


@pytest.mark.parametrize(
    ("said", "options", "prompt", "continues"),
    [
        ("\nNo.", {"stop": ("\n",)}, "2+2=", False),
        ("", {}, "2+2=", False),
        (" 4", {}, "2+2=", False),
        (" 4", {}, "2+2= 42 is wrong.", False),
        (" 4", {}, "2+2= 4<|im_end|>\nWhy?", True),
        ("", {}, "2+2=<|im_end|>\nWhy?", True),
        (" 4</a>", {"stop": ("</a>",)}, "2+2= 4 And?", False),
        (" 4</a>", {"stop": ("</a>",)}, "2+2= 4</a> And?", True),
        (" 4 and so on", {"max_tokens": 2}, "2+2=", False),
        (" 4 and so on", {"max_tokens": 2}, "2+2= 42 is wrong.", True),
    ],
)
async def test_a_model_reads_no_text_that_a_program_did_not_send(
    recording, opened, codec, said, options, prompt, continues
) -> None:
    """An end token and a stop string have to be in the next prompt. A repeated prompt is a fork."""
    model = recording(said, "Next.", "Last.")
    session = opened(model)
    await session.ask(ModelRequest(prompt="2+2=", **options))
    for _ in range(2):
        await session.ask(ModelRequest(prompt=prompt))

    for read, _ in model.sampled[1:]:
        assert codec.backend.decode(read) == prompt
    first, *others = session.trajectories()
    assert len(first.turns) == 1 + continues
    assert others[-1].reason is Branch.FORK
    assert wrong_tokens(session, model) == 0


async def test_ids_continue_behind_an_end_token(recording, opened) -> None:
    model = recording(" 4", "Next.")
    session = opened(model)
    await session.ask(ModelRequest(prompt="2+2="))
    ids = [*model.sampled[0][0], *model.sampled[0][1], 5]
    await session.ask(ModelRequest(prompt=ids))
    assert list(model.sampled[1][0]) == ids
    assert reasons(session) == [Branch.FIRST]


@pytest.mark.parametrize(
    ("said", "stop", "sent", "words"),
    [
        ("Hello", (), "Hello", "the last message is over"),
        ("Hello<a>", ("<a>",), "Hello", "lacks the stop string that ended the reply; expected 'Hello<a>'"),
        ("Hello\n", ("\n",), "Hello", "lacks the stop string"),
        ("Hello<a>", ("<a>",), "Hello<a>", ""),
    ],
)
async def test_a_reply_that_is_over_is_not_continued(recording, opened, said, stop, sent, words) -> None:
    model = recording(said, " more")
    session = opened(model)
    await chat(session, [user("hi")], stop=stop)
    request = ModelRequest(messages=[user("hi"), {"role": "assistant", "content": sent}], continued=True)
    if not words:
        await session.ask(request)
        assert session.trajectories()[0].messages[-1]["content"] == "Hello<a> more"
        return
    with pytest.raises(RequestRefusedError, match=words) as refusal:
        await session.ask(request)
    assert (refusal.value.status, len(model.sampled)) == (400, 1)


@pytest.fixture
def codec_of(qwen_tokenizer: Any) -> Callable[[str], ChatTokenizer]:
    """The vocabulary of Qwen2.5 with its chat template in the shared folder, or one of the package trl."""

    def load(name: str) -> ChatTokenizer:
        codec = ChatTokenizer(qwen_tokenizer, {151645})
        if not name:
            return codec
        folder = Path(os.environ.get("AFM_TOKENIZER_PACKAGES") or "absent")
        file = folder / f"trl/chat_templates/{name}.jinja"
        if not file.exists():
            advice = "pip install --no-deps --target DIR -r requirements/tokenizers.txt"
            pytest.skip(f"{file} is absent: {advice}, then set AFM_TOKENIZER_PACKAGES=DIR")
        return shown_by(codec, file.read_text())

    return load


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "qwen2_5", "qwen3"])
async def test_an_untouched_history_reads_as_the_template_writes_it(codec_of, name) -> None:
    codec = codec_of(name)
    model = RecordingModel(
        codec, ["Let me see.\n" + CALL, "Nothing found.", " <b>Then</b> 12\u00e9\U0001f600?"]
    )
    renderer = ChatRenderer(codec)
    session = Session("key", model, renderer)
    history = await chat(session, [user("Where is it?")], tools=[SEARCH])
    history.append(
        {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": "Nothing."}
    )
    history = await chat(session, history, tools=[SEARCH])
    before = [*history, user("And now?")]
    await chat(session, before, tools=[SEARCH])

    [trajectory] = session.trajectories()
    read = [*trajectory.prompt_ids, *trajectory.response_ids[: trajectory.turns[-1].begin]]
    assert codec.backend.decode(read) == renderer.text(before, [SEARCH])
    assert wrong_tokens(session, model) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_1", "gemma3", "cohere2"])
async def test_a_chat_continues_in_every_familys_template(codec_of, name) -> None:
    """In the words of Qwen's vocabulary, where the signs of other families are plain text."""
    codec = codec_of(name)
    model, renderer = RecordingModel(codec, ["One.", "Two.", "Three."]), ChatRenderer(codec)
    session, history = Session("key", model, renderer), [user("First?")]
    for question in ("Second?", "Third?"):
        history = [*await chat(session, history), user(question)]
    await chat(session, history)

    [trajectory] = session.trajectories()
    read = [*trajectory.prompt_ids, *trajectory.response_ids[: trajectory.turns[-1].begin]]
    assert codec.decode(read) == codec.decode(renderer.prompt_ids(history))


@pytest.mark.slow
async def test_thoughts_that_a_template_drops_stay_in_the_sequence(codec_of) -> None:
    codec = codec_of("qwen3")
    model = RecordingModel(codec, ["<think>\nHm.\n</think>\n\nOne.", "<think>\nSo.\n</think>\n\nTwo."])
    session = Session("key", model, ChatRenderer(codec))
    history = await chat(session, [user("First?")])
    await chat(session, [*history, user("Second?")])

    [trajectory] = session.trajectories()
    assert codec.backend.decode([*trajectory.prompt_ids, *trajectory.response_ids]).count("<think>") == 2
    assert wrong_tokens(session, model) == 0


async def test_limits_are_refusals_that_clients_do_not_try_again(recording, opened) -> None:
    model = recording("One.", "Two.", "Three.")
    session = opened(model, limits=SessionLimits(max_tokens=60, max_calls=2))
    history = await chat(session, [user("First?")])
    assert model.params[-1].max_new_tokens == 60 - len(model.sampled[0][0])
    with pytest.raises(RequestRefusedError, match="the prompt has 1") as refusal:
        await chat(session, [*history, user("x" * 100)])
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    await chat(session, [*history, user("Second?")], max_tokens=1)
    assert model.params[-1].max_new_tokens == 1
    with pytest.raises(RequestRefusedError, match="has had 2 requests"):
        await chat(session, [user("Third?")])
    assert session.refused == {"context_length_exceeded": 1, "max_calls": 1}
    assert session.trajectories()[0].turns[-1].finish == "length"

    short = replace(SessionLimits(), max_seconds=0.05)
    model.hold.clear()
    late = opened(model, limits=short)
    with pytest.raises(RequestRefusedError, match="session 'key' has ended"):
        await chat(late, [user("Third?")])
    assert (late.ended, model.cancelled, late.trajectories()) == (True, 1, [])


async def test_a_session_that_ends_keeps_what_had_ended_and_waits_for_what_cannot_be_cancelled(
    recording, opened
) -> None:
    for cancellable in (True, False):
        model = recording("One.", "Two.")
        model.cancellable = cancellable
        session = opened(model)
        history = await chat(session, [user("First?")])
        model.hold.clear()
        running = asyncio.create_task(chat(session, [*history, user("Second?")]))
        await model.waiting.wait()
        asyncio.get_running_loop().call_later(0.05, model.hold.set)
        [trajectory] = await session.close()
        with pytest.raises(RequestRefusedError, match="has ended"):
            await running
        assert [turn.call for turn in trajectory.turns] == [0]
        assert (model.cancelled, len(model.sampled)) == ((1, 1) if cancellable else (0, 2))


async def test_a_request_that_is_sent_again_after_a_failure_is_the_same_request(recording, opened) -> None:
    """It keeps its number and its seed, so that an engine that came back samples what it would have sampled."""
    undisturbed, model = recording("One.", "Two."), recording("One.", "Two.")
    session = opened(undisturbed, seed=7)
    await chat(session, [*await chat(session, [user("First?")]), user("Second?")])

    session = opened(model, seed=7, limits=SessionLimits(max_calls=2))
    history = await chat(session, [user("First?")])
    again = [*history, user("Second?")]
    model.failures += [EngineError("gone"), EngineError("still gone")]
    for reply in ("gone", "still gone"):
        with pytest.raises(EngineError, match=reply):
            await chat(session, again)
        assert reply in str(session.error)
    model.hold.clear()
    left = asyncio.create_task(chat(session, again))
    await model.waiting.wait()
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert "still gone" in str(session.error)
    model.hold.set()
    model.texts.append("Two.")
    await chat(session, again)

    assert session.error is None
    [trajectory] = session.trajectories()
    assert [turn.call for turn in trajectory.turns] == [0, 1]
    seeds = [params.seed for params in undisturbed.params]
    assert [params.seed for params in model.params] == [seeds[0], *[seeds[1]] * 4]
    assert wrong_tokens(session, model) == 0


async def test_the_same_request_twice_at_once_is_two_requests(recording, opened) -> None:
    model = recording("One.", "Two.")
    session = opened(model, seed=7)
    model.failures += [EngineError("gone"), EngineError("gone")]
    for _ in range(2):
        await asyncio.gather(*(chat(session, [user("?")]) for _ in range(2)), return_exceptions=True)
    first, second, *again = [params.seed for params in model.params]
    assert first != second
    assert {first, second} == set(again)
    assert (session.error, session.calls, reasons(session)) == (None, 2, [Branch.FIRST, Branch.FORK])


async def test_a_reply_that_cannot_be_answered_is_not_stored(recording, opened) -> None:
    model = recording("One.", "Two.", "Three.")
    session = opened(model)

    def fail(reply: Any) -> None:
        raise ValueError(f"{len(reply.choices)} choices")

    request = ModelRequest(messages=[user("?")], n=2)
    with pytest.raises(ValueError, match="2 choices"):
        await session.ask(request, on_reply=fail)
    assert session.trajectories() == []
    await chat(session, [user("?")])
    assert reasons(session) == [Branch.FIRST]


async def test_json_of_a_schema_is_for_models_that_constrain(recording, opened) -> None:
    model = recording("{}")
    wish = ModelRequest(messages=[user("?")], json_schema='{"type": "object"}')
    with pytest.raises(RequestRefusedError, match="tiny does not constrain sampling"):
        await opened(model).ask(wish)
    model.constrains = True
    await opened(model).ask(wish)
    assert [params.json_schema for params in model.params] == ['{"type": "object"}']


async def test_what_an_engine_refuses_is_not_asked_again(recording, opened) -> None:
    model = recording()
    session = opened(model)
    model.failures.append(RefusedError("no such format"))
    with pytest.raises(RequestRefusedError, match="no such format") as refusal:
        await chat(session, [user("?")])
    assert (refusal.value.status, refusal.value.code) == (400, "engine")
    assert isinstance(session.error, RefusedError)


async def test_an_end_token_that_was_sampled_is_not_written_twice_and_a_missing_one_is(
    recording, opened, codec
) -> None:
    model = recording("One.", "Two.", "Three.")
    session = opened(model)
    history = await chat(session, [user("First?")])
    history = await chat(session, [*history, user("Second?")], max_tokens=2)  # cut off before its end token
    before = [*history, user("Third?")]
    await chat(session, before)
    read, _ = model.sampled[-1]
    assert list(read) == ChatRenderer(codec).prompt_ids(before)
    assert wrong_tokens(session, model) == 0


async def test_of_two_equal_replies_the_one_with_the_ids_of_the_calls_continues(recording, opened) -> None:
    model = recording(CALL, CALL, "Seen.")
    session = opened(model)
    reply = await session.ask(ModelRequest(messages=[user("?")], tools=[SEARCH], n=2))
    said = reply.choices[0].message
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "A river."}
    await chat(session, [user("?"), said, result], tools=[SEARCH])
    assert [len(trajectory.turns) for trajectory in session.trajectories()] == [2, 1]
