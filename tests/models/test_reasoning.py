import pytest

from afm.models.reasoning import UnfinishedReasoningError, objects_in, without_reasoning


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("no tag", "no tag"),
        ("<think>a</think>\nb", "\nb"),
        ("<Thinking>a</Thinking>b<think>c</think>d", "bd"),
        ("a</think>b", "b"),
        ("a</think>b</think>c", "c"),
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
