import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs/images").glob("*.png"))


def test_every_picture_is_shown_and_small() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"!\[[^\]]+\]\(([^)]+\.png)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == set(PICTURES) != set()
    sizes = [picture.stat().st_size for picture in PICTURES]
    assert max(sizes) < 150_000
    assert sum(sizes) < 1_000_000


@pytest.mark.proof
@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_script_makes_every_picture(tmp_path) -> None:
    pytest.importorskip("playwright.sync_api")
    script = ROOT / "benchmarks/screenshots.py"
    subprocess.run([sys.executable, script, "--questions", "8", "--out", tmp_path], check=True, timeout=600)
    assert sorted(file.name for file in tmp_path.iterdir()) == [file.name for file in PICTURES]
