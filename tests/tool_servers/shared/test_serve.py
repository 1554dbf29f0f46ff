"""A signal stops a server."""

import subprocess
import sys

import pytest

SCRIPT = """
import builtins, os, signal, sys

from tool_servers.shared.command import Address
from tool_servers.shared.serve import ServedApp, serve

said = builtins.print


def print_and_signal(*words, **options):
    said(*words, **options)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))


builtins.print = print_and_signal


async def app(scope, receive, send):
    raise AssertionError(scope)


serve(ServedApp(app, token=None, finish_s=1.0), Address("127.0.0.1", 0, None))
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_right_after_the_address_is_printed_ends_the_server(number: str) -> None:
    words = [sys.executable, "-c", SCRIPT, number]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.startswith("listening on http://127.0.0.1:")
    assert (ended.returncode, ended.stderr) == (0, "")
