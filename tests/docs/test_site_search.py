"""The built site, opened from a disk in Chromium: its search works and nothing is wider than a phone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = Path(os.environ.get("DOCS_VENV", ROOT / ".venv-docs")) / "bin/mkdocs"
WIDER_THAN_SHOWN = """[...document.querySelectorAll("pre, table, .md-typeset__scrollwrap")]
    .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 80))"""


@pytest.mark.proof
@pytest.mark.skipif(not MKDOCS.is_file(), reason="./docs.sh makes the environment of the documentation")
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_site_is_searched_from_a_disk_and_fits_a_phone(tmp_path) -> None:
    api = pytest.importorskip("playwright.sync_api")
    build = [MKDOCS, "build", "--quiet", "--site-dir", tmp_path / "site"]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    with api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto((tmp_path / "site/index.html").as_uri())
        # The site reads the field when a key is released and when its index is ready. `fill` releases no key: filled
        # after the index was ready, the field was never read.
        field = page.locator(".md-search__input")
        field.click()
        field.press_sequentially("cassette")
        page.wait_for_selector(".md-search-result__item a", timeout=20_000)
        assert "assette" in page.inner_text(".md-search-result__list")
        narrow = browser.new_page(viewport={"width": 390, "height": 780})
        pages = sorted((tmp_path / "site").rglob("*.html"))
        assert len(pages) > 50
        for file in pages:
            narrow.goto(file.as_uri())
            assert narrow.evaluate("document.documentElement.scrollWidth") <= 390, file
            assert narrow.evaluate(WIDER_THAN_SHOWN) == [], file
        browser.close()
