import pytest

from afm.errors import DataError
from afm.trajectory.record import (
    CallRecord,
    Cost,
    Record,
    StopReason,
    Verdict,
    decrypt,
    encrypt,
    opened,
    sealed,
)
from afm.trajectory.tags import Author, Segment

KEY = "canary of a test"
CALL = {"role": "web_search", "tool": "web_search", "argument": "secret query", "observation": "secret page"}


def test_the_form_is_the_owners() -> None:
    """SHA-256 of "abc" begins with ba7816bf (FIPS 180-4); "Hi" is 48 69, so the text is f2 11, in base64 8hE=."""
    assert encrypt("Hi", "abc") == "8hE="
    assert decrypt("8hE=", "abc") == "Hi"


@pytest.mark.parametrize("text", ["", "x", "é" * 40, "0123456789abcdef" * 4, "\ud83d lone"])
def test_any_text_comes_back(text) -> None:
    assert decrypt(encrypt(text, KEY), KEY) == text


def test_what_is_no_encrypted_text_is_refused() -> None:
    other = encrypt("a longer text, so that chance cannot decode it", "other key")
    for broken in ("no base64!", "8hE", other):
        with pytest.raises(DataError, match="its canary is wrong"):
            decrypt(broken, KEY)


def record() -> Record:
    return Record(
        id="browsecomp-1#0",
        agent="web",
        agent_digest="0" * 16,
        question="secret question",
        segments=(Segment(Author.AGENT, "secret thought"),),
        ground_truth="secret answer",
        data_source="browsecomp",
        stop=StopReason.ANSWER,
        verdict=Verdict(score=1.0, parts={"correct": 1.0}, evidence="secret evidence"),
        cost=Cost(tool_calls=1),
        calls=(CallRecord(ok=True, **CALL),),
        prompt_ids=(1, 2),
        response_ids=(3,),
        provenance={"task": "browsecomp-1", "round": 0},
        error="EngineError: secret words",
        reason="secret reason",
    )


def test_a_sealed_record_keeps_figures_and_hides_every_text() -> None:
    plain = record()
    hidden = sealed(plain, KEY)
    line = hidden.model_dump_json()
    assert "secret" not in line
    assert (hidden.id, hidden.verdict.score, hidden.verdict.parts) == (plain.id, 1.0, {"correct": 1.0})
    assert (hidden.cost, hidden.stop) == (plain.cost, plain.stop)
    assert (hidden.calls[0].tool, hidden.calls[0].ok) == ("web_search", True)
    assert (hidden.error, hidden.prompt_ids, hidden.response_ids) == ("EngineError", None, None)
    assert hidden.provenance["round"] == 0


def test_a_sealed_record_opens_to_what_it_was_and_a_plain_one_is_itself() -> None:
    plain = record()
    assert opened(Record.model_validate_json(sealed(plain, KEY).model_dump_json())) == plain
    assert opened(plain) is plain


def test_a_damaged_seal_is_named() -> None:
    hidden = sealed(record(), KEY)
    broken = hidden.model_copy(update={"provenance": {**hidden.provenance, "sealed": "AAAA"}})
    with pytest.raises(DataError, match="record 'browsecomp-1#0': its sealed part is damaged"):
        opened(broken)
