import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from afm.endpoints.pace import Pace, TryAgainError, pause_s, persistently, retry_after_s
from afm.errors import ConfigError


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_no_minute_holds_more_requests_than_allowed():
    clock = Clock()
    pace = Pace(requests=2, clock=clock)
    pace.depart(0)
    clock.now += 10
    assert pace.delay_s(0) == 0
    pace.depart(0)

    assert pace.delay_s(0) == 50, "until the first one is a minute old"
    clock.now += 50
    assert pace.delay_s(0) == 0
    pace.depart(0)
    assert pace.delay_s(0) == 10


def test_tokens_wait_for_those_of_the_last_minute():
    clock = Clock()
    pace = Pace(tokens=100, clock=clock)
    first = pace.depart(60)
    clock.now += 20
    pace.depart(30)

    assert pace.delay_s(10) == 0
    assert pace.delay_s(20) == 40
    assert pace.delay_s(90) == 60, "both must have left"
    pace.settle(first, 20)
    assert pace.delay_s(50) == 0
    assert pace.delay_s(51) == 40, "20 and 30 are in use"


def test_what_was_settled_after_its_minute_changes_nothing():
    clock = Clock()
    pace = Pace(tokens=100, clock=clock)
    first = pace.depart(60)
    clock.now += 61
    assert pace.delay_s(100) == 0
    pace.settle(first, 5)
    pace.depart(100)
    assert pace.delay_s(1) == 60


def test_a_pause_that_the_server_asked_for_holds_everybody():
    clock = Clock()
    pace = Pace(clock=clock)
    pace.close_for(5)
    pace.close_for(2)
    assert pace.delay_s(0) == 5


def test_a_request_that_never_fits_is_an_error_of_the_settings():
    with pytest.raises(ConfigError, match="about 11 tokens never fits into 10 tokens per minute"):
        asyncio.run(Pace(tokens=10).departure(11))


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
