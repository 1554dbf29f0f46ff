import json

import pytest

from tool_servers.gateway.answers import EventStream, whole_answer


@pytest.mark.parametrize(("usage", "counted"), [("7", 7), ("-1", 0), ("1" + "0" * 400, 0), ('"7"', 0)])
def test_tokens_that_no_call_takes_are_not_believed(usage, counted):
    answer = whole_answer(b'{"usage": {"prompt_tokens": %b}}' % usage.encode())

    assert answer.tokens("prompt_tokens") == counted


def test_a_call_in_the_older_form_is_put_together_from_the_pieces_of_a_stream():
    stream = EventStream()
    for delta in ({"name": "search", "arguments": ""}, {"arguments": '{"query": '}, {"arguments": '"mill"}'}):
        piece = {"choices": [{"index": 0, "delta": {"function_call": delta}}]}
        stream.feed(f"data: {json.dumps(piece)}\n\n".encode())

    [choice] = stream.answer.in_order
    assert choice["message"]["function_call"] == {"name": "search", "arguments": '{"query": "mill"}'}
