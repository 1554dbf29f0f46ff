"""Files of GitHub at a commit, and the prompts that are taken out of them; every text here is the tests' own."""

from __future__ import annotations

import hashlib
import json

import pytest
from extras import needs
from typer.testing import CliRunner

from afm.agents import load_agent
from afm.agents.prompt_source import PromptSource
from afm.cli.data import app
from afm.datasets.download import plan, run
from afm.datasets.hub_sets import read_hub_sets
from afm.datasets.published import PublishedPrompt
from afm.errors import AfmError, ConfigError, DataError

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


def afm(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def failure(sets, folder):
    done = afm("download", sets, "--output-dir", folder)
    assert isinstance(done.exception, AfmError), done.output
    return str(done.exception)


def test_prompts_of_a_commit_on_github_become_texts(hub, sets, tmp_path):
    data = tmp_path / "raw"

    def prepare(folder, *options):
        return afm("prepare", "published", sets, "--data", folder, "--output-dir", tmp_path / "out", *options)

    told = afm("download", sets, "--output-dir", data)
    assert told.exit_code == 0, told.exception
    assert f"prompts: own/agents at {COMMIT[:12]} (pinned), 1 files" in told.output
    assert [names & {"authorization"} for _, names in hub.header_names] == [set()]
    assert f"prompts: 3 prompts, made into {data}/prompts" in prepare(data, "--dry-run").output.replace(
        "\n", ""
    )
    assert not (data / "prompts/ask.txt").exists()
    missing = "no such file; `afm data download` fetches it"
    assert missing in str(prepare(tmp_path, "--dry-run").exception)
    assert prepare(data).exit_code == 0
    texts = {path.stem: path.read_text() for path in (data / "prompts").glob("*.txt")}
    assert texts == {
        "ask": 'Answer with tags. JSON looks so: {"a": 1}\n\nQuestion: {question}\n',
        "wiki": "user\n\nLook it up.\n{question}\n",
        "judge": 'Is {answer} right for {question}? {{"ok": true}}\n',
    }
    asked = len(hub.asked)
    assert "nothing to fetch" in afm("download", sets, "--output-dir", data).output
    assert len(hub.asked) == asked


@pytest.mark.slow
def test_a_cut_off_file_of_github_goes_on_where_it_was(hub, sets, tmp_path):
    big = bytes(range(256)) * 4096 * 12
    hub.github[f"own/agents/{COMMIT}/{FILE}"] = big
    known = json.loads(sets.read_text())
    pinned = {"name": FILE, "size": len(big), "checksum": hashlib.sha256(big).hexdigest()}
    known["sets"]["prompts"]["pinned"] = [pinned]
    sets.write_text(json.dumps(known))
    hub.cut_at = 11 << 20  # the client writes 10 MiB at once
    assert run(plan(read_hub_sets(sets).sets, tmp_path / "raw"), lambda *_: None) == {}
    assert (tmp_path / "raw/prompts" / FILE).read_bytes() == big
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


@pytest.mark.parametrize(
    ("file", "constant", "reason"),
    [
        ("p.py", "ASKS", r"p\.py: no constant 'ASKS' that is a text; did you mean 'ASK'"),
        ("p.py", "COUNT", "no constant 'COUNT' that is a text"),
        ("broken.py", "ASK", "no Python file"),
        ("q.py", "ASK", "no such file; `afm data download` fetches it"),
        ("p.py", "ASK", r"\{question\} occurs 0 times, expected once"),
    ],
)
def test_constants_that_are_no_prompts_are_refused_with_the_reason(file, constant, reason, tmp_path):
    (tmp_path / "p.py").write_bytes(PY)
    (tmp_path / "broken.py").write_text("def (")
    with pytest.raises(DataError, match=reason):
        PublishedPrompt(name="ask", file=file, constant=constant, form="{prompt}").write(tmp_path, tmp_path)
