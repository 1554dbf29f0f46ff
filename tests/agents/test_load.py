from pathlib import Path

import pytest

from afm.agents import (
    agent_of_model,
    load_agent,
    model_folder,
    save_agent,
    save_agents,
    saved_agents,
    shipped_agents,
)
from afm.configuration import read_extended
from afm.errors import ConfigError

REPO = Path(__file__).parents[2]
TINY = REPO / "configs/tiny/agents/math.yaml"

MINIMAL = """
name: mini
roles:
  answer: {kind: answer}
transitions:
  start: [answer]
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def failure(source: str | Path) -> str:
    with pytest.raises(ConfigError) as error:
        load_agent(source)
    return str(error.value)


def test_seven_agents_are_shipped_and_load() -> None:
    assert shipped_agents() == ("code", "full", "math", "mhqa", "react", "web", "wiki")
    assert [load_agent(name).name for name in shipped_agents()] == list(shipped_agents())


def test_path_object_is_never_taken_for_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "math", MINIMAL)
    assert load_agent(Path("math")).name == "mini"
    assert load_agent("math").name == "math"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("extends: math\nlimits: {max_turn: 3}", "limits.max_turn: unknown key; did you mean 'max_turns'?"),
        (
            "extends: math\nlimits: {max_turns: many}",
            "limits.max_turns: got 'many' (text), expected a whole number",
        ),
        ("roles: {answer: {kind: answer}}\ntransitions: {start: [answer]}", "name: missing, but required"),
        (
            "extends: math\nlimits:\n  max_turns: 1\n  max_turns: 2",
            "line 4: key 'max_turns' is set twice in one mapping, first in line 3",
        ),
        ("extends: Web", "extends: agent 'Web' is not shipped; did you mean 'web'?"),
        (
            "name: a\nprompt: x\nroles: {ask: {tool: code}, seen: {kind: observation}, answer: {kind: answer}}\ntransitions: {start: [answer]}",
            "role 'ask': got kind 'text' and tool 'code'; write `kind: tool` and `tool: NAME`, or neither",
        ),
        (
            "extends: wbe",
            "extends: agent 'wbe' is not shipped (did you mean 'web'?); or pass the path of a YAML",
        ),
    ],
)
def test_errors_name_file_key_and_expectation(tmp_path: Path, text: str, fault: str) -> None:
    path = write(tmp_path, "bad.yaml", text)
    assert failure(path).startswith(f"{path}: {fault}")


def test_a_yaml_of_the_folder_is_named_when_its_ending_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "careful.yaml", "extends: math\nname: careful\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'careful' is not shipped \(did you mean careful\.yaml\?\)"):
        load_agent("careful")


def test_every_error_has_its_line(tmp_path: Path) -> None:
    text = "extends: web\nroles:\n  plan: {purpos: x}\n  reflection: {grade: {patern: x}}\n"
    assert len(failure(write(tmp_path, "bad.yaml", text)).splitlines()) == 2


def test_errors_without_a_file_of_their_own(tmp_path: Path) -> None:
    assert failure("mth") == "agent 'mth' is not shipped (did you mean 'math'?); or pass the path of a YAML"
    assert failure("nowhere/mine.yaml").startswith("nowhere/mine.yaml: no such agent file")
    path = write(tmp_path, "bad.yaml", "extends: math\nname: mine\ntransitions: {plan: [cod]}\n")
    assert failure(path) == f"{path}: transitions.plan: 'cod' cannot follow; did you mean 'code'?"


@pytest.mark.parametrize("text", ["- a\n", "just text", "", "a: [1\n"])
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "bad.yaml", text)
    assert failure(path).startswith(f"{path}: ")


def test_extends_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "mine.yaml",
        "extends: math\nname: mine\nroles: {plan: {purpose: Mine}}\ntransitions: {plan: [code]}\nrules: []\n",
    )
    mine, math = load_agent(path), load_agent("math")
    assert mine.roles["plan"].purpose == "Mine"
    assert mine.roles["plan"].max_count == 1
    assert mine.transitions["plan"] == ("code",)
    assert mine.transitions["code"] == math.transitions["code"]
    assert mine.rules == ()


def test_null_removes_what_was_inherited(tmp_path: Path) -> None:
    text = "extends: web\nname: mine\nroles: {reflection: {grade: null}}\nlimits: {max_turns: null, max_seconds: null, max_observation_chars: null}\n"
    mine = load_agent(write(tmp_path, "mine.yaml", text))
    assert mine.roles["reflection"].grade is None
    assert mine.limits.max_turns is None
    assert mine.limits.max_observation_chars == 16_000


def test_extends_path_is_relative_to_the_file_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b c").mkdir()
    write(tmp_path / "a", "base.yaml", MINIMAL)
    path = write(tmp_path / "b c", "child.yaml", "extends: ../a/base.yaml\nname: child\n")
    monkeypatch.chdir(tmp_path / "a")
    assert load_agent(path).name == "child"


def test_of_several_files_the_later_wins_and_the_file_itself_over_both(tmp_path: Path) -> None:
    write(tmp_path, "first.yaml", MINIMAL + "description: first\nquestion_format: '1 {question}'\n")
    write(tmp_path, "second.yaml", "description: second\nquestion_format: '2 {question}'\n")
    path = write(tmp_path, "mine.yaml", "extends: [first.yaml, second.yaml]\ndescription: mine\n")
    text = read_extended(path)
    assert (text["description"], text["question_format"]) == ("mine", "2 {question}")
    assert text["roles"] == read_extended(tmp_path / "first.yaml")["roles"]
    assert "extends: got 3, expected a name or a path" in failure(
        write(tmp_path, "bad.yaml", "extends: [first.yaml, 3]")
    )


def test_extends_in_a_circle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "one.yaml", "extends: two.yaml\n")
    path = write(tmp_path, "two.yaml", "extends: one.yaml\n")
    assert "`extends` is circular" in failure(path)


@pytest.mark.parametrize("name", [*shipped_agents(), *map(str, REPO.glob("configs/**/agents/*.yaml"))])
def test_saved_agent_loads_back_equal(tmp_path: Path, name: str) -> None:
    spec = load_agent(name)
    path = tmp_path / "deep" / "agent.yaml"
    save_agent(spec, path)
    again = load_agent(path)
    assert (again, again.digest) == (spec, spec.digest)
    assert [file.name for file in path.parent.iterdir()] == ["agent.yaml"]


def test_saved_prompt_is_a_readable_block(tmp_path: Path) -> None:
    save_agent(load_agent("math"), tmp_path / "agent.yaml")
    text = (tmp_path / "agent.yaml").read_text(encoding="utf-8")
    assert "prompt: |" in text
    assert "\n  {roles}\n" in text


def test_a_training_run_stands_for_the_model_inside_it(tmp_path: Path) -> None:
    assert model_folder(tmp_path) == tmp_path
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert model_folder(tmp_path) == tmp_path / "model"
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(tmp_path) == tmp_path


def test_a_model_trained_as_several_agents_has_each_of_them(tmp_path: Path) -> None:
    code = load_agent("code").model_copy(update={"prompt": "short"})
    save_agents((code, load_agent(TINY)), tmp_path)
    assert load_agent(tmp_path / "agent.yaml") == agent_of_model(tmp_path, "code") == code
    assert agent_of_model(tmp_path, "math") == load_agent(TINY) != load_agent("math")
    assert saved_agents(tmp_path) == [code, load_agent(TINY)]
    assert agent_of_model(tmp_path, "web") == load_agent("web")


def test_a_model_trained_as_one_agent_has_no_folder_of_agents(tmp_path: Path) -> None:
    save_agents((load_agent(TINY),), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["agent.yaml"]
    assert agent_of_model(tmp_path, "math") == load_agent(TINY)
    assert agent_of_model(tmp_path, "web") == load_agent("web")  # not the one that was trained
    assert agent_of_model(tmp_path / "none", "math") == load_agent("math")
    assert saved_agents(tmp_path / "none") == []


def test_any_transitions_let_a_tool_of_your_own_stand_anywhere(tmp_path: Path) -> None:
    stock = "extends: react\nname: shop\nroles:\n  stock: {kind: tool, tool: stock}"
    spec = load_agent(write(tmp_path, "shop.yaml", stock))
    everything = ("web_search", "crawl_page", "code", "answer", "stock")
    assert set(spec.transitions) == {"start", "web_search", "crawl_page", "code", "stock"}
    assert set(spec.transitions.values()) == {everything}
    save_agent(spec, tmp_path / "saved.yaml")
    assert load_agent(tmp_path / "saved.yaml") == spec
