"""Compare speed and memory of filters and merge with plain scripts that load everything.

    .venv/bin/python benchmarks/bench_pipeline.py --out pipeline.json
    .venv/bin/python benchmarks/bench_pipeline.py --memory-rows 10000 100000 1000000 --out pipeline.json   # 8 GB of disk

Every run is a separate session, whose memory is that of all its processes. There are two rivals, in the same rounds on the
same files. One script reads all rows with json, applies the same rules one after another, with a MinHashLSH of datasketch in
memory, and writes the rows that it keeps. The other groups all events of a log by task and joins their texts. Before
measuring, ours and the plain scripts must keep the same rows and join the same texts. Processor time, which other jobs
hardly change, includes the start of Python.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline_rows import AGENT, MEMBERS, Rows, write_log
from timing import environment, report, summary

STAGES: list[dict[str, Any]] = [
    {"complexity": {}},
    {"format": {}},
    {"repetition": {"similar": None}},
    {"quality": {"recorded": True}},
    {"reflection": {"role": "reflection", "keep_without": 0.3}},
    {"near_duplicates": {}},
    {"correction": {"times": 3}},
]
FILTERS = ("ours, 1 process", "ours, 2 processes", "plain")
MERGES = ("ours", "plain")


def ours(rows: Path, out: Path, processes: int) -> None:
    """Run the filters of ``afm data filter``."""
    from afm.agents import load_agent
    from afm.distill.filters.registry import FilterPlan
    from afm.distill.filters.run import filter_files

    plan = FilterPlan.model_validate({"stages": STAGES})
    filter_files([rows], plan, load_agent(AGENT), out, processes=processes, picture=False)


def plain(rows: Path, out: Path) -> None:
    """Filter in memory, one rule after another, as a quick script would."""
    import re

    from datasketch import MinHash, MinHashLSH

    from afm.agents import load_agent
    from afm.distill.filters.base import draw
    from afm.trajectory import validate
    from afm.trajectory.tags import Author, Segment

    spec = load_agent(AGENT)
    with rows.open() as file:
        records = [json.loads(line) for line in file]
    for record in records:
        record["text"] = "".join(part["text"] for part in record["segments"])
        record["queries"] = re.findall(r"<wiki_search>(.*?)</wiki_search>", record["text"], re.DOTALL)
    records = [record for record in records if len(record["queries"]) >= 5]
    records = [
        record
        for record in records
        if not validate([Segment(Author(part["author"]), part["text"]) for part in record["segments"]], spec)
    ]
    records = [record for record in records if len(set(record["queries"])) == len(record["queries"])]
    records = [record for record in records if record["verdict"]["score"] >= 1]
    records = [
        record
        for record in records
        if "<reflection>" in record["text"] or draw(0, "reflection", record["id"]) < 0.3
    ]
    index, unique = MinHashLSH(threshold=0.8, num_perm=128), []
    for record in records:
        words = re.findall(
            r"\w+", " ".join(part["text"] for part in record["segments"] if part["author"] == "agent").lower()
        )
        sketch = MinHash(num_perm=128)
        sketch.update_batch([" ".join(words[at : at + 5]).encode() for at in range(len(words) - 4)])
        if not index.query(sketch):
            index.insert(record["id"], sketch)
            unique.append(record)
    out.mkdir(parents=True)
    with (out / "kept.jsonl").open("w") as file:
        for record in unique:
            scores = re.findall(r"<double_check>.*?Score: (\d)", record["text"], re.DOTALL)
            del record["text"], record["queries"]
            for _ in range(3 if scores and int(scores[0]) < 3 else 1):
                file.write(json.dumps(record) + "\n")


def merge(log: Path, out: Path) -> None:
    """Run ``afm.distill.merge`` and write a line per task."""
    from afm.agents import load_agent
    from afm.distill.merge import RoleMap, merge_log
    from afm.trajectory.io import RecordWriter

    spec = load_agent(AGENT)
    with RecordWriter(out / "merged.jsonl") as writer:
        for record in merge_log(log, spec, RoleMap(messages=MEMBERS)):
            assert record.kept, record.reason
            writer.write(record)


def plain_merge(log: Path, out: Path) -> None:
    """Join all events by task in memory, without checking rules or recording authors."""
    with log.open() as file:
        events = [json.loads(line) for line in file]
    tasks = defaultdict(list)
    for event in events:
        tasks[event["task_id"]].append(event)
    out.mkdir(parents=True)
    with (out / "merged.jsonl").open("w") as file:
        for identity, mine in tasks.items():
            file.write(json.dumps({"id": identity, "text": "".join(map(_tagged, mine))}) + "\n")


def _tagged(event: dict[str, Any]) -> str:
    tags = {"tool_call": AGENT_TOOL, "final": "answer", "message": MEMBERS.get(event.get("agent", ""), "")}
    if event["kind"] == "tool_result":
        return f"\n<observation>\n{event['content'].strip()}\n</observation>\n"
    return (
        f"<{tags[event['kind']]}>{event['content']}</{tags[event['kind']]}>" if event["kind"] in tags else ""
    )


AGENT_TOOL = "wiki_search"
WAYS: dict[str, Callable[[Path, Path], None]] = {
    "filter: ours, 1 process": lambda rows, out: ours(rows, out, 1),
    "filter: ours, 2 processes": lambda rows, out: ours(rows, out, 2),
    "filter: plain": plain,
    "merge: ours": merge,
    "merge: plain": plain_merge,
}


def work(way: str, given: Path, out: Path) -> None:
    """Do one piece of work in this process, and print its seconds."""
    import afm.distill  # noqa: F401  loaded before the clock starts, for all ways

    if way.endswith("plain"):
        import datasketch  # noqa: F401

    out.parent.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    WAYS[way](given, out)
    print(time.perf_counter() - begun)


def measured(way: str, given: Path, place: Path) -> dict[str, float]:
    """Do one piece of work in a separate session; its output is at ``place``/``way``."""
    out = place / way.replace(" ", "_").replace(":", "").replace(",", "")
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, "--work", way, str(given), str(out)]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        watch = _Watch(child.pid)
        begun = time.monotonic()
        while child.poll() is None:
            watch.look()
            time.sleep(
                0.1 if time.monotonic() - begun < 10 else 1
            )  # a look takes 10 ms, also from two processes
        if child.returncode:
            errors.seek(0)
            raise SystemExit(f"{way} failed:\n{errors.read()}")
    assert child.stdout is not None
    seconds = float(child.stdout.read().splitlines()[-1])
    written = sum(1 for _ in _kept_file(out).open("rb"))
    print(
        f"{given.name} {way}: {seconds:.1f} s, {watch.peak_mb:.0f} MB, {written} rows kept", file=sys.stderr
    )
    return {"seconds": seconds, "cpu_s": watch.cpu_s, "peak_mb": watch.peak_mb, "written": float(written)}


class _Watch:
    """Samples the memory and processor time of all processes of a session.

    Attributes:
        peak_mb: Largest memory of all processes together, in MB. Excludes pages of files; counts pages that forks share
            for each process.
        cpu_s: Processor seconds of all processes, which other jobs on the machine hardly change.
    """

    def __init__(self, session: int) -> None:
        self.peak_mb = 0.0
        self._session = session
        self._cpu: dict[str, float] = {}

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu.values())

    def look(self) -> None:
        together = 0.0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) != self._session:
                    continue
                status = (folder / "status").read_text()
            except OSError:  # the process has just ended
                continue
            self._cpu[folder.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            together += (
                sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
                / 1024
            )
        self.peak_mb = max(self.peak_mb, together)


def _kept_file(out: Path) -> Path:
    return next(path for name in ("kept.jsonl", "merged.jsonl") if (path := out / name).exists())


def speed(
    kind: str, ways: tuple[str, ...], given: Path, count: int, runs: int, place: Path
) -> dict[str, Any]:
    """Run each way in each of ``runs`` rounds; the check before was the warm-up."""
    megabytes = given.stat().st_size / 1e6
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(runs):
        written = {}
        for way in ways:
            found = measured(f"{kind}: {way}", given, place)
            written[way] = found["written"]
            seconds[way].append(found["seconds"])
            cpu[way].append(found["cpu_s"])
        if len(set(written.values())) != 1:
            raise SystemExit(f"{kind}: the ways keep different rows: {written}")
    medians = {way: summary(values)["median_s"] for way, values in seconds.items()}
    return {
        "rows": count,
        "megabytes": round(megabytes, 1),
        "written": int(written[ways[0]]),
        "seconds": {way: summary(values) for way, values in seconds.items()},
        "cpu_seconds": {way: summary(values) for way, values in cpu.items()},
        "rows_per_s": {way: round(count / value) for way, value in medians.items()},
        "megabytes_per_s": {way: round(megabytes / value, 1) for way, value in medians.items()},
        "times_plain": {way: round(medians["plain"] / value, 2) for way, value in medians.items()},
    }


def check(place: Path, seed: int) -> None:
    """Check that ours and the plain scripts agree on 500 rows and 100 tasks, in one process and untimed."""
    rows, log = place / "check.jsonl", place / "check_log.jsonl"
    Rows(seed).write(rows, 500)
    write_log(log, 100, seed)
    kept = []
    for way in FILTERS:
        out = place / f"filter_{way.replace(', ', '_').replace(' ', '_')}"
        WAYS[f"filter: {way}"](rows, out)
        lines = (out / "kept.jsonl").read_text().splitlines()
        kept.append(sorted(json.loads(line)["id"].partition("+")[0] for line in lines))
    if not kept[0] == kept[1] == kept[2]:
        raise SystemExit("filter: the ways keep different rows")
    texts = []
    for way in MERGES:
        WAYS[f"merge: {way}"](log, place / f"merge_{way}")
        rows_of = map(json.loads, (place / f"merge_{way}" / "merged.jsonl").read_text().splitlines())
        texts.append(
            {
                row["id"]: row.get("text") or "".join(part["text"] for part in row["segments"])
                for row in rows_of
            }
        )
    if texts[0] != texts[1]:
        raise SystemExit("merge: the ways join different texts")


def memory(counts: list[int], plain_up_to: int, place: Path, seed: int) -> dict[str, Any]:
    """Return the peak memory by number of rows; plain scripts, which hold everything, only get up to a limit."""
    found: dict[str, Any] = {}
    for count in counts:
        rows, log = place / "rows.jsonl", place / "log.jsonl"
        size = Rows(seed).write(rows, count)
        one: dict[str, Any] = {
            "megabytes": round(size / 1e6),
            "log_megabytes": round(write_log(log, count, seed) / 1e6),
        }
        for kind, given in (("filter", rows), ("merge", log)):
            for way in FILTERS if kind == "filter" else MERGES:
                if way == "plain" and count > plain_up_to:
                    continue
                done = measured(f"{kind}: {way}", given, place)
                one[f"{kind}: {way}"] = {
                    "peak_mb": round(done["peak_mb"]),
                    "rows_per_s": round(count / done["seconds"]),
                }
        found[str(count)] = one
        rows.unlink()
        log.unlink()
    return found


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, help="rows of the speed measurement")
    parser.add_argument(
        "--memory-rows", type=int, nargs="*", help="numbers of rows for which to measure memory"
    )
    parser.add_argument("--plain-up-to", type=int, default=100_000, help="most rows for the plain scripts")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--smoke", action="store_true", help="few rows and one run, only to see that it works"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs=3, metavar=("WAY", "FILE", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work[0], Path(arguments.work[1]), Path(arguments.work[2]))
        return
    count, runs, counts = (200, 1, []) if arguments.smoke else (10_000, 3, [10_000, 100_000])
    count, runs = arguments.rows or count, arguments.runs or runs
    counts = counts if arguments.memory_rows is None else arguments.memory_rows
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        check(place, arguments.seed)
        rows, log = place / "rows.jsonl", place / "log.jsonl"
        Rows(arguments.seed).write(rows, count)
        write_log(log, count, arguments.seed)
        filtering = speed("filter", FILTERS, rows, count, runs, place)
        one, two = (filtering["seconds"][way]["median_s"] for way in FILTERS[:2])
        result = {
            "benchmark": "pipeline",
            "runs": runs,
            "seed": arguments.seed,
            "filter": filtering,
            "two_processes_speedup": round(one / two, 2),
            "merge": speed("merge", MERGES, log, count, runs, place),
            "memory": memory(counts, arguments.plain_up_to, place, arguments.seed),
            "environment": environment(["afm", "pydantic", "datasketch", "numpy"]),
        }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
