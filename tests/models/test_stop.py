from afm.models.stop import StopMatcher, first_stop

WORDS = ["<", "/", "code", ">", ">\n", "</code", "a", "", "é", "\ufffd"]


def decode(ids):
    return "".join(WORDS[token] for token in ids)


def test_only_tokens_with_a_last_character_are_watched():
    matcher = StopMatcher(decode, len(WORDS))
    assert matcher.watch(("</code>", "<a")) == {3, 4, 6}
    assert matcher.watch(()) == frozenset()


def test_half_characters_are_watched_for_a_stop_that_ends_in_several_bytes():
    assert StopMatcher(decode, len(WORDS)).watch(("caf\u00e9",)) == {8, 9}


def test_a_stop_string_is_found_however_it_is_cut_into_tokens():
    matcher = StopMatcher(decode, len(WORDS))
    for ids in ([0, 1, 2, 3], [5, 3], [5, 4], [6, 6, 6, 6, 6, 6, 5, 7, 7, 7, 4]):
        assert matcher.completed(ids, ("</code>",))
    for ids in ([0, 2, 3], [5, 6, 3], [3]):
        assert not matcher.completed(ids, ("</code>",))


def test_the_tail_is_bounded():
    asked = []

    def logged(ids):
        asked.append(len(ids))
        return decode(ids)

    matcher = StopMatcher(logged, len(WORDS))
    matcher.watch(("</code>",))
    asked.clear()
    assert matcher.completed([6] * 10_000 + [5, 3], ("</code>",))
    assert max(asked) <= 7


def test_ids_beyond_the_vocabulary_have_no_text():
    matcher = StopMatcher(lambda ids: decode([token for token in ids if token < len(WORDS)]), len(WORDS))
    assert matcher.completed([5, 99, 3], ("</code>",))


def test_the_first_completed_stop_string_counts():
    assert first_stop("a</b></a>", ("</a>", "</b>")) == 5
    assert first_stop("abc", ("bc", "b")) == 2
    assert first_stop("abc", ("x",)) == -1
