import json
import re
import shutil

import pytest
import typer
from typer.testing import CliRunner

from afm.cli.ask import ask
from afm.errors import ConfigError, EngineError, UsageError
from afm.trajectory.record import Record

app = typer.Typer()
app.command()(ask)


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words), "--seed", "1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def record(*words):
    return Record.model_validate_json(run(*words, "--json"))


def test_the_episode_is_shown_with_answer_and_cost(talker_folder):
    shown = run("What is 2 + 2?", "--model", talker_folder)
    assert re.search(r"answer: .* \(stopped: \w+\)\n", shown)
    assert re.search(r"cost: \d+ tokens written and 0 observed after a prompt of \d+, tool calls: 0", shown)
    assert "\x1b" not in shown
    assert "USD" not in shown


def test_with_prices_the_line_of_costs_holds_money(talker_folder):
    shown = run("What is 2 + 2?", "--model", talker_folder, "--prices", "{prompt: 0, completion: 1e6}")
    written, usd = re.search(r"cost: (\d+) tokens written .*, ([\d.]+) USD\n", shown).groups()
    assert float(usd) == int(written) > 0
    with pytest.raises(UsageError, match=r"--prices: promt: unknown key; did you mean 'prompt'\?"):
        run("Q", "--model", talker_folder, "--prices", "{promt: 1, completion: 1}")
    with pytest.raises(ConfigError, match=r"prices\.tools\.code: the agent calls no such tool"):
        run("Q", "--model", talker_folder, "--prices", "{prompt: 1, completion: 1, tools: {code: 1}}")


def test_json_is_one_record_and_nothing_else(talker_folder):
    made = record("What is 2 + 2?", "--model", talker_folder)
    assert (made.agent, made.question, made.seed) == ("talker", "What is 2 + 2?", 1)
    assert len(made.response_ids) <= 40
    shown = run("\x9b31m \u202eevil", "--model", talker_folder, "--json")
    assert shown.isascii()  # nothing that a terminal obeys
    assert json.loads(shown)["question"] == "\x9b31m \u202eevil"
    assert json.loads(shown)["schema_version"] == 1


def test_the_seed_and_the_temperature_count(talker_folder):
    def ids(*options):
        done = CliRunner().invoke(app, ["Q", "--model", str(talker_folder), "--json", *options])
        return Record.model_validate_json(done.stdout).response_ids

    assert ids("--seed", "1") == ids("--seed", "1") != ids("--seed", "2")
    assert ids("--temperature", "0", "--seed", "1") == ids("--temperature", "0", "--seed", "2")


def test_another_agent_than_the_models_own_is_asked_with_a_warning(talker_folder, tmp_path):
    other = tmp_path / "other.yaml"
    roles = "roles: {answer: {kind: answer}}\ntransitions: {start: [answer]}"
    other.write_text(f"name: chatter\n{roles}\nlimits: {{max_agent_tokens: 3}}\n")

    def warning(*words):
        return CliRunner().invoke(app, ["Q?", "--model", str(talker_folder), *map(str, words)]).stderr

    printed = warning("--agent", other)
    assert re.match(
        r"warning: \S+ was trained as agent 'talker' \(\w{16}\), but is asked as agent 'chatter'", printed
    )
    assert warning() == warning("--agent", "talker") == ""


def test_wrong_usage_says_what_is_missing(talker_folder, tmp_path):
    bare, own, agent = tmp_path / "bare", tmp_path / "own.yaml", talker_folder / "agent.yaml"
    shutil.copytree(talker_folder, bare, ignore=shutil.ignore_patterns("agent.yaml"))
    own.write_text("extends: math\nname: own\nroles: {code: {tool: teleport}}\n")
    (rl := tmp_path / "rl").mkdir()
    (rl / "rl_config.yaml").touch()
    for words, message in (
        (("Q", "--model", tmp_path), "holds no model"),
        (("Q", "--model", rl), rf"no checkpoint yet; .* resume it: afm rl {rl}/rl_config.yaml"),
        (("Q", "--model", bare), "the agent is unknown"),
        (("Q", "--model", talker_folder, "--agent", "mat"), r"--agent mat: .*did you mean 'math'"),
        ((" ", "--model", talker_folder), "empty"),
        (
            ("Q", "--model", talker_folder, "--save", "/proc/x"),
            "--save /proc/x: .*; choose a file in another",
        ),
        (("Q", "--model", tmp_path / "absent", "--agent", agent), "no such folder"),
        (("Q", "--model", talker_folder, "--agent", own), r"teleport.*--tools YAML"),
    ):
        with pytest.raises(UsageError, match=message):
            run(*words)
    declared = "{class_name: x.Y, tool_schema: {type: function, function: {name: teleport}}}"
    (tmp_path / "mine.yaml").write_text(f"tools: [{declared}]\n")
    with pytest.raises(UsageError, match=rf"teleport.*give --tools {tmp_path}/mine.yaml"):
        run("Q", "--model", talker_folder, "--agent", own)
    with pytest.raises(
        EngineError, match=r"prompt has [\d,]+ tokens, but the context is 3 tokens; .* raise --context-tokens"
    ):
        run("Q", "--model", talker_folder, "--context-tokens", 3)
    with pytest.raises(ConfigError, match="tokenizer"):
        run("Q", "--model", "http://127.0.0.1:9", "--agent", agent)
    with pytest.raises(
        EngineError, match=r"expected a running .* server, for example `afm serve model FOLDER`"
    ):
        run("Q", "--model", "http://127.0.0.1:9", "--agent", agent, "--tokenizer", talker_folder)


@pytest.mark.sandbox
def test_the_math_agent_finds_its_tool(talker_folder, tmp_path):
    (tmp_path / "short.yaml").write_text("extends: math\nlimits: {max_agent_tokens: 5}\n")
    made = record("What is 2 + 2?", "--model", talker_folder, "--agent", tmp_path / "short.yaml")
    assert (made.agent, made.cost.agent_tokens) == ("math", 5)


def test_another_prompt_is_refused_with_the_options_of_this_command(talker_folder, tmp_path):
    folder = shutil.copytree(talker_folder, tmp_path / "model")
    row = {"digest": "844061ad9f0b45a6", "system": "", "user": "Rules of old:\n{question}", "rows": 1}
    (folder / "prompt.json").write_text(json.dumps({"mode": "own", "templates": [row]}), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"expected 'Rules of old:'; add --prompt FILE .*--no-prompt-check"
    ) as caught:
        run("What is 2 + 2?", "--model", folder)
    assert "prompt_check=off" not in str(caught.value)
    assert "answer" in run("What is 2 + 2?", "--model", folder, "--no-prompt-check")
