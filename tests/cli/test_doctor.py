import importlib.util
import io
import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from extras import needs
from rich.console import Console
from typer.testing import CliRunner

from afm.cli.commands import app
from afm.cli.doctor import _kind_to_check, next_command, print_table
from afm.cli.doctor_machine import diagnose_machine, package_findings
from afm.errors import ConfigError
from afm.file_kinds import AGENT_FILE, EVAL_FILE, RL_FILE, SFT_FILE
from afm.findings import Finding, Level, driver_finding, gpu_findings, try_imports
from afm.terminal import afm_command

ROOT = Path(__file__).resolve().parents[2]


def doctor(*words: object) -> Any:
    """What the command prints as JSON; its exit status says the same."""
    done = CliRunner().invoke(app, ["doctor", *map(str, words)])
    printed = json.loads(done.stdout)
    assert printed["ok"] is (done.exit_code == 0)
    return printed


@pytest.mark.sandbox
def test_this_computer_is_fine_and_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GRM_BASE_URL", "WEB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    report = doctor("--json")
    found = {one["subject"]: one for one in report["findings"]}
    assert report["ok"], report
    assert found["sandbox"]["status"] == "ok"
    assert "verl 0.9.1" in found["rl"]["why"]
    assert "llamafactory 0.9.5" in found["sft"]["why"]
    assert {"python", "memory", "disk", "gpu", "servers", "browser"} <= found.keys()


@pytest.mark.slow
def test_ports_that_are_taken_and_services_that_are_silent_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("CODE_SERVER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("GRM_BASE_URL", "http://127.0.0.1:1/v1")
        monkeypatch.setenv("WEB_CACHE", "redis://:secret@127.0.0.1:1/0")
        monkeypatch.setenv("WIKI_RAG_SERVER_URL", "http://127.0.0.1:port/retrieve")
        findings = diagnose_machine({})
    warned = {one.subject: one.text for one in findings if one.level is Level.WARNING}
    servers = "".join(one.text for one in findings if one.subject == "servers")
    assert "Address already in use; stop the program that listens there" in servers
    assert "wiki_search: WIKI_RAG_SERVER_URL: Port could not be cast" in servers
    assert "no answer from http://127.0.0.1:1/v1" in warned["judge"]
    assert "does not answer (ConnectionError)" in warned["redis"]
    assert "secret" not in str(findings)


def test_a_wrong_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE_SERVER_PORT", "many")
    errors = {one.subject: one.text for one in diagnose_machine({}) if one.level is Level.ERROR}
    assert "CODE_SERVER_PORT: got 'many'" in errors["environment"]


def test_a_package_of_another_version_fails_an_absent_extra_warns() -> None:
    lines = ["httpx>=99; extra == 'rl'", "nosuch==1; extra == 'sft'", "pyyaml"]
    findings = {one.subject: (one.level, one.text) for one in package_findings(lines)}
    assert findings["rl"][0] is Level.ERROR
    assert "(expected >=99)" in findings["rl"][1]
    assert findings["sft"][0] is Level.WARNING
    assert findings["sft"][1].startswith("nosuch is not installed; ")
    assert findings["packages"][0] is Level.OK


def test_a_terminal_gets_a_table_that_untrusted_text_cannot_paint() -> None:
    sink = io.StringIO()
    findings = [Finding(Level.ERROR, "model", "no \x1b[2J[bold]such[/bold] folder; train one")]
    print_table(
        findings, "afm rl rl.yaml", Console(file=sink, force_terminal=True, width=80, color_system=None)
    )
    shown = sink.getvalue()
    assert "\x1b[2J" not in shown
    assert "[bold]such[/bold] folder" in shown
    assert "train one" in shown
    assert shown.rstrip().endswith("1 error: fix the error first")


@pytest.mark.parametrize(
    ("levels", "summary"),
    [
        ([Level.OK], "no fault found; next: afm rl rl.yaml"),
        ([Level.WARNING] * 2, "2 warnings; next: afm rl rl.yaml"),
        ([Level.ERROR, Level.WARNING, Level.ERROR], "2 errors, 1 warning: fix the errors first"),
    ],
)
def test_the_last_line_counts_the_faults_and_says_what_is_next(
    capsys: pytest.CaptureFixture[str], levels: list[Level], summary: str
) -> None:
    print_table([Finding(level, "x", "text") for level in levels], "afm rl rl.yaml")
    assert capsys.readouterr().out.splitlines()[-1] == summary


def test_the_next_command_trains_on_the_nodes_and_gpus_that_were_checked() -> None:
    needs("verl")
    rl, sft = Path("rl.yaml"), Path("sft.yaml")
    assert next_command(RL_FILE, rl, ["seed=1", "verl.trainer.nnodes=8"], 8, 4) == (
        f"{afm_command()} rl rl.yaml seed=1 verl.trainer.nnodes=8 verl.trainer.n_gpus_per_node=4"
    )
    assert next_command(RL_FILE, rl, [], None, None) == f"{afm_command()} rl rl.yaml"
    several = f"NNODES=2 NODE_RANK=RANK MASTER_ADDR=HOST NPROC_PER_NODE=8 {afm_command()} sft sft.yaml"
    assert next_command(SFT_FILE, sft, [], 2, 8) == several
    assert next_command(SFT_FILE, sft, [], 1, None) == f"{afm_command()} sft sft.yaml"


def test_an_option_and_a_key_that_name_different_counts_are_refused() -> None:
    words = ["doctor", str(ROOT / "configs/rl/code_dapo_7b.yaml"), "verl.trainer.nnodes=4", "--nodes", "8"]
    done = CliRunner().invoke(app, words)
    assert "--nodes 8: verl.trainer.nnodes=4 differs; leave one of them out" in str(done.exception)
    assert done.stdout == ""


def test_what_is_checked_goes_to_standard_error_unless_json_is_asked_for() -> None:
    words = ["doctor", str(ROOT / "configs/tools/wiki_rag.yaml")]
    shown, as_json = (CliRunner().invoke(app, [*words, *more]) for more in ([], ["--json"]))
    assert shown.stderr.splitlines() == ["checking: tools"]
    assert "checking" not in shown.stdout
    assert shown.stdout.splitlines()[-1].endswith("wiki_rag.yaml model=DIR")
    assert as_json.stderr == ""


def test_a_tools_file_is_looked_at_tool_by_tool() -> None:
    tools = ROOT / "configs/tools/wiki_rag.yaml"
    assert CliRunner().invoke(app, ["doctor", str(tools), "tools.0.x=1"]).exit_code != 0
    findings = doctor(tools, "--json")["findings"]
    assert findings[0]["why"] == "1 tool: wiki_search"
    agents = next(one["why"] for one in findings if one["subject"] == "agents")
    assert agents.startswith("shipped agents with all their tools here: mhqa, wiki; code lacks code; ")


def test_an_agent_is_checked_with_its_tools_and_without_a_model(tmp_path: Path) -> None:
    agent = tmp_path / "calculator.yaml"
    [text] = re.findall(
        r"```yaml\n(name: calculator\n.*?)```\n\n", (ROOT / "README.md").read_text(), re.DOTALL
    )
    agent.write_text(text)
    shown = CliRunner().invoke(app, ["doctor", str(agent)])
    assert "calculator (" in shown.stdout
    assert shown.stdout.endswith(f"next: {afm_command()} ask --agent {agent} --model DIR\n")
    agent.write_text(text.replace("tool: code", "tool: abacus"))
    assert (
        "calls abacus, which no file in configs/tools declares"
        in CliRunner().invoke(app, ["doctor", str(agent)]).stdout
    )
    schema = "{type: function, function: {name: abakus}}"
    (tmp_path / "own.yaml").write_text(f"tools: [{{class_name: x.Y, tool_schema: {schema}}}]\n")
    assert f"; {tmp_path}/own.yaml declares abakus: correct the name there, or `tool` under the agent's" in (
        CliRunner().invoke(app, ["doctor", str(agent)]).stdout
    )
    agent.write_text(text.replace("start: [code, answer]", "start: [cod, answer]"))
    assert doctor(agent, "--json")["findings"][0]["status"] == "fail"


def test_a_tool_of_ones_own_is_imported_and_shown_with_what_was_not_checked(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["init", str(tmp_path / "own")]).exit_code == 0
    tools = tmp_path / "own/tools.yaml"
    try:
        findings = doctor(tools, "--json")["findings"]
    finally:
        sys.modules.pop("weekday_tool", None)  # another test has a file of this name
    assert [each["subject"] for each in findings] == ["keys", "tools"], (
        "no word of agents that it cannot serve"
    )
    finding = findings[1]
    assert finding["status"] == "ok"
    assert finding["why"] == (
        "weekday: weekday_tool.WeekdayTool can be imported, its settings are valid, it takes date (string); "
        "it was not called, so its answers are not checked"
    )


NVIDIA_SMI = """#!/bin/sh
case "$*" in
  --query-gpu=name,memory.total,driver_version*) echo "NVIDIA H100 80GB HBM3, 81559 MiB, {driver}" ;;
  "") echo "| NVIDIA-SMI {driver}    Driver Version: {driver}    CUDA Version: {cuda}    |" ;;
  *) exit 6 ;;
esac
"""
NVCC = """#!/bin/sh
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release 13.0, V13.0.88"
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def findings_about_gpus() -> dict[str, list[Finding]]:
    findings: dict[str, list[Finding]] = {}
    for each in gpu_findings(os.environ):
        findings.setdefault(each.subject, []).append(each)
    return findings


@pytest.mark.slow
@pytest.mark.parametrize(("path", "folder"), [(True, "bin"), (False, "cuda/bin")])
def test_a_machine_with_a_gpu_has_its_driver_nvcc_and_compiler_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: bool, folder: str
) -> None:
    executable(tmp_path / "bin/nvidia-smi", NVIDIA_SMI.format(driver="580.65.06", cuda="13.0"))
    executable(tmp_path / folder / "nvcc", NVCC)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    if path:
        monkeypatch.delenv("CUDA_HOME", raising=False)
    else:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    found = findings_about_gpus()
    assert found["gpu"][0].why == "0: NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"
    assert (found["driver"][0].level, found["driver"][0].why) == (Level.OK, "supports CUDA up to 13.0")
    assert found["nvcc"][0].why == f"{tmp_path}/{folder}/nvcc, CUDA 13.0"
    assert found["compiler"][0].level is (Level.OK if shutil.which("c++") else Level.WARNING)
    if importlib.util.find_spec("verl") and not importlib.util.find_spec("flash_attn"):
        flash, slow = found["flash-attn"][-1], found["log-probs"][-1]
        assert flash.level is slow.level is Level.WARNING
        assert "flash-attn is not installed: verl asks for flash_attention_2" in flash.why
        assert "and its critic has no other choice" in flash.why
        assert slow.why.endswith("slower path for log-probabilities")
        assert flash.next_step.startswith("build flash-attn 2.8.3 with nvcc")


@pytest.mark.slow
def test_what_a_machine_with_a_gpu_lacks_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "bin/nvidia-smi", NVIDIA_SMI.format(driver="580.65.06", cuda="N/A"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin" + ("" if shutil.which("c++", path="/bin") else ":/bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    found = {subject: some[-1] for subject, some in findings_about_gpus().items()}
    assert found["driver"].why == "nvidia-smi prints no CUDA version"
    assert found["nvcc"].level is found["compiler"].level is Level.WARNING
    assert found["nvcc"].why.startswith(
        f"not found at {tmp_path}/nothing/bin/nvcc: flash-attn cannot be built"
    )
    assert "set CUDA_HOME to its folder" in found["nvcc"].next_step
    assert found["compiler"].why.startswith("no C++ compiler (c++, g++, clang++)")


def test_a_module_that_ends_python_is_the_only_one_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {"crashing": "import os; os.abort()", "leaving": "raise SystemExit('no GPU')"}
    sources |= {"talking": "import atexit; print('hello'); atexit.register(print, 'bye')"}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert try_imports(["json", "crashing", "leaving", "talking", "absent"]).errors == {
        "crashing": "ends Python when it is imported (status -6)",
        "leaving": "cannot be imported: SystemExit: no GPU",
        "absent": "is not installed",
    }


def test_a_machine_without_a_gpu_is_not_asked_for_what_gpus_need_and_a_broken_nvidia_smi_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = findings_about_gpus()
    why = "none (no nvidia-smi): training runs on the CPU, for the tiny recipes"
    assert [finding.why for finding in found["gpu"]] == [why]
    assert {"driver", "nvcc", "compiler", "flash-attn", "log-probs"}.isdisjoint(found)
    executable(tmp_path / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    [gpu] = findings_about_gpus()["gpu"]
    assert (gpu.level, gpu.next_step) == (Level.WARNING, "repair the driver")
    assert "exit status 9" in gpu.why


@pytest.mark.parametrize(
    ("supported", "built", "level", "text"),
    [
        ("12.2", None, Level.WARNING, "up to 12.2; the GPU locks need a driver for CUDA 13"),
        ("12.4", "13.0", Level.ERROR, "up to 12.4, torch is built for CUDA 13.0; install a driver for CUDA 13.0"),
        ("13.2", "12.8", Level.OK, "up to 13.2, torch is built for 12.8"),
        ("13.0", "13.2", Level.OK, "up to 13.0, torch is built for 13.2"),  # CUDA's minor version compatibility
    ],
)  # fmt: skip
def test_a_driver_runs_the_cuda_of_its_major_version_and_older_ones(
    supported: str, built: str | None, level: Level, text: str
) -> None:
    finding = driver_finding(re.match(r"(\d+)\.(\d+)", supported), built)
    assert finding.level is level
    assert text in finding.text


@pytest.mark.parametrize("content", ["", "[1, 2]", "a: [b", "benchmark: aime24\nverl: {}\n", None])
def test_json_is_json_for_what_is_no_configuration_too(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "broken.yaml"
    if content is not None:
        file.write_text(content)
    report = doctor(file, "--json")
    assert report["ok"] is False
    assert [(one["status"], one["subject"]) for one in report["findings"]] == [("fail", "config")]


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda file: file.stem)
def test_each_shipped_file_is_recognised_also_through_what_it_extends(file: Path) -> None:
    kind: object
    try:
        kind = _kind_to_check(file, [])
    except ConfigError as error:
        kind = re.search(r"this is an? .*, which afm doctor does not check; .*afm ", str(error))
    assert kind


def test_a_part_of_an_evaluation_is_not_one_of_a_training(tmp_path: Path) -> None:
    assert _kind_to_check(ROOT / "configs/eval/math.yaml", []) is EVAL_FILE
    (tmp_path / "mine.yaml").write_text("extends: math\nname: mine\n")
    (tmp_path / "again.yaml").write_text("extends: mine.yaml\nname: again\n")
    assert _kind_to_check(tmp_path / "again.yaml", []) is AGENT_FILE
    (tmp_path / "mine.yaml").write_text("extends: again.yaml\nname: mine\n")
    with pytest.raises(ConfigError, match="`extends` is circular"):
        _kind_to_check(tmp_path / "again.yaml", [])
