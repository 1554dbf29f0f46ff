import pytest

from afm.agents import load_agent
from afm.trajectory import author_segments, validate
from afm.trajectory.record import CallRecord, Record, Verdict

QUERIES = (
    "author of The Silent Harbour",
    "birthplace of Mara Lindqvist",
    "river that flows through Vessby",
    "length of the river Ostra",
    "source of the river Ostra",
)
RIGHT = Verdict(score=1.0, evidence="equal")


@pytest.fixture(scope="session")
def wiki():
    return load_agent("wiki")


@pytest.fixture(scope="session")
def row(wiki):
    """Makes a record that the wiki agent's rules accept; each test breaks it in one way."""

    def search(query, found):
        return (
            f"<think>I look this up now.</think><wiki_search>{query}</wiki_search>\n"
            f"<observation>{found}</observation>\n"
        )

    def check(score):
        return (
            "<think>I may know it.</think><suggested_answer>212 km</suggested_answer>"
            f"<think>I test that.</think><double_check>Compared with both pages.\nScore: {score}</double_check>"
        )

    def make(
        name="row-1",
        *,
        queries=QUERIES,
        found="The page says so.",
        thought="First the author, then the town, and at last the river.",
        reflects=True,
        scores=(4,),
        answer="212 km",
        **fields,
    ):
        text = f"<think>{thought}</think><plan>1. author 2. town 3. river</plan>"
        text += "".join(search(query, found) for query in queries)
        if reflects:
            text += "<think>How is it going?</think><reflection>Information conflict: good</reflection>"
        for at, score in enumerate(scores):
            text += check(score)
            if at + 1 < len(scores):
                text += search(f"Ostra gauge number {at}", found)
        text += f"<think>Sure now.</think><answer>{answer}</answer>"
        segments = author_segments(text, wiki)
        assert not validate(segments, wiki)
        defaults = {
            "question": "How long is the river through the town where the author of The Silent Harbour was born?",
            "ground_truth": ["212 km"],
            "data_source": "hotpotqa",
            "verdict": RIGHT,
            "calls": tuple(
                CallRecord(role="wiki_search", tool="wiki_search", argument=query, observation=found, ok=True)
                for query in queries
            ),
        }
        return Record(
            id=name,
            agent="wiki",
            agent_digest=wiki.digest,
            segments=segments,
            **{**defaults, **fields},
        )

    return make
