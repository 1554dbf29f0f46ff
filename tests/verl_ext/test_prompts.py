"""Prompts of a run: from rows or a file, against the record of the model, and as kept with the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from afm.agents import PromptMode, PromptTemplate, load_agent
from afm.agents.prompt_record import PROMPT_FILE, PromptRecord, PromptTally
from afm.errors import ConfigError, DataError
from verl_ext.export import keep_prompts, prompts_of
from verl_ext.rows import rl_prompts
from verl_ext.settings import SETTINGS_FILE, RlSettings

RULES = "Write <plan> and <answer>.\n\nQuestion: "
MATH = load_agent("math")


def record(*prompts: str) -> PromptRecord:
    tally = PromptTally(PromptMode.ROW, [PromptTemplate.of_agent(MATH)])
    for prompt in prompts:
        tally.add(turn(prompt))
    return tally.record()


def counts(of: PromptRecord | None) -> dict[str, int]:
    """Count rows by the user's turn."""
    assert of is not None
    return {template.user: template.rows for template in of.templates}


def turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def rows(path: Path, *prompts: Any, sources: Sequence[str] = ()) -> str:
    gold = {"reward_model": {"ground_truth": "1"}}
    made: list[dict[str, Any]] = [{"prompt": prompt and turn(prompt)} | gold for prompt in prompts]
    made += [{"prompt": turn(f"{RULES}1?"), "data_source": source} for source in sources]
    pq.write_table(pa.Table.from_pylist(made), path)
    return str(path)


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    def make(*prompts: Any, **more: Any) -> RlSettings:
        files = (rows(tmp_path / "train.parquet", *(prompts or (f"{RULES}1?", f"{RULES}2?"))),)
        given = {"agent": "math", "model": str(tmp_path / "base"), "output_dir": tmp_path / "out"}
        return RlSettings.model_validate({**given, "train_files": files} | more)

    return make


def test_a_run_in_each_mode_and_what_its_export_will_say(settings: Any, tmp_path: Path) -> None:
    own = rl_prompts(settings())
    assert own.record.the_one == PromptTemplate.of_agent(MATH)
    assert own.record.templates[0].rows == 2
    assert str(own) == "prompt: the agent's own, the model's folder does not record its training prompt"
    row = rl_prompts(settings(prompt="row"))
    assert row.record == record(f"{RULES}1?", f"{RULES}2?")
    (tmp_path / "p.txt").write_text("Task:\n{question}\n")
    file = rl_prompts(settings(prompt=str(tmp_path / "p.txt")))
    assert file.record.the_one == PromptTemplate("Task:\n")
    assert keep_prompts(row, tmp_path / "out", 0) == {"": "row"}
    assert prompts_of(tmp_path / "out") == row.record
    assert prompts_of(tmp_path / "base") is None


def test_a_model_of_another_prompt_is_refused_before_training_unless_asked_for(
    settings: Any, tmp_path: Path
) -> None:
    record(f"{RULES}3?").save(tmp_path / "base" / PROMPT_FILE)
    with pytest.raises(
        ConfigError, match=r"2 rows, line 1 of the user turn: got .*prompt=row .* prompt_check=off"
    ):
        rl_prompts(settings())
    assert (
        str(rl_prompts(settings(prompt="row")))
        == "prompt: each row's own, the same as in the model's training"
    )
    assert "differs from the model's training prompt, as requested" in str(
        rl_prompts(settings(prompt_check=False))
    )
    val = rows(tmp_path / "val.parquet", "Write nothing.\nQuestion: 1?")
    with pytest.raises(ConfigError, match=r"line 1 of the user turn: got 'Write nothing\.'"):
        rl_prompts(settings(prompt="row", val_files=[val]))


def test_a_row_without_a_prompt_takes_the_models_one_or_is_refused_by_file_and_row(
    settings: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"train.parquet:2: prompt=row, but the row holds no prompt"):
        rl_prompts(settings(f"{RULES}1?", None, prompt="row"))
    record(f"{RULES}3?").save(tmp_path / "base" / PROMPT_FILE)
    assert rl_prompts(settings(f"{RULES}1?", None, prompt="row")).record.templates[0].rows == 2


def test_a_question_that_could_begin_at_several_lines_is_refused_unless_the_row_asks(settings: Any) -> None:
    prompts = (f"{RULES}1?", f"{RULES}Read lines such as\nTask: name\nand print them.")
    with pytest.raises(DataError, match=r"train\.parquet:2: .*add extra_info\.question, or set prompt=row"):
        rl_prompts(settings(*prompts))
    assert rl_prompts(settings(*prompts, prompt="row")).record.mode is PromptMode.ROW


def test_steps_with_another_file_are_another_run(settings: Any, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("Task:\n{question}\n")
    given = settings(prompt=str(file))
    kept = keep_prompts(rl_prompts(given), tmp_path / "out", 0)[""]
    assert Path(kept).parent == tmp_path / "out"
    (tmp_path / "out" / SETTINGS_FILE).write_text(yaml.safe_dump({"prompt": kept}))
    file.write_text("Task:\n{question}")  # the same prompt
    assert keep_prompts(rl_prompts(given), tmp_path / "out", 5) == {"": kept}
    file.write_text("Question: {question}")
    with pytest.raises(
        ConfigError, match=r"holds a run up to step 5 with prompt .*choose another output_dir"
    ):
        keep_prompts(rl_prompts(given), tmp_path / "out", 5)
    keep_prompts(rl_prompts(given), tmp_path / "out", 0)  # nothing is trained yet
    (tmp_path / "out" / SETTINGS_FILE).write_text(yaml.safe_dump({"agent": "math"}))  # of an older version
    with pytest.raises(ConfigError, match="with prompt own"):
        keep_prompts(rl_prompts(given), tmp_path / "out", 5)


def test_reinforcement_adds_to_what_the_model_was_trained_with(settings: Any, tmp_path: Path) -> None:
    record(f"{RULES}3?", "Task:\n1?").save(tmp_path / "base" / PROMPT_FILE)
    keep_prompts(rl_prompts(settings(prompt="row")), tmp_path / "out", 0)
    assert counts(prompts_of(tmp_path / "out")) == {RULES + "{question}": 2, "Task:\n{question}": 1}


def test_each_agent_of_a_run_has_its_prompt(settings: Any, tmp_path: Path) -> None:
    files = [rows(tmp_path / "mix.parquet", sources=("aime24", "aime25", "livecodebench"))]
    (tmp_path / "p.txt").write_text("Write a program.\nTask:\n{question}\n")
    agents = {
        "math": {"agent": "math", "data_sources": ["aime*"], "prompt": "row"},
        "code": {"agent": "code", "prompt": str(tmp_path / "p.txt")},
    }
    found = rl_prompts(settings(train_files=files, agents=agents))
    assert counts(found.record) == {RULES + "{question}": 2, "Write a program.\nTask:\n{question}": 1}
    kept = keep_prompts(found, tmp_path / "out", 0)
    assert (kept["math"], Path(kept["code"]).parent) == ("row", tmp_path / "out")
    written = {"prompt": "own", "agents": {name: {"prompt": prompt} for name, prompt in kept.items()}}
    (tmp_path / "out" / SETTINGS_FILE).write_text(yaml.safe_dump(written))
    assert keep_prompts(found, tmp_path / "out", 3) == kept
    agents["math"]["prompt"] = "own"
    other = rl_prompts(settings(train_files=files, agents=agents))
    with pytest.raises(ConfigError, match="with prompt row, but this run uses own"):
        keep_prompts(other, tmp_path / "out", 3)
