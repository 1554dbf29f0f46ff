import re
import subprocess
from pathlib import Path

import pytest
from published_repository import REPOSITORY, needs_repository, published_text

from afm.presets import published
from afm.settings import Environment
from afm.tools import registry
from llamafactory_patch import config as sft_config
from verl_ext import settings as rl_settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/from_afm.md").read_text("utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
SHIPPED = ("configs/", "data/", "docs/", "evaluation/", "tool_servers/", "train/")
MADE = re.compile(r"(data/\w+/(raw|sft|rl|eval)|models|runs)(/|$)")


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_script_and_file_of_ours_on_the_page_exists() -> None:
    named = {word.split()[0] for row in ROWS for word in quoted(row[-1])}
    block = re.search(r"```bash.*?\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    named |= set(re.findall(r"(?:data|train|evaluation|tool_servers|configs)/[\w./-]+", block[1]))
    paths = {word for word in named if word.startswith(SHIPPED) and not MADE.match(word)}
    assert len(paths) > 15
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_link_on_the_page_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def listed(*words: str) -> list[str]:
    """Paths of the published repository."""
    command = ["git", "-C", REPOSITORY, "ls-tree", "-r", "-t", "--name-only", published().revision, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@needs_repository
def test_every_path_of_afm_on_the_page_exists_there() -> None:
    named = {word for row in ROWS for word in quoted(row[0]) if re.match(r"(AFM|verl|LLaMA-Factory)/", word)}
    local = {"AFM/models/web_agent/AFM-WebAgent-32B-sft"}  # a download of the user's
    assert len(named) > 20
    assert sorted(named - set(listed()) - local) == []


@needs_repository
def test_every_variable_of_afms_environment_is_on_the_page() -> None:
    names = re.findall(r"^export (\w+)=", published_text("environment.sh"), re.MULTILINE)
    assert len(names) > 15
    assert [name for name in names if name not in PAGE] == []
    ours = {name.upper() for name in Environment.model_fields}
    assert [name for name in names if name not in ours] == ["UNI_API_URLS", "UNI_API_KEY"]


@needs_repository
@pytest.mark.parametrize("folder", ["search", "code", "mm", "afm"])
def test_every_tool_of_afms_files_is_on_the_page(folder: str) -> None:
    files = listed(f"verl/verl/tools/config/{folder}_tool_config/")
    assert files
    for file in files:
        for name in re.findall(r"class_name: (\S+)", published_text(file)):
            assert name in PAGE, file
            assert name.split(".")[2] in registry._OF_VERL, file


@pytest.mark.parametrize("table", [sft_config._SCRIPT_VARIABLES, rl_settings._SCRIPT_VARIABLES])
def test_every_name_that_an_error_explains_is_on_the_page(table: dict[str, str]) -> None:
    shell = {"EXPERIMENT_NAME", "SWANLAB_API_KEY", "SWANLAB_PROJECT"}  # theirs and ours alike
    assert [name for name in table if name not in PAGE and name not in shell] == []
