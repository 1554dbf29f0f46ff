"""Settings of ``afm eval``: what is shipped parses, what is wrong is named."""

import json
from pathlib import Path

import pytest

from afm.errors import AfmError, DataError
from afm.evaluation.config import dump_config, load_config
from afm.evaluation.job import load_tasks, sources_of

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(ROOT.glob("configs/eval/*.yaml")) + sorted(ROOT.glob("configs/tiny/eval/*.yaml"))


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        file = tmp_path / "eval.yaml"
        file.write_text(text)
        return file

    return write


MINIMAL = "name: x\ndata: tasks.jsonl\nagent: math\nmodel: m\noutput_dir: out\n"
MODELLESS = MINIMAL.replace("model: m\n", "")
SERVED = MINIMAL.replace("model: m", "model: http://127.0.0.1:9")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_config_parses_and_its_parts_exist(path) -> None:
    config = load_config(path, ["model=models/any", "data=any.parquet", "output_dir=any"])
    assert config.routes().first.declared.name in (
        "web",
        "mhqa",
        "math",
        "code",
        "full",
        "code_unseen",
        "chat",
    )
    assert (config.tools is None) == (config.routes().first.declared.name == "chat")
    assert config.tools is None or (ROOT / config.tools).is_file()
    assert isinstance(config.rewards, dict | None) or (ROOT / config.rewards).is_file()
    head = path.read_text().splitlines()
    assert head[0].startswith("# ")
    assert any(line.startswith("# Hardware:") for line in head)


def test_a_child_config_keeps_what_it_does_not_say() -> None:
    twin = load_config(ROOT / "configs/tiny/eval/aime24.yaml", ["model=m"])
    assert (twin.limit, twin.rounds, twin.name) == (5, 2, "aime24")
    assert twin.sampling.top_p == 1.0
    assert twin.sampling.temperature == 1.0
    assert twin.limits["max_turns"] == 2


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (MINIMAL + "samplng: {}\n", [], r"eval.yaml: samplng: unknown key; did you mean 'sampling'\?"),
        (
            MINIMAL,
            ["sampling.temprature=1"],
            r"'sampling.temprature=1': sampling.temprature: unknown key; did you mean 'temperature'\?",
        ),
        (MINIMAL, ["limits.max_turn=1"], r"unknown limit 'max_turn'; did you mean 'max_turns'\?"),
        (
            MINIMAL,
            ["rounds=0"],
            r"override 'rounds=0': rounds: got 0 \(int\), expected greater than or equal to 1",
        ),
        (MINIMAL, ["rounds"], "'rounds': expected key=value"),
        (MINIMAL, ["benchmark=browscomp"], "the name of a benchmark; did you mean 'browsecomp'"),
        (MODELLESS, ["modle=m"], r"'modle=m': modle: unknown key; did you mean 'model'\?"),
        (MODELLESS + "modell: m\n", [], r"eval.yaml: modell: unknown key; did you mean 'model'\?"),
        (MODELLESS, [], "model: missing; give the model's folder or address .* or a team: team=FILE"),
        (MINIMAL, ["team=t.yaml", "model=m"], "either a model or a team answers; give exactly one"),
        (MINIMAL, ["team.budget.usd=1"], "team.budget.usd=1: is for a team's file; give it: team=FILE"),
        (MODELLESS, ["team=t.yaml", "keep_tokens=true"], "are for a model, not for a team"),
        (MODELLESS, ["team=t.yaml", "agents={math: {agent: math}}"], "agents: a team answers as one agent"),
        (SERVED, ["model.chat=tags", "keep_tokens=true"], "a chat endpoint shows no token ids"),
        (SERVED, ["model.chat=tags", "sampling.top_k=5"], "model.request.top_k"),
        (
            SERVED,
            ["model.chat=tags", "model.tokenizer=/models/x"],
            "the address of one server and no tokenizer",
        ),
        (SERVED, ["model.chat=sometimes"], "'tags' or 'native'"),
        (SERVED, ["model.chat=native", "agents={math: {agent: math}}"], "model.chat=tags where rows choose"),
        (SERVED, ["model.request.seed=null"], "no `request` without `chat`"),
        ("extend: web.yaml\n", [], r"extend: unknown key; did you mean 'extends'\?"),
        ("extends: eval.yaml\n", [], "goes in a circle"),
    ],
)
def test_what_is_wrong_is_named(config_file, text, words, message) -> None:
    with pytest.raises(AfmError, match=message):
        load_config(config_file(text), words)


def test_overrides_reach_into_mappings(config_file) -> None:
    config = load_config(
        config_file(MINIMAL),
        ["model.name=big", "sampling.top_k=20", "data=[a b.jsonl, c.parquet]", "limit=3"],
    )
    assert (config.model.path, config.model.name) == ("m", "big")
    assert config.sampling.top_k == 20
    assert config.data == (Path("a b.jsonl"), Path("c.parquet"))


def test_the_resolved_config_reads_back_equal(config_file, tmp_path) -> None:
    config = load_config(config_file(MINIMAL), ["model.name=big", "limits.max_turns=3"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_config(config))
    assert load_config(saved) == config


def test_a_server_is_no_folder(config_file) -> None:
    served = load_config(config_file(MINIMAL), ["model=http://127.0.0.1:8000"])
    assert served.model.folder is None
    assert served.routes().first.declared.name == "math"
    assert load_config(config_file(MINIMAL)).model.folder == Path("m")


def test_tasks_of_several_files_keep_apart(config_file, tmp_path) -> None:
    for name in ("one", "two"):
        rows = "".join(f'{{"id": "{i}", "question": "{name} {i}", "answer": "1"}}\n' for i in range(3))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    files = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    config = load_config(config_file(MINIMAL), [f"data=[{', '.join(files)}]", "limit=2", "data_source=gsm8k"])
    tasks = load_tasks(config)
    assert [task.id for task in tasks] == ["0", "1", "two/0", "two/1"]
    assert [task.question for task in tasks] == ["one 0", "one 1", "two 0", "two 1"]
    assert {task.data_source for task in tasks} == {"gsm8k"}
    assert sources_of(config).data == tuple(files)
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no task in"):
        load_tasks(load_config(config_file(MINIMAL), [f"data={tmp_path / 'none.jsonl'}"]))


def test_a_question_that_cannot_be_told_from_its_prompt_is_refused(config_file, tmp_path) -> None:
    def tasks(prompt, **fields):
        row = {"prompt": prompt, "ground_truth": "1", "data_source": "nq", **fields}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        return lambda *words: load_tasks(
            load_config(config_file(MINIMAL), [f"data={tmp_path}/rows.jsonl", *words])
        )

    several = "Use tools.\nQuestion: Which line is last?\nQuestion: this one"
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has no `question`, and several lines"):
        tasks(several)()
    assert tasks(several)("prompt=row")[0].question == "this one"
    assert tasks(several, extra_info={"question": "Which?"})()[0].question == "Which?"
    assert tasks("Use tools.\nQuestion: Which?")()[0].question == "Which?"
