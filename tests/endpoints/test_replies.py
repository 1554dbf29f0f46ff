import pytest

from afm.endpoints.chat import (
    UnfinishedReasoningError,
    UnusableReplyError,
    objects_in,
    read_reply,
    without_reasoning,
)
from afm.endpoints.pace import TryAgainError


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("no tag", "no tag"),
        ("<think>a</think>\nb", "\nb"),
        ("<Thinking>a</Thinking>b<think>c</think>d", "bd"),
        ("a</think>b", "b"),
        ("<think>a <think> b</think>c", "c"),
        ('{"answer": "the tag <think> opens"}', '{"answer": "the tag <think> opens"}'),
        ('x</think>{"answer": "</think> closes"}', '{"answer": "</think> closes"}'),
        ('<think>{"answer": "13</think>{"answer": "42"}', '{"answer": "42"}'),
    ],
)
def test_reasoning_is_taken_away_and_quoted_tags_stay(text, left):
    assert without_reasoning(text) == left


@pytest.mark.parametrize("text", ["<think>a", 'a</think><think>{"answer": "13"}', "<think>a</think>b<think>"])
def test_unfinished_reasoning_is_no_reply(text):
    with pytest.raises(UnfinishedReasoningError, match="not finished"):
        without_reasoning(text)


def test_objects_are_whole_ones_and_never_parts_of_others():
    text = r'\frac{1}{2} {so} {"a": {"b": 1}} {"c": "{\"d\": 1}"} {"e": [{"f": 1}], "g": "h'
    assert list(objects_in(text)) == [{"a": {"b": 1}}, {"c": '{"d": 1}'}, None]


def test_many_braces_of_formulas_hide_no_object():
    assert list(objects_in(r"\frac{1}{2} " * 5_000 + '{"a": 1}')) == [{"a": 1}]


def test_a_reply_of_another_role_or_cut_short_is_unusable_but_counted():
    whole = b'{"choices": [{"message": {"role": "%s", "content": "hi"}, "finish_reason": "%s"}],'
    whole += b' "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}'

    assert read_reply(whole % (b"assistant", b"stop")).text == "hi"
    for role, finish in ((b"user", b"stop"), (b"assistant", b"length")):
        with pytest.raises(UnusableReplyError) as caught:
            read_reply(whole % (role, finish))
        assert (caught.value.reply.prompt_tokens, caught.value.reply.completion_tokens) == (7, 2)
    with pytest.raises(TryAgainError, match="not a chat completion"):
        read_reply(whole[:40])
