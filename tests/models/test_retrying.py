from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest

from afm.models.chat import UnusableReplyError, read_reply
from afm.models.retrying import TryAgainError, persistently, retry_after_s


def asked(value):
    return retry_after_s(httpx.Response(429, headers={"Retry-After": value}))


def test_retry_after_in_seconds_or_as_a_date_is_bounded():
    assert asked("1.5") == 1.5
    assert asked("-3") == 0
    assert asked("nan") == 0
    assert asked("soon") == 0
    assert asked("100000") == 60
    assert retry_after_s(httpx.Response(429)) == 0
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
