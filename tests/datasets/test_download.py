"""Sets of the Hub, fetched by the command line from a server that speaks the Hub's protocol and has its faults."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from extras import needs

from afm.datasets.download import plan, run
from afm.datasets.hub_sets import read_hub_sets
from afm.errors import ConfigError, UsageError

needs("huggingface_hub")

ROOT = Path(__file__).parents[2]
REVISION = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_secret_of_a_test"
NEWER = "89abcdef0123456789abcdef0123456789abcdef"
ROWS = b'[{"instruction": "q", "input": "", "output": "<answer>a</answer>"}]'
LARGE = bytes(range(256)) * 4096 * 24
"""24 MiB: more than the client writes at once, 10 MiB."""
SETS = """\
sets:
  small: {repository: own/small, files: ["*.json", "data/*"]}
  large: {repository: own/large, files: ["*.bin"], optional: true}
  model: {repository: own/model, kind: model, optional: true}
"""


@pytest.fixture
def hub(hub):
    hub.repositories = {
        "own/small": {
            "README.md": b"# small",
            "rows.json": ROWS,
            "data/train 1.json": b"[]",
            "empty.json": b"",
        },
        "own/large": {"README.md": b"# large", "all.bin": LARGE},
        "models/own/model": {"config.json": b"{}", "model.safetensors": b"weights"},
    }
    return hub


@pytest.fixture
def sets(tmp_path):
    path = tmp_path / "sets.yaml"
    path.write_text(SETS)
    return path


@pytest.fixture
def download(said, hub_here, sets, tmp_path):
    return partial(said, "data", "download", sets, "--output-dir", tmp_path / "a folder")


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_wanted_files_are_fetched_checked_and_noted(hub, download, tmp_path):
    printed = download()

    folder = tmp_path / "a folder"
    notes = {"download.manifest.json", "download.lock.json"}
    assert files_of(folder) == notes | {
        f"small/{name}" for name in ("rows.json", "empty.json", "data/train 1.json")
    }
    assert (folder / "small/rows.json").read_bytes() == ROWS
    assert f"small: own/small at {REVISION[:12]} (not pinned yet), 3 files" in printed
    noted = json.loads((folder / "download.manifest.json").read_text())
    assert noted["counts"] == {"sets": 1, "files": 3}
    small = noted["sets"]["small"]
    assert (small["repository"], small["commit"]) == ("own/small", REVISION)
    checksums = {file["name"]: file["checksum"] for file in small["files"]}
    assert checksums["rows.json"] == hashlib.sha256(ROWS).hexdigest()
    sent = len(hub.sent)
    hub.close()
    assert "nothing to fetch" in download()  # what is locked and whole needs no Hub
    assert len(hub.sent) == sent


def test_a_model_comes_from_the_addresses_of_models(hub, download, tmp_path):
    download("--only", "model")
    download()
    assert (tmp_path / "a folder/model/model.safetensors").read_bytes() == b"weights"
    assert f"/own/model/resolve/{REVISION}/config.json" in hub.asked
    noted = json.loads((tmp_path / "a folder/download.manifest.json").read_text())
    assert set(noted["sets"]) == {"small", "model"}


def test_a_dry_run_fetches_nothing(hub, download, tmp_path):
    printed = download("--all", "--dry-run")
    assert f"large: own/large at {REVISION[:12]} (not pinned yet), 1 file, 24 MiB, 24 MiB to fetch" in printed
    assert hub.sent == []
    assert files_of(tmp_path / "a folder") == set()


def test_a_pinned_set_stays_at_its_commit_whatever_the_hub_has(hub, download, tmp_path):
    folder = tmp_path / "a folder"
    download("--pin")
    lock = json.loads((folder / "download.lock.json").read_text())
    assert lock["sets"]["small"]["commit"] == REVISION
    hub.commits["own/small"] = {NEWER: {"rows.json": b"[1]"}}
    hub.main["own/small"] = NEWER
    for path in (folder / "small").rglob("*.json"):
        path.unlink()
    asked = len(hub.asked)

    assert f"at {REVISION[:12]} (pinned)" in download()

    assert (folder / "small/rows.json").read_bytes() == ROWS
    assert [path for path in hub.asked[asked:] if path.startswith("/api/datasets")] == []
    download("--pin")
    assert (folder / "small/rows.json").read_bytes() == b"[1]"
    assert json.loads((folder / "download.lock.json").read_text())["sets"]["small"]["commit"] == NEWER


def test_what_differs_from_the_lock_is_an_error(hub, download, sets, tmp_path):
    folder = tmp_path / "a folder"
    download("--pin")
    (folder / "small/rows.json").write_bytes(ROWS.replace(b"q", b"Q"))
    printed = download(status=1)
    assert "rows.json: differs from the pinned" in printed
    assert "pin what the Hub has now with --pin" in printed
    assert b"Q" in (folder / "small/rows.json").read_bytes()

    sets.write_text(SETS.replace('files: ["*.json", "data/*"]', f'revision: "{NEWER}"'))
    printed = download(status=1)
    assert f"set 'small' is pinned to commit {REVISION}, but the YAML asks for {NEWER}" in printed
    sets.write_text(SETS.replace("own/small", "own/other"))
    assert "is pinned to repository own/small, but the YAML asks for own/other" in download(status=1)
    (folder / "download.lock.json").write_text("{")
    assert "download.lock.json: not a lock of downloads" in download(status=1)


def test_a_commit_in_the_yaml_is_asked_for(hub, download, sets, tmp_path):
    hub.commits["own/small"] = {NEWER: {"rows.json": b"[1]"}}
    sets.write_text(f"sets: {{small: {{repository: own/small, revision: {NEWER}}}}}")
    download()
    assert (tmp_path / "a folder/small/rows.json").read_bytes() == b"[1]"
    (tmp_path / "a folder/download.lock.json").unlink()
    sets.write_text("sets: {small: {repository: own/small, revision: gone}}")
    assert "there is no revision 'gone'" in download(status=1)


@pytest.mark.slow
def test_a_connection_that_breaks_in_the_middle_is_gone_on_with(hub, download, tmp_path):
    hub.cut_at = 11 << 20
    download("--only", "large")
    assert (tmp_path / "a folder/large/all.bin").read_bytes() == LARGE
    assert [start for _, start, _ in hub.sent] == [0, 10 << 20, 20 << 20]


def test_an_interrupted_download_has_marked_its_folder(hub_here, sets, tmp_path):
    """Without the manifest, code in the folder would count as the user's."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan({"small": read_hub_sets(sets).sets["small"]}, tmp_path / "a folder"), interrupt)
    assert json.loads((tmp_path / "a folder/download.manifest.json").read_text())["sets"] == {}


def test_a_second_download_into_the_folder_is_kept_out(download, tmp_path):
    (tmp_path / "a folder").mkdir()
    folder = os.open(tmp_path / "a folder", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert "another run is writing here" in download(status=1)
    os.close(folder)
    download()


def test_bytes_that_are_wrong_leave_nothing_behind(hub, download, tmp_path):
    stated = hub.described("own/small", hub.repositories["own/small"])
    hub.repositories["own/small"]["rows.json"] = ROWS.replace(b"q", b"x")
    hub.described = lambda *_: stated
    printed = download(status=1)
    assert "1 of 1 set could not be downloaded" in printed
    assert (
        f"expected {hashlib.sha256(ROWS).hexdigest()}. It was removed: run the same command again" in printed
    )
    assert not any(name.startswith("small/rows.json") for name in files_of(tmp_path / "a folder"))
    hub.repositories["own/small"]["rows.json"] = ROWS
    download()


def test_a_file_that_was_changed_here_is_fetched_anew_unless_it_is_pinned(hub, download, tmp_path):
    download()
    (tmp_path / "a folder/download.lock.json").unlink()
    (tmp_path / "a folder/small/rows.json").write_bytes(ROWS.replace(b"q", b"x"))
    download()
    assert (tmp_path / "a folder/small/rows.json").read_bytes() == ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "failure"), [("api/datasets", 500), ("datasets/own/small/resolve", 429), ("store/", 500)]
)
def test_a_server_that_fails_is_asked_again(failing, failure, hub, download, tmp_path):
    hub.failing, hub.failures, hub.failure = failing, 1, failure
    download()
    assert hub.failures == 0
    assert (tmp_path / "a folder/small/rows.json").read_bytes() == ROWS


@pytest.mark.slow
def test_a_server_that_goes_on_failing_is_told(hub, download):
    hub.failing, hub.failures = "api/", 100
    printed = download("--only", "model", status=1)
    assert "model own/model of http://127.0.0.1" in printed
    assert "500" in printed


def test_sets_that_cannot_be_had_do_not_keep_the_others_away(hub, download, tmp_path):
    hub.gated = {"own/large"}
    printed = download("--all", status=1)
    assert "1 of 3 sets could not be downloaded" in printed
    assert "access is given on request" in printed
    assert "set HF_TOKEN to a token of your account" in printed
    assert (tmp_path / "a folder/small/rows.json").exists()
    assert (tmp_path / "a folder/model/config.json").exists()
    hub.tokens = {TOKEN}
    download("--all")
    (tmp_path / "a folder/download.lock.json").unlink()
    del hub.repositories["own/small"]
    printed = download(status=1)
    assert "dataset own/small" in printed
    assert "Check its name; if it is private, set HF_TOKEN" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}], ids=["no route", "offline"]
)
def test_without_a_hub_the_error_says_what_to_do(variables, hub_environment, sets, tmp_path):
    words = [sys.executable, "-m", "afm.cli.main", "data", "download", sets, "--output-dir", tmp_path]
    environment = hub_environment | variables
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, cwd=ROOT)
    printed = done.stdout + done.stderr
    assert done.returncode == 1, printed
    assert "Traceback" not in printed
    assert TOKEN not in printed
    assert "dataset own/small of http://127.0.0.1" in printed
    assert "set HF_ENDPOINT to a mirror, or run the same command on another machine and copy" in printed


def test_patterns_that_match_nothing_are_an_error_that_names_what_is_there(download, sets):
    sets.write_text("sets: {small: {repository: own/small, files: ['*.parquet']}}")
    assert "own/small holds no file that matches *.parquet; it holds README.md, data/tr" in download(status=1)


@pytest.mark.slow
def test_a_name_that_leads_out_of_the_folder_is_refused(hub, download, tmp_path):
    hub.repositories["own/small"] = {"../rows.json": ROWS}
    assert "names a file '../rows.json', which would be outside the folder" in download(status=1)
    assert not (tmp_path / "a folder/rows.json").exists()
    for name in ("a\0b.json", "a\x1b[2J.json", "a\nb.json"):
        hub.repositories["own/small"] = {name: ROWS}
        assert "with invisible characters" in download(status=1)


def test_a_disk_that_is_too_small_is_told_before_the_download(hub, download):
    facts = hub.described("own/large", hub.repositories["own/large"])
    facts["siblings"] = [sibling | {"size": 900 << 40} for sibling in facts["siblings"]]
    hub.described = lambda *_: facts
    printed = download("--only", "large", status=1)
    assert "GiB free, 921600.0 GiB to fetch; choose another disk with --output-dir, or fewer sets" in printed
    assert hub.sent == []


def test_names_and_keys_that_are_wrong_are_told(tmp_path, sets):
    known = read_hub_sets(sets)
    assert list(known.chosen([])) == ["small"]
    assert list(known.chosen([], everything=True)) == ["small", "large", "model"]
    assert list(known.chosen(["model", "small"])) == ["small", "model"]
    with pytest.raises(UsageError, match="--only smal: no such set; did you mean 'small'"):
        known.chosen(["smal"])
    sets.write_text("sets: {small: {repository: own/small, optional: true}}")
    with pytest.raises(UsageError, match="choose sets with --only NAME, or --all: small"):
        read_hub_sets(sets).chosen([])
    sets.write_text("sets: {small: {repository: small}}")
    with pytest.raises(ConfigError, match=r"sets\.yaml: sets\.small\.repository"):
        read_hub_sets(sets)
    sets.write_text("sets: {small: {repository: own/small, prepare: [{reader: nqq, into: tasks}]}}")
    with pytest.raises(ConfigError, match="the name of a reader; did you mean 'nq'"):
        read_hub_sets(sets)


@pytest.mark.slow
def test_the_scripts_fetch_and_prepare_the_published_sets(hub, hub_environment, tmp_path):
    rows = [
        {
            "data_source": "search",
            "prompt": [{"role": "user", "content": "Rules.\n\nQuestion: who?"}],
            "reward_model": {"ground_truth": '{"target": ["a"], "question": "who?"}'},
            "extra_info": {"index": index, "question": question, "need_tools_kwargs": True},
        }
        for index, question in (("7", "who?"), ("8", "where?"))
    ]
    lines = "\n".join(map(json.dumps, rows)).encode()
    hub.repositories = {
        "PersonalAILab/AFM-WebAgent-SFT-Dataset": {"README.md": b"#", "sft.json": ROWS},
        "PersonalAILab/AFM-WebAgent-RL-Dataset": {"README.md": b"#", "rl.jsonl": lines},
    }
    data, out, scripts = tmp_path / "downloads", tmp_path / "made", ROOT / "data/web_agent"
    only = ["--only", "web_agent_sft", "--only", "web_agent_rl"]
    environment = hub_environment | {"PATH": f"{Path(sys.executable).parent}:{hub_environment['PATH']}"}
    for words in (
        [sys.executable, scripts / "download.py", "--output-dir", data, *only],
        [scripts / "prepare.sh", "--data", data, "--output-dir", out, *only],
    ):
        done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    info = json.loads((out / "sft/dataset_info.json").read_text())
    assert info["web_agent_sft"]["file_name"] == "web_agent_sft.json"
    assert json.loads((out / "sft/web_agent_sft.json").read_text()) == json.loads(ROWS)
    pq = pytest.importorskip("pyarrow.parquet")
    made = [row for part in ("train", "val") for row in pq.read_table(out / f"rl/{part}.parquet").to_pylist()]
    assert sorted(row["extra_info"]["index"] for row in made) == ["7", "8"]
    assert json.loads(made[0]["reward_model"]["ground_truth"])["question"]
    assert json.loads((out / "rl/train.manifest.json").read_text())["commit"] == REVISION
    locked = json.loads((data / "download.lock.json").read_text())["sets"]
    assert locked["web_agent_rl"]["rows"] == {"rl": 2}


def test_every_published_name_is_in_a_shipped_list():
    sizes = {"WebAgent": ("7B", "32B"), "MHQA-Agent": ("3B", "7B"), "CodeAgent": ("7B", "32B")}
    wanted = {"internlm/Agent-FLAN"}
    for agent, both in sizes.items():
        wanted |= {f"PersonalAILab/AFM-{agent}-{kind}-Dataset" for kind in ("SFT", "RL")}
        wanted |= {f"PersonalAILab/AFM-{agent}-{size}-{stage}" for size in both for stage in ("sft", "rl")}
    lists = (ROOT / "configs/data").glob("*.yaml")
    listed = [entry for path in lists for entry in read_hub_sets(path).sets.values()]
    assert wanted <= {entry.repository for entry in listed}
    for entry in listed:
        if entry.kind != "github":
            assert (entry.kind == "model") == entry.repository.endswith(("-sft", "-rl"))
