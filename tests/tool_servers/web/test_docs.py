"""The example in the docs, as it stands there, with the ports of two running servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_requests_alone_can_use_both_servers(start, site, tmp_path):
    pytest.importorskip("requests")
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/web.md").read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 11
    site.pages["/anduin"] = (200, "text/html", b"<p>The Anduin is 1388 miles long.</p>")
    store = tmp_path / "pages.jsonl"
    store.write_text(json.dumps({"url": f"{site.url}/anduin", "title": "Anduin", "text": "A river."}))
    search = start("web_search", WEB_PAGE_STORE=store)
    crawl = start("crawl_page", {"trusted": [site.host], "workers": 1})
    program = example.replace("http://127.0.0.1:9001", search.url).replace("http://127.0.0.1:9000", crawl.url)
    environment = os.environ | {"WEB_SERVER_TOKEN": "a-long-random-token", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == f"{site.url}/anduin The Anduin is 1388 miles long.\n", done.stderr


@pytest.mark.slow
def test_load_script_finds_no_error_in_a_short_run(tmp_path):
    out = tmp_path / "load.json"
    command = [sys.executable, str(ROOT / "benchmarks/load_web.py"), "--smoke", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["errors"] == 0
    assert result["answers"]["200"] > 20
