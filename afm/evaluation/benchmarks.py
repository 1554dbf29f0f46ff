"""The benchmarks of AFM's evaluation, with SVAMP and GSM8K: sizes, settings and scores as published (arXiv 2508.13167).

``configs/eval/NAME.yaml`` holds the settings of our runs. This table holds the published ones. With both, a manifest
shows whether two scores are comparable. The scores are read from ``published_scores.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from afm.configuration import Settings, read_file, validated
from afm.errors import DataError, suggestion
from afm.rewards.base import DEFAULT_FORMULA

_FILE = "published_scores.yaml"


class _Source(Settings):
    work: str
    where: str
    model: str
    own_protocol: bool = False
    confirmed: str = ""


class _ScoreRow(Settings):
    metric: str = Field(pattern=r"^(pass@|avg@|best-of-)\d+$")
    percent: float = Field(ge=0, le=100)
    source: str
    model: str | None = None


class _Table(Settings):
    sources: dict[str, _Source]
    scores: dict[str, list[_ScoreRow]]

    @model_validator(mode="after")
    def _check(self) -> _Table:
        for row in (row for rows in self.scores.values() for row in rows):
            if row.source not in self.sources:
                raise ValueError(
                    f"the name of a source, got {row.source!r}; {suggestion(row.source, self.sources)}"
                )
        return self


@dataclass(frozen=True, slots=True)
class PublishedScore:
    """One published figure, in percent.

    Attributes:
        of_another_model: Whether it is not of the source's main model.
        own_protocol: Whether it is of another project's model, measured in that project's way: our runs cannot have its
            settings.
    """

    metric: str
    percent: float
    model: str
    source: str
    of_another_model: bool = False
    own_protocol: bool = False

    @property
    def label(self) -> str:
        """The metric, with the model where it is not AFM's main one."""
        apart = self.of_another_model or self.own_protocol
        return f"{self.metric} ({self.model})" if apart else self.metric


@cache
def published_scores() -> Mapping[str, tuple[PublishedScore, ...]]:
    """All published figures by the name of their benchmark.

    Raises:
        ConfigError: The file is wrong.
    """
    with as_file(files("afm.evaluation") / _FILE) as path:
        table = validated(_Table, read_file(path, "published scores"), str(path))
    return {
        name: tuple(
            PublishedScore(
                row.metric,
                row.percent,
                row.model or source.model,
                f"{source.work}, {source.where}",
                of_another_model=row.model is not None,
                own_protocol=source.own_protocol,
            )
            for row in rows
            for source in (table.sources[row.source],)
        )
        for name, rows in table.scores.items()
    }


_LIST = "benchmarks"


@dataclass(frozen=True, slots=True)
class PublishedSettings:
    """How a benchmark was run; ``temperatures``: models of several sizes had their own. ``None`` was not published."""

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
        values = asdict(self) | {"temperatures": list(self.temperatures)}
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One row of the published evaluation. `afm data download benchmarks` has the data under the same name.

    Attributes:
        questions: Size of the published evaluation.
        prepared: Whether `afm data prepare` makes tasks of it; what is published encrypted is read as it is.
        choice_in: List of `afm data download` that has AFM's file, where AFM asks only some of the published questions.
        settings: ``None`` for a benchmark that AFM does not have.
        own_list: Whether the set comes in a list of its own name, with its training questions.
    """

    name: str
    settings: PublishedSettings | None
    questions: int
    prepared: bool = True
    choice_in: str | None = None
    own_list: bool = False

    def commands(self, place: Path) -> tuple[str, ...]:
        """Return the commands that fetch the data to where a run looks for it."""
        source, only = (self.choice_in, _LIST) if self.choice_in else (_LIST, self.name)
        source = self.name if self.own_list else source
        raw = place.parent.parent / "raw" if self.prepared else place.parent
        fetch = f"afm data download {source} --output-dir {raw} --only {only}"
        if not self.prepared:
            return (fetch,)
        out = place.parent.parent if self.choice_in or self.own_list else place.parent
        return fetch, f"afm data prepare published {source} --data {raw} --output-dir {out} --only {only}"

    def missing(self, place: Path) -> DataError:
        """Return the error for missing data, with the commands that fetch it."""
        owner = (
            "its publisher"
            if self.choice_in is None
            else f"AFM, which asks {self.questions} of its questions"
        )
        return DataError(
            f"no such file: the data of {self.name} is not shipped. Fetch it from {owner}:\n  "
            + "\n  ".join(self.commands(place))
            + "\nor name a file that you have: data=FILE",
            path=str(place),
        )

    def departures(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield each setting of a manifest that differs from the published one, so that scores cannot be compared."""
        published = self.settings
        if published is None:
            if (asked := settings["data"]["tasks"]) != self.questions:
                yield f"questions: {asked} here, {self.questions} published"
            if settings["rounds"] != 1:
                yield f"rounds: {settings['rounds']} here, 1 published"
            yield from _other_score(settings)
            return
        sampling, limits = settings["sampling"], settings["limits"]
        if sampling["temperature"] not in published.temperatures:
            wanted = " or ".join(f"{value:g}" for value in published.temperatures)
            yield f"temperature: {sampling['temperature']:g} here, {wanted} published"
        pairs = (
            ("top_p", sampling["top_p"], published.top_p),
            ("top_k", sampling["top_k"], published.top_k),
            ("tokens per turn", limits["max_turn_tokens"], published.turn_tokens),
            ("tokens per episode", limits["max_response_tokens"], published.response_tokens),
            ("tool calls", limits["max_turns"], published.turns),
            ("rounds", settings["rounds"], published.rounds),
            ("questions", settings["data"]["tasks"], self.questions),
        )
        for name, ours, theirs in pairs:
            if ours != theirs and theirs is not None:
                yield f"{name}: {ours} here, {theirs} published"
        yield from _other_texts(
            settings, ("AFM's text", "FILE") if published is WEB else ("the row's", "row")
        )
        if published is WEB and not settings.get("model", {}).get("team"):
            yield from _departures_from_the_script(settings)
        if lacking := settings["data"].get("sample_tests_only"):
            yield (
                f"tests: only samples for {lacking} of {settings['data']['tasks']} problems here, complete tests published; "
                "set LIVECODEBENCH_DATA_PATH (`afm data livecodebench` makes the folder)"
            )
        if settings["agent"].get("without_tools_of") is not None:
            yield "the agent has no tools"


WEB = PublishedSettings(
    (1.0,), top_p=0.9, top_k=20, turn_tokens=4096, response_tokens=32768, turns=36, rounds=5, parallel=30
)
QUESTIONS = PublishedSettings(
    temperatures=(0.0,), top_p=1.0, prompt_tokens=2048, response_tokens=8192, turns=8, rounds=1
)
MATH_16 = PublishedSettings(temperatures=(0.8, 0.6), top_p=1.0, response_tokens=32768, turns=12, rounds=16)
CODE = PublishedSettings(temperatures=(0.8, 0.6), top_p=1.0, response_tokens=32768, turns=12, rounds=1)

# Questions are the rows of AFM's published file (revision 8f94516) where there is one; of the other sets of questions, the rows
# in FlashRAG and Search-R1 (arXiv 2503.09516), of TriviaQA the validation split of unfiltered.nocontext by its data set card; of
# CodeContests the published test split (AlphaCode, arXiv 2203.07814).
BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("gaia", WEB, 103, choice_in="web_agent"),
        Benchmark("webwalker", WEB, 680),
        Benchmark("browsecomp", WEB, 1266, prepared=False),
        Benchmark("hle", WEB, 500, choice_in="web_agent"),
        Benchmark("nq", QUESTIONS, 3610),
        Benchmark("triviaqa", QUESTIONS, 11313),
        Benchmark("hotpotqa", QUESTIONS, 7405),
        Benchmark("2wikimultihopqa", QUESTIONS, 12576),
        Benchmark("musique", QUESTIONS, 2417),
        Benchmark("bamboogle", QUESTIONS, 125),
        Benchmark("popqa", QUESTIONS, 14267),
        Benchmark("aime24", MATH_16, 30),
        Benchmark("aime25", MATH_16, 30),
        Benchmark("amc23", MATH_16, 40),
        Benchmark("math500", CODE, 500),
        Benchmark("olympiadbench", CODE, 675),
        Benchmark("livecodebench_v4", CODE, 100),
        Benchmark("livecodebench_v5", CODE, 167),
        Benchmark("codecontests", CODE, 165),
        Benchmark("svamp", None, 1000, own_list=True),
        Benchmark("gsm8k", None, 1319, own_list=True),
    )
}

READ_AS_PUBLISHED = {name: Benchmark(name, None, 0, prepared=False) for name in ("glaive", "t_eval")}
"""Sets of the same list that AFM was not evaluated on."""

_OUR_PROTOCOL = (
    "suggested answers: never count as the answer here; published, the third one does, and the last one at a limit; "
    "set protocol=published",
    "full context: ends the episode here; published, the history is trimmed and the episode continues",
    "steps: all in one turn of the assistant here, one turn each published",
    "repeats: an answered call is not run again here; published, no step may repeat, and none may follow five of its kind",
    "attempts: 1 here; published, up to 3 until there is an answer",
)

PUBLISHED_REMARKS = (
    "Faults of the published script are not repeated. Its stop list lacks suggested answers, so its own rule about them "
    "never applies. It runs a call inside a thought and keeps an observation that the agent wrote.",
    "An episode without an answer counts as wrong here. The published script leaves it out of its file. A judge's reply that "
    "cannot be read gives no score here. There it counts as a wrong answer.",
)
"""What a reader of a run with ``protocol: published`` should know."""


def checked_benchmark(name: str) -> str:
    """Return ``name`` if there is such a benchmark.

    Raises:
        ValueError: No benchmark has that name.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"the name of a benchmark; {suggestion(name, BENCHMARKS)}")
    return name


def _other_score(settings: Mapping[str, Any]) -> Iterator[str]:
    formula = (settings.get("reward") or {}).get("formula", DEFAULT_FORMULA)
    if formula != "correct":
        yield f"score: {formula} here, correct published"


def _other_texts(settings: Mapping[str, Any], prompt: tuple[str, str]) -> Iterator[str]:
    """Departures of prompt and score in a benchmark of AFM. ``prompt`` is the published one and the value that sets it."""
    yield from _other_score(settings)
    if "prompt" not in settings and not settings.get("model", {}).get("team"):
        yield f"prompt: the agent's own here, {prompt[0]} published; set prompt={prompt[1]}"


def _departures_from_the_script(settings: Mapping[str, Any]) -> Iterator[str]:
    """Departures from the published script of the web agent."""
    if "protocol" not in settings:
        yield from _OUR_PROTOCOL
    judge = (settings.get("reward") or {}).get("judge") or {}
    if not judge.get("prompt"):
        yield "judge's text: ours here, AFM's published; set rewards.judge.prompt=FILE"
    elif judge.get("control", True):
        yield "judge's verdicts: an accepted answer is checked again here, one verdict published; set rewards.judge.control=false"
