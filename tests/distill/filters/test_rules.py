import pytest

from afm.agents import load_agent
from afm.distill.filters.base import Funnel, run_filters
from afm.distill.filters.quality import QualityFilter
from afm.distill.filters.rules import (
    ComplexityFilter,
    ComplexitySettings,
    Correction,
    CorrectionSettings,
    FormatFilter,
    LengthFilter,
    LengthSettings,
    ReflectionFilter,
    ReflectionSettings,
    RepetitionFilter,
    RepetitionSettings,
)
from afm.errors import ConfigError
from afm.rewards import load_reward
from afm.trajectory import author_segments
from afm.trajectory.record import Verdict
from afm.trajectory.tags import Segment


def with_text(record, old, new):
    assert old in record.text
    parts = tuple(Segment(part.author, part.text.replace(old, new)) for part in record.segments)
    return record.model_copy(update={"segments": parts})


def test_five_tool_interactions_are_enough_and_four_are_not(wiki, row):
    stage = ComplexityFilter(wiki)

    assert stage.apply(row()).kept
    four = stage.apply(row(queries=("one", "two", "three", "four")))
    assert (four.kept, four.reason) == (False, "complexity: 4 tool interactions, expected at least 5")


def test_calls_of_one_tool_alone_are_no_cooperation(wiki, row):
    web = load_agent("web")
    stage = ComplexityFilter(web, ComplexitySettings(min_tools=2))

    def work(*tools):
        text = "<think>t</think><plan>p</plan>"
        for at, tool in enumerate(tools):
            text += f"<think>t</think><{tool}>x{at}</{tool}><observation>o</observation>"
        parts = author_segments(f"{text}<think>t</think>", web)
        return row().model_copy(update={"segments": parts, "agent": "web"})

    assert stage.apply(work(*["web_search"] * 4, "crawl_page")).kept
    alone = stage.apply(work(*["web_search"] * 6))
    assert alone.reason == "complexity: calls only web_search, expected at least 2 tools"
    assert stage.apply(work("web_search", "crawl_page")).reason.startswith("complexity: 2 tool interactions")
    with pytest.raises(ConfigError, match=r"min_tools: got 2, agent 'wiki' has 1 \(wiki_search\)"):
        ComplexityFilter(wiki, ComplexitySettings(min_tools=2))


def test_an_instruction_violation_is_caught_by_the_agents_rules(wiki, row):
    stage = FormatFilter(wiki)

    assert stage.apply(row()).kept
    hasty = stage.apply(with_text(row(), "<think>Sure now.</think>", ""))
    assert hasty.reason.startswith("format: <answer> at character ")
    against_its_grade = stage.apply(with_text(row(), "Score: 4", "Score: 1"))
    assert "may not follow <double_check>" in against_its_grade.reason


def test_the_same_call_twice_is_caught(wiki, row):
    stage = RepetitionFilter(wiki)

    assert stage.apply(row()).kept
    twice = stage.apply(row(queries=("author of X", "birthplace of Y", "author of\n X ")))
    assert twice.reason == "repetition: call 3 <wiki_search> repeats call 1: 'author of X'"


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        ("OF the River Ostra: length?", "repeats call 1"),  # the same words
        ("length of the river Vessa", ""),
        ("length of the river Ostra 2010", ""),  # another number is another question
    ],
)
def test_a_call_in_other_words_is_redundant_only_if_they_are_the_same_words(wiki, row, again, reason):
    done = RepetitionFilter(wiki, RepetitionSettings(similar=0.8)).apply(
        row(queries=("length of the river Ostra", again))
    )

    assert done.kept == (not reason)
    assert reason in done.reason


FENCED = "\n```py\nif x:\n    y()\nz()\n```\n"


@pytest.mark.parametrize(
    ("similar", "queries", "kept"),
    [
        (None, ("print(a + b)", "print(b + a)"), True),
        (None, ("print(A + b)", "print(a + b)"), True),
        (None, ("if x:\n    y()\nz()", "if x:\n    y()\n    z()"), True),
        (None, ("x = 1\nprint(x)", "\nx = 1  \nprint(x)\n"), False),
        # A program in a fence is compared so in any case.
        (0.9, (FENCED, FENCED.replace("z()", "    z()")), True),
        (0.9, (FENCED, FENCED.replace("z()", "Z()")), True),
        (0.9, (FENCED, FENCED.replace("z()", "z() ")), False),
    ],
)
def test_programs_are_compared_as_they_are_and_never_by_their_words(wiki, row, similar, queries, kept):
    stage = RepetitionFilter(wiki, RepetitionSettings(similar=similar))
    assert stage.apply(row(queries=queries)).kept is kept


def test_some_repeats_can_be_allowed(wiki, row):
    stage = RepetitionFilter(wiki, RepetitionSettings(max_repeats=1))

    assert stage.apply(row(queries=("a", "a", "b"))).kept
    assert "(2 repeated calls in total)" in stage.apply(row(queries=("a", "a", "a"))).reason


class Abstains:
    """A reward whose infrastructure is down."""

    async def score(self, sample):
        return Verdict(score=None, evidence="worker died")


async def test_a_score_that_is_no_number_and_a_missing_verdict_are_not_good_enough(wiki, row):
    stage = QualityFilter(wiki, Abstains(), recorded=True)
    infinite = await stage.check(row(verdict=Verdict(score=float("nan"))))
    assert infinite.reason == "quality: score nan: "
    unjudged = await QualityFilter(wiki, Abstains()).check(row(verdict=None))
    assert unjudged.reason == "quality: no verdict: worker died"


async def test_order_is_kept_and_later_stages_see_only_what_earlier_ones_kept(wiki, row):
    hasty = with_text(row("c", verdict=None), "<think>Sure now.</think>", "")
    early = row("d").model_copy(update={"kept": False, "reason": "team failed: no idea"})
    rows = [row("a"), row("b", answer="99 km"), hasty, early, row("e")]
    quality = QualityFilter(wiki, load_reward())
    funnel = Funnel()

    out = [record async for record in run_filters(rows, [FormatFilter(wiki), quality], parallel=2)]
    await quality.close()
    for record in out:
        funnel.add(kept=record.kept, reason=record.reason)

    fates = {"a": True, "b": False, "c": False, "d": False, "e": True}
    assert [(record.id, record.kept) for record in out] == list(fates.items())
    assert out[0].verdict.parts["correct"] == 1.0
    assert out[2].verdict is None
    assert (funnel.seen, funnel.kept) == (5, 2)
    assert funnel.dropped == {"quality": 1, "format": 1, "team failed": 1}


async def test_a_recorded_verdict_is_trusted_when_that_is_asked_for(wiki, row):
    record = row(answer="99 km", verdict=Verdict(score=1.0, evidence="the judge said so"))
    trusting = QualityFilter(wiki, load_reward(), recorded=True)

    assert await trusting.check(record) is record
    assert not (await trusting.check(record.model_copy(update={"verdict": None}))).kept
    assert not (await QualityFilter(wiki, load_reward()).check(record)).kept


def test_without_reflection_a_share_stays_and_with_it_all(wiki, row):
    stage = ReflectionFilter(wiki, ReflectionSettings(role="reflection", keep_without=0.3), seed=7)

    # Rows without an id are drawn by their content.
    names = [f"row-{number}" if number % 2 else "" for number in range(400)]
    asked = [f"What is fact {number}?" for number in range(400)]
    rows = [row(name, reflects=False, question=text) for name, text in zip(names, asked, strict=True)]
    bare = [stage.apply(record) for record in rows]
    kept = [record.question for record in bare if record.kept]

    assert all(stage.apply(row(f"row-{number}")).kept for number in range(400))
    assert 90 <= len(kept) <= 150  # 120 expected, standard deviation 9.2
    dropped = [record for record in bare if not record.kept]
    assert all(record.reason.startswith("reflection: no <reflection>, drew 0.") for record in dropped)
    again = [stage.apply(record) for record in reversed(rows)]
    assert sorted(record.question for record in again if record.kept) == sorted(kept)
    other = ReflectionFilter(wiki, stage.settings, seed=8)
    assert [record.question for record in rows if other.apply(record).kept] != kept


@pytest.mark.parametrize("name", ["row-{}", ""])
def test_copies_of_a_row_stay_or_go_with_it(wiki, row, name):
    stage = ReflectionFilter(wiki, ReflectionSettings(role="reflection", keep_without=0.5))
    for number in range(40):
        origin = row(name.format(number), reflects=False, question=f"What is fact {number}?", scores=(2, 4))
        copies = [*Correction(wiki).copies(origin)]
        again = [*Correction(wiki).copies(copies[0])]

        assert len({copy.id for copy in (*copies, *again)}) == 4
        assert {copy.provenance["copy_of"] for copy in (*copies, *again)} == {origin.identity}
        assert len({stage.apply(record).kept for record in (origin, *copies, *again)}) == 1


def test_a_role_that_the_agent_lacks_is_refused_with_a_suggestion(wiki):
    with pytest.raises(ConfigError, match=r"no role 'reflexion'; did you mean 'reflection'\?"):
        ReflectionFilter(wiki, ReflectionSettings(role="reflexion", keep_without=0.3))
    with pytest.raises(ConfigError, match="has no grade"):
        Correction(wiki, CorrectionSettings(role="plan"))


def test_corrected_work_is_repeated_under_ids_of_its_own(wiki, row):
    stage = Correction(wiki)
    record = row(scores=(2, 4))

    copies = list(stage.copies(record))

    assert [copy.id for copy in copies] == ["row-1+2", "row-1+3"]
    assert copies[1].provenance == {"copy_of": "row-1", "copy": 3}
    assert {copy.text for copy in copies} == {record.text}
    assert Correction(load_agent("mhqa")).role is None


@pytest.mark.parametrize(
    "fields",
    [
        {"scores": (4,)},  # right at once
        {"scores": (2, 4), "verdict": Verdict(score=0.0)},  # corrected, to something wrong
        {"scores": (2, 4), "verdict": None},  # nobody knows
        {"scores": (3,)},  # good enough at once
    ],
)
def test_other_work_is_not_repeated(wiki, row, fields):
    assert list(Correction(wiki).copies(row(**fields))) == []
    late = with_text(row(scores=(2, 4)), "Score: 2", "Score: 3")  # the first check counts
    assert list(Correction(wiki).copies(late)) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"min_hops": 5, "max_hops": 5, "max_chars": 1072}, ""),
        ({"min_hops": 6}, "length: 5 hops, expected at least 6"),
        ({"max_hops": 4}, "length: 5 hops, expected at most 4"),
        ({"max_chars": 1071}, "length: 1072 characters, expected at most 1071"),
    ],
)
def test_length_in_hops_and_characters(wiki, row, settings, reason):
    done = LengthFilter(wiki, LengthSettings(**settings)).apply(row())
    assert (done.kept, done.reason) == (not reason, reason)


@pytest.mark.slow
def test_length_in_tokens_of_a_real_tokenizer(wiki, row, qwen_folder):
    def filtered(bound):
        return LengthFilter(wiki, LengthSettings(max_tokens=bound, tokenizer=qwen_folder)).apply(row())

    assert filtered(1000).kept
    assert filtered(100).reason.endswith(" tokens, expected at most 100")
