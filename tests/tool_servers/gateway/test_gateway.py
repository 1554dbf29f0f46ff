"""The recording gateway with OpenAI's own client, in front of an endpoint that fails in many ways."""

from __future__ import annotations

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
from afm.errors import DataError

openai = LazyPackage("openai")
HI = [{"role": "user", "content": "Hi"}]


@cache
def connections():
    return openai.OpenAI(api_key="none", base_url="http://127.0.0.1:9", max_retries=0, timeout=120)


def client(gateway, key="any:task=t1,agent=planner", base=None):
    return connections().with_options(api_key=key, base_url=base or gateway.base)


def ask(gateway, words="Hi", *, key="any:task=t1,agent=planner", base=None, model="tiny", **options):
    messages = [{"role": "user", "content": words}]
    asking = client(gateway, key, base).chat.completions
    return asking.create(model=model, messages=messages, **options)


def post(gateway, model, path="chat/completions", **more):
    body = {"model": model, "messages": HI} | more
    return httpx.post(f"{gateway.base}/{path}", json=body, timeout=60, trust_env=False)


def get(gateway, path):
    return httpx.get(f"{gateway.url}{path}", timeout=60, trust_env=False)


def calls(gateway):
    """Return the calls of all tasks, in the order of the log."""
    return [found for attempt in read_calls(gateway.log) for found in attempt]


def one_call(gateway):
    [found] = calls(gateway)
    return found


def outcome(gateway):
    """Return the failure and the recorded text of the only call."""
    found = one_call(gateway)
    return found.call.trouble, found.event.content


def test_a_chat_is_passed_on_and_recorded(gateway, teacher):
    answer = ask(gateway, temperature=0.5)

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
    function = {"name": "wiki_search", "arguments": '{"query": "Mill"}'}
    call = {"id": "c9", "type": "function", "function": function}
    teacher.script = lambda body: {"role": "assistant", "content": "I look it up.", "tool_calls": [call]}

    chunks = list(ask(gateway, stream=True))

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look it up."
    assert all(chunk.choices for chunk in chunks), "the client did not ask for the tokens"
    recorded = one_call(gateway)
    assert recorded.call.choices[0]["message"]["tool_calls"] == [call]
    assert (recorded.event.content, recorded.call.stream) == ("I look it up.", True)
    assert (recorded.event.prompt_tokens, recorded.event.completion_tokens) == (100, 10)
    assert "stream_options" not in recorded.call.request


def test_a_client_that_asks_for_the_tokens_of_a_stream_gets_them(gateway):
    stream = ask(gateway, stream=True, stream_options={"include_usage": True})

    assert [chunk.usage.completion_tokens for chunk in stream if chunk.usage] == [10]


def test_without_leave_to_ask_for_tokens_a_stream_is_left_as_it_is(start, teacher):
    gateway = start(config={"ask_usage": False})
    list(ask(gateway, stream=True))

    assert "stream_options" not in teacher.seen[0]
    assert one_call(gateway).event.prompt_tokens == 0


def test_completions_and_models_are_passed_on(gateway):
    asking = client(gateway)

    assert asking.completions.create(model="tiny", prompt="Once").choices[0].text == "You said Once."
    assert [model.id for model in asking.models.list()] == ["tiny"]
    recorded = one_call(gateway)
    assert (recorded.call.path, recorded.call.prompt) == ("completions", "Once")
    assert recorded.event.content == "You said Once."


def test_the_first_word_of_a_stream_does_not_wait_for_the_second(gateway, teacher):
    stream = ask(gateway, model="slow", stream=True)

    assert next(iter(stream)).choices[0].delta.content == "First"  # the endpoint delays the second
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
    ask(gateway, key=key, base=f"{gateway.url}{prefix}/v1", extra_headers=headers)

    event = one_call(gateway).event
    assert (event.task_id, event.agent, event.attempt) == (task, agent, attempt)


@pytest.mark.parametrize(
    "key", ["k:task=a,colour=red", "k:task=a,attempt=no", "k:task=a%00", "k:task=" + "a" * 400]
)
def test_a_label_that_cannot_be_is_refused(gateway, teacher, key):
    with pytest.raises(openai.BadRequestError):
        ask(gateway, key=key)
    assert not teacher.seen


def test_only_clients_with_the_token_are_let_in_and_no_key_is_logged(start, teacher):
    gateway = start(token="a-long-random-token")
    for key in ("wrong", "wrong:task=a", "a-long-random-token2:task=a"):
        with pytest.raises(openai.AuthenticationError):
            ask(gateway, key=key)
        with pytest.raises(openai.AuthenticationError):
            client(gateway, key).models.list()
    assert (get(gateway, "/metrics").status_code, get(gateway, "/health").status_code) == (401, 200)
    ask(gateway, key="a-long-random-token:task=a")

    assert teacher.keys == ["Bearer sk-key-of-the-endpoint"]
    assert "a-long-random-token" not in gateway.log.read_text()


def test_errors_of_the_endpoint_come_as_they_are_but_without_its_key(gateway):
    busy, broken = post(gateway, "busy"), post(gateway, "broken")

    assert (busy.headers["retry-after"], busy.headers["x-ratelimit-limit"]) == ("7", "3")
    assert busy.json() == {"error": {"message": "slow down"}}
    assert broken.json() == {"error": {"message": "Incorrect API key: [key]"}}
    first, second = calls(gateway)
    assert (first.call.status, first.call.trouble, first.event.ok) == (429, "status", False)
    assert (second.call.status, second.call.trouble, second.event.ok) == (500, "status", False)
    assert "slow down" in first.call.error
    text = get(gateway, "/metrics").text
    assert 'afm_gateway_requests_total{outcome="status"} 2' in text


def test_a_stream_and_its_headers_do_not_tell_the_key(gateway):
    answer = post(gateway, "telltale", stream=True)

    assert answer.text == 'data: {"error": {"message": "Incorrect API key: [key]"}}\n\n'
    assert answer.headers["openai-organization"] == "of [key]"
    assert one_call(gateway).call.error == '{"message": "Incorrect API key: [key]"}'


def test_a_refused_question_for_a_model_does_not_tell_the_key(gateway, teacher):
    body = b'{"error": {"message": "Incorrect API key: sk-key-of-the-endpoint"}}'
    teacher.pages["/v1/models/org/refused"] = (401, "application/json", body)
    answer = get(gateway, "/v1/models/org/refused")

    assert (answer.status_code, answer.json()) == (401, {"error": {"message": "Incorrect API key: [key]"}})


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ("..%2F..%2Fadmin", None),
        ("a/./b", "/v1/models/a/b"),  # normalised by the client
        ("a%2F%2E%2E%2Fb", None),
        ("x%3Fa=b%23c", "/v1/models/x%3Fa%3Db%23c"),
        ("ft:tiny@1", "/v1/models/ft:tiny@1"),
        ("a%00b", "/v1/models/a%00b"),
    ],
)
def test_the_name_of_a_model_leads_nowhere_else_with_the_key(gateway, teacher, asked, path):
    teacher.pages[path] = teacher.pages["/v1/models"]
    status = get(gateway, f"/v1/models/{asked}").status_code

    assert (status, teacher.asked) == ((200, [path]) if path else (404, []))


def test_arguments_that_a_stream_says_as_an_object_are_recorded(gateway):
    assert post(gateway, "objects", stream=True).text.endswith("data: [DONE]\n\n")
    function = {"name": "search", "arguments": '{"query": "rain"}'}
    [call] = one_call(gateway).call.choices[0]["message"]["tool_calls"]
    assert call == {"id": "7", "type": "function", "function": function}


def test_half_json_comes_as_it_is(gateway):
    answer = post(gateway, "half")

    assert (answer.status_code, answer.text) == (200, '{"choices": [{"message": {"content": "Ha')
    assert (one_call(gateway).call.trouble, one_call(gateway).event.ok) == ("broken", False)


def _kept(pieces, kept):
    """Collect all pieces in ``kept``, which keeps them if an error follows."""
    for piece in pieces:
        kept.extend(piece)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_cut_for_the_client_too(gateway, stream):
    body = {"model": "cut", "messages": HI, "stream": stream}
    got = bytearray()
    with httpx.stream(
        "POST", f"{gateway.base}/chat/completions", json=body, timeout=60, trust_env=False
    ) as answer:
        pieces = answer.iter_bytes()
        with pytest.raises(httpx.RemoteProtocolError):
            _kept(pieces, got)
    assert len(got) > 20
    assert one_call(gateway).call.status == 200
    assert outcome(gateway) == ("cut", "Half a th" if stream else "")


def test_an_endpoint_that_says_nothing_is_given_up(start):
    gateway = start(config={"answer_s": 0.3})
    with pytest.raises(openai.InternalServerError, match="did not answer in time") as late:
        ask(gateway, model="silent")

    assert late.value.status_code == 504
    assert (one_call(gateway).call.status, outcome(gateway)) == (0, ("timeout", ""))


def test_a_stream_that_falls_silent_is_cut(start):
    gateway = start(config={"silence_s": 3})
    with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
        list(ask(gateway, model="slow", stream=True))

    assert outcome(gateway) == ("cut", "First")


def test_an_endpoint_that_is_not_there_is_a_bad_gateway(start):
    gateway = start(upstream="http://127.0.0.1:9/v1")
    with pytest.raises(openai.InternalServerError, match="cannot be reached"):
        ask(gateway)

    assert one_call(gateway).call.trouble == "connect"


def test_a_client_that_leaves_is_logged_with_what_it_got(gateway, teacher):
    stream = ask(gateway, model="slow", stream=True)
    next(iter(stream))
    stream.close()

    for _ in range(1200):
        if len(gateway.log.read_bytes().splitlines()) == 2:
            break
        time.sleep(0.05)
    assert outcome(gateway) == ("gone", "First")


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


def test_what_is_not_recorded_is_not_passed_on(gateway):
    answer = post(gateway, "tiny", "embeddings")

    assert answer.status_code == 404
    assert "the gateway records chat/completions and completions" in answer.json()["error"]["message"]


def test_cost_comes_from_the_price_table(start):
    prices = {"tiny": {"prompt": 2, "completion": 8, "cached": 1}, "ti*": {"prompt": 1, "completion": 1}}
    gateway = start(config={"prices": prices})
    for model in ("tiny", "tier", "other"):
        ask(gateway, model=model)

    first, second, third = calls(gateway)
    # 100 prompt tokens, of which 40 are cached, and 10 completion tokens; prices are per million
    assert first.event.cost_usd == pytest.approx((60 * 2 + 40 * 1 + 10 * 8) / 1e6)
    assert second.event.cost_usd == pytest.approx(110 / 1e6)
    assert (third.event.cost_usd, third.call.priced, second.call.priced) == (0, False, True)


def test_each_model_is_asked_at_its_endpoint(start, teacher):
    upstreams = [
        {"url": teacher.url, "models": ["ti*"]},
        {"url": "http://127.0.0.1:9/v1", "models": ["far-*"], "key_variable": "NO_SUCH_KEY"},
    ]
    gateway = start(upstream="", config={"upstreams": upstreams})

    assert ask(gateway).choices
    with pytest.raises(openai.InternalServerError):
        ask(gateway, model="far-away")
    with pytest.raises(openai.NotFoundError, match="no endpoint is set up"):
        ask(gateway, model="unheard-of")
    assert [model.id for model in client(gateway).models.list()] == ["tiny"]


@pytest.mark.slow
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
    assert gateway.log.stat().st_size < 40_000  # 20 copies of the conversation would have 290 kB


@pytest.mark.slow
def test_64_agents_at_once_are_all_recorded_each_in_its_task(gateway, teacher):
    gate = threading.Barrier(64)

    def script(body):
        gate.wait(100)
        return {"role": "assistant", "content": f"for {body['messages'][-1]['content']}"}

    teacher.script = script

    def work(number):
        for turn in range(2):
            key, stream = f"k:task=t{number},agent=a", bool(number % 2)
            list(ask(gateway, f"{number}/{turn}", key=key, stream=stream))

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(work, range(64)))

    attempts = list(read_calls(gateway.log))
    assert (len(attempts), teacher.most_at_once) == (64, 64)
    for attempt in attempts:
        number = attempt[0].event.task_id[1:]
        assert [found.event.content for found in attempt] == [f"for {number}/0", f"for {number}/1"]


@pytest.mark.slow
def test_a_killed_gateway_loses_nothing_that_a_client_was_told(spawn):
    gateway = spawn()
    assert "another run is writing here" in spawn()
    answered = []

    def work(number):
        for turn in range(1000):
            stream = turn % 2 == 0
            try:
                answer = list(ask(gateway, f"{number}/{turn}", key=f"k:task=t{number}", stream=stream))
                if stream and not answer[-1].choices[0].finish_reason:
                    return
            except (openai.APIError, httpx.HTTPError):
                return
            answered.append(f"You said {number}/{turn}.")

    with ThreadPoolExecutor(8) as pool:
        working = [pool.submit(work, number) for number in range(8)]
        while len(answered) < 60:
            time.sleep(0.01)
        gateway.kill()
        for future in working:
            future.result()
    with gateway.log.open("ab") as log:
        log.write(b'{"id": "t0#1.9", "task_')  # as after a kill during a write

    again = spawn()
    ask(again, key="k:task=t0")
    recorded = [found.event.content for found in calls(again)]
    assert set(answered) <= set(recorded)
    assert len(recorded) == len(set(recorded))
    identities = [event.id for event in read_events(again.log)]
    assert len(identities) == len(set(identities))


def test_half_a_surrogate_pair_does_not_stop_the_gateway(gateway):
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "a \\ud83d b"}]}'
    answer = httpx.post(f"{gateway.base}/chat/completions", content=body, timeout=60, trust_env=False)

    assert answer.status_code == 200
    assert one_call(gateway).call.messages == ({"role": "user", "content": "a ? b"},)


def test_a_log_of_another_kind_is_no_gateways(tmp_path):
    (tmp_path / "log").write_text('{"id": "a#1.0", "task_id": "a", "attempt": 1, "kind": "task"}\n')
    with pytest.raises(DataError, match="holds no model calls"):
        list(read_calls(tmp_path / "log"))


def asked(gateway):
    """Return the requests in the log; check that all its lines are complete."""
    lines = gateway.log.read_bytes().splitlines(keepends=True)
    assert len(list(read_events(gateway.log))) == len(lines)
    return [found.call.messages[-1]["content"] for found in calls(gateway)]


def test_with_a_full_disk_the_endpoint_is_not_asked(disk, start, teacher):
    gateway = start(folder=disk.folder)
    disk.fill()

    trouble = "the log cannot be written (No space left on device)"
    for _ in range(3):
        with pytest.raises(openai.InternalServerError) as refused:
            ask(gateway, "first")
        assert (refused.value.status_code, refused.value.code) == (503, "log")
        assert f"{trouble}; the endpoint was not asked" in str(refused.value)
    assert not teacher.seen
    health = get(gateway, "/health")
    assert (health.status_code, health.json()["error"]) == (503, trouble)

    disk.empty()
    ask(gateway, "second")
    assert get(gateway, "/health").json()["status"] == "ok"
    assert asked(gateway) == ["second"]


def test_a_disk_that_fills_between_calls_splices_no_lines(disk, start, teacher):
    gateway = start(folder=disk.folder)
    ask(gateway, "0")
    disk.fill()
    answered = ["0"]
    with suppress(openai.InternalServerError):
        for number in range(1, 100):  # some fit into blocks left by an earlier call
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
    stream = ask(gateway, model="slow", stream=True)
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
