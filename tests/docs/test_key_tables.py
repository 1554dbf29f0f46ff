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


def test_a_key_without_a_docstring_is_refused() -> None:
    with pytest.raises(ValueError, match="no docstring below share_of_start, first"):
        reference_pages.key_table("verl_ext.alarms.EntropyCollapse")
