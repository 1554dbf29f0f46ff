import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from afm.endpoints.chat import UnusableReplyError, read_reply
from afm.endpoints.retry import RETRIED_STATUS, TryAgainError, pause_s, persistently, retry_after_s


def asked(value):
    return retry_after_s({"Retry-After": value})


def test_retry_after_in_seconds_or_as_a_date_is_bounded():
    assert asked("1.5") == 1.5
    assert asked("-3") == 0
    assert asked("nan") == 0
    assert asked("soon") == 0
    assert asked("100000") == 60
    assert retry_after_s({}) == 0
    assert 20 < asked(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)) <= 30
    assert asked(format_datetime(datetime.now(UTC) - timedelta(seconds=30), usegmt=True)) == 0


async def test_what_may_pass_is_repeated_and_the_last_failure_is_told():
    failures = [TryAgainError("one"), TryAgainError("two")]

    async def call():
        if failures:
            raise failures.pop(0)
        return "done"

    assert await persistently(3, call) == "done"

    async def never():
        raise TryAgainError("no")

    with pytest.raises(TryAgainError, match="no"):
        await persistently(2, never)


def test_a_reply_of_another_role_or_cut_short_is_unusable_but_counted():
    whole = b'{"choices": [{"message": {"role": "%s", "content": "hi"}, "finish_reason": "%s"}],'
    whole += b' "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}'

    assert read_reply(whole % (b"assistant", b"stop")).text == "hi"
    for role, finish in ((b"user", b"stop"), (b"assistant", b"length")):
        with pytest.raises(UnusableReplyError) as caught:
            read_reply(whole % (role, finish))
        assert (caught.value.reply.prompt_tokens, caught.value.reply.completion_tokens) == (7, 2)
    with pytest.raises(TryAgainError, match="no chat completion"):
        read_reply(whole[:40])


def test_what_may_pass_is_a_busy_or_failing_server_and_nothing_that_it_refused():
    assert {408, 409, 425, 429, 500, 502, 503, 504} == RETRIED_STATUS


def test_a_pause_grows_to_its_bound_and_adds_to_what_the_server_asked_for():
    assert 0.125 <= pause_s(0) <= 0.25
    assert 10 <= pause_s(30) <= 20
    assert 4 <= pause_s(30, longest_s=8) <= 8
    assert 3.125 <= pause_s(0, 3.0) <= 3.25


async def test_a_repeated_call_waits_as_long_as_the_server_asked():
    failures, started = [TryAgainError("busy", 0.3)], time.monotonic()

    async def call():
        if failures:
            raise failures.pop()

    await persistently(2, call)
    assert time.monotonic() - started >= 0.3 + 0.125
