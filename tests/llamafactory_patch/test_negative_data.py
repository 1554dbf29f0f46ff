"""Negative samples through LLaMA-Factory's own pipeline, as ``afm data negative`` writes them."""

import json

import pytest

from afm.agents import load_agent
from afm.agents.load import without_tools
from afm.datasets.negative_samples import DirectAnswer, NegativeKind, SampleMaker
from afm.datasets.negative_set import NegativeSources, write_negative
from afm.trajectory.record import Record, TextSegment
from llamafactory_patch.bad_rows import REPORT_FILE

MATH = load_agent("math")
PLAN = "<plan>P.</plan><think>T.</think><code>```py\nprint(42)\n```</code>"
SEEN = "\n<observation>\n42\n</observation>\n"
SAID = "<reflection>good</reflection><think>T é🙂.</think><answer>\\boxed{42}</answer>"


def record(name, *parts):
    segments = tuple(
        TextSegment(author="environment" if "<observation>" in text else "agent", text=text) for text in parts
    )
    return Record(id=name, agent="math", agent_digest="d", question=f"{name}?", segments=segments)


@pytest.fixture
def folder(tmp_path):
    """A data set of two rows of every kind, the general ones with a system message and in plain text."""
    records = [record(f"c{i}", PLAN, SEEN, SAID) for i in range(2)]
    (tmp_path / "records.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in records))
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Hello, 中文."},
    ]
    chat = [{"messages": messages}, {"question": "Who?", "answer": "Me."}]
    (tmp_path / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chat))
    sources = NegativeSources(tmp_path / "records.jsonl", tmp_path / "chat.jsonl")
    maker = SampleMaker(MATH, direct_answer=DirectAnswer.PLAIN)
    summary = write_negative(
        sources, maker, tmp_path / "data", name="rows", ratios=dict.fromkeys(NegativeKind, 1.0)
    )
    assert dict(summary.rows) == dict.fromkeys(NegativeKind, 2)
    return tmp_path / "data"


def test_every_kind_is_trained_on_what_the_agent_wrote_and_nothing_else(pipeline, folder, model_dir):
    rows = json.loads((folder / "rows.json").read_text())
    built = pipeline(model_dir, folder)
    assert built.trained() == [f"{row['output'].replace(SEEN, '')}<|im_end|>" for row in rows]
    for row, masked in zip(rows, built.masked(), strict=True):
        system = f"<|im_start|>system\n{row['system']}<|im_end|>\n" if row["system"] else ""
        seen = SEEN if row["extra_info"]["kind"] == "present_needed" else ""
        asked = f"<|im_start|>user\n{row['instruction']}<|im_end|>\n<|im_start|>assistant\n"
        assert masked == f"{system}{asked}{seen}\n"
    assert not (folder / "out" / REPORT_FILE).exists()


def test_the_prompts_of_the_kinds_declare_their_tools_or_none(pipeline, folder, qwen):
    built = pipeline(qwen, folder)
    kinds = [row["extra_info"]["kind"] for row in json.loads((folder / "rows.json").read_text())]
    for kind, masked in zip(kinds, built.masked(), strict=True):
        assert (MATH.system_prompt() in masked) is kind.startswith("present")
        assert (without_tools(MATH).system_prompt() in masked) is (kind == "absent_needed")
