"""Settings of ``afm eval``: what is shipped parses, what is wrong is named."""

from pathlib import Path

import pytest

from afm.errors import ConfigError, DataError, UsageError
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


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_config_parses_and_its_parts_exist(path) -> None:
    config = load_config(path, ["model=models/any", "data=any.parquet", "output_dir=any"])
    assert config.spec().name in ("web", "mhqa", "math", "code", "full", "code_unseen", "chat")
    assert (config.tools is None) == (config.spec().name == "chat")
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


def test_unknown_keys_are_refused_with_a_suggestion(config_file) -> None:
    with pytest.raises(ConfigError, match=r"eval.yaml: samplng: unknown key; did you mean 'sampling'\?"):
        load_config(config_file(MINIMAL + "samplng: {}\n"))
    with pytest.raises(
        UsageError,
        match=r"'sampling.temprature=1': sampling.temprature: unknown key; did you mean 'temperature'\?",
    ):
        load_config(config_file(MINIMAL), ["sampling.temprature=1"])
    with pytest.raises(UsageError, match=r"unknown limit 'max_turn'; did you mean 'max_turns'\?"):
        load_config(config_file(MINIMAL), ["limits.max_turn=1"])
    with pytest.raises(
        UsageError, match=r"override 'rounds=0': rounds: got 0 \(int\), expected greater than or equal to 1"
    ):
        load_config(config_file(MINIMAL), ["rounds=0"])


def test_a_misspelt_model_or_base_is_told_as_such(config_file) -> None:
    without = MINIMAL.replace("model: m\n", "")
    with pytest.raises(UsageError, match=r"'modle=m': modle: unknown key; did you mean 'model'\?"):
        load_config(config_file(without), ["modle=m"])
    with pytest.raises(ConfigError, match=r"eval.yaml: modell: unknown key; did you mean 'model'\?"):
        load_config(config_file(without + "modell: m\n"))
    with pytest.raises(ConfigError, match=r"extend: unknown key; did you mean 'extends'\?"):
        load_config(config_file("extend: web.yaml\n"))


def test_a_missing_model_says_how_to_give_it(config_file) -> None:
    with pytest.raises(UsageError, match="model: missing; give the model's folder or address"):
        load_config(config_file(MINIMAL.replace("model: m\n", "")))


def test_overrides_reach_into_mappings(config_file) -> None:
    config = load_config(
        config_file(MINIMAL),
        ["model.name=big", "sampling.top_k=20", "data=[a b.jsonl, c.parquet]", "limit=3"],
    )
    assert (config.model.path, config.model.name) == ("m", "big")
    assert config.sampling.top_k == 20
    assert config.data == (Path("a b.jsonl"), Path("c.parquet"))
    with pytest.raises(UsageError, match="'rounds': expected key=value"):
        load_config(config_file(MINIMAL), ["rounds"])


def test_a_circle_of_configs_is_named(config_file) -> None:
    with pytest.raises(ConfigError, match="goes in a circle"):
        load_config(config_file("extends: eval.yaml\n"))


def test_the_resolved_config_reads_back_equal(config_file, tmp_path) -> None:
    config = load_config(config_file(MINIMAL), ["model.name=big", "limits.max_turns=3"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_config(config))
    assert load_config(saved) == config


def test_a_server_is_no_folder(config_file) -> None:
    served = load_config(config_file(MINIMAL), ["model=http://127.0.0.1:8000"])
    assert served.model.folder is None
    assert served.spec().name == "math"
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
