"""The recording gateway with OpenAI's own client, in front of an endpoint that also fails in every way."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import httpx
import pytest
from extras import LazyPackage

from afm.distill.event_log import EventKind, read_events
from afm.distill.model_calls import CallLog, Label, ModelCall, Usage, read_calls

openai = LazyPackage("openai")
HI = [{"role": "user", "content": "Hi"}]


@cache
def connections():
    return openai.OpenAI(api_key="none", base_url="http://127.0.0.1:9", max_retries=0, timeout=60)


def client(gateway, key="any:task=t1,agent=planner", base=None):
    return connections().with_options(api_key=key, base_url=base or gateway.base)


def calls(gateway):
    """Of all tasks, in the order of the log's attempts."""
    return [found for attempt in read_calls(gateway.log) for found in attempt]


def one_call(gateway):
    [found] = calls(gateway)
    return found


def test_a_chat_is_passed_on_and_recorded(gateway, teacher):
    answer = client(gateway).chat.completions.create(model="tiny", messages=HI, temperature=0.5)

    assert answer.choices[0].message.content == "You said Hi."
    assert answer.usage.prompt_tokens == 100
    assert teacher.keys == ["Bearer sk-key-of-the-endpoint"]
    begin, event = read_events(gateway.log)
    assert (begin.kind, begin.id, begin.task_id) == (EventKind.TASK, "t1#1.0", "t1")
    assert (event.kind, event.id, event.agent, event.ok) == (EventKind.CALL, "t1#1.1", "planner", True)
    assert (event.content, event.prompt_tokens, event.completion_tokens) == ("You said Hi.", 100, 10)
    assert event.seconds > 0
    call = one_call(gateway).call
    assert (call.path, call.model, call.answered_by) == ("chat/completions", "tiny", "tiny-1")
    assert (call.messages, call.request) == (tuple(HI), {"temperature": 0.5})
    assert call.choices[0]["message"]["content"] == "You said Hi."
    assert (call.status, call.trouble, call.stream) == (200, "", False)


def test_a_stream_is_passed_on_and_put_together_for_the_log(gateway, teacher):
    call = {
        "id": "c9",
        "type": "function",
        "function": {"name": "wiki_search", "arguments": '{"query": "Mill"}'},
    }
    teacher.script = lambda body: {"role": "assistant", "content": "I look it up.", "tool_calls": [call]}

    stream = client(gateway).chat.completions.create(model="tiny", messages=HI, stream=True)
    chunks = list(stream)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look it up."
    assert all(chunk.choices for chunk in chunks), "the client did not ask for the tokens"
    recorded = one_call(gateway)
    assert recorded.call.choices[0]["message"]["tool_calls"] == [call]
    assert (recorded.event.content, recorded.call.stream) == ("I look it up.", True)
    assert (recorded.event.prompt_tokens, recorded.event.completion_tokens) == (100, 10)
    assert "stream_options" not in recorded.call.request


def test_a_client_that_asks_for_the_tokens_of_a_stream_gets_them(gateway):
    options = {"include_usage": True}
    stream = client(gateway).chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options=options
    )

    assert [chunk.usage.completion_tokens for chunk in stream if chunk.usage] == [10]


def test_without_leave_to_ask_for_tokens_a_stream_is_left_as_it_is(start, teacher):
    gateway = start(config={"ask_usage": False})
    list(client(gateway).chat.completions.create(model="tiny", messages=HI, stream=True))

    assert "stream_options" not in teacher.seen[0][1]
    assert one_call(gateway).event.prompt_tokens == 0


def test_completions_and_models_are_passed_on(gateway):
    asking = client(gateway)

    assert asking.completions.create(model="tiny", prompt="Once").choices[0].text == "You said Once."
    assert [model.id for model in asking.models.list()] == ["tiny"]
    recorded = one_call(gateway)
    assert (recorded.call.path, recorded.call.prompt) == ("completions", "Once")
    assert recorded.event.content == "You said Once."


def test_the_first_word_of_a_stream_does_not_wait_for_the_second(gateway, teacher):
    stream = client(gateway).chat.completions.create(model="slow", messages=HI, stream=True)

    first = next(iter(stream))
    assert first.choices[0].delta.content == "First"  # the endpoint writes the second when it is told
    teacher.pause.set()
    assert [chunk.choices[0].delta.content for chunk in stream] == [" last"]


@pytest.mark.parametrize(
    ("key", "headers", "prefix", "task", "agent", "attempt"),
    [
        ("k:task=a,agent=b", {}, "", "a", "b", 1),
        ("k:task=a%2Cb%20%C3%A9,attempt=3", {}, "", "a,b é", "", 3),
        ("k:part:task=a", {}, "", "a", "", 1),
        ("k", {"X-AFM-Task": "a", "X-AFM-Agent": "b", "X-AFM-Attempt": "2"}, "", "a", "b", 2),
        ("k:task=a,agent=b", {"X-AFM-Agent": "c"}, "", "a", "c", 1),
        ("k", {}, "/task/a%20b/agent/c", "a b", "c", 1),
        ("k:agent=c", {}, "/task/a", "a", "c", 1),
        ("k", {}, "", "auto-3639efcd08ab", "", 1),
    ],
)
def test_a_call_is_filed_under_its_task_and_agent(gateway, key, headers, prefix, task, agent, attempt):
    asking = client(gateway, key, base=f"{gateway.url}{prefix}/v1")
    asking.chat.completions.create(model="tiny", messages=HI, extra_headers=headers)

    event = one_call(gateway).event
    assert (event.task_id, event.agent, event.attempt) == (task, agent, attempt)


@pytest.mark.parametrize(
    "key", ["k:task=a,colour=red", "k:task=a,attempt=no", "k:task=a%00", "k:task=" + "a" * 400]
)
def test_a_label_that_cannot_be_is_refused(gateway, teacher, key):
    with pytest.raises(openai.BadRequestError):
        client(gateway, key).chat.completions.create(model="tiny", messages=HI)
    assert not teacher.seen


def test_only_clients_with_the_token_are_let_in_and_no_key_is_logged(start, teacher):
    gateway = start(token="a-long-random-token")
    for key in ("wrong", "wrong:task=a", "a-long-random-token2:task=a"):
        with pytest.raises(openai.AuthenticationError):
            client(gateway, key).chat.completions.create(model="tiny", messages=HI)
        with pytest.raises(openai.AuthenticationError):
            client(gateway, key).models.list()
    assert httpx.get(f"{gateway.url}/metrics", trust_env=False).status_code == 401
    assert httpx.get(f"{gateway.url}/health", trust_env=False).status_code == 200
    client(gateway, "a-long-random-token:task=a").chat.completions.create(model="tiny", messages=HI)

    assert teacher.keys == ["Bearer sk-key-of-the-endpoint"]
    assert "a-long-random-token" not in gateway.log.read_text()


def test_errors_of_the_endpoint_come_as_they_are_but_without_its_key(gateway):
    asking = client(gateway)
    with pytest.raises(openai.RateLimitError) as busy:
        asking.chat.completions.create(model="busy", messages=HI)
    with pytest.raises(openai.InternalServerError) as broken:
        asking.chat.completions.create(model="broken", messages=HI)

    assert busy.value.response.headers["retry-after"] == "7"
    assert busy.value.response.headers["x-ratelimit-limit"] == "3"
    assert busy.value.response.json() == {"error": {"message": "slow down"}}
    assert broken.value.response.json() == {"error": {"message": "Incorrect API key: [key]"}}
    first, second = (found.call for found in calls(gateway))
    assert (first.status, first.trouble) == (429, "status")
    assert (second.status, second.trouble) == (500, "status")
    assert "slow down" in first.error
    assert not any(found.event.ok for found in calls(gateway))


def test_a_stream_and_its_headers_do_not_tell_the_key(gateway):
    asked = {"model": "telltale", "messages": HI, "stream": True}
    answer = httpx.post(f"{gateway.base}/chat/completions", json=asked, trust_env=False)

    assert answer.text == 'data: {"error": {"message": "Incorrect API key: [key]"}}\n\n'
    assert answer.headers["openai-organization"] == "of [key]"
    assert one_call(gateway).call.error == '{"message": "Incorrect API key: [key]"}'


def test_a_refused_question_for_a_model_does_not_tell_the_key(gateway):
    answer = httpx.get(f"{gateway.base}/models/org/refused", trust_env=False)

    assert (answer.status_code, answer.json()) == (401, {"error": {"message": "Incorrect API key: [key]"}})


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ("..%2F..%2Fadmin", None),
        ("%2e%2e/files", None),
        ("a/./b", "/v1/models/a/b"),  # the client's own reading
        ("a%2F%2E%2E%2Fb", None),
        ("x%3Fa=b%23c", "/v1/models/x%3Fa%3Db%23c"),
        ("org/name", "/v1/models/org/name"),
        ("ft:tiny@1", "/v1/models/ft:tiny@1"),
        ("a%00b", "/v1/models/a%00b"),
    ],
)
def test_the_name_of_a_model_leads_nowhere_else_with_the_key(gateway, teacher, asked, path):
    answer = httpx.get(f"{gateway.base}/models/{asked}", trust_env=False)

    assert teacher.paths == ([] if path is None else [path])
    assert answer.status_code == (404 if path is None else 200)


def test_arguments_that_a_stream_says_as_an_object_are_recorded(gateway):
    asked = {"model": "objects", "messages": HI, "stream": True}
    answer = httpx.post(f"{gateway.base}/chat/completions", json=asked, trust_env=False)

    assert answer.text.endswith("data: [DONE]\n\n")
    [made] = one_call(gateway).call.choices[0]["message"]["tool_calls"]
    assert made == {
        "id": "7",
        "type": "function",
        "function": {"name": "search", "arguments": '{"query": "rain"}'},
    }


def test_half_json_comes_as_it_is(gateway):
    answer = httpx.post(
        f"{gateway.base}/chat/completions", json={"model": "half", "messages": HI}, trust_env=False
    )

    assert (answer.status_code, answer.text) == (200, '{"choices": [{"message": {"content": "Ha')
    assert (one_call(gateway).call.trouble, one_call(gateway).event.ok) == ("broken", False)


def _kept(pieces, kept):
    """Takes pieces until there are none; what came stays in ``kept`` if that fails."""
    for piece in pieces:
        kept.extend(piece)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_cut_for_the_client_too(gateway, stream):
    body = {"model": "cut", "messages": HI, "stream": stream}
    got = bytearray()
    with httpx.stream("POST", f"{gateway.base}/chat/completions", json=body, trust_env=False) as answer:
        pieces = answer.iter_bytes()
        with pytest.raises(httpx.RemoteProtocolError):
            _kept(pieces, got)
    assert len(got) > 20

    recorded = one_call(gateway)
    assert (recorded.call.status, recorded.call.trouble) == (200, "cut")
    assert recorded.event.content == ("Half a th" if stream else "")


def test_an_endpoint_that_says_nothing_is_given_up(start):
    gateway = start(config={"answer_s": 0.3})
    with pytest.raises(openai.InternalServerError, match="did not answer in time") as late:
        client(gateway).chat.completions.create(model="silent", messages=HI)

    assert late.value.status_code == 504
    assert (one_call(gateway).call.status, one_call(gateway).call.trouble) == (0, "timeout")


def test_a_stream_that_falls_silent_is_cut(start):
    gateway = start(config={"silence_s": 0.3})
    with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
        list(client(gateway).chat.completions.create(model="slow", messages=HI, stream=True))

    assert (one_call(gateway).call.trouble, one_call(gateway).event.content) == ("cut", "First")


def test_an_endpoint_that_is_not_there_is_a_bad_gateway(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    gateway = start(upstream=f"http://127.0.0.1:{port}/v1")
    with pytest.raises(openai.InternalServerError, match="cannot be reached"):
        client(gateway).chat.completions.create(model="tiny", messages=HI)

    assert one_call(gateway).call.trouble == "connect"


def test_a_client_that_leaves_is_logged_with_what_it_got(gateway, teacher):
    stream = client(gateway).chat.completions.create(model="slow", messages=HI, stream=True)
    next(iter(stream))
    stream.close()

    for _ in range(200):
        if len(gateway.log.read_bytes().splitlines()) == 2:
            break
        time.sleep(0.05)
    assert (one_call(gateway).call.trouble, one_call(gateway).event.content) == ("gone", "First")


def test_too_large_a_request_or_an_answer_is_refused(start, teacher):
    gateway = start(config={"max_request_bytes": 5000, "max_answer_bytes": 5000})
    with pytest.raises(openai.APIStatusError) as large:
        client(gateway).completions.create(model="tiny", prompt="x" * 6000)
    assert large.value.status_code == 413
    assert not teacher.seen
    teacher.script = lambda body: {"role": "assistant", "content": "y" * 6000}
    with pytest.raises(openai.InternalServerError, match="too large"):
        client(gateway).completions.create(model="tiny", prompt="x")
    assert one_call(gateway).call.trouble == "too_large"


def test_a_body_that_is_no_json_is_the_endpoints_to_refuse(gateway, teacher):
    answer = httpx.post(f"{gateway.base}/embeddings", content=b"{", trust_env=False)

    assert answer.status_code == 404
    assert "recorded are chat/completions and completions" in answer.json()["error"]["message"]


def test_cost_comes_from_the_price_table(start):
    prices = {"tiny": {"prompt": 2, "completion": 8, "cached": 1}, "ti*": {"prompt": 1, "completion": 1}}
    gateway = start(config={"prices": prices})
    asking = client(gateway)
    for model in ("tiny", "tier", "other"):
        asking.chat.completions.create(model=model, messages=HI)

    first, second, third = calls(gateway)
    # 100 prompt tokens, 40 of them cached, and 10 of completion, for a million each
    assert first.event.cost_usd == pytest.approx((60 * 2 + 40 * 1 + 10 * 8) / 1e6)
    assert second.event.cost_usd == pytest.approx(110 / 1e6)
    assert (third.event.cost_usd, third.call.priced, second.call.priced) == (0, False, True)


def test_each_model_is_asked_at_its_endpoint(start, teacher):
    upstreams = [
        {"url": teacher.url, "models": ["ti*"]},
        {"url": "http://127.0.0.1:9/v1", "models": ["far-*"], "key_variable": "NO_SUCH_KEY"},
    ]
    gateway = start(upstream="", config={"upstreams": upstreams})
    asking = client(gateway)

    assert asking.chat.completions.create(model="tiny", messages=HI).choices
    with pytest.raises(openai.InternalServerError):
        asking.chat.completions.create(model="far-away", messages=HI)
    with pytest.raises(openai.NotFoundError, match="no endpoint is set up"):
        asking.chat.completions.create(model="unheard-of", messages=HI)
    assert [model.id for model in asking.models.list()] == ["tiny"]


def test_an_agents_conversation_is_written_once_however_often_it_is_sent(gateway):
    asking = client(gateway)
    tools = [{"type": "function", "function": {"name": "wiki_search", "description": "d" * 2000}}]
    messages = [{"role": "system", "content": "s" * 5000}, *HI]
    sent = []
    for turn in range(20):
        sent.append(list(messages))
        answer = asking.chat.completions.create(model="tiny", messages=messages, tools=tools)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": f"{turn} " * 100})

    assert [list(found.call.messages) for found in calls(gateway)] == sent
    assert all(list(found.call.tools) == tools for found in calls(gateway))
    assert gateway.log.stat().st_size < 40_000  # 20 times the conversation would be 290 kB


def test_64_agents_at_once_are_all_recorded_each_in_its_task(gateway, teacher):
    gate = threading.Barrier(64)

    def script(body):
        gate.wait(20)
        return {"role": "assistant", "content": f"for {said(body)}"}

    def said(body):
        return body["messages"][-1]["content"]

    teacher.script = script

    def work(number):
        asking = client(gateway, f"k:task=t{number},agent=a")
        for turn in range(2):
            messages = [{"role": "user", "content": f"{number}/{turn}"}]
            answer = asking.chat.completions.create(model="tiny", messages=messages, stream=bool(number % 2))
            if number % 2:
                list(answer)

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(work, range(64)))

    attempts = list(read_calls(gateway.log))
    assert len(attempts) == 64
    assert teacher.most_at_once == 64
    for attempt in attempts:
        number = attempt[0].event.task_id[1:]
        assert [found.event.content for found in attempt] == [f"for {number}/0", f"for {number}/1"]


@pytest.mark.slow
def test_a_killed_gateway_loses_nothing_that_a_client_was_told(spawn):
    gateway = spawn()
    assert "another run is writing here" in spawn()
    told = []

    def work(number):
        asking = client(gateway, f"k:task=t{number}")
        for turn in range(1000):
            try:
                stream = asking.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": f"{number}/{turn}"}],
                    stream=turn % 2 == 0,
                )
                if turn % 2 == 0 and not list(stream)[-1].choices[0].finish_reason:
                    return
            except (openai.APIError, httpx.HTTPError):
                return
            told.append(f"You said {number}/{turn}.")

    with ThreadPoolExecutor(8) as pool:
        working = [pool.submit(work, number) for number in range(8)]
        while len(told) < 60:
            time.sleep(0.01)
        gateway.kill()
        for future in working:
            future.result()
    with gateway.log.open("ab") as log:
        log.write(b'{"id": "t0#1.9", "task_')  # as a kill within a write would leave it

    again = spawn()
    client(again, "k:task=t0").chat.completions.create(model="tiny", messages=HI)
    recorded = [found.event.content for found in calls(again)]
    assert set(told) <= set(recorded)
    assert len(recorded) == len(set(recorded))
    identities = [event.id for event in read_events(again.log)]
    assert len(identities) == len(set(identities))


def test_half_a_surrogate_pair_does_not_stop_the_gateway(gateway):
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "a \\ud83d b"}]}'
    answer = httpx.post(f"{gateway.base}/chat/completions", content=body, trust_env=False)

    assert answer.status_code == 200
    assert one_call(gateway).call.messages == ({"role": "user", "content": "a ? b"},)


def test_metrics_count_calls_by_outcome(gateway):
    asking = client(gateway)
    asking.chat.completions.create(model="tiny", messages=HI)
    with pytest.raises(openai.RateLimitError):
        asking.chat.completions.create(model="busy", messages=HI)

    text = httpx.get(f"{gateway.url}/metrics", trust_env=False).text
    assert 'afm_gateway_requests_total{outcome="ok"} 1' in text
    assert 'afm_gateway_requests_total{outcome="status"} 1' in text


def test_a_log_of_another_kind_is_no_gateways(tmp_path):
    from afm.errors import DataError

    (tmp_path / "log").write_text(
        json.dumps({"id": "a#1.0", "task_id": "a", "attempt": 1, "kind": "task"}) + "\n"
    )
    with pytest.raises(DataError, match="holds no model calls"):
        list(read_calls(tmp_path / "log"))


def ask(gateway, words, **options):
    messages = [{"role": "user", "content": words}]
    return client(gateway).chat.completions.create(model="tiny", messages=messages, **options)


def asked(gateway):
    """What the calls in the log asked, every line of which is whole."""
    lines = gateway.log.read_bytes().splitlines(keepends=True)
    assert len(list(read_events(gateway.log))) == len(lines)
    return [found.call.messages[-1]["content"] for found in calls(gateway)]


def test_with_a_full_disk_the_endpoint_is_not_asked(disk, start, teacher):
    gateway = start(folder=disk.folder)
    disk.fill()

    for _ in range(3):
        with pytest.raises(openai.InternalServerError) as refused:
            ask(gateway, "first")
        assert (refused.value.status_code, refused.value.code) == (503, "log")
        message = "the log cannot be written (No space left on device); the endpoint was not asked"
        assert message in str(refused.value)
    assert not teacher.seen
    health = httpx.get(f"{gateway.url}/health", trust_env=False)
    assert health.status_code == 503
    assert health.json()["error"] == "the log cannot be written (No space left on device)"

    disk.empty()
    ask(gateway, "second")
    assert httpx.get(f"{gateway.url}/health", trust_env=False).json()["status"] == "ok"
    assert asked(gateway) == ["second"]


def test_a_disk_that_fills_between_calls_splices_no_lines(disk, start, teacher):
    gateway = start(folder=disk.folder)
    ask(gateway, "0")
    disk.fill()
    answered = ["0"]
    with suppress(openai.InternalServerError):
        for number in range(1, 100):  # some have room in blocks that an earlier call has left
            ask(gateway, f"{number}")
            answered.append(f"{number}")
    assert len(teacher.seen) == len(answered) < 100
    disk.empty()
    ask(gateway, "last")
    assert asked(gateway) == [*answered, "last"]


def test_a_closed_log_keeps_no_room(disk):
    path = disk.folder / "closed.jsonl"
    with CallLog(path) as log, log.reserved(1 << 20):
        log.record(Label(task="t"), ModelCall(path="completions"), Usage())
        assert path.stat().st_blocks * 512 >= 1 << 20
    assert path.stat().st_blocks * 512 <= 4096
    assert len(list(read_events(path))) == 2


def test_calls_under_way_when_the_disk_fills_are_recorded(disk, start, teacher):
    gateway = start(folder=disk.folder)
    stream = client(gateway).chat.completions.create(model="slow", messages=HI, stream=True)
    assert next(iter(stream)).choices[0].delta.content == "First"
    disk.fill()

    teacher.pause.set()
    assert [chunk.choices[0].delta.content for chunk in stream] == [" last"]
    assert one_call(gateway).event.content == "First last"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_log_does_not_hold_leaves_nothing_of_itself_and_is_not_paid_again(
    disk, start, teacher, stream
):
    gateway = start(folder=disk.folder)
    teacher.script = lambda body: {"role": "assistant", "content": "y" * (3 << 20)}  # written twice
    asking = client(gateway).with_options(max_retries=2)
    with pytest.raises((openai.APIStatusError, httpx.RemoteProtocolError, openai.APIConnectionError)) as lost:
        list(asking.chat.completions.create(model="tiny", messages=HI, stream=stream))
    if not stream:
        assert lost.value.status_code == 507
        assert "asking again costs again" in str(lost.value)
    assert len(teacher.seen) == 1

    teacher.script = lambda body: {"role": "assistant", "content": "short"}
    ask(gateway, "next")
    assert asked(gateway) == ["next"]
