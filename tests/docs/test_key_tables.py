"""The tables of keys in the documentation are those of the settings classes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "<!-- keys:" in page.read_text("utf-8")]


@pytest.fixture(scope="module")
def reference_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "benchmarks/reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_pages"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_keys_are_current(reference_pages: ModuleType, page: Path) -> None:
    text = page.read_text("utf-8")
    assert reference_pages.with_key_tables(text) == text, (
        "run `python benchmarks/reference_pages.py docs/reference`"
    )


def test_a_table_has_inherited_keys_defaults_and_links(reference_pages: ModuleType) -> None:
    rows = reference_pages.key_table("verl_ext.settings.RlSettings").splitlines()
    assert rows[2] == "| `agent` |  | Who acts: the name of a shipped agent, or the path of a YAML. |"
    by_key = {row.split("`")[1]: row for row in rows[2:]}
    assert by_key["model"].startswith("| `model` | required | Folder of the model")
    assert by_key["mask_observations"].startswith("| `mask_observations` | `true` | `false` also")
    assert "see [prompts.md](prompts.md)" in by_key["prompt"]
    assert r"`preset=script\|paper`" in by_key["published"]


def test_a_default_of_several_lines_stays_in_its_cell(reference_pages: ModuleType) -> None:
    table = reference_pages.key_table("afm.agents.spec.AgentSpec")
    assert r"| `prompt` | `{roles}\n\n{rules}` | Instruction text" in table


def test_a_key_without_a_docstring_is_refused(reference_pages: ModuleType) -> None:
    with pytest.raises(ValueError, match="no docstring below share_of_start, first"):
        reference_pages.key_table("verl_ext.alarms.EntropyCollapse")
