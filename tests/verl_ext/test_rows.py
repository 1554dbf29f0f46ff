import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from afm.agents import load_agent
from afm.datasets import Task
from afm.datasets.rl_files import write_rl
from afm.errors import ConfigError, DataError
from afm.findings import Finding, Level
from afm.rollout.routes import AgentRoute, AgentRoutes, routes_of
from verl_ext.doctor_episodes import prompt_finding
from verl_ext.rows import check_file, check_kinds, read_rows, row_findings
from verl_ext.settings import RlSettings

SPEC = load_agent("math")
TESTS = '{"inputs": ["1"], "outputs": ["2"]}'
ROUTES = routes_of(AgentRoute(agent="math"), {}, load_agent)


def row(index: str | None = "1", *, source: str = "gsm8k", **columns: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": SPEC.prompt_messages("1 + 1?"),
        "reward_model": {"ground_truth": TESTS if source == "codeforces" else "2"},
        "extra_info": {"index": index, "question": "1 + 1?"},
    } | columns


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., list[Finding]]:
    def look(
        *rows: dict[str, Any], by_source: dict[str, str] | None = None, agents: dict[str, Any] | None = None
    ) -> list[Finding]:
        file = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
        section = TypeAdapter(AgentRoutes).validate_python(agents or {})
        routes = routes_of(AgentRoute(agent="math"), section, load_agent)
        read = read_rows([str(file)], routes, {"": by_source or {}})
        return list(row_findings(read, routes, "train_files"))

    return look


def worst(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in findings if finding.level is not Level.OK]


def errors(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.level is Level.ERROR]


def test_prepared_rows_are_sound(tmp_path: Path) -> None:
    tasks = [Task(id=str(n), question=f"{n}?", ground_truth="1", data_source="gsm8k") for n in range(600)]
    write_rl(tasks, SPEC, tmp_path / "rl.parquet")
    rows = read_rows([str(tmp_path / "rl.parquet")], ROUTES, {})
    assert [finding.text for finding in row_findings(rows, ROUTES, "train_files")] == [
        "train_files: 600 readable rows",
        "train_files: every extra_info.index is unique",
    ]
    assert rows.scorers == {"math": 600}
    assert len(rows.longest) == 256


OTHER_PROMPT = load_agent("mhqa").prompt_messages("1 + 1?")


@pytest.mark.parametrize(
    ("rows", "level", "text"),
    [
        ([row("7"), row("8"), row("7")], Level.ERROR,
         "1 row with the extra_info.index of an earlier row: rows.parquet:3 has '7' of rows.parquet:1"),
        ([row(None), row(None)], Level.ERROR, "2 of 2 rows have no extra_info.index, so verl gives each of them 0"),
        ([row("1", agent_name="tool_agent")], Level.ERROR, "1 row with agent_name='tool_agent', expected"),
        ([row("1"), row("2", prompt=OTHER_PROMPT)], Level.WARNING,
         "1 of 2 rows have a different prompt than agent 'math'; the agent's prompt is used"),
        ([row("1"), row("2") | {"reward_model": {"ground_truth": None}}], Level.ERROR,
         "1 of 2 rows are bad: rows.parquet:2: expected `answer`"),
        ([row("1"), *[row("2") | {"reward_model": {"ground_truth": None}}] * 4], Level.ERROR,
         "rows.parquet:4: expected `answer`"),  # three are named
    ],
)  # fmt: skip
def test_what_is_wrong_with_rows_is_counted_and_named(
    found: Any, rows: list[dict[str, Any]], level: Level, text: str
) -> None:
    [(seen, message)] = worst(found(*rows))
    assert (seen, text in message) == (level, True), message
    assert worst(found(row("1", agent_name="afm_agent"))) == []


def test_indices_are_unique_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.Table.from_pylist([row("7")]), tmp_path / f"{name}.parquet")
    rows = read_rows([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], ROUTES, {})
    assert rows.repeated.first == ["b.parquet:1 has '7' of a.parquet:1"]


MIXED = {
    "code": {"agent": "code", "data_sources": ["codeforces"]},
    "math": {"data_sources": ["gsm8k", "aime24"]},
}


def test_rows_that_their_agent_can_never_solve_are_named(found: Any) -> None:
    rows = (row("1", source="codeforces"), row("2"), row("3", source="codeforces"))
    [(level, text)] = worst(found(*rows))
    assert level is Level.ERROR
    assert text.startswith(
        "train_files: 2 rows of data_source 'codeforces' can never be solved: agent 'math' answers with a boxed result, "
        "but code_tests expects a program; list them in `agents`"
    )
    findings = found(*rows, agents=MIXED)
    assert errors(findings) == []
    assert worst(findings)[0][1] == "agents.math.data_sources: no row of train_files matches aime24"
    assert [finding.text for finding in findings if finding.subject == "agents"][1:] == [
        "train_files: 2 rows go to code, agent 'code'",
        "train_files: 1 rows go to math, agent 'math'",
    ]


@pytest.mark.parametrize(
    ("source", "gold", "why"),
    [
        ("codeforces", "4", "their gold is a result, but code_tests expects tests"),
        ("gsm8k", TESTS, "their gold is tests of a program, but math expects a result"),
        ("gsm8k", '["\\\\frac{1}{2}"]', None),
        ("gsm8k", "{3}", None),
        ("gsm8k", '{"target": ["4"], "question": "q"}', None),
        ("codeforces", '["assert f(1) == 2"]', None),
        ("codeforces", '[{"input": "1", "output": "2"}]', None),
        ("codeforces", '{"question_id": "abc"}', None),
    ],
)
def test_gold_that_its_reward_cannot_use_is_named(
    found: Any, source: str, gold: str, why: str | None
) -> None:
    rows = row("1", source=source, reward_model={"ground_truth": gold})
    message = (
        f"train_files: 1 row of data_source {source!r} can never be solved: {why}; list them in `agents` for an "
        "agent that can, or correct their data_source"
    )
    assert errors(found(rows, agents=MIXED)) == ([message] if why else [])


def test_a_row_that_no_agent_takes_is_an_error_before_a_run(found: Any, tmp_path: Path) -> None:
    other = row("3", source="olympiadbench", ability="math")
    [text] = errors(found(row("1", source="codeforces", ability=None), row("2"), other, agents=MIXED))
    message = "no entry of `agents` takes rows of data_source 'olympiadbench' and ability 'math' (1 row)"
    assert text.startswith(f"train_files: {message}; list it in data_sources of one of code, math")
    file = str(tmp_path / "rows.parquet")
    settings = RlSettings(agent="math", model="m", output_dir=tmp_path, train_files=(file,), val_files=(file,), agents=MIXED)  # fmt: skip
    with pytest.raises(DataError, match=re.escape(message)):
        check_kinds(settings, {})


def test_a_file_with_other_columns_is_refused_before_a_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    for lacking in (["prompt", "extra_info"], ["reward_model"]):
        pq.write_table(pa.Table.from_pylist([row()]).drop_columns(lacking), file)
        with pytest.raises(
            ConfigError, match=r"first rows cannot be read: .* columns '?data_source"
        ) as caught:
            check_file(str(file))
        assert str(caught.value).startswith(f"{file}: ")
        assert str(caught.value).count("afm data") == 1
        assert f"; `afm data prepare tasks {file} --question-key KEY" in str(caught.value)
    unreadable = row() | {"reward_model": None}
    pq.write_table(pa.Table.from_pylist([unreadable, row()]), file)
    check_file(str(file))  # a single bad row is counted in the run (max_failed_episodes)


def test_rows_without_a_scorer_are_refused_at_the_start_and_the_others_name_theirs(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    settings = RlSettings(agent="math", model="m", output_dir=tmp_path, train_files=(str(file),))
    own = {"index": "3", "question": "1 + 1?", "reward": "exact_match"}
    pq.write_table(pa.Table.from_pylist([row("1"), row("2", source="search"), row(extra_info=own)]), file)
    assert check_kinds(settings, {"": {"gsm8k": "f1"}}) == {"": {"f1", "judge", "exact_match"}}
    pq.write_table(pa.Table.from_pylist([row("1"), row("2", source="")]), file)
    advice = f"afm data prepare rl {file} --data-source NAME --out NEW.parquet"
    with pytest.raises(ConfigError, match=rf"{file}:2: the row has no data_source, .*; .*: {advice}$"):
        check_kinds(settings, {"": {}})
    pq.write_table(pa.Table.from_pylist([row()]).drop_columns(["data_source"]), file)
    with pytest.raises(ConfigError, match=rf"{file}:1: the row has no data_source"):
        check_kinds(settings, {"": {}})
    assert check_kinds(settings, {"": {"*": "math"}}) == {"": {"math"}}


def test_a_source_that_nothing_judges_is_an_error(found: Any) -> None:
    [(level, text)] = worst(found(row(source="my_set")))
    assert (level, "no reward for data_source 'my_set'" in text) == (Level.ERROR, True)
    assert worst(found(row(source="my_set"), by_source={"my_set": "exact_match"})) == []
    own = {"index": "1", "question": "1 + 1?", "reward": "exact"}
    [(level, text)] = worst(found(row(extra_info=own)))
    assert "reward 'exact' is unknown, did you mean 'exact_match'?" in text


def test_a_question_that_could_begin_at_several_lines_is_an_error(found: Any) -> None:
    text = "Use <plan>.\n\nTask: Read lines like\nTask: name\nand print them."
    prompt = [{"role": "user", "content": text}]
    [error] = errors(found(row(prompt=prompt, extra_info={"index": "1"})))
    assert error.startswith("train_files: 1 row may get only a part of their question: rows.parquet:1; ")
    assert [level for level, _ in worst(found(row(prompt=prompt)))] == [Level.WARNING]


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), (b"x", "not a parquet file")])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "rows.parquet"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file}: {message}"):
        read_rows([str(file)], ROUTES, {})


def test_a_prompt_too_long_for_verl_is_an_error(tmp_path: Path, tokenizer_dir: Path, tokenizer: Any) -> None:
    long, gold = "coins " * 40, {"ground_truth": "1", "data_source": "gsm8k"}
    tasks = [Task(id="short", question="1?", **gold), Task(id="long", question=long, **gold)]
    write_rl(tasks, SPEC, tmp_path / "rl.parquet")
    rows = read_rows([str(tmp_path / "rl.parquet")], ROUTES, {})
    chat = tokenizer.apply_chat_template(SPEC.prompt_messages(long), add_generation_prompt=True)
    length = len(chat["input_ids"])
    for limit, level, text in (
        (length, Level.OK, f"has {length:,} tokens (row 'long')"),
        (length - 1, Level.ERROR, "1 rows are too long"),
    ):
        finding = prompt_finding(rows, tokenizer_dir, limit)
        assert finding is not None
        assert (finding.level, text in finding.text) == (level, True)
    assert prompt_finding(rows, tmp_path, length) is None
