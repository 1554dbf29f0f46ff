import pytest

from afm.distill.filters.contamination import _words, with_marks
from afm.distill.queries.select import question_key

OTHERS = [
    ("Compute $3+2$.", "Compute $3-2$."),
    ("Solve x^2 = 4.", "Solve x2 = 4"),
    ("What is 3.5 * 2?", "What is 35 * 2?"),
    ("Find all x with x>2.", "Find all x with x<2."),
    ("Find all x with x \u2265 2.", "Find all x with x \u2264 2."),
    ("What is 7 * 8?", "What is 7 / 8?"),
    ("What is $-5+8$?", "What is $5-8$?"),
    ("What is -5 + 8?", "What is 5 + 8?"),
    ("What is 10^{-3}?", "What is 10^{3}?"),
    (r"Find y if \(y = a/b\).", r"Find y if \(y = a^b\)."),
    ("What is $5!$?", "What is $5$?"),
    ("Is it written in C++ or C?", "Is it written in C or C#?"),
]


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_signs_between_numbers_and_in_formulas_make_another_question(one, other):
    assert question_key(one) != question_key(other)
    assert _words(one) != _words(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3*2?", "what is 3 * 2"),
        ("Where was Ren\u00e9 born?", "\uff37here was _Rene\u0301_\u200b\u00a0born?"),
        ("Solve $x^2 = 4$.", "Solve x^2=4"),
        ("Find x if x \u2265 1.", "Find x if x>=1."),
        ("What is 3\u22122?", "What is 3 - 2?"),
        ("Who led it in 1914\u20131918?", "Who led it in 1914-1918?"),
        ("It cost $3 and then $5 - really!", "It cost 3 and then 5, really?"),
        ("> # Who, in 1901?! --- #1", "who in 1901 1"),
        ("- Who sold 5 apples -- or (pears)?", "Who sold 5 apples, or pears"),
        ("What happened in 1966 - a year of war?", "What happened in 1966, a year of war?"),
        ("Who directed Plan B - a film?", "Who directed Plan B, a film?"),
        ("What is a well-known mill?", "What is a well known mill?"),
    ],
)
def test_layout_and_punctuation_of_prose_make_none(one, other):
    assert question_key(one) == question_key(other)
    assert _words(one) == _words(other)


def test_more_punctuation_of_prose_is_none_where_words_are_compared():
    words = _words("**Who** is the well-known J. K. Rowling and/or <b>U.S.</b>?")
    assert " ".join(words) == "who is the well known j k rowling and or u s"


def test_signs_are_no_words_of_their_own():
    assert len(_words("Compute $1 + 2 - 3 * 4$.")) == 5


def test_letters_that_look_like_marks_are_none():
    assert with_marks("What is 3\ue0002?") == with_marks("What is 3 2?")


def test_long_lines_of_signs_take_no_time():
    text = "$" * 20_000 + "1 - " * 20_000 + "\\(" * 20_000 + "=" * 20_000
    assert with_marks(text)
