from pathlib import Path

import pytest

from llamafactory_patch.parity import SCRIPTS, our_settings, parity_page

pytest.importorskip("llamafactory")

ROOT = Path(__file__).parents[2]


def test_the_page_in_the_docs_is_the_one_the_configurations_give():
    command = "python -m llamafactory_patch.parity > docs/sft_parity.md"
    assert (ROOT / "docs/sft_parity.md").read_text("utf-8") == parity_page(ROOT / "configs/sft"), (
        f"run: {command}"
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_published_script_has_its_recipe_with_the_same_settings(name):
    ours = our_settings(ROOT / f"configs/sft/{name}.yaml")
    said = {
        field: value
        for field in SCRIPTS[name].__slots__
        if (value := getattr(SCRIPTS[name], field)) is not None
    }
    assert {field: getattr(ours, field) for field in said} == said
