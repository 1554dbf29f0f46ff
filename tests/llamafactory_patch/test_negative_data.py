"""Negative samples, as ``afm data negative`` writes them, in LLaMA-Factory's own pipeline."""

import json

import pytest

from afm.agents import load_agent
from afm.agents.load import without_tools
from afm.datasets.negative_samples import DirectAnswer, NegativeKind, SampleMaker
from afm.datasets.negative_set import NegativeSources, write_negative
from afm.trajectory.record import Record
from afm.trajectory.tags import Author, Segment

MATH = load_agent("math")
PLAN = "<plan>P.</plan><think>T.</think><code>```py\nprint(42)\n```</code>"
SEEN = "\n<observation>\n42\n</observation>\n"
SAID = "<reflection>good</reflection><think>T é🙂.</think><answer>\\boxed{42}</answer>"


def record(name, *parts):
    segments = tuple(
        Segment(Author.ENVIRONMENT if "<observation>" in text else Author.AGENT, text) for text in parts
    )
    return Record(id=name, agent="math", agent_digest="d", question=f"{name}?", segments=segments)


@pytest.fixture
def folder(tmp_path):
    """Write a data set with two rows of every kind; the general rows have a system message and plain text."""
    records = [record(f"c{i}", PLAN, SEEN, SAID) for i in range(2)]
    (tmp_path / "records.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in records))
    turns = {"system": "Be kind.", "user": "Hi?", "assistant": "Hello, 中文."}
    messages = [{"role": role, "content": text} for role, text in turns.items()]
    chat = [{"messages": messages}, {"question": "Who?", "answer": "Me."}]
    (tmp_path / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chat))
    sources = NegativeSources(tmp_path / "records.jsonl", tmp_path / "chat.jsonl")
    maker, ratios = SampleMaker(MATH, direct_answer=DirectAnswer.PLAIN), dict.fromkeys(NegativeKind, 1.0)
    summary = write_negative(sources, maker, tmp_path / "data", name="rows", ratios=ratios)
    assert dict(summary.rows) == dict.fromkeys(NegativeKind, 2)
    return tmp_path / "data"


@pytest.mark.slow
def test_every_kind_is_trained_on_what_the_agent_wrote_and_its_prompt_declares_tools_or_none(
    pipeline, folder, model_dir
):
    rows = json.loads((folder / "rows.json").read_text())
    built = pipeline(model_dir, folder)
    assert built.trained() == [f"{row['output'].replace(SEEN, '')}<|im_end|>" for row in rows]
    for row, masked in zip(rows, built.masked(), strict=True):
        system = f"<|im_start|>system\n{row['system']}<|im_end|>\n" if row["system"] else ""
        seen = SEEN if row["extra_info"]["kind"] == "present_needed" else ""
        asked = f"<|im_start|>user\n{row['instruction']}<|im_end|>\n<|im_start|>assistant\n"
        assert masked == f"{system}{asked}{seen}\n"
        kind = row["extra_info"]["kind"]
        assert (MATH.system_prompt() in masked) is kind.startswith("present")
        assert (without_tools(MATH).system_prompt() in masked) is (kind == "absent_needed")
    assert not (folder / "out/bad_rows.jsonl").exists()
