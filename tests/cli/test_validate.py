import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from afm.agents import load_agent
from afm.cli.convert import validate
from afm.cli.data import app as data
from afm.trajectory import author_segments
from afm.trajectory.record import Record

app = typer.Typer()
app.command()(validate)

GOOD = "<plan>p</plan><think>t</think><answer>\\boxed{1}</answer>"
BAD = "<plan>p</plan><thnk>t</thnk><answer>1</answer>"


def run(path: Path, agent: object, *words: object) -> Result:
    return CliRunner().invoke(app, [str(path), "--agent", str(agent), *map(str, words)])


def alpaca(folder: Path, *outputs: str, **fields: str) -> Path:
    rows = [{"instruction": "q", "input": "", "output": output, **fields} for output in outputs]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_fault_is_printed_with_file_line_and_character(tmp_path: Path) -> None:
    path = alpaca(tmp_path, GOOD, BAD)
    result = run(path, "math")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{path}:2: <thnk> at character 14 (line 1 of the text) is not a role of agent 'math'; did you mean 'think'?",
        f"{path}:2: <answer> at character 28 (line 1 of the text) has no <think> directly before it",
        f"{path}:2: <answer> at character 28 (line 1 of the text) holds no answer in the format 'boxed'",
        "2 trajectories: 1 valid, 1 with faults",
    ]


def test_json_holds_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    evil = "<plan>p</plan><answer>\x9b31m\u202eevil</answer><\u202e>"
    result = run(alpaca(tmp_path, evil, id="\x9b31m\u202e"), "math", "--json")
    assert result.stdout.isascii()
    assert json.loads(result.stdout.splitlines()[-1])["id"] == "\x9b31m\u202e"


def test_json_is_one_object_a_row(tmp_path: Path) -> None:
    path = alpaca(tmp_path, GOOD, BAD)
    path.write_text(path.read_text() + "{oops\n")
    result = run(path, "math", "--json")
    first, second, third = map(json.loads, result.stdout.splitlines())
    assert result.exit_code == 1
    assert first == {"id": "1", "line": 1, "valid": True, "faults": []}
    assert (second["id"], second["valid"]) == ("2", False)
    faults = [(fault["kind"], fault["character"]) for fault in second["faults"]]
    assert faults == [("unknown_role", 14), ("thought", 28), ("answer_format", 28)]
    assert (third["id"], third["line"], third["faults"][0]["kind"]) == (None, 3, "unreadable")


PICTURE = '\n```json\n{"file_path": "a.png", "question": "What?"}\n```\n'
SAID = "<plan>p</plan><think>t</think><answer>1</answer>"


def called(tag: str, argument: str) -> str:
    """A trajectory of the agent `any` with one call."""
    call = f"<think>t</think><{tag}>{argument}</{tag}>\n<observation>o</observation>\n"
    return SAID.replace("<think>", f"{call}<think>")


@pytest.mark.parametrize(
    ("tag", "argument", "message"),
    [
        ("code", "print(1)", "Nothing was run: found no program, expected one."),
        ("crawl_page", "the page of Quito", "Nothing was read: found no address."),
        ("visual_inspector", "a.png: what is it?", "Nothing was looked at: expected a JSON object"),
        ("visual_inspector", PICTURE, ""),
        ("web_search", "word " * 2_000, ""),
        ("wiki_search", "word " * 2_000, "Nothing was searched: the query has 9999 characters"),
    ],
)
def test_a_call_that_its_tool_would_refuse_is_a_fault_and_never_becomes_training_data(
    tmp_path: Path, tag: str, argument: str, message: str
) -> None:
    agent = tmp_path / "any.yaml"
    agent.write_text(ANY.replace("TOOL", tag))
    text = called(tag, argument)
    result, prepared = run(alpaca(tmp_path, text), agent), prepare(tmp_path, text)

    refused = (
        f"<{tag}> at character 30 (line 1 of the text) is a call that the tool {tag!r} refuses: {message}"
    )
    assert (result.exit_code, prepared.exit_code) == ((1, 1) if message else (0, 0)), result.output
    if message:
        assert result.stdout.startswith(f"{tmp_path}/rows.jsonl:1: {refused}")
        place = f"{tmp_path}/records.jsonl:3: record 'b' breaks the rules of agent 'any'"
        assert str(prepared.exception).startswith(f"{place}: {refused}")
        assert not (tmp_path / "sft/x.json").exists()


def prepare(folder: Path, text: str, *more: str) -> Result:
    """`afm data prepare sft` of a good row, a blank line and one more."""
    spec, lines = load_agent(str(folder / "any.yaml")), []
    for name, said in (("a", SAID), ("b", text)):
        parts = author_segments(said, spec)
        record = Record(id=name, agent="any", agent_digest="d", question="?", segments=parts)
        lines.append(record.model_dump_json())
    (folder / "records.jsonl").write_text("\n\n".join(lines) + "\n")
    words = ["prepare", "sft", str(folder / "records.jsonl"), "--agent", str(folder / "any.yaml")]
    return CliRunner().invoke(data, [*words, "--output-dir", str(folder / "sft"), "--name", "x", *more])


def test_the_class_in_the_tools_file_reads_the_calls(tmp_path: Path) -> None:
    """A tool of one's own may be called `code` and read anything; one of another name may be our code tool."""
    (tmp_path / "any.yaml").write_text(ANY.replace("TOOL", "code"))
    (tmp_path / "tools.yaml").write_text(TOOLS.replace("CLASS", "afm.tools.search.WikiSearchTool"))
    (tmp_path / "own.yaml").write_text(
        TOOLS.replace("CLASS", "afm.tools.code.CodeTool").replace("code,", "run,")
    )
    text, agent, own = called("code", "print(1)"), tmp_path / "any.yaml", tmp_path / "own.yaml"
    rows = alpaca(tmp_path, text)

    for tools in (tmp_path / "tools.yaml", own):
        assert run(rows, agent, "--tools", tools).exit_code == 0
        assert prepare(tmp_path, text, "--tools", str(tools)).exit_code == 0
    own.write_text(TOOLS.replace("CLASS", "afm.tools.code.CodeTool"))
    assert run(rows, agent, "--tools", own).exit_code == 1


ANY = """
name: any
description: Has any tool.
prompt: "Work in the functions.\\n{roles}\\n{rules}"
roles:
  plan: {purpose: Plan., format: Text., no_thought: true}
  think: {kind: thought, purpose: Think., format: Text.}
  TOOL: {kind: tool, tool: TOOL, purpose: Use., format: Text., needs_thought: true}
  observation: {kind: observation, purpose: What came back.}
  answer: {kind: answer, purpose: Answer., format: Text., needs_thought: true}
transitions:
  start: [plan]
  plan: [TOOL, answer]
  TOOL: [TOOL, answer]
"""
TOOLS = """
tools:
  - class_name: CLASS
    tool_schema:
      type: function
      function: {name: code, parameters: {type: object, properties: {query: {type: string}}}}
"""
