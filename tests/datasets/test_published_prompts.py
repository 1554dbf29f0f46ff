"""Files of GitHub at a commit, and the prompts that are taken out of them; every text here is the tests' own."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
from extras import needs
from typer.testing import CliRunner

from afm.agents import load_agent
from afm.agents.prompt_source import PromptSource
from afm.cli.data import app
from afm.datasets.download import plan, run
from afm.datasets.hub_sets import read_hub_sets
from afm.datasets.published import PublishedPrompt, text_constant
from afm.errors import AfmError, ConfigError, DataError

needs("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
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
    path = tmp_path / "sets.yaml"
    pinned = {"name": "a b/prompts.py", "size": len(PY), "checksum": hashlib.sha256(PY).hexdigest()}
    prompts = [
        {"name": "ask", "file": "a b/prompts.py", "constant": "ASK"},
        {
            "name": "wiki",
            "file": "a b/prompts.py",
            "constant": "WIKI",
            "form": "user\n\n{prompt}\n{question}",
        },
        {"name": "judge", "file": "a b/prompts.py", "constant": "JUDGE", "form": "{prompt}"},
    ]
    one = {"repository": "own/agents", "kind": "github", "revision": COMMIT}
    path.write_text(json.dumps({"sets": {"prompts": one | {"pinned": [pinned], "prompts": prompts}}}))
    return path


def afm(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def failure(sets, folder):
    done = afm("download", sets, "--output-dir", folder)
    assert isinstance(done.exception, AfmError), done.output
    return str(done.exception)


def test_prompts_of_a_commit_on_github_become_texts(hub, sets, tmp_path):
    data = tmp_path / "raw"
    told = afm("download", sets, "--output-dir", data)
    assert told.exit_code == 0, told.exception
    assert f"prompts: own/agents at {COMMIT[:12]} (pinned), 1 files" in told.output
    assert [names & {"authorization"} for _, names in hub.header_names] == [set()]
    dry = afm("prepare", "published", sets, "--data", data, "--output-dir", tmp_path / "out", "--dry-run")
    assert f"prompts: 3 prompts, made into {data}/prompts" in dry.output.replace("\n", "")
    assert not (data / "prompts/ask.txt").exists()
    nothing = afm(
        "prepare", "published", sets, "--data", tmp_path, "--output-dir", tmp_path / "out", "--dry-run"
    )
    assert "no such file; `afm data download` fetches it" in str(nothing.exception)
    done = afm("prepare", "published", sets, "--data", data, "--output-dir", tmp_path / "out")
    assert done.exit_code == 0, done.exception
    texts = {path.stem: path.read_text() for path in (data / "prompts").glob("*.txt")}
    assert texts == {
        "ask": 'Answer with tags. JSON looks so: {"a": 1}\n\nQuestion: {question}\n',
        "wiki": "user\n\nLook it up.\n{question}\n",
        "judge": 'Is {answer} right for {question}? {{"ok": true}}\n',
    }
    asked = len(hub.asked)
    assert "nothing to fetch" in afm("download", sets, "--output-dir", data).output
    assert len(hub.asked) == asked


def test_a_cut_off_file_of_github_goes_on_where_it_was(hub, sets, tmp_path):
    big = bytes(range(256)) * 4096 * 12
    hub.github[f"own/agents/{COMMIT}/a b/prompts.py"] = big
    checksum, size = hashlib.sha256(big).hexdigest(), len(big)
    text = re.sub(
        r'"size": \d+, "checksum": "\w+"', f'"size": {size}, "checksum": "{checksum}"', sets.read_text()
    )
    sets.write_text(text)
    hub.cut_at = 11 << 20  # the client writes 10 MiB at once
    planned = plan(read_hub_sets(sets).sets, tmp_path / "raw")
    assert run(planned, lambda *_: None) == {}
    assert (tmp_path / "raw/prompts/a b/prompts.py").read_bytes() == big
    assert [start for _, start, _ in hub.sent][:2] == [0, 10 << 20]


def test_files_of_github_that_are_wrong_or_missing_are_told(hub, sets, tmp_path, monkeypatch):
    [name] = hub.github
    hub.github[name] = PY.replace(b"Look", b"Pook")
    assert "has checksum" in failure(sets, tmp_path / "raw")
    assert not (tmp_path / "raw/prompts/a b/prompts.py").exists()
    hub.github.clear()
    missing = failure(sets, tmp_path / "raw")
    assert "a b/prompts.py: github own/agents of http://127.0.0.1" in missing
    assert "404" in missing
    monkeypatch.setenv("GITHUB_RAW_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    assert "set GITHUB_RAW_ENDPOINT to a mirror of its raw files" in failure(sets, tmp_path / "raw")


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
    turns = [
        f"Solve it.\n\nTask:\n{question}\nEnd with a box.\n" for question in ("1+1?", "What is 2+2, then?")
    ]
    rows = [{"prompt": [{"role": "user", "content": turn}]} for turn in turns]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    made = PublishedPrompt(name="math", file="rows.parquet").write(tmp_path, tmp_path)
    assert made.read_text() == "Solve it.\n\nTask:\n{question}\nEnd with a box.\n\n"
    asked = PromptSource.load(made).messages(load_agent("math"), "What is 2+2, then?")
    assert asked == rows[1]["prompt"]
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: 1 different prompts, expected two or more"):
        PublishedPrompt(name="math", file="rows.parquet").write(tmp_path, tmp_path)


def test_constants_that_are_no_texts_are_refused_with_the_names_that_are(tmp_path):
    (tmp_path / "p.py").write_bytes(PY)
    with pytest.raises(DataError, match=r"p\.py: no constant 'ASKS' that is a text; did you mean 'ASK'"):
        text_constant(tmp_path / "p.py", "ASKS")
    with pytest.raises(DataError, match="no constant 'COUNT' that is a text"):
        text_constant(tmp_path / "p.py", "COUNT")
    with pytest.raises(DataError, match=r"\{question\} occurs 0 times, expected once"):
        PublishedPrompt(name="ask", file="p.py", constant="ASK", form="{prompt}").write(tmp_path, tmp_path)
    (tmp_path / "p.py").write_text("def (")
    with pytest.raises(DataError, match="no Python file"):
        text_constant(tmp_path / "p.py", "ASK")
    with pytest.raises(DataError, match="no such file; `afm data download` fetches it"):
        text_constant(tmp_path / "q.py", "ASK")
