"""What the viewer shows of a run besides its episodes: the table of files, settings, logs, the model's tokenizer."""

import json
import os
import time

import httpx
import pytest
from extras import needs

from afm.evaluation.viewer import EpisodeIndex
from afm.evaluation.viewer.run_files import LOG_PIECE_BYTES, RunFiles

needs("fastapi")

MANIFEST = {
    "started": "2026-03-01T10:00:00+00:00",
    "sources": {"model": "models/small"},
    "settings": {"sampling": {"temperature": 0.5}, "rounds": 2, "seed": 7},
    "versions": {"torch": "2.13.0"},
    "machine": {"commit": "abc123"},
}


@pytest.fixture
def run(tmp_path, viewer):
    """An evaluation of four episodes, and an older distillation of one."""
    folder = tmp_path / "run"
    viewer.write(folder / "distil.jsonl", [viewer.episode(9)])
    os.utime(folder / "distil.jsonl", (1e9, 1e9))
    viewer.write(folder / "eval/episodes.jsonl", [viewer.episode(n, passed=n > 1) for n in range(1, 5)])
    (folder / "eval/manifest.json").write_text(json.dumps(MANIFEST))
    return folder


@pytest.fixture
def get(run, viewer, tmp_path):
    """``get(path)``: the JSON that the running viewer answers, or its response where it refuses."""
    with viewer.showing(EpisodeIndex(run, tmp_path / "index.sqlite")) as address:

        def ask(path, **query):
            response = httpx.get(address + path, params=query)
            return response.json() if response.is_success else response

        yield ask


def test_the_table_has_a_row_for_each_file_and_evaluations_are_first(run, get):
    evaluation, distillation = get("/api/files")
    assert (evaluation["name"], evaluation["episodes"], evaluation["is_evaluation"]) == (
        "eval/episodes.jsonl",
        4,
        True,
    )
    assert (evaluation["pass_at_1"], evaluation["calls"], evaluation["tokens"]) == (0.75, 1.0, 12.5)
    assert (distillation["name"], distillation["is_evaluation"]) == ("distil.jsonl", False)
    assert distillation["date"] == "2001-09-09T01:46:40+00:00"
    os.utime(run / "distil.jsonl", (4e9, 4e9))  # newer than the evaluation
    assert [row["name"] for row in get("/api/files")] == ["eval/episodes.jsonl", "distil.jsonl"]


def test_the_list_begins_with_the_newest_evaluation(run, get, viewer):
    viewer.write(run / "eval_old/episodes.jsonl", [viewer.episode(20), viewer.episode(21)])
    manifest = MANIFEST | {"started": "2001-01-01T00:00:00+00:00"}
    (run / "eval_old/manifest.json").write_text(json.dumps(manifest))
    viewer.until(lambda: get("/api/episodes")["total"] == 7)
    names = ["e1", "e2", "e3", "e4", "e20", "e21", "e9"]
    assert [row["name"] for row in get("/api/episodes")["rows"]] == names
    assert [row["name"] for row in get("/api/episodes", offset=3, limit=2)["rows"]] == ["e4", "e20"]
    distilled = get("/api/episodes", file=str(run / "distil.jsonl"))
    assert [row["name"] for row in distilled["rows"]] == ["e9"]


@pytest.mark.parametrize(("counted", "expected"), [(4, 0.5), (3, 0.75)])
def test_pass_at_1_comes_from_metrics_that_counted_the_same_episodes(run, get, counted, expected):
    """Metrics average over questions, and may be those of an earlier part of the file."""
    (run / "eval/metrics.json").write_text(json.dumps({"episodes": counted, "pass_at_1": {"value": 0.5}}))
    assert get("/api/files")[0]["pass_at_1"] == expected


def test_settings_are_shown_in_short_and_in_full(get):
    number = get("/api/files")[0]["id"]
    about = get(f"/api/files/{number}")
    facts = dict(about["facts"])
    assert facts["model"] == "models/small"
    assert (facts["rounds"], facts["temperature"], facts["seed"]) == ("2", "0.5", "7")
    assert (facts["commit"], facts["versions"], facts["agent"]) == ("abc123", "torch 2.13.0", "not recorded")
    assert [part["name"] for part in about["parts"]] == ["eval/manifest.json"]
    assert get("/api/files/77").json() == {"error": "there is no file 77"}


def test_a_log_is_read_from_its_end_in_whole_lines(run, get):
    lines = [f"line {n:06}\n" for n in range(20_000)]
    (run / "train.log").write_text("".join(lines))
    assert get("/api/logs") == [{"name": "train.log", "size": 240_000}]
    last = get("/api/logs/read", name="train.log")
    assert last["end"] == 240_000
    assert LOG_PIECE_BYTES - 12 <= len(last["text"]) <= LOG_PIECE_BYTES
    assert last["text"].startswith("line ")
    earlier = get("/api/logs/read", name="train.log", end=last["begin"])
    assert (earlier["text"] + last["text"]) in "".join(lines)

    with (run / "train.log").open("a") as log:
        log.write("the newest\n")
    assert get("/api/logs/read", name="train.log", begin=last["end"])["text"] == "the newest\n"


def test_a_log_shows_what_a_terminal_would_show(run, get):
    (run / "a.log").write_bytes(b"10 %\r50 %\r100 %\ndone\r\n\x1b[31mred\x1b[0m \xff\n")
    assert get("/api/logs/read", name="a.log")["text"].splitlines() == ["100 %", "done", "red \ufffd"]


def test_a_log_of_one_endless_line_is_read_at_once(run, get):
    (run / "a.log").write_text("y" * 1_000_000 + "\n")
    began = time.monotonic()
    assert get("/api/logs/read", name="a.log")["text"].count("y") == LOG_PIECE_BYTES - 1
    assert time.monotonic() - began < 3


def test_only_logs_of_the_run_are_read(run, get, tmp_path):
    (tmp_path / "other.log").write_text("not yours")
    (run / "link.log").symlink_to(tmp_path / "other.log")
    (run / ".hidden.log").write_text("hidden")
    (run / "secret.txt").write_text("no log")
    assert get("/api/logs") == []
    for name in ("link.log", ".hidden.log", "secret.txt", "../other.log", str(tmp_path / "other.log")):
        assert get("/api/logs/read", name=name).status_code == 404, name


def test_a_secret_of_the_environment_is_in_no_log_and_no_setting(run, viewer, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_veryverysecret")
    (run / "a.log").write_text("sent hf_veryverysecret\n")
    (run / "eval/manifest.json").write_text(json.dumps(MANIFEST | {"settings": {"key": "hf_veryverysecret"}}))
    files = RunFiles(run)
    assert files.read_log("a.log")["text"] == "sent [secret]\n"
    assert "veryverysecret" not in json.dumps(files.about(run / "eval/episodes.jsonl"))


class TestTokens:
    """The tokenizer of the model that made the episodes is found, and reads its tokens."""

    @pytest.fixture
    def trained(self, tmp_path):
        pytest.importorskip("transformers")
        from afm.models.tiny import train_tokenizer

        folder = tmp_path / "run/models/small"
        train_tokenizer(["a river is long, how long?"] * 20, folder, vocab_size=270)
        return folder

    def test_the_model_of_the_manifest_is_found(self, run, trained):
        decode, note = RunFiles(run).decoder(run / "eval/episodes.jsonl")
        from afm.models.tokenizer import ChatTokenizer

        ids = ChatTokenizer.load(trained).encode("a river")
        assert decode(ids) == "a river"
        assert note == f"Decoded with the tokenizer of {trained}."

    def test_a_broken_tokenizer_is_named(self, run, trained):
        (trained / "tokenizer.json").write_text("{}")
        decode, note = RunFiles(run).decoder(run / "eval/episodes.jsonl")
        assert decode is None
        assert str(trained) in note
        assert "--tokenizer MODEL_FOLDER" in note

    def test_without_a_folder_the_wanted_name_is_shown(self, run):
        decode, note = RunFiles(run).decoder(run / "eval/episodes.jsonl")
        assert decode is None
        assert note.startswith("There is no tokenizer in models/small.")
