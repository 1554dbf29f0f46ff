from pathlib import Path

import pytest

from afm.distill.model_team.settings import read_team
from afm.distill.model_team.team import load_team
from afm.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[3]
TEAMS = sorted(path.stem for path in (ROOT / "configs/distill").glob("*.yaml"))


@pytest.mark.parametrize("name", TEAMS)
def test_shipped_teams_fit_their_agents_and_tools(name, monkeypatch):
    monkeypatch.setenv("TEACHER_BASE_URL", "http://127.0.0.1:1/v1")
    team = load_team(ROOT / f"configs/distill/{name}.yaml")

    assert team.spec.name == name
    assert team.settings.tools.is_file()
    assert team.settings.limits.tool_calls <= team.spec.limits.max_turns


def test_an_unknown_key_is_refused_with_a_suggestion(tmp_path):
    file = tmp_path / "team.yaml"
    file.write_text(f"extends: {ROOT / 'configs/distill/mhqa.yaml'}\nlimits: {{round: 2}}\n")
    with pytest.raises(ConfigError, match=r"limits.round: unknown key; did you mean 'rounds'\?"):
        read_team(file)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("members.planner.model=strung", "planner.model: got 'strung'; did you mean 'strong'"),
        ("models.fast.endpoint=teach", "models.fast.endpoint: got 'teach'; did you mean 'teacher'"),
        ("models.fast.request={n: 4}", r"\['n'\] cannot be set; a request has one reply"),
        ("models.fast.price=", "models.fast.price: missing, but needed for a budget in money"),
        ("endpoints.teacher.api_key=sk-1", "api_key: unknown key"),
        ("budget.use=1", "override 'budget.use=1': budget.use: unknown key"),
    ],
)
def test_names_that_lead_nowhere_are_refused(override, message):
    with pytest.raises((ConfigError, UsageError), match=message):
        read_team(ROOT / "configs/distill/mhqa.yaml", [override])


def test_without_an_address_it_is_said_how_to_give_one(monkeypatch):
    monkeypatch.delenv("TEACHER_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match=r"endpoints.teacher.url: missing; set it, or .* TEACHER_BASE_URL"):
        load_team(ROOT / "configs/distill/mhqa.yaml")


def test_a_budget_changes_no_digest_and_a_prompt_does(tmp_path, monkeypatch):
    monkeypatch.setenv("TEACHER_BASE_URL", "http://127.0.0.1:1/v1")
    file = ROOT / "configs/distill/mhqa.yaml"
    prompt = tmp_path / "planner.yaml"
    prompt.write_text("system: Plan.\nuser: '{{ question }}'\nsays: p\n")

    plain = load_team(file).name
    assert load_team(file, overrides=["budget.usd=1", "endpoints.teacher.max_parallel=1"]).name == plain
    assert load_team(file, overrides=[f"members.planner.prompt={prompt}"]).name != plain
    prompt.write_text("system: '{{ qestion }'\nuser: u\n")
    with pytest.raises(ConfigError, match=r"planner.yaml: system: invalid template"):
        load_team(file, overrides=[f"members.planner.prompt={prompt}"])
