"""The benchmarks of AFM's evaluation: sizes and settings as published (AFM, arXiv 2508.13167).

What a run of ours does stands in ``configs/eval/NAME.yaml``. This table says what was published, so that a manifest can
tell whether a score may stand beside it. The scores themselves: :mod:`afm.evaluation.published`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import DataError, suggestion

_LIST = "benchmarks"
_DOWNLOADS = "downloads/benchmarks"


@dataclass(frozen=True, slots=True)
class PublishedSettings:
    """How a benchmark was run.

    Attributes:
        temperatures: Any of them: models of several sizes had their own.
        turn_tokens: New tokens of one turn.
        response_tokens: All tokens of an episode after the prompt.
        prompt_tokens: Of a prompt at most; our prompts and these questions stay below.
        turns: Tool calls.
        rounds: Samples of every question.
        parallel: Episodes in flight; no score depends on it.
    """

    temperatures: tuple[float, ...]
    top_p: float
    response_tokens: int
    turns: int
    rounds: int
    top_k: int = 0
    turn_tokens: int | None = None
    prompt_tokens: int | None = None
    parallel: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a manifest, without what was not published."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: list(value) if name == "temperatures" else value for name, value in values.items() if value
        }


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One row of the published evaluation.

    Attributes:
        name: Of the YAML in ``configs/eval``.
        hub_set: Of the list ``benchmarks`` of `afm data download`.
        prepared: Whether `afm data prepare` makes tasks of it; what is published encrypted is read as it is.
        questions: Size, where it was published.
    """

    name: str
    hub_set: str
    settings: PublishedSettings
    questions: int | None = None
    prepared: bool = True

    def commands(self, place: Path) -> tuple[str, ...]:
        """What fetches the data to where a run looks for it."""
        fetch = f"afm data download {_LIST} --out {_DOWNLOADS} --only {self.hub_set}"
        if not self.prepared:
            return (fetch,)
        prepare = f"afm data prepare published {_LIST} --data {_DOWNLOADS} --out {place.parent} --only {self.hub_set}"
        return fetch, prepare

    def missing(self, place: Path) -> DataError:
        """What to say when there is no data."""
        return DataError(
            f"no such file: the data of {self.name} is not shipped. Fetch it from its owner:\n  "
            + "\n  ".join(self.commands(place))
            + "\nor name a file that you have: data=FILE",
            path=str(place),
        )

    def departures(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Where a manifest's ``settings`` are not the published ones, so that scores cannot be compared."""
        return tuple(_departures(self, settings))


WEB = PublishedSettings(
    temperatures=(1.0,),
    top_p=0.9,
    top_k=20,
    turn_tokens=4096,
    response_tokens=32768,
    turns=36,
    rounds=5,
    parallel=30,
)
QUESTIONS = PublishedSettings(
    temperatures=(0.0,), top_p=1.0, prompt_tokens=2048, response_tokens=8192, turns=8, rounds=1
)
MATH_16 = PublishedSettings(temperatures=(0.8, 0.6), top_p=1.0, response_tokens=32768, turns=12, rounds=16)
CODE = PublishedSettings(temperatures=(0.8, 0.6), top_p=1.0, response_tokens=32768, turns=12, rounds=1)

BENCHMARKS: dict[str, Benchmark] = {
    one.name: one
    for one in (
        Benchmark("gaia", "gaia", WEB, 103),
        Benchmark("webwalker", "webwalker", WEB, 680),
        Benchmark("browsecomp", "browsecomp", WEB, 1266, prepared=False),
        Benchmark("hle", "hle", WEB, 500),
        Benchmark("nq", "nq", QUESTIONS, 3610),
        *(
            Benchmark(name, name, QUESTIONS)
            for name in ("triviaqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "popqa")
        ),
        Benchmark("aime24", "aime24", MATH_16, 30),
        Benchmark("aime25", "aime25", MATH_16, 30),
        Benchmark("amc23", "amc23", MATH_16, 40),
        Benchmark("math500", "math500", CODE, 500),
        Benchmark("olympiadbench", "olympiadbench", CODE, 675),
        Benchmark("livecodebench_v4", "livecodebench_v4", CODE, 100),
        Benchmark("livecodebench_v5", "livecodebench_v5", CODE, 167),
        Benchmark("codecontests", "codecontests", CODE),
    )
}


def checked_benchmark(name: str) -> str:
    """``name``, when there is such a benchmark.

    Raises:
        ValueError: There is none.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"the name of a benchmark; {suggestion(name, BENCHMARKS)}")
    return name


def _departures(benchmark: Benchmark, settings: Mapping[str, Any]) -> Iterator[str]:
    published = benchmark.settings
    sampling, limits = settings["sampling"], settings["limits"]
    if sampling["temperature"] not in published.temperatures:
        wanted = " or ".join(f"{value:g}" for value in published.temperatures)
        yield f"temperature {sampling['temperature']:g}, published {wanted}"
    pairs = (
        ("top_p", sampling["top_p"], published.top_p),
        ("top_k", sampling["top_k"], published.top_k),
        ("tokens of a turn", limits["max_turn_tokens"], published.turn_tokens),
        ("tokens of an episode", limits["max_response_tokens"], published.response_tokens),
        ("tool calls", limits["max_turns"], published.turns),
        ("rounds", settings["rounds"], published.rounds),
        ("questions", settings["data"]["tasks"], benchmark.questions),
    )
    for name, ours, theirs in pairs:
        if ours != theirs and theirs is not None:
            yield f"{name}: {ours}, published {theirs}"
    if settings["agent"].get("without_tools_of") is not None:
        yield "the agent has no tools"
