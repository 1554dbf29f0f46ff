"""The README does what it shows: its agent loads, its Python runs, its commands and links exist, its figures are the recorded ones."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import draw_readme
import pytest
import yaml

from afm.agents import load_agent

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def fence(language: str) -> str:
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return text


def test_the_agent_of_twelve_lines_loads(tmp_path: Path) -> None:
    text = fence("yaml")
    assert len(text.splitlines()) == 12
    file = tmp_path / "agent.yaml"
    file.write_text(text, encoding="utf-8")
    agent = load_agent(file)
    assert agent.name == yaml.safe_load(text)["name"]
    assert agent.tool_roles == {"code": "code"}


def test_the_python_runs_and_is_short() -> None:
    text = fence("python")
    assert len([line for line in text.splitlines() if line.strip()]) <= 10
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "README.md", "exec"), {})
    assert printed.getvalue().splitlines() == [
        "Trajectory(plan, think, code, observation, reflection, think, answer)",
        "score=1.0 parts={'correct': 1.0, 'format': 1.0} evidence=\"'95' equals the gold answer\"",
    ]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', TEXT):
        path, _, anchor = (target[0] or target[1]).partition("#")
        file = ROOT / path if path else ROOT / "README.md"
        assert file.exists() or path.startswith("docs/reference/"), path
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{path}#{anchor}: {anchors}"


def test_each_path_has_four_commands() -> None:
    section = TEXT.split("## Three paths")[1].split("\n## ")[0]
    commands = section.replace("\\\n", "")
    blocks = re.findall(r"^```bash\n(.*?)^```$", commands, re.MULTILINE | re.DOTALL)
    assert [len(block.splitlines()) for block in blocks] == [4, 4, 4]
    for block in blocks:
        for line in block.splitlines():
            assert shlex.split(line)


def test_the_table_and_the_pictures_show_the_recorded_figures() -> None:
    record = json.loads(draw_readme.RECORD.read_text(encoding="utf-8"))
    assert record["command"] in TEXT
    for seed in record["seeds"]:
        gain = seed["after_rl"] - seed["after_sft"]
        row = f"| {seed['seed']} | {seed['after_sft']:.3f} | {seed['after_rl']:.3f} | {gain:+.3f} ({seed['low']:.3f} to {seed['high']:.3f}) |"
        assert row in TEXT
        assert f"| {seed['minutes']} | {seed['peak_gib']} GiB |" in TEXT


@pytest.mark.parametrize(("name", "narrow"), [("quickstart", False), ("quickstart_narrow", True)])
def test_the_pictures_are_current(name: str, narrow: bool) -> None:
    record = json.loads(draw_readme.RECORD.read_text(encoding="utf-8"))
    drawn = draw_readme.picture(record, narrow=narrow)
    kept = (ROOT / f"docs/images/{name}.svg").read_text(encoding="utf-8")
    assert kept == drawn, "run `python benchmarks/draw_readme.py`"
