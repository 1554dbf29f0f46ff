import pytest
from extras import needs

from afm.distill.filters.quality import LanguageFilter, LanguageSettings
from afm.errors import ConfigError

needs("py3langid")

GERMAN = "Zuerst suche ich die Autorin des Romans, danach ihren Geburtsort und zum Schluss den Fluss, der dort entspringt."
FRENCH = "Quelle est la longueur du fleuve qui traverse la ville où est née la romancière, et où prend-il sa source ?"


def test_another_language_is_caught(wiki, row):
    stage = LanguageFilter(wiki)

    assert stage.apply(row()).kept
    done = stage.apply(row(question=FRENCH, thought=FRENCH * 5))
    assert done.reason.startswith("language: fr (confidence ")
    assert done.reason.endswith("expected en")


def test_languages_are_chosen(wiki, row):
    german = row(question=GERMAN, thought=GERMAN * 5)

    assert not LanguageFilter(wiki).apply(german).kept
    assert LanguageFilter(wiki, LanguageSettings(allowed=("en", "de"))).apply(german).kept


def test_what_tools_are_asked_and_return_is_not_judged(wiki, row):
    assert LanguageFilter(wiki).apply(row(found=GERMAN * 5, queries=(GERMAN, FRENCH))).kept


def test_a_short_text_is_not_judged(wiki, row):
    long = LanguageSettings(min_chars=599)

    assert LanguageFilter(wiki, long).apply(row(question=FRENCH, thought=FRENCH * 5)).kept


def test_an_unknown_language_is_refused(wiki):
    with pytest.raises(ConfigError, match="unknown languages"):
        LanguageFilter(wiki, LanguageSettings(allowed=("english",)))
