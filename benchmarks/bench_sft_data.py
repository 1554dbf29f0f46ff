"""Measure the cost of author masks in fine-tuning: preprocessing, against two rivals, and a step.

    .venv/bin/python benchmarks/bench_sft_data.py --tokenizer /models/Qwen2.5-7B-Instruct --out sft_data.json

Preprocessing goes from the JSONL file to token ids and labels, each time in a separate process with an empty cache. Rivals,
in the same round on the same rows:
- stock: LLaMA-Factory 0.9.5 without masks; the target is at most 1.3 times its time with one process;
- marker search: the same, with a search for the tokens of the observation's markers, as published systems do.
Our memory must not grow with the file. A step is a forward and backward pass of a tiny model over the same ids, once with
masked labels and once with all labels; the target is a difference of at most 2 percent.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_masking import Row, default_tokenizer, make_rows, marker_search
from timing import environment, interleaved, report, summary

from afm.agents import load_agent

TARGET = 1.3
_HELD_ROWS = 100
WAYS = ("stock", "ours", "marker search")


def write_data(rows: list[Row], folder: Path) -> None:
    """Write the rows as an alpaca data set called ``rows``."""
    lines = ({"instruction": f"Question {n}?", "input": "", "output": row.text} for n, row in enumerate(rows))
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))


def model_folder(tokenizer: Path | None, rows: list[Row], folder: Path) -> Path:
    """Make a folder with a tokenizer and the config of a tiny model, which LLaMA-Factory requires."""
    from afm.models.tiny import create_tiny_model, train_tokenizer

    train_tokenizer((row.text for row in rows[:50]), folder, vocab_size=2000)
    create_tiny_model(folder, folder, seed=1, hidden_size=64, layers=2, heads=2, mlp=128)
    if tokenizer is not None:
        for path in tokenizer.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


class OwnMemory:
    """Measures the peak memory of this process in the block, without pages of files."""

    def __enter__(self) -> OwnMemory:
        self._before = self._most = self._now()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    @property
    def grown_mb(self) -> float:
        """Return the growth in the block, in MB."""
        return (self._most - self._before) / 1024

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Work:
    """One preprocessing, in a fork so that it shares nothing with the next."""

    def __init__(self, way: str, processes: int, data: Path, model: Path, **options: Any) -> None:
        self.way, self.processes, self.data, self.model, self.options = way, processes, data, model, options

    def __call__(self) -> dict[str, float]:
        """Return the seconds and the growth of memory in the child."""
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=self._child, args=(sender,))
        child.start()
        sender.close()
        try:
            found: dict[str, float] = receiver.recv()
        except EOFError:
            raise SystemExit(f"{self.way} with {self.processes} processes failed") from None
        child.join()
        return found

    def _child(self, sender: Any) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        with tempfile.TemporaryDirectory() as cache, OwnMemory() as memory:
            begun = time.perf_counter()
            exact = self._run(cache)
            seconds = time.perf_counter() - begun
        sender.send({"seconds": seconds, "grown_mb": memory.grown_mb, **exact})

    def _run(self, cache: str) -> dict[str, float]:
        from llamafactory.data import get_dataset

        from llamafactory_patch.engine import load_tools, parse_arguments
        from llamafactory_patch.reading import BadRowReport
        from llamafactory_patch.tokenise import tokenise

        given = {
            "model_name_or_path": str(self.model),
            "dataset_dir": str(self.data),
            "dataset": "rows",
            "output_dir": f"{cache}/out",
            "cache_dir": cache,
            "template": "qwen3_nothink",
            "cutoff_len": 8192,
            "ignore_observation": self.way == "ours",
            "preprocessing_num_workers": self.processes if self.processes > 1 else None,
            "do_train": True,
            "max_steps": 1,
            "report_to": "none",
            **self.options,
        }
        arguments = parse_arguments(given)
        if self.way == "ours":
            return {"rows": float(len(tokenise(arguments, BadRowReport("error")).sets["train"]))}
        tools, template = load_tools(arguments)
        if self.way == "marker search":
            search_markers(tools["tokenizer"])
        places = (arguments.model, arguments.data, arguments.training)
        return {"rows": float(len(get_dataset(template, *places, stage="sft", **tools)["train_dataset"]))}


def search_markers(tokenizer: Any) -> None:
    """Make the stock processor search for markers in labels; rows with unpaired markers stay unchanged."""
    from llamafactory.data.processor import SupervisedDatasetProcessor

    encode = SupervisedDatasetProcessor._encode_data_example

    def searching(self: Any, **given: Any) -> Any:
        ids, labels = encode(self, **given)
        [masked] = marker_search(tokenizer, [Row(given["response"][0]["content"], "")], "observation")
        if masked is not None:
            at = len(ids) - len(masked.mask)
            labels = [
                *labels[:at],
                *(token if kept else -100 for token, kept in zip(labels[at:], masked.mask, strict=True)),
            ]
        return ids, labels

    SupervisedDatasetProcessor._encode_data_example = searching


def preprocessing(data: Path, model: Path, processes: tuple[int, ...], runs: int) -> dict[str, Any]:
    """Return the seconds of every way with every number of processes; all run in each round."""
    works = {(way, count): Work(way, count, data, model) for count in processes for way in WAYS}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in works}
    for number in range(runs + 1):
        for key, work in works.items():
            found = work()
            if number:
                seconds[key].append(found["seconds"])
    return {
        f"{count} process{'es' if count > 1 else ''}": {way: summary(seconds[way, count]) for way in WAYS}
        for count in processes
    }


def memory(rows: list[Row], model: Path, folder: Path) -> dict[str, float]:
    """Return the memory for tokenising all rows, and a quarter of them."""
    grown = {}
    for name, part in (("a quarter of the rows", rows[: len(rows) // 4]), ("all rows", rows)):
        place = folder / name.replace(" ", "_")
        place.mkdir()
        write_data(part, place)
        work = Work(
            "ours", 1, place, model, preprocessing_batch_size=_HELD_ROWS
        )  # a batch is in memory by design
        grown[name] = round(work()["grown_mb"], 1)
    return grown


def steps(model_dir: Path, runs: int) -> dict[str, Any]:
    """Return the seconds of a step with masked labels and with all labels, over the same ids."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids_BT = torch.randint(0, model.config.vocab_size, (2, 1024))
    masked_BT = torch.where(torch.rand(ids_BT.shape) < 0.6, -100, ids_BT)

    def step(labels_BT: Any) -> None:
        model(input_ids=ids_BT, labels=labels_BT).loss.backward()
        model.zero_grad()

    found = interleaved({"all labels": lambda: step(ids_BT), "masked": lambda: step(masked_BT)}, runs)
    return {
        "seconds": found,
        "times_all": round(found["masked"]["median_s"] / found["all labels"]["median_s"], 3),
    }


def counts(smoke: bool) -> Iterator[int]:
    """Yield the number of rows, of preprocessing rounds and of step rounds."""
    yield from (60, 1, 2) if smoke else (5000, 3, 30)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, default=default_tokenizer())
    parser.add_argument("--rows", type=int)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--smoke", action="store_true", help="few rows and one run, only to see that it works"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    count, runs, step_runs = counts(arguments.smoke)
    count, runs = arguments.rows or count, arguments.runs or runs
    os.environ.update({"HF_HUB_OFFLINE": "1", "LLAMAFACTORY_VERBOSITY": "ERROR", "OMP_NUM_THREADS": "1"})
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    from llamafactory_patch.engine import load_engine

    load_engine()  # before the clock starts, and before each fork
    rows = make_rows(count, load_agent("web"), arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        data, model, tiny = (Path(place) / name for name in ("data", "model", "tiny"))
        for folder in (data, model, tiny):
            folder.mkdir()
        write_data(rows, data)
        model_folder(arguments.tokenizer, rows, model)
        model_folder(None, rows, tiny)
        seconds = preprocessing(data, model, (1, 2), runs)
        one = {way: value["median_s"] for way, value in seconds["1 process"].items()}
        result = {
            "benchmark": "sft_data",
            "rows": count,
            "runs": runs,
            "seed": arguments.seed,
            "seconds": seconds,
            "times_stock": {way: round(value / one["stock"], 2) for way, value in one.items()},
            "target_times_stock": TARGET,
            "two_processes_speedup": round(one["ours"] / seconds["2 processes"]["ours"]["median_s"], 2),
            "grown_mb": memory(rows, model, Path(place)),
            "step": steps(tiny, step_runs),
            "environment": environment(["llamafactory", "transformers", "tokenizers", "datasets", "afm"]),
        }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
