import pytest

from afm.errors import ConfigError
from tool_servers.shared.access import MIN_TOKEN, check_exposure

LONG = "a" * MIN_TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
@pytest.mark.parametrize("token", [None, "x", LONG])
def test_this_machine_alone_needs_no_token(host, token):
    check_exposure(host, token, "SOME_TOKEN")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node7"])
def test_other_machines_come_in_only_by_a_token_that_is_hard_to_guess(host):
    check_exposure(host, LONG, "SOME_TOKEN")
    for token, said in (
        (None, "needs a token; set SOME_TOKEN"),
        (LONG[1:], "needs a longer token, got 15 characters"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_exposure(host, token, "SOME_TOKEN")
