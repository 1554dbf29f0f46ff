"""The tables of keys in the documentation are those of the settings classes."""

from pathlib import Path

import pytest
import reference_pages

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "<!-- keys:" in page.read_text("utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_keys_are_current(page: Path) -> None:
    text = page.read_text("utf-8")
    assert reference_pages.with_key_tables(text) == text, (
        "run `python benchmarks/reference_pages.py docs/reference`"
    )


def test_a_table_has_inherited_keys_defaults_and_links() -> None:
    rows = reference_pages.key_table("verl_ext.settings.RlSettings").splitlines()
    assert rows[2] == "| `agent` |  | Who acts: the name of a shipped agent, or the path of a YAML. |"
    by_key = {row.split("`")[1]: row for row in rows[2:]}
    assert by_key["model"].startswith("| `model` | required | Folder of the model")
    assert by_key["mask_observations"].startswith("| `mask_observations` | `true` | `false` also")
    assert "see [prompts.md](prompts.md)" in by_key["prompt"]
    assert r"`preset=script\|paper`" in by_key["published"]
    several_lines = reference_pages.key_table("afm.agents.spec.AgentSpec")
    assert r"| `prompt` | `{roles}\n\n{rules}` | Instruction text" in several_lines


def test_a_key_without_a_docstring_is_refused() -> None:
    with pytest.raises(ValueError, match="no docstring below share_of_start, first"):
        reference_pages.key_table("verl_ext.alarms.EntropyCollapse")
