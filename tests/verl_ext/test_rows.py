from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from afm.agents import load_agent
from afm.datasets import Task
from afm.datasets.prepare import write_rl
from afm.errors import ConfigError
from afm.planning import Finding, Level
from verl_ext.rows import prompt_finding, read_rows, row_findings

SPEC = load_agent("math")


def row(index: str | None = "1", *, source: str = "gsm8k", **columns: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": SPEC.prompt_messages("1 + 1?"),
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": index, "question": "1 + 1?"},
    } | columns


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., list[Finding]]:
    def look(*rows: dict[str, Any], by_source: dict[str, str] | None = None) -> list[Finding]:
        file = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
        return list(row_findings(read_rows([str(file)], SPEC, by_source or {}), SPEC, "train_files"))

    return look


def worst(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in findings if finding.level is not Level.OK]


def test_prepared_rows_are_sound(tmp_path: Path) -> None:
    tasks = [Task(id=str(n), question=f"{n}?", ground_truth="1", data_source="gsm8k") for n in range(600)]
    write_rl(tasks, SPEC, tmp_path / "rl.parquet")
    rows = read_rows([str(tmp_path / "rl.parquet")], SPEC, {})
    assert [finding.text for finding in row_findings(rows, SPEC, "train_files")] == [
        "train_files: 600 rows that can be read",
        "train_files: every extra_info.index is unique",
    ]
    assert rows.scorers == {"math": 600}
    assert len(rows.longest) == 256


def test_an_index_that_two_rows_share_is_an_error_that_names_both(found: Any) -> None:
    [(level, text)] = worst(found(row("7"), row("8"), row("7")))
    assert level is Level.ERROR
    assert "1 rows repeat an extra_info.index: rows.parquet:3 has '7' of rows.parquet:1" in text
    assert "make them unique" in text


def test_indices_are_unique_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.Table.from_pylist([row("7")]), tmp_path / f"{name}.parquet")
    rows = read_rows([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], SPEC, {})
    assert rows.repeated == ["b.parquet:1 has '7' of a.parquet:1"]


def test_rows_without_an_index_would_all_be_zero(found: Any) -> None:
    [(level, text)] = worst(found(row(None), row(None)))
    assert level is Level.ERROR
    assert "2 of 2 rows have no extra_info.index, so verl gives each of them 0" in text


def test_rows_of_another_agent_loop_are_an_error(found: Any) -> None:
    assert worst(found(row("1", agent_name="afm_agent"))) == []
    [(level, text)] = worst(found(row("1", agent_name="tool_agent")))
    assert level is Level.ERROR
    assert "1 rows name agent_name='tool_agent'" in text
    assert "say afm_agent" in text


def test_a_source_that_nothing_judges_is_an_error(found: Any) -> None:
    [(level, text)] = worst(found(row(source="my_set")))
    assert (level, "no reward for data_source 'my_set'" in text) == (Level.ERROR, True)
    assert worst(found(row(source="my_set"), by_source={"my_set": "exact_match"})) == []
    own = {"index": "1", "question": "1 + 1?", "reward": "exact"}
    [(level, text)] = worst(found(row(extra_info=own)))
    assert "reward 'exact' is unknown, did you mean 'exact_match'?" in text


def test_a_prompt_of_another_agent_is_a_warning(found: Any) -> None:
    other = load_agent("mhqa").prompt_messages("1 + 1?")
    [(level, text)] = worst(found(row("1"), row("2", prompt=other)))
    assert level is Level.WARNING
    assert "1 of 2 rows hold another prompt than agent 'math' writes; the agent's own is used" in text


def test_a_row_that_ends_the_run_is_an_error_that_names_it(found: Any) -> None:
    without = row("2") | {"reward_model": {"ground_truth": None}}
    [(level, text)] = worst(found(row("1"), without))
    assert level is Level.ERROR
    assert "1 of 2 rows are bad: rows.parquet:2: expected `answer`" in text


@pytest.mark.parametrize(("content", "told"), [(None, "no such file"), (b"x", "no parquet file")])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "rows.parquet"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file}: {told}"):
        read_rows([str(file)], SPEC, {})


def test_a_prompt_too_long_for_verl_is_an_error(tmp_path: Path, tokenizer_dir: Path, tokenizer: Any) -> None:
    tasks = [
        Task(id=name, question=question, ground_truth="1", data_source="gsm8k")
        for name, question in (("short", "1?"), ("long", "coins " * 40))
    ]
    write_rl(tasks, SPEC, tmp_path / "rl.parquet")
    rows = read_rows([str(tmp_path / "rl.parquet")], SPEC, {})
    messages = SPEC.prompt_messages("coins " * 40)
    length = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    fits = prompt_finding(rows, SPEC, tokenizer_dir, length)
    assert fits is not None
    assert (fits.level, f"has {length:,} tokens (row 'long')" in fits.text) == (Level.OK, True)
    short = prompt_finding(rows, SPEC, tokenizer_dir, length - 1)
    assert short is not None
    assert (short.level, "1 rows are too long" in short.text) == (Level.ERROR, True)
    assert prompt_finding(rows, SPEC, tmp_path, length) is None
