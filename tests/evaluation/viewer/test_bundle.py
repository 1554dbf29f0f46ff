"""A run as a static folder: what it holds, what it must not hold, and what it refuses."""

import json
import os
import re
import shutil
import subprocess

import pytest

from afm.trajectory.record import Verdict

# An example of the form that a provider's keys have, cut so that no scanner takes this file for a leak.
KEY = "sk-proj-" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5bC7dE9fG1hJ3"


@pytest.fixture
def run(tmp_path, viewer):
    folder = tmp_path / "run"
    viewer.write(folder / "a.jsonl", [viewer.episode(n) for n in range(1, 61)])
    viewer.write(folder / "b.jsonl", [viewer.episode(100)])
    os.utime(folder / "b.jsonl", (1e9, 1e9))
    (folder / "train.log").write_text("step 1\n")
    return folder


def content(folder, name="data/run.js"):
    """The JSON that a script of a bundle carries."""
    text = (folder / name).read_text(encoding="ascii")
    return json.loads(re.fullmatch(r'AFM_BUNDLE\.take\("\w+", (.*)\);\n', text, re.DOTALL)[1])


def test_a_bundle_holds_a_run(run, afm, tmp_path):
    out = tmp_path / "out"
    printed = afm("view", run, "--bundle", out).stdout.splitlines()
    assert printed == [str(out / "index.html")]
    data = content(out)
    assert [(row["name"], row["episodes"]) for row in data["files"]] == [("a.jsonl", 60), ("b.jsonl", 1)]
    assert data["logs"][0]["text"] == "step 1\n"
    assert len(data["rows"]) == 61
    episodes = {key: value for n in range(3) for key, value in content(out, f"data/episodes-{n}.js").items()}
    assert {row["file"] for row in data["rows"]} == {"a.jsonl", "b.jsonl"}
    assert {str(row["id"]) for row in data["rows"]} == set(episodes)
    assert str(tmp_path) not in "".join(file.read_text() for file in out.rglob("*") if file.is_file())


def test_long_files_share_what_short_ones_leave_and_the_page_says_what_is_missing(run, afm, tmp_path):
    out = tmp_path / "out"
    printed = afm("view", run, "--bundle", out, "--bundle-episodes", 10).stdout
    sentence = "51 of 60 episodes of a.jsonl: --bundle-episodes 10 keeps its first 9."
    assert f"left out: {sentence}" in printed
    assert sentence in content(out)["left_out"]
    assert len(content(out)["rows"]) == 10


def test_lines_that_are_no_episodes_are_said_to_be_left_out(run, afm, tmp_path, viewer):
    line = viewer.episode(200).model_dump_json()
    with (run / "a.jsonl").open("a") as job:
        job.write("{}\n" + line[:50])
    with (run / "b.jsonl").open("a") as job:
        job.write(line)  # whole, although no line break follows
    printed = afm("view", run, "--bundle", tmp_path / "out").stdout
    assert "left out: 1 unreadable line of a.jsonl.\n" in printed
    assert "left out: a.jsonl:62: a half-written last line. If the job still runs" in printed
    assert "b.jsonl:" not in printed
    assert [row["episodes"] for row in content(tmp_path / "out")["files"]] == [60, 2]


def test_no_secret_leaves_the_machine(run, afm, tmp_path, viewer, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "my-very-own-key")
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----"
    leak = f"my-very-own-key {KEY} {key}"
    evidence = Verdict(score=1.0, evidence=leak)
    viewer.write(
        run / "c.jsonl", [viewer.episode(1, question=leak, verdict=evidence, provenance={leak: [leak]})]
    )
    (run / "train.log").write_text(leak)
    (run / "settings.json").write_text(json.dumps({"key": leak}))
    afm("view", run, "--bundle", tmp_path / "out")
    text = "".join(file.read_text() for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert text.count("[secret]") > 10
    for secret in ("my-very-own-key", KEY, "MIIabc"):
        assert secret not in text


def test_a_folder_with_other_files_is_refused_and_an_older_bundle_is_replaced(run, afm, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    refused = afm("view", run, "--bundle", out, status=2)
    assert f"--bundle {out}: holds other files; expected a new folder" in refused.stderr
    assert [file.name for file in out.iterdir()] == ["thesis.tex"]

    (out / "thesis.tex").unlink()
    afm("view", run, "--bundle", out)
    assert (out / "data/episodes-2.js").exists()
    afm("view", run, "--bundle", out, "--bundle-episodes", 2)
    assert sorted(file.name for file in (out / "data").iterdir()) == ["episodes-0.js", "run.js"]


def test_a_full_disk_is_one_error_and_leaves_no_page(run, afm, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        page = disk / "out/index.html"
        afm("view", run, "--bundle", disk / "out", "--bundle-episodes", 2)
        assert page.is_file()
        for left in (8192, 0):  # the second time, not even the first file of a new bundle fits
            filler = disk / "filler"
            filler.write_bytes(b"x" * (shutil.disk_usage(disk).free - left))
            full = afm("view", run, "--bundle", disk / "out", status=1)
            assert full.stderr.count("\n") == 1
            assert re.match(rf"error: {disk}/out/data/\S+\.js: No space left on device; delete", full.stderr)
            assert not page.exists()
            shutil.rmtree(disk / "out")
            filler.unlink()
        (disk / "out/data").mkdir(parents=True)  # what a disk without any space leaves
        afm("view", run, "--bundle", disk / "out", "--bundle-episodes", 2)
        assert page.is_file()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_figures_that_json_lacks_become_null(run, afm, tmp_path, viewer):
    (run / "a.jsonl").unlink()
    (run / "b.jsonl").write_text(viewer.line_without_numbers(1))
    afm("view", run, "--bundle", tmp_path / "out")
    (episode,) = content(tmp_path / "out", "data/episodes-0.js").values()
    assert (episode["cost"]["wall_seconds"], episode["verdict"]["score"]) == (None, None)
    assert "NaN" not in (tmp_path / "out/data/run.js").read_text()
