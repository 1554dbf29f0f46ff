"""``afm data``: from generated problems and a team's work to the files that training reads."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from afm.choices import GoldForm, WorldKind
from afm.cli.distill import distill, expand, queries
from afm.cli.options import (
    AgentOfRowsOption,
    AgentOption,
    CallReadersOption,
    RecordsArgument,
    SeedOption,
    TasksArgument,
    TrustOption,
    agent_of_rows,
    agent_option,
    prompt_option,
)
from afm.cli.published_data import download, livecodebench, mix, published, tasks
from afm.cli.trajectories import filter_files, merge, negative, stats
from afm.errors import DataError, UsageError, reasons_by_kind
from afm.terminal import plural, visible

if TYPE_CHECKING:
    from afm.datasets import Task
    from afm.datasets.encyclopaedia import Shape
    from afm.trajectory.record import Record

RowT = TypeVar("RowT")

app = typer.Typer(help="Make questions, trajectories and training files.", no_args_is_help=True)


prepare = typer.Typer(help="Write the files that training and evaluation read.", no_args_is_help=True)
app.add_typer(prepare, name="prepare")
app.command()(distill)
app.command("filter")(filter_files)
prepare.command()(published)
prepare.command("tasks")(tasks)
prepare.command("mix")(mix)
app.command()(negative)
app.command()(download)
app.command()(merge)
app.command()(livecodebench)
app.command()(stats)
app.command()(queries)
app.command()(expand)


def _problems(use: str) -> Any:
    """Return an option for the size of a set. Its questions are compared, so memory holds them all."""
    return typer.Option(min=1, max=10_000_000, help=f"Number of problems for {use}.")


@app.command()
def world(
    output_dir: Annotated[Path, typer.Option(help="Folder for the three JSONL files and their manifest.")],
    kind: Annotated[
        WorldKind,
        typer.Option(help="math: arithmetic word problems; wiki: questions about a generated encyclopaedia."),
    ] = WorldKind.MATH,
    seed: SeedOption = 0,
    train: Annotated[int, _problems("demonstrations")] = 6_000,
    rl: Annotated[int, _problems("reinforcement learning")] = 4_096,
    heldout: Annotated[int, _problems("evaluation only")] = 200,
    pages: Annotated[
        int, typer.Option(min=40, max=16_000_000, help="Pages of the encyclopaedia; for --kind wiki.")
    ] = 1_000,
    hops: Annotated[
        str, typer.Option(help="Numbers of pages that a question needs, with commas; for --kind wiki.")
    ] = "1,2,3,4",
    shapes: Annotated[
        str,
        typer.Option(
            help="Shapes of questions, with commas: chain, comparison, intersection; for --kind wiki. The scripted teams of "
            "`afm data distill` read chains only."
        ),
    ] = "chain",
    wordings: Annotated[
        int,
        typer.Option(min=1, max=2, help="Number of ways in which a page phrases a fact; for --kind wiki."),
    ] = 1,
) -> None:
    """Generate problems with gold answers in three disjoint sets.

    The sets are train.jsonl, rl.jsonl and heldout.jsonl. With --kind wiki the encyclopaedia that holds the answers is
    written as corpus.jsonl.
    """
    from afm.datasets.mini_world import WorldSplit, write_world

    numbers, wanted = _hops(hops), _shapes(shapes)
    sizes = {WorldSplit.TRAIN: train, WorldSplit.RL: rl, WorldSplit.HELDOUT: heldout}
    if kind is WorldKind.WIKI:
        from afm.datasets.encyclopaedia import Encyclopaedia, write_encyclopaedia
        from afm.terminal import ProgressView

        made = Encyclopaedia(pages, seed=seed, wordings=wordings)
        paths = write_encyclopaedia(
            output_dir,
            made,
            sizes=sizes,
            seed=seed,
            hops=numbers,
            shapes=wanted,
            progress=ProgressView().update,
        )
    else:
        paths = write_world(output_dir, seed=seed, sizes=sizes)
    for split, path in paths.items():
        print(f"{path}: {plural(sizes[split], 'problem')}")


def _hops(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not set(numbers) <= {1, 2, 3, 4}:
        raise UsageError(f"--hops {text!r}: expected numbers from 1 to 4 with commas, for example 1,2")
    return numbers


def _shapes(text: str) -> list[Shape]:
    from afm.datasets.encyclopaedia import Shape

    names = [part.strip() for part in text.split(",")]
    if not set(names) <= set(Shape):
        raise UsageError(
            f"--shapes {text!r}: expected chain, comparison or intersection, or several of them with commas"
        )
    return [shape for shape in Shape if shape in names]


@prepare.command("sft")
def prepare_sft(
    records: RecordsArgument,
    output_dir: Annotated[Path, typer.Option(help="Folder of the data set and its dataset_info.json.")],
    agent: AgentOfRowsOption = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the data set for LLaMA-Factory [default: AGENT_sft].")
    ] = None,
    tools: CallReadersOption = None,
    trust: TrustOption = False,
) -> None:
    """Write trajectories as an alpaca data set for `afm sft`.

    A trajectory that breaks the agent's rules is an error, and so is a call that its tool would refuse. Rows with
    `kept: false` are left out.

    Example: afm data prepare sft runs/quickstart/distill/trajectories.jsonl --agent math --name mine --output-dir runs/data
    """
    from afm.datasets.sft_files import write_sft
    from afm.tools.registry import readers_of
    from afm.trajectory.io import numbered_records

    spec, readers = agent_of_rows(agent, [records]), readers_of(tools)
    rows_read = _Rows(records, numbered_records(records))
    name = name or f"{spec.name}_sft"
    reasons = list[str]()

    def noted() -> Iterator[Record]:
        for record in rows_read:
            if not record.kept:
                reasons.append(record.reason or "no reason is recorded")
            yield record

    with rows_read.locating():
        rows = write_sft(noted(), spec, output_dir, name=name, inputs=[records], readers=readers)
    more = ""
    if reasons:
        more = f", {len(reasons):,} with kept: false left out ({visible(reasons_by_kind(reasons))})"
    print(f"{output_dir / name}.json: {plural(rows, 'row')}{more}")


@prepare.command("rl")
def prepare_rl(
    tasks: TasksArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write; its name ends in .parquet.")],
    agent: AgentOption = "math",
    ability: Annotated[str, typer.Option(help="Value of the column `ability`.")] = "math",
    split: Annotated[str, typer.Option(help="Value of the key extra_info.split.")] = "train",
    ground_truth: Annotated[
        GoldForm | None,
        typer.Option(
            help="Form of the gold answer: text, question (JSON with target and question) or target (an object with target) "
            "[default: question for agents with tools and no code tool, else text]."
        ),
    ] = None,
    validation: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Hold out this many questions, at most a tenth, as val.parquet in the same folder [default: none].",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="own (the agent's prompt), row (each row's prompt), or a text file with {question} in it "
            "[default: each row's prompt, else the agent's]."
        ),
    ] = None,
    data_source: Annotated[
        str | None, typer.Option(help="data_source of rows without one [default: none].")
    ] = None,
) -> None:
    """Write problems as the parquet rows that `afm rl` reads."""
    from afm.datasets.hub_sets import Validation
    from afm.datasets.rl_files import most_held_out, write_rl
    from afm.datasets.schema import numbered_tasks

    if out.suffix != ".parquet":
        raise UsageError(f"--out {out}: expected a file that ends in .parquet")
    held_out = None if validation is None else Validation(rows=validation)
    if held_out is not None and out.name == f"{held_out.name}.parquet":
        raise UsageError(f"--out {out}: --validation writes that file; choose another name")
    rows_read = _Rows(tasks, _sourced(numbered_tasks(tasks, data_source=data_source)))
    with rows_read.locating():
        written = write_rl(
            rows_read,
            agent_option(agent),
            out,
            split=split,
            ability=ability,
            gold=ground_truth,
            inputs=[tasks],
            prompt=None if prompt is None else prompt_option(prompt),
            validation=held_out,
        )
    for path, rows in written.items():
        print(f"{path}: {plural(rows, 'row')}")
    most = most_held_out(rows_read.count)  # the file may have more rows: several rows can have one question
    if validation is not None and most < validation:
        text = f"--validation {validation}: {plural(most, 'question')} held out, at most a tenth of the rows"
        print(f"warning: {text}", file=sys.stderr)


_UNJUDGED = (
    "the row has no data_source, which chooses the reward; expected a column `data_source`, or a scorer in "
    "extra_info.reward; to give all such rows one, add --data-source NAME"
)


def _sourced(numbered: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, Task | DataError]]:
    """Yield the tasks of a file, and an error for one that no reward could score."""
    for line, task in numbered:
        judged = task.data_source or task.extra_info.get("reward")
        yield line, task if judged else DataError(_UNJUDGED)


class _Rows(Generic[RowT]):
    """The rows of a file. The first bad row is an error, and so is a row that the command rejects, each with its line."""

    def __init__(self, file: Path, numbered: Iterable[tuple[int, RowT | DataError]]) -> None:
        self._file = file
        self._numbered = numbered
        self._line: int | None = None
        self.count = 0

    def __iter__(self) -> Iterator[RowT]:
        for line, item in self._numbered:
            self._line = line
            if isinstance(item, DataError):
                raise item
            self.count += 1
            yield item
        self._line = None

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add file and line of the row that was read last to an error about it."""
        try:
            yield
        except DataError as error:
            if error.path is not None or self._line is None:
                raise
            command = "afm data filter "
            message = error.message.replace(f"{command}FILE", command + shlex.quote(str(self._file)))
            raise DataError(message, path=str(self._file), line=self._line) from None
