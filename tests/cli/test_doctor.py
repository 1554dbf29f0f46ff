"""`afm doctor` without a configuration: this computer; and how findings are shown."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from afm.cli.doctor.machine import diagnose_machine
from afm.cli.doctor.packages import package_findings
from afm.cli.doctor.shown import print_table
from afm.cli.main import app
from afm.planning import Finding, Level

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.sandbox
def test_this_computer_is_fine_and_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GRM_BASE_URL", "WEB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0, told
    found = {one["subject"]: one for one in told["findings"]}
    assert found["sandbox"]["status"] == "ok"
    assert "verl 0.9.1" in found["rl"]["why"]
    assert {"python", "memory", "disk", "gpu", "servers", "browser"} <= found.keys()


def test_ports_that_are_taken_and_services_that_are_silent_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("CODE_SERVER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("GRM_BASE_URL", "http://127.0.0.1:1/v1")
        monkeypatch.setenv("WEB_CACHE", "redis://:secret@127.0.0.1:1/0")
        findings = diagnose_machine({})
    warned = {one.subject: one.text for one in findings if one.level is Level.WARNING}
    assert "cannot be used: Address already in use" in warned["servers"]
    assert "nobody answers at http://127.0.0.1:1/v1" in warned["judge"]
    assert "does not answer (ConnectionError)" in warned["redis"]
    assert "secret" not in str(findings)


def test_a_wrong_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE_SERVER_PORT", "many")
    errors = {one.subject: one.text for one in diagnose_machine({}) if one.level is Level.ERROR}
    assert "CODE_SERVER_PORT: got 'many'" in errors["environment"]


def test_a_package_of_another_version_fails_an_absent_extra_warns() -> None:
    lines = ["httpx>=99; extra == 'rl'", "nosuch==1; extra == 'sft'", "pyyaml"]
    told = {one.subject: (one.level, one.text) for one in package_findings(lines)}
    assert told["rl"][0] is Level.ERROR
    assert "(expected >=99)" in told["rl"][1]
    assert told["sft"][0] is Level.WARNING
    assert told["sft"][1].startswith("nosuch is absent; ")
    assert told["packages"][0] is Level.OK


def test_a_terminal_gets_a_table_that_untrusted_text_cannot_paint() -> None:
    sink = io.StringIO()
    findings = [Finding(Level.ERROR, "model", "no \x1b[2J[bold]such[/bold] folder; train one")]
    print_table(findings, Console(file=sink, force_terminal=True, width=80, color_system=None))
    shown = sink.getvalue()
    assert "\x1b[2J" not in shown
    assert "[bold]such[/bold] folder" in shown
    assert "train one" in shown
    assert "1 fail" in shown


def test_a_tools_file_is_looked_at_tool_by_tool() -> None:
    done = CliRunner().invoke(app, ["doctor", str(ROOT / "configs/tools/wiki_rag.yaml"), "tools.0.x=1"])
    assert done.exit_code != 0
    done = CliRunner().invoke(app, ["doctor", str(ROOT / "configs/tools/wiki_rag.yaml"), "--json"])
    told = json.loads(done.stdout)["findings"]
    assert told[0]["why"] == "1 tools: wiki_search"
    agents = next(one["why"] for one in told if one["subject"] == "agents")
    assert agents.startswith("enough for mhqa, wiki; not code (lacks code)")


@pytest.mark.parametrize("content", ["", "[1, 2]", "a: [b", "benchmark: aime24\nverl: {}\n", None])
def test_json_is_json_for_what_is_no_configuration_too(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "broken.yaml"
    if content is not None:
        file.write_text(content)
    done = CliRunner().invoke(app, ["doctor", str(file), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"]) == (1, False)
    assert [(one["status"], one["subject"]) for one in told["findings"]] == [("fail", "config")]
