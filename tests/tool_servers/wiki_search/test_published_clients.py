"""AFM's wiki clients, unmodified, against our wiki server."""

from __future__ import annotations

import json

from published_repository import lay_out, needs_repository, run

UTILS = "verl/verl/tools/utils/search_r1_like_utils.py"
SIMPLE = "AFM/tool_servers/web_server/server_tests/test_wiki_rag_simple.py"


@needs_repository
def test_the_search_of_afms_wiki_tool_finds_passages(start, world, tmp_path):
    page = world.page(1500)
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from search_r1_like_utils import perform_single_search_batch
print(json.dumps(perform_single_search_batch(sys.argv[2] + "/retrieve", [sys.argv[3]], topk=3, timeout=30)))
"""
    folder = (lay_out(tmp_path, UTILS) / UTILS).parent
    text, facts = json.loads(run(code, folder, start().url, page.title))
    assert (facts["status"], facts["total_results"]) == ("success", 3)
    assert page.text in json.loads(text)["result"]


@needs_repository
def test_afms_test_of_the_wiki_server_passes(start, tmp_path):
    script = lay_out(tmp_path, SIMPLE) / SIMPLE
    text = script.read_text().replace("http://127.0.0.1:8000", start().url)  # replaces the fixed port
    text = text.replace("machine learning algorithms", "friend of the mayor")  # our corpus has other pages
    printed = run(text)
    assert "Doc: 3" in printed
    assert "Merged Result" in printed
