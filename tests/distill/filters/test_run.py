import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from extras import needs

from afm.distill.filters.registry import FilterPlan
from afm.distill.filters.run import filter_files
from afm.errors import ConfigError, DataError
from afm.trajectory import load_records

needs("numpy")

PLAN = FilterPlan.model_validate(
    {
        "stages": [
            {"complexity": {}},
            {"format": {}},
            {"repetition": {}},
            {"quality": {"recorded": True}},
            {"reflection": {"role": "reflection", "keep_without": 0.5}},
            {"near_duplicates": {}},
            {"correction": {"times": 2}},
        ]
    }
)
FILES = ("kept.jsonl", "dropped.jsonl", "funnel.json")
WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("ala", "eno", "iru", "opi", "uma")]


def thought(number):
    return " ".join(WORDS[(number * at) % 59] + str(number * at % 7) for at in range(1, 60))


@pytest.fixture(scope="session")
def lines(row):
    """240 rows: of every 8 one of each fate."""
    fates = (
        {},
        {"queries": ("a", "b")},
        {"queries": ("a", "b", "c", "d", "a")},
        {"verdict": {"score": 0.0}},
        {"reflects": False},
        {"twin": True},
        {"scores": (2, 4)},
        {},
    )

    def line(number):
        fate = dict(fates[number % 8])
        source = number - 5 if fate.pop("twin", False) else number
        return row(f"row-{number}", thought=thought(source), **fate).model_dump_json().encode() + b"\n"

    return [line(number) for number in range(240)]


@pytest.fixture
def rows(tmp_path, lines):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def filtered(rows, agent, out, plan=PLAN, **options):
    return filter_files(rows, plan, agent, out, picture=False, **options)


def refused(error, message, *arguments, **options):
    with pytest.raises(error, match=message):
        filtered(*arguments, **options)


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_every_row_is_kept_or_dropped_with_its_reason(rows, lines, wiki, tmp_path):
    summary = filter_files([rows], PLAN, wiki, tmp_path / "out")

    kept, gone = (load_records(tmp_path / "out" / name) for name in FILES[:2])
    stages = {stage.name: stage.dropped for stage in summary.funnel.stages()}
    assert stages.pop("reflection") == sum(record.reason.startswith("reflection: ") for record in gone)
    thirty = dict.fromkeys(("complexity", "repetition", "quality", "near_duplicates"), 30)
    assert stages == thirty | {"format": 0, "correction": 0}
    first = [record for record in kept if "copy_of" not in record.provenance]
    assert sorted(record.id for record in [*first, *gone]) == sorted(f"row-{number}" for number in range(240))
    assert sum("copy_of" in record.provenance for record in kept) == summary.funnel.copies == 30
    assert (summary.funnel.seen, summary.funnel.kept) == (240, len(first))
    assert all(json.loads(line)["segments"] for line in (tmp_path / "out/dropped.jsonl").open())
    assert {record.id: record.text for record in gone} == {
        record.id: record.text for record in load_records(rows) if record.id in {one.id for one in gone}
    }
    twin = next(record for record in gone if record.id == "row-5")
    assert twin.reason == "near_duplicates: 1.00 similar to 'row-0'"
    written = (tmp_path / "out/kept.jsonl").read_bytes()
    assert lines[0] in written
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["counts"] == {"seen": 240, "kept": len(first), "copies": 30}
    assert (tmp_path / "out/funnel.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out/state.sqlite").exists()


def test_a_twin_with_the_id_of_the_row_is_named_with_its_number(lines, wiki, tmp_path):
    twice = tmp_path / "twice.jsonl"
    twice.write_bytes(lines[1] + lines[0] + lines[0])
    filter_files([twice], PLAN, wiki, tmp_path / "out")
    gone = load_records(tmp_path / "out/dropped.jsonl")[-1]
    assert (gone.id, gone.reason) == (
        "row-0",
        "near_duplicates: 1.00 similar to row 2, which has the same id",
    )


def test_a_row_that_was_dropped_before_stays_the_line_it_was(rows, lines, wiki, tmp_path):
    earlier = json.loads(lines[7]) | {"id": "gone", "kept": False, "reason": "team failed"}
    spaced, plain = (json.dumps(earlier, separators=form).encode() + b"\n" for form in (None, (",", ":")))
    more = tmp_path / "more.jsonl"
    more.write_bytes(spaced + plain)

    summary = filtered([rows, more], wiki, tmp_path / "out")

    assert (tmp_path / "out/dropped.jsonl").read_bytes().endswith(spaced + plain)
    assert summary.funnel.seen == 242
    first = next(summary.funnel.stages())
    assert (first.name, first.rows, first.dropped) == ("earlier run: team failed", 242, 2)


def test_rows_that_an_earlier_run_dropped_are_counted_apart(rows, wiki, tmp_path):
    """The same stage dropped them, but in another run: this one never showed them to it."""
    plan = FilterPlan.model_validate({"stages": [{"complexity": {}}, {"format": {}}]})
    filtered([rows], wiki, tmp_path / "one", plan)
    again = [tmp_path / "one" / name for name in ("kept.jsonl", "dropped.jsonl")]
    unsaid = json.loads(again[1].read_text().splitlines()[0]) | {"reason": ""}
    again.append(tmp_path / "unsaid.jsonl")
    again[2].write_text(json.dumps(unsaid) + "\n")

    for _ in range(2):  # made, and read from the finished folder
        found = filtered(again, wiki, tmp_path / "two", plan)
        assert [(stage.name, stage.rows, stage.dropped) for stage in found.funnel.stages()] == [
            ("earlier run: complexity", 241, 30),
            ("earlier run: no reason", 211, 1),
            ("complexity", 210, 0),
            ("format", 210, 0),
        ]


def test_reasons_that_differ_in_every_row_do_not_make_a_stage_each(lines, wiki, tmp_path):
    given = json.loads(lines[0]) | {"kept": False}
    gateways = [f"event 't-{at}#1.3': the model: said {at}" for at in range(100)]
    others = [f"result {at} answers no call" for at in range(100)]
    source = tmp_path / "dropped.jsonl"
    source.write_text("".join(json.dumps(given | {"reason": reason}) + "\n" for reason in gateways + others))

    found = filtered([source], wiki, tmp_path / "out").funnel

    earlier = [(stage.name, stage.dropped) for stage in found.stages() if stage.name.startswith("earlier")]
    assert len(earlier) == 33
    assert earlier[:2] == [("earlier run: other reasons", 69), ("earlier run: result 0 answers no call", 1)]
    assert earlier[-1] == ("earlier run: the model", 100)


def test_two_processes_write_the_same_files_as_one(rows, lines, wiki, tmp_path):
    packed = tmp_path / "more.jsonl.gz"
    marked = b"\xef\xbb\xbf" + lines[0]
    packed.write_bytes(
        gzip.compress(b"\n".join(line.rstrip() for line in [marked, *lines[1:3], b"no record"]))
    )

    for processes in (1, 2):
        out = tmp_path / str(processes)
        filtered([rows, packed], wiki, out, processes=processes)

    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    [bad] = map(json.loads, (tmp_path / "2/unreadable.jsonl").read_text().splitlines())
    assert (bad["line"], bad["text"], bad["path"]) == (4, "no record", str(packed))
    assert "invalid JSON" in bad["error"]


def test_a_line_without_end_is_not_read_into_memory(rows, lines, wiki, tmp_path, monkeypatch):
    """4 MB of gzip may hold a line of 900 MB."""
    monkeypatch.setattr("afm.distill.filters.worker_pool._MOST_LINE_BYTES", 1 << 20)
    packed = tmp_path / "more.jsonl.gz"
    packed.write_bytes(gzip.compress(lines[0].rstrip() + b"\n" + b"x" * (2 << 20)))

    with pytest.raises(DataError, match=r"more\.jsonl\.gz:2: a line of more than 1 MiB"):
        filtered([packed], wiki, tmp_path / "out")


def test_a_finished_run_is_not_run_again(rows, wiki, tmp_path):
    filtered([rows], wiki, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out/state.sqlite").write_bytes(b"of a run that was killed behind its manifest")

    again = filtered([rows], wiki, tmp_path / "out")

    assert again.resumed == again.funnel.seen == 240
    assert contents(tmp_path / "out") == before
    assert not (tmp_path / "out/state.sqlite").exists()
    (tmp_path / "out/funnel.json").unlink()
    refused(DataError, "funnel of a finished run", [rows], wiki, tmp_path / "out")


def test_other_settings_and_other_files_are_refused(rows, wiki, tmp_path):
    reward = tmp_path / "reward.yaml"
    reward.write_text("formula: correct\n")
    plan = FilterPlan.model_validate({"stages": [{"quality": {"recorded": True, "reward": reward}}]})
    out, other_seed = tmp_path / "out", plan.model_copy(update={"seed": 1})
    filtered([rows], wiki, out, plan)

    refused(ConfigError, r"other settings \(plan\.seed: 0 -> 1", [rows], wiki, out, other_seed)
    refused(ConfigError, r"other settings \(inputs: ", [rows, rows], wiki, out, plan)
    reward.write_text("formula: correct * format\n")
    refused(ConfigError, r"other settings \(rewards\.", [rows], wiki, out, plan)
    reward.write_text("formula: correct\n")
    rows.write_text(rows.read_text().replace("a", "b", 1))  # of the same size
    refused(ConfigError, r"other settings \(inputs: ", [rows], wiki, out, plan)


def test_other_settings_replace_a_run_that_kept_nothing(rows, wiki, tmp_path):
    none, some = (
        FilterPlan.model_validate({"stages": [{"complexity": {"min_calls": calls}}]}) for calls in (99, 1)
    )
    assert filtered([rows], wiki, tmp_path / "out", none).funnel.kept == 0
    assert filtered([rows], wiki, tmp_path / "out", none).resumed == 240
    assert filtered([rows], wiki, tmp_path / "out", some).funnel.kept > 0
    refused(ConfigError, "other settings", [rows], wiki, tmp_path / "out", none)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_row_without_reward_is_named_with_its_line(rows, wiki, tmp_path, processes):
    plan = FilterPlan.model_validate({"stages": [{"quality": {}}]})
    lines = rows.read_bytes().splitlines(keepends=True) * 20
    lines[1] = b"\n"
    lines[4500] = json.dumps(json.loads(lines[4500]) | {"data_source": ""}).encode() + b"\n"
    rows.write_bytes(b"".join(lines))
    message = r"rows.jsonl:4501: the row has no data_source, which chooses the reward"
    refused(ConfigError, message, [rows], wiki, tmp_path / "out", plan, processes=processes)


@pytest.fixture
def stopped(rows, wiki, tmp_path):
    """The folder of a run that ended in the middle."""

    def stop(done):
        raise KeyboardInterrupt

    refused(KeyboardInterrupt, None, [rows], wiki, tmp_path / "out", on_rows=stop)
    return tmp_path / "out"


def test_a_damaged_state_is_not_built_upon(rows, wiki, stopped):
    file = stopped / "state.sqlite"
    size = file.stat().st_size
    with file.open("r+b") as state:  # as if its last pages had never reached the disk
        state.seek(size // 2)
        state.write(bytes(size - size // 2))

    refused(ConfigError, r"state\.sqlite: damaged .*remove the folder", [rows], wiki, stopped)
    file.write_bytes(bytes(4096) + b"no database")
    refused(ConfigError, r"state\.sqlite: damaged .*remove the folder", [rows], wiki, stopped)


def test_rows_that_never_reached_the_disk_are_noticed(rows, wiki, stopped):
    size = (stopped / "kept.jsonl").stat().st_size
    with (stopped / "kept.jsonl").open("r+b") as kept:
        kept.seek(size - 100)
        kept.write(bytes(100))

    refused(ConfigError, rf"kept\.jsonl: no line ends at byte {size}", [rows], wiki, stopped)
    os.truncate(stopped / "kept.jsonl", size - 100)
    shorter = rf"kept\.jsonl: {size - 100} bytes, expected at least {size}"
    refused(ConfigError, shorter, [rows], wiki, stopped)


def test_an_empty_file_is_an_error(wiki, tmp_path):
    (tmp_path / "none.jsonl").write_bytes(b"\n\n")
    refused(DataError, "holds no trajectories", [tmp_path / "none.jsonl"], wiki, tmp_path / "out")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stage_that_cannot_be_built_says_why(rows, wiki, tmp_path, processes):
    plan = FilterPlan.model_validate({"stages": [{"reflection": {"role": "musing", "keep_without": 0}}]})

    refused(ConfigError, "no role 'musing'", [rows], wiki, tmp_path / "out", plan, processes=processes)


def running(session):
    """Processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of_session) == session and state != "Z":
            found.append(stat.parent.name)
    return found


@pytest.mark.slow
def test_killed_runs_continue_without_losing_or_doubling_a_row(lines, wiki, tmp_path):
    """Killed after its first rows and in the middle, against one undisturbed run."""
    rows = tmp_path / "rows.jsonl"
    with rows.open("wb") as file:
        for turn in range(5):
            file.writelines(line.replace(b'"id":"row-', b'"id":"turn-%d-' % turn, 1) for line in lines)
    filtered([rows], wiki, tmp_path / "whole")
    (tmp_path / "plan.yaml").write_text(PLAN.model_dump_json())
    out, settings = tmp_path / "killed", ("--agent=wiki", "--processes=2", "--no-picture")
    command = [sys.executable, "-m", "afm.cli.main", "data", "filter", rows, f"--output-dir={out}", *settings]
    command.append(f"--config={tmp_path / 'plan.yaml'}")

    for killed_at_bytes in (1, 1_200_000):
        child = subprocess.Popen(command, start_new_session=True)
        while sum(path.stat().st_size for path in out.glob("*.jsonl")) < killed_at_bytes:
            assert child.poll() is None
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        until = time.monotonic() + 60
        while running(child.pid):
            assert time.monotonic() < until, "the workers outlive the one that started them"
            time.sleep(0.05)
    assert not (out / "manifest.json").exists()
    subprocess.run(command, check=True, timeout=300)

    assert contents(out) == contents(tmp_path / "whole")
