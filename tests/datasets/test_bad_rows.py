"""Bad rows, for every command that reads rows: named with file and line, and counted after three of a kind."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TEXT = "<plan>p</plan><think>t</think><answer>\\boxed{1}</answer>"
RECORD = {"id": "a", "agent": "math", "agent_digest": "d", "question": "?", "segments": []}
RECORD |= {"segments": [{"author": "agent", "text": TEXT}]}
TASK = {"question": "1+1?", "answer": "2", "data_source": "math"}
ALPACA = {"instruction": "1+1?", "input": "", "output": TEXT}
CHAT = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": TEXT}]}
REWARD = {"data_source": "math", "response": TEXT, "ground_truth": "1"}
NO_JSON = "{bad"
GOOD = {
    "record": RECORD, "task": TASK, "alpaca": ALPACA, "chat": CHAT, "reward": REWARD,
}  # fmt: skip


def jsonl(kind, bad):
    """Two good rows and six bad ones."""
    rows = [json.dumps(GOOD[kind] | {"id": f"good-{number}"}) for number in range(2)]
    return "\n".join([*rows, *[bad if isinstance(bad, str) else json.dumps(bad)] * 6]) + "\n"


CONVERT = "convert {F} --to coa --agent math -o {T}/o.jsonl"
COMMANDS = [
    *(
        (command, kind, NO_JSON)
        for command, kind in (
            ("validate {F}", "record"),
            ("validate {F} --agent math", "chat"),
            (CONVERT, "chat"),
            (CONVERT, "alpaca"),
            ("reward {F}", "reward"),
            ("data stats {F}", "record"),
            ("data negative {F} --output-dir {T}/n", "record"),
            ("data prepare sft {F} --output-dir {T}/s", "record"),
            ("data prepare rl {F} --out {T}/o.parquet", "task"),
            ("data prepare tasks {F} --out {T}/o.jsonl", "task"),
            ("data prepare tasks {F} --out {T}/o.jsonl --on-bad-rows error", "task"),
            ("data distill {F} --output-dir {T}/d", "task"),
            ("data livecodebench {F} --output-dir {T}/l", "task"),
            ("data queries configs/queries/qa.yaml tasks={F} model=m output_dir={T}/q", "task"),
            ("eval configs/eval/aime24.yaml model=m data={F} output_dir={T}/e", "task"),
        )
    ),
    ("validate {F}", "record", RECORD | {"segments": 3}),
    ("validate {F}", "record", RECORD | {"segments": [{"author": "agent", "text": "no tags"}]}),
    (CONVERT, "chat", {"messages": [{"role": "user"}]}),
    (CONVERT, "alpaca", ALPACA | {"output": 3}),
    ("reward {F}", "reward", REWARD | {"data_source": "nowhere"}),
    ("data prepare sft {F} --output-dir {T}/s", "record", RECORD | {"agent": "mhqa"}),
    ("data prepare rl {F} --out {T}/o.parquet --agent mhqa", "task", TASK | {"answer": {"inputs": ["1"]}}),
    (
        "data prepare rl {F} --out {T}/o.parquet --agent mhqa --validation 1",
        "task",
        TASK | {"answer": {"inputs": ["1"]}},
    ),
    ("data prepare tasks {F} --out {T}/o.jsonl", "task", {"q": "1+1?", "answer": "2"}),
]


@pytest.mark.parametrize(("command", "kind", "bad"), COMMANDS, ids=lambda value: str(value)[:40])
def test_a_bad_row_is_named_with_file_and_line_and_counted_after_three(command, kind, bad, afm, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(jsonl(kind, bad))
    done = afm(*command.replace("{F}", str(file)).replace("{T}", str(tmp_path)).split(), status=None)
    output = done.stdout + done.stderr
    first = 1 if command.startswith("data livecodebench") else 3
    assert re.search(rf"{file}:{first}\b", output), output
    assert not re.search(rf"{file}:[678]\b", output), output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", "question,answer\n1+1?,2\n1+2?,3,4\n", ":3: expected 2 fields, as in the first line"),
        ("rows.csv", "question,question,answer\n1+1?,2+2?,2\n", ":1: two columns are called 'question'"),
        (
            "rows.jsonl",
            '{"question": "1+1?", "answer": "2"}\n{"question"\n',
            ":2: invalid JSON: .* at character 13",
        ),
        ("rows.parquet", "", ":2: expected `question`"),
    ],
)
def test_tables_name_the_line_too(name, text, message, afm, tmp_path):
    file = tmp_path / name
    if text:
        file.write_bytes(text.encode())
    else:
        pq.write_table(pa.table({"question": ["1+1?", None], "answer": ["2", "3"]}), file)
    words = ("data", "prepare", "rl", file, "--out", tmp_path / "o.parquet", "--data-source", "math")
    done = afm(*words, status=1)
    assert re.search(f"{file}{message}", done.stderr), done.stderr


def test_reasons_that_differ_in_every_row_are_few_lines(afm, tmp_path):
    file = tmp_path / "rows.jsonl"
    reasons = [
        json.dumps(
            {"question": "1+1?", "answer": "2", f"extra_info{'x' * number}": 1}
            | ({"id": {}} if number % 2 else {"data_source": number})
        )
        for number in range(60)
    ]
    file.write_text("\n".join([json.dumps(TASK), *reasons]) + "\n")
    printed = afm("data", "prepare", "tasks", file, "--out", tmp_path / "o.jsonl").stdout
    assert 1 <= len(re.findall("refused: ", printed)) <= 11
