"""Real clients over loopback HTTP: what they get is what was sampled, in each protocol, and sessions do not mix."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from extras import LazyPackage
from loopback import LoopbackServer
from recording_model import wrong_tokens

from afm.harness import Branch, HarnessServer, Session, SessionLimits
from afm.models import ScriptedModel

openai = LazyPackage("openai")
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Ilm"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Looks up.", "parameters": PARAMETERS},
}
USER = [{"role": "user", "content": "Where is it?"}]


@pytest.fixture
def connect(server, opened):
    """A session of this model, and OpenAI's client for it."""

    def connected(model, **options):
        session = opened(model, **options)
        return session, openai.AsyncOpenAI(base_url=server.open(session), api_key="none", max_retries=0)

    return connected


async def collected(stream: Any) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Text, calls and reasons of a chat's stream."""
    text, calls, ends = "", [], []
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or ()]
            ends += [choice.finish_reason] if choice.finish_reason else []
    return text, calls, ends


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bare_script_with_parallel_calls_gives_one_trajectory(connect, recording, stream) -> None:
    model = recording(f"Let me see.\n{CALL}\n{CALL}", "At the Ilm.")
    session, client = connect(model)

    async def ask(messages):
        answer = await client.chat.completions.create(
            model="tiny", messages=messages, tools=[SEARCH], stream=stream
        )
        if stream:
            return await collected(answer)
        [choice] = answer.choices
        calls = [call.model_dump() for call in choice.message.tool_calls or ()]
        return choice.message.content, calls, [choice.finish_reason]

    text, calls, ends = await ask(USER)
    assert (text, ends) == ("Let me see.", ["tool_calls"])
    assert [call["function"] for call in calls] == [{"name": "search", "arguments": '{"query": "Ilm"}'}] * 2
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "A river."} for call in calls]
    said = {"role": "assistant", "content": text, "tool_calls": calls}
    assert await ask([*USER, said, *results]) == ("At the Ilm.", [], ["stop"])
    [trajectory] = session.trajectories()
    assert [turn.tool_calls for turn in trajectory.turns] == [2, 0]
    assert wrong_tokens(session, model) == 0


async def test_several_choices_log_probabilities_ids_and_counts_are_those_of_the_model(
    connect, recording
) -> None:
    model = recording("One. <end> More", "Two.")
    session, client = connect(model)
    options = {"n": 2, "logprobs": True, "stop": "<end>", "extra_body": {"return_token_ids": True}}
    answer = await client.chat.completions.create(model="tiny", messages=USER, **options)

    texts = [choice.message.content for choice in answer.choices]
    assert texts == ["One. ", "Two."]
    for choice, (prompt, ids) in zip(answer.choices, model.sampled, strict=True):
        assert choice.token_ids == list(ids)
        assert [row.logprob for row in choice.logprobs.content] == [-token / 1000 for token in ids]
        assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(ids) for _, ids in model.sampled)
    assert [trajectory.reason for trajectory in session.trajectories()] == [Branch.FIRST, Branch.FORK]
    assert wrong_tokens(session, model) == 0


async def test_completions_stream_and_continue(connect, recording) -> None:
    model = recording(" One.<end>", " Two.<end>")
    session, client = connect(model)
    first = await client.completions.create(model="tiny", prompt="Count:", stop="<end>", logprobs=1)
    assert first.choices[0].logprobs.token_logprobs == [-token / 1000 for token in model.sampled[0][1]]
    text = f"Count:{first.choices[0].text}<end> And?"
    stream = await client.completions.create(
        model="tiny", prompt=text, stop=["<end>"], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == " Two."
    assert chunks[-1].usage.prompt_tokens == len(model.sampled[1][0])
    assert len(session.trajectories()) == 1
    assert wrong_tokens(session, model) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_the_responses_api_gives_one_trajectory(connect, recording, stream, stored) -> None:
    model = recording(f"Let me see.\n{CALL}", "At the Ilm.")
    session, client = connect(model)
    tools = [{"type": "function", **SEARCH["function"]}]

    async def ask(items, previous=None):
        options = {"model": "tiny", "input": items, "tools": tools, "instructions": "Be brief."}
        if not stream:
            return await client.responses.create(previous_response_id=previous, **options)
        async with client.responses.stream(
            **options, **({"previous_response_id": previous} if previous else {})
        ) as events:
            shown = "".join([event.delta async for event in events if event.type.endswith("text.delta")])
            answer = await events.get_final_response()
        assert shown == answer.output_text
        return answer

    first = await ask("Where is it?")
    said, call = first.output
    assert (said.content[0].text, call.name, call.arguments) == (
        "Let me see.",
        "search",
        '{"query": "Ilm"}',
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "A river."}
    if stored:
        last = await ask([result], previous=first.id)
    else:
        before = [item.model_dump(exclude_none=True) for item in first.output]
        last = await ask([{"role": "user", "content": "Where is it?"}, *before, result])
    assert (last.output_text, last.status) == ("At the Ilm.", "completed")
    assert last.usage.output_tokens == len(model.sampled[1][1])
    assert len(session.trajectories()) == 1
    assert wrong_tokens(session, model) == 0


LOST = {
    "messages": USER,
    "max_tokens": 9,
    "thread": {"type": "continue", "previous_message_id": "msg_1"},
}


THOUGHT = {"role": "user", "content": [{"type": "thinking", "thinking": "Hm."}]}


def said_with(calls: Any) -> dict[str, Any]:
    """A chat in which the assistant made these calls."""
    return {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": calls}]}


def called_with(arguments: Any) -> dict[str, Any]:
    function = {"name": "search", "arguments": arguments}
    return said_with([{"id": "c1", "type": "function", "function": function}])


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """An Anthropic message from its stream, as their client does it."""
    message = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                message["content"][event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                message["content"][event["index"]]["json"] += event["delta"]["partial_json"]
            case "message_delta":
                message |= event["delta"]
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("held", [False, True])
async def test_anthropics_messages_give_one_trajectory(server, opened, recording, stream, held) -> None:
    """The history comes with each request, or is held by the server as a thread with its prompt and tools."""
    model = recording(f"Let me see.\n{CALL}", "At the Ilm.")
    session = opened(model)
    server.open(session)
    tools = [{"name": "search", "description": "Looks up.", "input_schema": PARAMETERS}]
    client = httpx.AsyncClient(base_url=server.origin, headers={"x-api-key": "key"}, timeout=None)

    whole = {"system": "Be brief.", "tools": tools}

    async def ask(messages, **more):
        body = {"model": "tiny", "max_tokens": 200, "stream": stream, "messages": messages}
        answer = await client.post("/v1/messages", json=body | more)
        assert answer.status_code == 200, answer.text
        return put_together(events_of(answer.text)) if stream else answer.json()

    async with client:
        first = await ask(USER, **whole, **({"thread": {"type": "create"}} if held else {}))
        text, call = first["content"]
        assert (text["text"], call["name"], call["input"]) == ("Let me see.", "search", {"query": "Ilm"})
        assert first["stop_reason"] == "tool_use"
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": "A river."}],
        }
        new = [{"role": "user", "content": [result]}]
        if held:
            last = await ask(new, thread={"type": "continue", "previous_message_id": first["id"]})
        else:
            last = await ask([*USER, {"role": "assistant", "content": first["content"]}, *new], **whole)
    assert (last["content"][0]["text"], last["stop_reason"]) == ("At the Ilm.", "end_turn")
    assert len(session.trajectories()) == 1
    assert wrong_tokens(session, model) == 0


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [
        ("chat/completions", {"messages": USER, "tools": [SEARCH]}, '"role": "assistant"'),
        (
            "responses",
            {"input": "x", "tools": [{"type": "function", **SEARCH["function"]}]},
            "response.created",
        ),
        (
            "messages",
            {"messages": USER, "max_tokens": 99, "tools": [{"name": "search", "input_schema": PARAMETERS}]},
            "message_start",
        ),
    ],
)
async def test_a_stream_of_calls_alone_begins_as_every_other(
    server, opened, recording, path, body, first
) -> None:
    url = server.open(opened(recording(CALL)))
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"{url}/{path}", json=body | {"stream": True})
    assert first in answer.text.partition("\n\n")[0]
    assert "search" in answer.text


def deep(levels: int) -> str:
    """A call whose arguments have this many levels."""
    inner = "[" * (levels - 1) + "]" * (levels - 1)
    return f'<tool_call>{{"name": "search", "arguments": {{"query": {inner}}}}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize(
    ("said", "called"),
    [
        (r'<tool_call>{"name": "search", "arguments": {"query": "\ud800"}}</tool_call>', False),
        (r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>', False),
        ('<tool_call>{"name": "search", "arguments": {"query": NaN}}</tool_call>', False),
        ('[TOOL_CALLS][{"name": "search", "arguments": {"query": 1e999}}]', False),
        (deep(64), True),
        (deep(65), False),
        (deep(250), False),
        (deep(976), False),
        ('{"name": "Tom", "age": 3}', False),
        ('{"name": "search", "age": 3}', False),
        ('{"name": "Tom", "parameters": {"age": 3}}', False),
        ('{"name": "search", "parameters": {"query": "Ilm"}}', True),
        ('<tool_call>{"name": "search"}</tool_call>', True),
    ],
)
async def test_a_call_that_cannot_be_written_as_json_stays_text_and_continues(
    server, opened, recording, path, stream, said, called
) -> None:
    model = recording(said, "Done.")
    session = opened(model)
    url = server.open(session)
    chat = path == "chat/completions"
    tool = SEARCH if chat else {"name": "search", "input_schema": PARAMETERS}
    body = {"max_tokens": 5000, "tools": [tool]}
    async with httpx.AsyncClient(timeout=None) as client:

        async def ask(messages):
            answer = await client.post(f"{url}/{path}", json=body | {"messages": messages, "stream": stream})
            assert answer.status_code == 200, answer.text
            if not stream:
                return answer.json()["choices"][0]["message"] if chat else answer.json()
            if not chat:
                return put_together(events_of(answer.text))
            whole: dict[str, Any] = {"role": "assistant", "content": ""}
            deltas = [event["choices"][0]["delta"] for event in events_of(answer.text)]
            for delta in deltas:
                whole["content"] += delta.get("content") or ""
                if calls := delta.get("tool_calls"):
                    whole["tool_calls"] = calls
            return whole

        reply = await ask(USER)
        if chat:
            assert bool(reply.get("tool_calls")) == called
            assert (reply["content"] == said) is not called
        else:
            assert [block["type"] for block in reply["content"]] == ["tool_use" if called else "text"]
            assert called or reply["content"][0]["text"] == said
        message = {
            "role": "assistant",
            "content": reply["content"],
            **({"tool_calls": reply["tool_calls"]} if chat and called else {}),
        }
        await ask([*USER, message, {"role": "user", "content": "And?"}])
    assert [len(trajectory.turns) for trajectory in session.trajectories()] == [2]
    assert wrong_tokens(session, model) == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat/completions", {"messages": []}, 400, "messages: got [] (list), expected at least 1 item"),
        (
            "chat/completions",
            {"messages": USER, "response_format": {"type": "json_object"}},
            400,
            "does not constrain",
        ),
        (
            "chat/completions",
            {"messages": USER, "response_format": {"type": "json_schema"}},
            400,
            "response_format: got 'json_schema', expected text, json_object, or json_schema with a schema",
        ),
        ("responses", {"input": "x", "text": {"format": {"type": "xml"}}}, 400, "text.format: got 'xml'"),
        ("chat/completions", {"messages": USER, "tool_choice": "required"}, 400, "tools (no tool)"),
        (
            "chat/completions",
            {
                "messages": USER,
                "tools": [SEARCH],
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            400,
            "a function of the request's tools (search)",
        ),
        ("chat/completions", {"messages": USER, "top_logprobs": 3, "logprobs": True}, 400, "expected 0"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0]: expected text",
        ),
        ("chat/completions", {"messages": USER, "n": 1000}, 400, "n: got 1000 (number), expected at most"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, 400, "hosted tools do not run here"),
        (
            "responses",
            {"input": "x", "previous_response_id": "resp_1"},
            400,
            "no stored response 'resp_1'",
        ),
        (
            "messages",
            {"messages": USER, "max_tokens": 0},
            400,
            "max_tokens: got 0 (number), expected at least 1",
        ),
        ("responses", {"input": "x", "conversation": "conv_1"}, 400, "nothing is stored at OpenAI"),
        ("messages", LOST, 404, "no stored response 'msg_1'"),
        (
            "messages",
            {"messages": USER, "max_tokens": 9, "mcp_servers": [{}]},
            400,
            "mcp_servers: not supported",
        ),
        ("completions", {"prompt": "x", "echo": True}, 400, "echo: got true"),
        (
            "completions",
            {"prompt": [5, 300]},
            400,
            "prompt: token id 300 at index 1 is not in the vocabulary",
        ),
        ("completions", {"prompt": [-1]}, 400, "prompt: token id -1 at index 0 is not in the vocabulary"),
        (
            "chat/completions",
            {"messages": USER, "seed": 1 << 64},
            400,
            "seed: got 18446744073709551616 (number), expected less than",
        ),
        ("completions", {"prompt": "x" * 7_000_000}, 400, "the request has 7,000,000 characters"),
        ("completions", {"prompt": "x", "stop": [""]}, 400, "stop contains an empty string"),
        (
            "chat/completions",
            {"messages": USER, "tools": [{"type": "function", "function": "x"}]},
            400,
            "tools[0]: got",
        ),
        ("chat/completions", {"messages": USER, "tools": [{"type": "web_search"}]}, 400, "tools[0]: got"),
        (
            "chat/completions",
            {"messages": USER, "tools": [SEARCH], "tool_choice": {"type": "function", "function": "f"}},
            400,
            "tool_choice: got",
        ),
        (
            "chat/completions",
            {"messages": USER, "response_format": {"type": "json_schema", "json_schema": "x"}},
            400,
            "response_format: got 'json_schema'",
        ),
        ("chat/completions", said_with(5), 400, "messages[1].tool_calls: got number, expected a list"),
        ("chat/completions", said_with(True), 400, "messages[1].tool_calls: got boolean, expected a list"),
        ("chat/completions", said_with([{"function": "f"}]), 400, "messages[1].tool_calls[0]: got"),
        ("chat/completions", called_with(r'{"a": "\ud800"}'), 400, "expected JSON in UTF-8"),
        (
            "chat/completions",
            called_with("[" * 100_000),
            400,
            "expected JSON in UTF-8 with at most 64 levels",
        ),
        (
            "chat/completions",
            called_with("[" * 3000 + "]" * 3000),
            400,
            "expected JSON in UTF-8 with at most 64",
        ),
        ("chat/completions", called_with("[" * 65 + "]" * 65), 400, "got more than 64 levels"),
        ("responses", {"input": []}, 400, "messages: got none with content, expected at least one"),
        (
            "responses",
            {"input": "x", "text": {"format": "x"}},
            400,
            "text.format: got 'x' (text), expected an object",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": []}], "max_tokens": 9},
            400,
            "messages: got none",
        ),
        ("messages", {"messages": [THOUGHT], "max_tokens": 9}, 400, "messages: got none"),
        (
            "messages",
            {"messages": USER, "max_tokens": 9, "thread": {"type": "continue"}},
            400,
            "thread: got continue without previous_message_id",
        ),
        ("images", {}, 404, "expected POST chat/completions"),
        ("embeddings", {"input": "x"}, 404, "this gateway has no server for them"),
        ("reward", {"reward": "much"}, 400, "reward: got 'much' (text), expected a number"),
    ],
)
async def test_what_cannot_be_answered_is_refused_with_a_reason(
    server, opened, recording, path, body, status, words
) -> None:
    url = server.open(opened(recording("One.")))
    async with httpx.AsyncClient(timeout=None) as client:
        for stream in (False, True):
            answer = await client.post(f"{url}/{path}", json=body | {"stream": stream})
            assert answer.status_code == status
            assert words in answer.json()["error"]["message"]


async def test_a_request_of_any_length_is_refused_before_it_is_encoded(connect, recording) -> None:
    """Tools, arguments, names and roles count as well: all of them are in the prompt."""
    session, client = connect(recording(), limits=SessionLimits(max_tokens=100))
    long = "x" * 50_000
    tool = {"type": "function", "function": {"name": "search", "description": long}}
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": long}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    for body in (
        {"messages": [{**USER[0], "content": long}]},
        {"messages": USER, "tools": [tool]},
        {"messages": [*USER, said]},
        {"messages": [*USER, {"role": long, "content": "x"}]},
        {
            "messages": [
                *USER,
                {**said, "tool_calls": [{**call, "function": {"name": long, "arguments": ""}}]},
            ]
        },
    ):
        with pytest.raises(
            openai.BadRequestError, match=r"has 5\d,\d{3} characters; a sequence of 100 tokens has at most"
        ):
            await client.chat.completions.create(model="tiny", **body)
    assert session.refused == {"context_length_exceeded": 5}


@pytest.mark.parametrize("arguments", ["[" * 64 + "]" * 64, "", "[1]", "no JSON", "NaN", {"query": "Ilm"}])
async def test_calls_of_other_models_may_have_any_arguments_that_can_be_written(
    server, opened, recording, arguments
) -> None:
    url = server.open(opened(recording("One.")))
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"{url}/chat/completions", json=called_with(arguments))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_the_gateway_itself_is_json_and_in_the_log(
    server, opened, recording, monkeypatch, caplog, stream
) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("once")

    model = recording("One.", "Two.")
    session = opened(model)
    url = server.open(session)
    async with httpx.AsyncClient(timeout=None) as client:
        body = {"messages": USER, "stream": stream}
        with monkeypatch.context() as patch:
            patch.setattr("afm.harness.chat_api.ChatBody.answer", broken)
            answer = await client.post(f"{url}/chat/completions", json=body)
        fault = events_of(answer.text)[-1] if stream else answer.json()
        assert answer.status_code == (200 if stream else 500)
        assert fault["error"]["code"] == "internal"
        assert "the gateway failed (ZeroDivisionError)" in fault["error"]["message"]
        assert "once" not in answer.text  # what the error says may be secret
        assert "ZeroDivisionError: once" in caplog.text
        assert session.trajectories() == []
        assert (await client.post(f"{url}/chat/completions", json=body)).status_code == 200
    assert [trajectory.reason for trajectory in session.trajectories()] == [Branch.FIRST]


async def test_a_top_p_of_0_takes_the_likeliest_token(connect, recording) -> None:
    """OpenAI allows it; engines do not."""
    model = recording("One.")
    _, client = connect(model)
    await client.chat.completions.create(model="tiny", messages=USER, top_p=0)
    assert (model.params[-1].top_p, model.params[-1].top_k) == (1.0, 1)


async def test_a_response_that_is_not_to_be_stored_cannot_be_continued(connect, recording) -> None:
    _, client = connect(recording("One.", "Two."))
    first = await client.responses.create(model="tiny", input="x", store=False)
    with pytest.raises(openai.BadRequestError, match="no stored response"):
        await client.responses.create(model="tiny", input="y", previous_response_id=first.id)


async def test_a_schema_reaches_a_model_that_constrains_and_a_required_call_is_left_to_the_model(
    connect, recording
) -> None:
    """As smolagents sends it: a model that does not call is answered as it spoke."""
    model = recording('{"a": 1}', '{"a": 2}', "No call.")
    model.constrains = True
    _, client = connect(model)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"name": "reply", "schema": schema}
    await client.chat.completions.create(
        model="tiny", messages=USER, response_format={"type": "json_schema", "json_schema": named}
    )
    await client.responses.create(
        model="tiny", input="x", text={"format": {"type": "json_schema", **named, "strict": True}}
    )
    answer = await client.chat.completions.create(
        model="tiny", messages=USER, tools=[SEARCH], tool_choice="required"
    )
    assert answer.choices[0].message.content == "No call."
    got = [params.json_schema for params in model.params]
    assert [text and json.loads(text) for text in got] == [schema, schema, None]


async def test_a_client_that_leaves_ends_its_generation_and_the_session_continues(connect, recording) -> None:
    model = recording("One.", "Never.", "Never.", "Two.")
    session, client = connect(model)
    said = (await client.chat.completions.create(model="tiny", messages=USER)).choices[0].message
    history = [*USER, said.model_dump(), {"role": "user", "content": "And?"}]

    async def ask(stream: bool) -> None:
        await collected(await client.chat.completions.create(model="tiny", messages=history, stream=stream))

    model.hold.clear()
    for stream in (False, True):
        model.waiting.clear()
        model.gone.clear()
        asking = asyncio.create_task(ask(stream))
        await model.waiting.wait()
        asking.cancel()
        await model.gone.wait()
    model.hold.set()
    answer = await client.chat.completions.create(model="tiny", messages=history)

    assert answer.choices[0].message.content == "Two."
    assert (model.cancelled, session.cancelled, len(session.trajectories())) == (2, 2, 1)
    assert wrong_tokens(session, model) == 0


async def test_an_engine_that_fails_is_reported_to_both_sides(server, opened, codec) -> None:
    session = opened(ScriptedModel([], codec))
    url = server.open(session)
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"{url}/chat/completions", json={"messages": USER})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine")
    assert "used up" in str(session.error)


async def test_a_program_may_give_its_own_reward_which_ends_the_session(connect, recording) -> None:
    session, client = connect(recording("One."))
    await client.chat.completions.create(model="tiny", messages=USER)
    async with httpx.AsyncClient(timeout=None) as other:
        await other.post(f"{client.base_url}reward", json={"reward": 0.5})
    with pytest.raises(openai.APIStatusError, match="has ended") as refusal:
        await client.chat.completions.create(model="tiny", messages=USER)
    assert (refusal.value.status_code, session.reward, session.ended) == (410, 0.5, True)
    assert len(await session.close()) == 1


async def test_many_sessions_at_once_do_not_mix(server, recording, codec) -> None:
    from afm.harness import ChatRenderer

    models = [recording(*(f"{number} {turn}" for turn in range(3))) for number in range(40)]
    sessions = [
        Session(f"episode/{number}", model, ChatRenderer(codec)) for number, model in enumerate(models)
    ]

    async def play(session: Session, client: httpx.AsyncClient) -> None:
        url, history = server.open(session), [{"role": "user", "content": session.key}]
        for _ in range(3):
            answer = await client.post(f"{url}/chat/completions", json={"messages": history})
            history += [answer.json()["choices"][0]["message"], {"role": "user", "content": "More."}]

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=40), timeout=None) as client:
        await asyncio.gather(*(play(session, client) for session in sessions))
    for number, (session, model) in enumerate(zip(sessions, models, strict=True)):
        [trajectory] = await server.end(session.key)
        said = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
        assert said == [f"{number} {turn}" for turn in range(3)]
        assert wrong_tokens(session, model) == 0


async def test_a_session_that_ended_leaves_nothing_to_the_next_of_its_key(server, opened, recording) -> None:
    async with httpx.AsyncClient(timeout=None) as client:
        url = server.open(opened(recording("One.")))
        first = (await client.post(f"{url}/responses", json={"input": "x"})).json()["id"]
        await server.end("key")
        assert (await client.post(f"{url}/responses", json={"input": "x"})).status_code == 404
        server.open(opened(recording("Two.")))
        again = {"input": "y", "previous_response_id": first}
        answer = await client.post(f"{url}/responses", json=again)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_id")


async def test_a_conversation_is_one_members(connect, recording) -> None:
    """Planner and writer are asked the same and say the same; each continues its own conversation."""
    model = recording("Ilm.", "Ilm.", "A.", "B.")
    session, client = connect(model)
    url = str(client.base_url)
    members = [
        client.with_options(base_url=url.replace("/v1", f"/agent/{name}/v1")) for name in ("planner", "a%20b")
    ]
    history = {}
    for _ in range(2):
        for member in members:
            before = history.get(member, USER)
            answer = await member.chat.completions.create(model="tiny", messages=before)
            said = answer.choices[0].message.model_dump(exclude_none=True)
            history[member] = [*before, said, {"role": "user", "content": "And?"}]
    played = [(each.member, each.reason, len(each.turns)) for each in session.trajectories()]
    assert played == [("planner", Branch.FIRST, 2), ("a b", Branch.NEW, 2)]
    assert wrong_tokens(session, model) == 0


async def test_a_unix_socket_serves_the_same_sessions(opened, recording, tmp_path) -> None:
    path = tmp_path / "gateway.sock"
    async with HarnessServer(host=None, unix_socket=path) as server:
        url = server.open(opened(recording("One.")))
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(path)), timeout=None
        ) as client:
            answer = await client.post(f"{url}/chat/completions", json={"messages": USER})
            assert (await client.get(f"{url}/models")).json()["data"][0]["id"] == "tiny"
    assert answer.json()["choices"][0]["message"]["content"] == "One."


async def test_a_unix_socket_may_have_a_path_of_any_length(opened, recording, tmp_path) -> None:
    """The kernel's limit is 107 bytes, which a long TMPDIR exceeds."""
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    async with HarnessServer(host=None, unix_socket=folder / "gateway.sock") as server:
        url = server.open(opened(recording("One.")))
        (tmp_path / "short").symlink_to(folder)
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(tmp_path / "short/gateway.sock"))
        ) as client:
            answer = await client.post(f"{url}/chat/completions", json={"messages": USER})
    assert answer.json()["choices"][0]["message"]["content"] == "One."


async def test_embeddings_are_passed_on_as_they_are(opened, recording) -> None:
    async def embed(scope, receive, send):
        body = scope["path"].encode() + (await receive())["body"]
        head = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 429, "headers": head})
        await send({"type": "http.response.body", "body": body})

    upstream = LoopbackServer(embed, lifespan="off").start()
    try:
        async with (
            HarnessServer(embeddings=upstream.origin) as server,
            httpx.AsyncClient(timeout=None) as client,
        ):
            url = server.open(opened(recording()))
            answer = await client.post(f"{url}/embeddings", json={"input": "x"})
    finally:
        upstream.stop()
    assert (answer.status_code, answer.text) == (429, '/v1/embeddings{"input":"x"}')


async def test_the_script_of_the_page_is_trained_as_one_trajectory(connect, recording, tmp_path) -> None:
    model = recording("It is 41.", "It is 42.", "42")
    session, client = connect(model)
    page = (Path(__file__).parents[2] / "docs/harness.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(import json.*?)```", page, re.DOTALL)
    assert script is not None
    (tmp_path / "my_agent.py").write_text(script[1])
    places = {"OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": "key", "AFM_MODEL": "tiny"}
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        str(tmp_path / "my_agent.py"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | places,
    )
    said, _ = await program.communicate(json.dumps({"messages": USER}).encode())

    assert said == b"42\n"
    [trajectory] = session.trajectories()
    assert len(trajectory.turns) == 3
    assert wrong_tokens(session, model) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ToolCallingAgent", "CodeAgent"])
async def test_smolagents_keeps_its_sampled_tokens(connect, recording, kind) -> None:
    smolagents = pytest.importorskip("smolagents")
    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "Weimar"}}</tool_call>'
    texts = {
        "ToolCallingAgent": [CALL, final],
        "CodeAgent": ["Look.\n<code>\nx = 1\n</code>", 'Done.\n<code>\nfinal_answer("Weimar")\n</code>'],
    }
    model = recording(*texts[kind])
    session, client = connect(model)

    @smolagents.tool
    def search(query: str) -> str:
        """Looks up.

        Args:
            query: What.
        """
        return "A river."

    served = smolagents.OpenAIServerModel("tiny", api_base=str(client.base_url), api_key="none")
    agent = getattr(smolagents, kind)(tools=[search], model=served, verbosity_level=0)
    assert await asyncio.to_thread(agent.run, "Where was she born?") == "Weimar"
    assert sum(len(trajectory.turns) for trajectory in session.trajectories()) == 2
    assert wrong_tokens(session, model) == 0
