import asyncio

import pytest

from afm.endpoints.pace import Pace
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
    with pytest.raises(ConfigError, match="about 11 tokens never fits into 10 tokens a minute"):
        asyncio.run(Pace(tokens=10).departure(11))
