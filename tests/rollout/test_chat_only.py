"""Episodes over a chat endpoint that shows no token ids: a real server on this machine, in the forms that servers have."""

import json

import pytest
from fastapi import FastAPI, Request, Response
from loopback import LoopbackServer

from afm.agents import Limits
from afm.errors import EngineError
from afm.models.base import FinishReason, SamplingParams, ToolCalls
from afm.models.chat_only import ChatOnlyModel, TextCodec, Utterance
from afm.rollout import run_episode
from afm.trajectory.record import StopReason
from afm.trajectory.tags import Author, Segment

QUESTION = "What is 2 + 3?"
CALL = "<think>add</think><calc>2 + 3</calc>"
OBSERVATION = "\n<observation>\n5\n</observation>\n"


class ChatServer(LoopbackServer):
    """Answers with ``replies`` in turn: a text, a message, a pair of message and finish reason, or a whole response."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests = []
        app = FastAPI()
        app.post("/v1/chat/completions")(self.answer)
        super().__init__(app)

    async def answer(self, request: Request):
        self.requests.append(await request.json())
        reply = self.replies.pop(0)
        if isinstance(reply, Response):
            return reply
        reply = {"content": reply} if isinstance(reply, str) else reply
        message, finish = reply if isinstance(reply, tuple) else (reply, "stop")
        return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}


@pytest.fixture
def serve():
    servers = []

    def start(*replies):
        servers.append(ChatServer(*replies).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def native_call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": "x", "type": "function", "function": function}]
    return {"content": None, "tool_calls": calls}, "tool_calls"


async def play(server, spec, tool, *, limits=None, **options):
    model = ChatOnlyModel(server.origin, name="closed", **options)
    try:
        return await run_episode(spec, model, {tool.name: tool}, QUESTION, limits=limits)
    finally:
        await model.close()


async def test_an_episode_is_a_conversation_with_the_observation_as_the_users_turn(serve, spec, calculator):
    server = serve(CALL, "<answer>5</answer>")
    episode = await play(server, spec, calculator)
    assert episode.segments == (
        Segment(Author.AGENT, CALL),
        Segment(Author.ENVIRONMENT, OBSERVATION),
        Segment(Author.AGENT, "<answer>5</answer>"),
    )
    assert episode.stop is StopReason.ANSWER
    asked = {"role": "user", "content": QUESTION}
    assert [request["messages"] for request in server.requests] == [
        [asked],
        [asked, {"role": "assistant", "content": CALL}, {"role": "user", "content": OBSERVATION}],
    ]


async def test_a_closing_tag_that_the_server_removed_is_put_back(serve, spec, calculator):
    server = serve("<think>the <answer> is near</think><calc>2 + 3", "<answer>5 <calc>")
    episode = await play(server, spec, calculator)
    assert calculator.arguments == ["2 + 3"]
    assert episode.text.endswith("<answer>5 <calc></answer>")


async def test_what_a_server_writes_behind_a_stop_string_is_dropped(serve, spec, calculator):
    server = serve(CALL + "\n<observation>7</observation><answer>7</answer>", "<answer>5</answer>")
    episode = await play(server, spec, calculator)
    assert episode.text == CALL + OBSERVATION + "<answer>5</answer>"


async def test_native_tool_calls_become_the_agents_tags_and_go_back_as_tool_messages(serve, spec, calculator):
    server = serve(native_call("calc", input="2 + 3"), "<answer>5</answer>")
    options = {"tool_calls": ToolCalls.NATIVE, "tool_roles": {"calc": "Adds."}}
    episode = await play(server, spec, calculator, **options)
    assert episode.text == "<calc>2 + 3</calc>" + OBSERVATION + "<answer>5</answer>"
    [tool] = server.requests[0]["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("calc", "Adds.")
    _, called, answered = server.requests[1]["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"input": "2 + 3"}'}
    assert answered["role"] == "tool"
    assert answered["tool_call_id"] == called["tool_calls"][0]["id"]


async def test_a_call_of_a_function_that_was_not_offered_is_an_error(serve, spec, calculator):
    server = serve(native_call("shell", input="ls"))
    with pytest.raises(EngineError, match="'shell', which is not offered; offered: calc"):
        await play(server, spec, calculator, tool_calls=ToolCalls.NATIVE, tool_roles={"calc": ""})


async def test_a_reply_cut_at_its_limit_ends_the_episode_there(serve, spec, calculator):
    server = serve(({"content": "<think>I wonder"}, "length"))
    episode = await play(server, spec, calculator, limits=Limits(max_turn_tokens=4))
    assert server.requests[0]["max_tokens"] == 4
    assert episode.text == "<think>I wonder"
    assert len(episode.response_ids) <= 4
    assert episode.stop is StopReason.AGENT_TOKENS


async def test_fields_of_the_request_may_be_changed_and_removed(serve, spec, calculator):
    server = serve("<answer>5</answer>")
    request = {"max_tokens": None, "stop": None, "max_completion_tokens": 99}
    await play(server, spec, calculator, request=request)
    [body] = server.requests
    assert body["max_completion_tokens"] == 99
    assert {"max_tokens", "stop"}.isdisjoint(body)


def test_ids_hold_text_and_author() -> None:
    codec = TextCodec()
    text = "\0 zero, é, 漢字, \ud800 and 🙂"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    ids = [*codec.encode_prompt(messages), *codec.encode_written(text, 2), 0, *codec.encode("seen")]
    assert len(codec.encode_written(text, 2)) == 2
    assert codec.decode(ids) == "Be brief." + text + text + "seen"
    assert codec.utterances(ids) == [
        Utterance("system", "Be brief."),
        Utterance("user", text),
        Utterance("assistant", text),
        Utterance("environment", "seen"),
    ]


def test_an_earlier_answer_in_the_prompt_is_the_assistants() -> None:
    codec = TextCodec()
    turns = [("user", "2 + 3?"), ("assistant", "5"), ("user", "And twice that?")]
    ids = codec.encode_prompt([{"role": role, "content": text} for role, text in turns])
    assert codec.utterances(ids) == [Utterance(role, text) for role, text in turns]
    with pytest.raises(EngineError, match="'tool', expected one of system, user, assistant"):
        codec.encode_prompt([{"role": "tool", "content": "5"}])


async def test_a_text_without_a_stop_string_ends_with_the_end_id(serve) -> None:
    """Also where the text alone would take all tokens: 3 pieces of four characters."""
    server = serve("That is all.", "That is all.")
    model = ChatOnlyModel(server.origin, name="closed")
    prompt = model.encode_prompt([{"role": "user", "content": "Hello"}])
    for most in (100, 3):
        generation = await model.generate(prompt, SamplingParams(most, stop=("</answer>",)))
        assert generation.finish is FinishReason.END_OF_TEXT
        assert generation.token_ids[-1] == 0
        assert model.decode(generation.token_ids) == "That is all."
    await model.close()
