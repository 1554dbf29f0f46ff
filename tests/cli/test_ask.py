import json
import re
import shutil

import pytest
import typer
from typer.testing import CliRunner

from afm.agents import AgentSpec, save_agent
from afm.cli.ask import ask
from afm.errors import ConfigError, UsageError
from afm.trajectory.record import Record

app = typer.Typer()
app.command()(ask)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model that was "trained" as an agent of 40 tokens without tools."""
    from afm.models.tiny import create_tiny_model, train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(["<answer>4</answer> What is 2 + 2?"] * 50, folder, vocab_size=280)
    create_tiny_model(folder, folder)
    spec = AgentSpec(
        name="talker",
        roles={"plan": {}, "answer": {"kind": "answer"}},
        transitions={"start": ("plan", "answer"), "plan": ("answer",)},
        limits={"max_response_tokens": 40},
    )
    save_agent(spec, folder / "agent.yaml")
    return folder


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_episode_is_shown_with_answer_and_cost(folder):
    shown = run("What is 2 + 2?", "--model", folder, "--seed", 1)
    assert re.search(r"answer: .* \(stopped: \w+\)\n", shown)
    assert re.search(r"cost: \d+ tokens written and 0 observed after a prompt of \d+, tool calls: 0", shown)
    assert "\x1b" not in shown
    assert "USD" not in shown


def test_with_prices_the_line_of_costs_holds_money(folder):
    shown = run("What is 2 + 2?", "--model", folder, "--seed", 1, "--prices", "{prompt: 0, completion: 1e6}")
    written, usd = re.search(r"cost: (\d+) tokens written .*, ([\d.]+) USD\n", shown).groups()
    assert float(usd) == int(written) > 0
    with pytest.raises(UsageError, match=r"--prices: promt: unknown key; did you mean 'prompt'\?"):
        run("Q", "--model", folder, "--prices", "{promt: 1, completion: 1}")
    with pytest.raises(ConfigError, match=r"prices\.tools\.code: the agent calls no such tool"):
        run("Q", "--model", folder, "--prices", "{prompt: 1, completion: 1, tools: {code: 1}}")


def test_json_is_one_record_and_nothing_else(folder):
    lines = [run("What is 2 + 2?", "--model", folder, "--seed", 1, "--json") for _ in range(2)]
    records = [Record.model_validate_json(line) for line in lines]
    assert records[0].response_ids == records[1].response_ids
    assert (records[0].agent, records[0].question, records[0].seed) == ("talker", "What is 2 + 2?", 1)
    assert len(records[0].response_ids) <= 40
    assert json.loads(lines[0])["schema_version"] == 1


def test_json_holds_nothing_that_a_terminal_obeys(folder):
    shown = run("\x9b31m \u202eevil", "--model", folder, "--seed", 1, "--json")
    assert shown.isascii()
    assert json.loads(shown)["question"] == "\x9b31m \u202eevil"


def test_the_seed_and_the_temperature_count(folder):
    def ids(*options):
        return Record.model_validate_json(run("Q", "--model", folder, "--json", *options)).response_ids

    assert ids("--seed", 1) != ids("--seed", 2)
    assert ids("--temperature", 0, "--seed", 1) == ids("--temperature", 0, "--seed", 2)


def test_an_agent_given_by_path_wins(folder, tmp_path):
    spec = AgentSpec(name="other", roles={"answer": {"kind": "answer"}}, transitions={"start": ("answer",)})
    save_agent(
        spec.model_copy(update={"limits": spec.limits.model_copy(update={"max_agent_tokens": 3})}),
        tmp_path / "o.yaml",
    )
    words = ("Q", "--model", folder, "--agent", tmp_path / "o.yaml", "--seed", 1, "--json")
    record = Record.model_validate_json(run(*words))
    assert (record.agent, record.cost.agent_tokens) == ("other", 3)


def test_another_agent_than_the_models_own_is_asked_with_a_warning(folder, tmp_path, capfd):
    other = AgentSpec(
        name="chatter",
        roles={"answer": {"kind": "answer"}},
        transitions={"start": ("answer",)},
        limits={"max_response_tokens": 5},
    )
    save_agent(other, tmp_path / "other.yaml")

    def warning(*words):
        done = CliRunner().invoke(app, ["Q?", "--model", str(folder), "--seed", "1", *map(str, words)])
        assert done.exit_code == 0, done.output
        return done.stderr

    told = warning("--agent", tmp_path / "other.yaml")
    assert re.match(r"warning: \S+ was trained as agent 'talker' \(\w{16}\), and is asked as 'chatter'", told)
    assert warning() == warning("--agent", "talker") == ""


def test_wrong_usage_says_what_is_missing(folder, tmp_path):
    with pytest.raises(UsageError, match="holds no model"):
        run("Q", "--model", tmp_path)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("agent.yaml"))
    with pytest.raises(UsageError, match="does not say which agent"):
        run("Q", "--model", bare)
    with pytest.raises(UsageError, match=r"--agent mat: .*did you mean 'math'"):
        run("Q", "--model", folder, "--agent", "mat")
    with pytest.raises(UsageError, match="empty"):
        run(" ", "--model", folder)
    with pytest.raises(UsageError, match="is no folder"):
        run("Q", "--model", tmp_path / "absent", "--agent", folder / "agent.yaml")
    with pytest.raises(ConfigError, match="tokenizer"):
        run("Q", "--model", "http://127.0.0.1:9", "--agent", folder / "agent.yaml")


@pytest.mark.sandbox
def test_the_math_agent_finds_its_tool(folder, tmp_path):
    (tmp_path / "short.yaml").write_text("extends: math\nlimits: {max_agent_tokens: 5}\n")
    record = Record.model_validate_json(
        run("What is 2 + 2?", "--model", folder, "--agent", tmp_path / "short.yaml", "--json", "--seed", 1)
    )
    assert (record.agent, record.cost.agent_tokens) == ("math", 5)


def test_an_agent_whose_tools_are_nowhere_is_named(folder, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("extends: math\nname: own\nroles: {code: {tool: teleport}}\n")
    with pytest.raises(UsageError, match=r"teleport.*--tools"):
        run("Q", "--model", folder, "--agent", own)
