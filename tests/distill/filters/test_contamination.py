import json

import pytest

from afm.distill.filters.contamination import ContaminationFilter, ContaminationSettings

BENCHMARK = (
    "In which year did the composer of the opera that opened the first festival in the northern harbour die?"
)


def benchmark(folder, *questions):
    path = folder / "benchmark.jsonl"
    rows = [{"id": f"q{n}", "question": text, "answer": "A"} for n, text in enumerate(questions, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tasks(tmp_path):
    return benchmark(tmp_path, BENCHMARK, "Who?")


def filtered(wiki, record, tasks, **settings):
    return ContaminationFilter(wiki, ContaminationSettings(tasks=(tasks,), **settings)).apply(record)


def test_the_same_question_is_caught_in_any_typography(wiki, row, tasks):
    assert filtered(wiki, row(), tasks).kept
    done = filtered(wiki, row(question=f"  {BENCHMARK.upper()}  "), tasks)
    assert done.reason == "contamination: the question is 'q1' of benchmark.jsonl"
    assert filtered(wiki, row(question="WHO"), tasks).reason.endswith("is 'q2' of benchmark.jsonl")


def test_thirteen_words_in_a_row_are_caught_and_twelve_are_not(wiki, row, tasks):
    words = BENCHMARK.split()
    thirteen, twelve = (f"Tell me {' '.join(words[-n:])} and why?" for n in (13, 12))

    assert filtered(wiki, row(question=thirteen), tasks).reason == (
        "contamination: question shares 13 words in a row with 'q1' of benchmark.jsonl"
    )
    assert filtered(wiki, row(question=twelve), tasks).kept
    assert not filtered(wiki, row(question=twelve), tasks, ngram=12).kept
    assert filtered(wiki, row(question=thirteen), tasks, ngram=None).kept


def test_a_short_question_is_found_within_longer_texts(wiki, row, tmp_path):
    tasks = benchmark(tmp_path, "Who wrote the music of the first harbour opera?")
    inside = row(question="Please say who wrote the music of the first harbour opera, and when.")
    assert filtered(wiki, inside, tasks).reason == (
        "contamination: question shares 9 words in a row with 'q1' of benchmark.jsonl"
    )
    assert filtered(wiki, inside, tasks, shortest=10).kept
    assert not filtered(wiki, inside, tasks, shortest=9).kept
    assert filtered(wiki, row(question="Who wrote the music of the second harbour opera?"), tasks).kept


def test_writing_without_blanks_is_compared_letter_by_letter(wiki, row, tmp_path):
    asked = "\u8c01\u5199\u4e86\u7b2c\u4e00\u90e8\u6e2f\u53e3\u6b4c\u5267\u7684\u97f3\u4e50"
    tasks, inside = benchmark(tmp_path, asked), f"\u8bf7\u95ee{asked}\u5462?"
    assert not filtered(wiki, row(question=inside), tasks).kept
    assert filtered(wiki, row(question=inside[:8]), tasks).kept


def test_a_page_that_publishes_the_benchmark_is_caught_where_that_is_asked_for(wiki, row, tasks):
    leaked = row(found=f"Sample of the benchmark: {BENCHMARK} Answer: 1901")

    assert filtered(wiki, leaked, tasks).kept
    for record, place in ((leaked, "observations"), (row(thought=BENCHMARK), "agent")):
        reason = filtered(wiki, record, tasks, places=(place,)).reason
        assert reason.startswith(f"contamination: {place} shares")


def test_a_formula_with_another_operator_is_another_question(wiki, row, tmp_path):
    tasks = benchmark(tmp_path, "Find the sum of all real x with $x^2 - 5x + 6 > 0$ and $x < 3.5$.")
    copied = "find the sum of ALL real x, with x^2-5x+6>0 and x<3.5"
    assert not filtered(wiki, row(question=copied), tasks).kept
    assert filtered(wiki, row(question=copied.replace("6>0", "6<0")), tasks).kept
    assert filtered(wiki, row(question=copied.replace("3.5", "35")), tasks, ngram=None).kept
