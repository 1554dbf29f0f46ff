"""Files of GitHub at a commit, and the prompts in them. All texts here are written for the tests."""

import hashlib
import json
from functools import partial

import pytest
from extras import needs

from afm.agents import load_agent
from afm.agents.prompt_source import PromptSource
from afm.datasets.hub_sets import read_hub_sets
from afm.datasets.published import PublishedPrompt
from afm.errors import ConfigError, DataError

needs("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = "a b/prompts.py"
PY = b'''raise SystemExit("never executed")
ASK = """
Answer with tags. JSON looks so: {"a": 1}
"""
WIKI = ("Look it " "up.").strip()
JUDGE = """Is {answer} right for {question}? {{"ok": true}}"""
COUNT = 3
'''


@pytest.fixture
def sets(hub, tmp_path, monkeypatch):
    """A list with one set on GitHub, whose file the server has."""
    hub.github = {f"own/agents/{COMMIT}/a b/prompts.py": PY}
    monkeypatch.setenv("GITHUB_RAW_ENDPOINT", f"http://127.0.0.1:{hub.port}/")
    monkeypatch.setenv("HF_TOKEN", "hf_a_secret_of_a_test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    forms = {"ask": {}, "wiki": {"form": "user\n\n{prompt}\n{question}"}, "judge": {"form": "{prompt}"}}
    entry = {
        "repository": "own/agents",
        "kind": "github",
        "revision": COMMIT,
        "pinned": [{"name": FILE, "size": len(PY), "checksum": hashlib.sha256(PY).hexdigest()}],
        "prompts": [
            {"name": name, "file": FILE, "constant": name.upper()} | form for name, form in forms.items()
        ],
    }
    (tmp_path / "sets.yaml").write_text(json.dumps({"sets": {"prompts": entry}}))
    return tmp_path / "sets.yaml"


@pytest.fixture
def download(said, sets, tmp_path):
    return partial(said, "data", "download", sets, "--output-dir", tmp_path / "raw")


def test_prompts_of_a_commit_on_github_become_texts(hub, said, download, sets, tmp_path):
    data = tmp_path / "raw"
    prepare = partial(said, "data", "prepare", "published", sets, "--output-dir", tmp_path / "out", "--data")
    assert f"prompts: own/agents at {COMMIT[:12]} (pinned), 1 file" in download()
    [sent] = hub.headers
    assert "authorization" not in map(str.lower, sent)
    planned = prepare(data, "--dry-run").replace("\n", "")
    assert f"prompts: 3 prompts, made into {data}/prompts" in planned
    assert not (data / "prompts/ask.txt").exists()
    missing = "no such file; `afm data download` fetches it"
    assert missing in prepare(tmp_path, "--dry-run", status=1)
    prepare(data)
    texts = {path.stem: path.read_text() for path in (data / "prompts").glob("*.txt")}
    assert texts == {
        "ask": 'Answer with tags. JSON looks so: {"a": 1}\n\nQuestion: {question}\n',
        "wiki": "user\n\nLook it up.\n{question}\n",
        "judge": 'Is {answer} right for {question}? {{"ok": true}}\n',
    }
    asked = len(hub.asked)
    assert "nothing to fetch" in download()
    assert len(hub.asked) == asked


def test_files_of_github_that_are_wrong_or_missing_are_told(hub, download, tmp_path, monkeypatch):
    [name] = hub.github
    hub.github[name] = PY.replace(b"Look", b"Pook")
    assert "has checksum" in download(status=1)
    assert not (tmp_path / "raw/prompts/a b/prompts.py").exists()
    hub.github.clear()
    missing = download(status=1)
    assert "a b/prompts.py: github own/agents of http://127.0.0.1" in missing
    assert "404" in missing
    monkeypatch.setenv("GITHUB_RAW_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    assert "set GITHUB_RAW_ENDPOINT to a mirror of its raw files" in download(status=1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"revision": "main"}, "needs `revision` .a whole commit. and `pinned`"),
        ({"pinned": []}, "needs `revision` .a whole commit. and `pinned`"),
        ({"kind": "dataset"}, "`pinned` goes with kind github"),
        ({"pinned": [{"name": "../x", "size": 1, "checksum": "0" * 64}]}, "outside the folder"),
        ({"pinned": [{"name": "x", "size": 1, "checksum": "0" * 40}]}, "expected a SHA-256"),
    ],
)
def test_a_set_on_github_is_pinned_in_its_list(sets, change, reason):
    known = json.loads(sets.read_text())
    known["sets"]["prompts"] |= change
    sets.write_text(json.dumps(known))
    with pytest.raises(ConfigError, match=reason):
        read_hub_sets(sets)


def test_prompts_around_the_questions_of_rows(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    asked = ("1+1?", "What is 2+2, then?")
    turns = [f"Solve it.\n\nTask:\n{question}\nEnd with a box.\n" for question in asked]
    rows = [{"prompt": [{"role": "user", "content": turn}]} for turn in turns]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    made = PublishedPrompt(name="math", file="rows.parquet").write(tmp_path, tmp_path)
    assert made.read_text() == "Solve it.\n\nTask:\n{question}\nEnd with a box.\n\n"
    asked = PromptSource.load(made).messages(load_agent("math"), "What is 2+2, then?")
    assert asked == rows[1]["prompt"]
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: 1 different prompts, expected two or more"):
        PublishedPrompt(name="math", file="rows.parquet").write(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("file", "constant", "reason"),
    [
        ("p.py", "ASKS", r"p\.py: no string constant 'ASKS'; did you mean 'ASK'"),
        ("p.py", "COUNT", "no string constant 'COUNT'"),
        ("broken.py", "ASK", "not a Python file"),
        ("q.py", "ASK", "no such file; `afm data download` fetches it"),
        ("p.py", "ASK", r"\{question\} occurs 0 times, expected once"),
    ],
)
def test_constants_that_are_no_prompts_are_refused_with_the_reason(file, constant, reason, tmp_path):
    (tmp_path / "p.py").write_bytes(PY)
    (tmp_path / "broken.py").write_text("def (")
    with pytest.raises(DataError, match=reason):
        PublishedPrompt(name="ask", file=file, constant=constant, form="{prompt}").write(tmp_path, tmp_path)
