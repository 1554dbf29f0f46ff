import json
from pathlib import Path

import pytest

from afm.errors import AfmError, DataError
from afm.evaluation.config import dump_config, load_config
from afm.evaluation.job import load_tasks, sources_of

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(ROOT.glob("configs/eval/*.yaml")) + sorted(ROOT.glob("configs/tiny/eval/*.yaml"))


@pytest.fixture
def config_of(tmp_path):
    """The settings of a file with so much text, changed by words."""

    def load(text, *words):
        file = tmp_path / "eval.yaml"
        file.write_text(text)
        return load_config(file, words)

    return load


MINIMAL = "name: x\ndata: tasks.jsonl\nagent: math\nmodel: m\noutput_dir: out\n"
MODELLESS = MINIMAL.replace("model: m\n", "")
SERVED = MINIMAL.replace("model: m", "model: http://127.0.0.1:9")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_config_parses_and_its_parts_exist(path) -> None:
    config = load_config(path, ["model=models/any", "data=any.parquet", "output_dir=any"])
    agent = config.routes().first.declared.name
    assert agent in ["web", "mhqa", "math", "code", "full", "code_unseen", "chat"]
    assert (config.tools is None) == (agent == "chat")
    assert config.tools is None or (ROOT / config.tools).is_file()
    assert isinstance(config.rewards, dict | None) or (ROOT / config.rewards).is_file()
    head = path.read_text().splitlines()
    assert head[0].startswith("# ")
    assert any(line.startswith("# Hardware:") for line in head)


def test_a_child_config_keeps_what_it_does_not_say() -> None:
    twin = load_config(ROOT / "configs/tiny/eval/aime24.yaml", ["model=m"])
    assert (twin.limit, twin.rounds, twin.name) == (5, 2, "aime24")
    assert (twin.sampling.top_p, twin.sampling.temperature, twin.limits["max_turns"]) == (1.0, 1.0, 2)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (MINIMAL + "samplng: {}\n", [], r"eval.yaml: samplng: unknown key; did you mean 'sampling'\?"),
        (MINIMAL, ["sampling.topp=1"], r"'sampling.topp=1': sampling.topp: .* 'top_p'\?"),
        (MINIMAL, ["limits.max_turn=1"], r"'max_turn' is unknown; did you mean 'max_turns'\?"),
        (MINIMAL, ["rounds=0"], r"override 'rounds=0': rounds: got 0 \(number\), expected at least 1"),
        (MINIMAL, ["rounds"], "'rounds': expected key=value"),
        (MINIMAL, ["benchmark=browscomp"], "the name of a benchmark; did you mean 'browsecomp'"),
        (MODELLESS, ["modle=m"], r"'modle=m': modle: unknown key; did you mean 'model'\?"),
        (MODELLESS + "modell: m\n", [], r"eval.yaml: modell: unknown key; did you mean 'model'\?"),
        (MODELLESS, [], r"model: missing; name a model \(model=DIR_OR_URL\) or a team \(team=FILE\)"),
        (MINIMAL, ["team=t.yaml", "model=m"], "give exactly one of `model` and `team`"),
        (MINIMAL, ["team.budget.usd=1"], "team.budget.usd=1: changes the file of a team; also set team=FILE"),
        (MODELLESS, ["team=t.yaml", "keep_tokens=true"], "are for a model, not for a team"),
        (MODELLESS, ["team=t.yaml", "agents={math: {agent: math}}"], "agents: a team answers as one agent"),
        (SERVED, ["model.chat=tags", "keep_tokens=true"], "a chat endpoint shows no token ids"),
        (SERVED, ["model.chat=tags", "sampling.top_k=5"], "model.request.top_k"),
        (SERVED, ["model.chat=tags", "model.tokenizer=/x"], "the address of one server and no tokenizer"),
        (SERVED, ["model.chat=sometimes"], "'tags' or 'native'"),
        (SERVED, ["model.chat=native", "agents={math: {agent: math}}"], "model.chat=tags where rows choose"),
        (SERVED, ["model.request.seed=null"], "no `request` without `chat`"),
        (SERVED, ["model.dtype=bfloat16"], "no `threads` or `dtype` with a server"),
        ("extend: web.yaml\n", [], r"extend: unknown key; did you mean 'extends'\?"),
        ("extends: eval.yaml\n", [], "is circular"),
    ],
)
def test_what_is_wrong_is_named(config_of, text, words, message) -> None:
    with pytest.raises(AfmError, match=message):
        config_of(text, *words)


def test_overrides_reach_into_mappings_and_the_resolved_config_reads_back_equal(config_of, tmp_path) -> None:
    config = config_of(
        MINIMAL, "model.name=big", "sampling.top_k=20", "data=[a b.jsonl, c.parquet]", "limit=3"
    )
    assert (config.model.path, config.model.name, config.sampling.top_k) == ("m", "big", 20)
    assert config.data == (Path("a b.jsonl"), Path("c.parquet"))
    (tmp_path / "saved.yaml").write_text(dump_config(config, tmp_path))
    assert load_config(tmp_path / "saved.yaml") == config


def test_settings_saved_in_another_folder_find_their_files(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = "agent: agent.yaml\ntools: tools.yaml\nrewards: rewards.yaml\n"
    Path("eval.yaml").write_text(MINIMAL.replace("agent: math\n", "") + files)
    config = load_config("eval.yaml")
    Path("runs/eval").mkdir(parents=True)
    Path("runs/eval/config.yaml").write_text(dump_config(config, Path("runs/eval")))
    assert load_config("runs/eval/config.yaml") == config


@pytest.mark.parametrize(
    "word", ["harness={team: team.yaml}", "harness={command: [python, play.py]}", "team=team.yaml"]
)
def test_files_of_overrides_are_found_from_the_folder_of_the_saved_settings(
    word, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("eval.yaml").write_text(MINIMAL)
    for name in ("team.yaml", "play.py"):
        Path(name).touch()
    Path("run").mkdir()
    Path("run/config.yaml").write_text(dump_config(load_config("eval.yaml", [word]), Path("run")))
    monkeypatch.chdir("run")
    found = load_config("config.yaml")
    team = found.team.file if found.team else found.harness.team or found.harness.command[1]
    assert Path(team).is_file()


def test_a_server_is_no_folder(config_of) -> None:
    served = config_of(MINIMAL, "model=http://127.0.0.1:8000")
    assert (served.model.folder, served.routes().first.declared.name) == (None, "math")
    assert config_of(MINIMAL).model.folder == Path("m")


def test_tasks_of_several_files_keep_apart(config_of, tmp_path) -> None:
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file in files:
        rows = (f'{{"id": "{i}", "question": "{file.stem} {i}", "answer": "1"}}\n' for i in range(3))
        file.write_text("".join(rows))
    config = config_of(MINIMAL, f"data=[{files[0]}, {files[1]}]", "limit=2", "data_source=gsm8k")
    tasks = [(task.id, task.question, task.data_source) for task in load_tasks(config)]
    named = [("0", "one 0"), ("1", "one 1"), ("two/0", "two 0"), ("two/1", "two 1")]
    assert tasks == [(*names, "gsm8k") for names in named]
    assert sources_of(config).data == tuple(map(str, files))
    files[0].write_text("\n")
    with pytest.raises(DataError, match="no task in"):
        load_tasks(config_of(MINIMAL, f"data={files[0]}"))


def test_a_question_that_cannot_be_told_from_its_prompt_is_refused(config_of, tmp_path) -> None:
    def question(prompt, *words, **fields):
        row = {"prompt": prompt, "ground_truth": "1", "data_source": "nq", **fields}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        return load_tasks(config_of(MINIMAL, f"data={tmp_path}/rows.jsonl", *words))[0].question

    several = "Use tools.\nQuestion: Which line is last?\nQuestion: this one"
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has no `question`, and several lines"):
        question(several)
    assert question(several, "prompt=row") == "this one"
    assert question(several, extra_info={"question": "Which?"}) == "Which?"
    assert question("Use tools.\nQuestion: Which?") == "Which?"
