import pytest
from extras import needs

from afm.distill.filters.quality import LanguageFilter, LanguageSettings
from afm.errors import ConfigError

needs("py3langid")

GERMAN = "Zuerst suche ich die Autorin des Romans, danach ihren Geburtsort und zum Schluss den Fluss, der dort entspringt."
FRENCH = "Quelle est la longueur du fleuve qui traverse la ville où est née la romancière, et où prend-il sa source ?"


def judged(wiki, row, thought, question=FRENCH, **settings):
    return LanguageFilter(wiki, LanguageSettings(**settings)).apply(
        row(question=question, thought=thought * 5)
    )


def test_another_language_is_caught_unless_it_is_chosen(wiki, row):
    assert LanguageFilter(wiki).apply(row()).kept
    done = judged(wiki, row, FRENCH)
    assert done.reason.startswith("language: fr (confidence ")
    assert done.reason.endswith("expected en")
    assert not judged(wiki, row, GERMAN, GERMAN).kept
    assert judged(wiki, row, GERMAN, GERMAN, allowed=("en", "de")).kept


def test_neither_a_short_text_nor_what_tools_are_asked_and_return_is_judged(wiki, row):
    assert judged(wiki, row, FRENCH, min_chars=599).kept
    assert LanguageFilter(wiki).apply(row(found=GERMAN * 5, queries=(GERMAN, FRENCH))).kept


def test_an_unknown_language_is_refused(wiki):
    with pytest.raises(ConfigError, match="unknown languages"):
        LanguageFilter(wiki, LanguageSettings(allowed=("english",)))
