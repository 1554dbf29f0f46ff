"""``afm data expand``: larger questions, from a generated encyclopaedia by rule or from a corpus by models."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.errors import BudgetSpentError, DataError, UsageError

if TYPE_CHECKING:
    from afm.datasets.encyclopaedia import Encyclopaedia


class By(StrEnum):
    """The direction in which questions grow."""

    DEPTH = "depth"
    WIDTH = "width"


class SplitName(StrEnum):
    """The disjoint parts of a generated world."""

    TRAIN = "train"
    RL = "rl"
    HELDOUT = "heldout"


def expand(
    out: Annotated[Path, typer.Option(help="JSONL of questions; with --corpus a folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value for the file of --team.", show_default=False)
    ] = None,
    by: Annotated[By, typer.Option(help="A chain of facts, or sub-questions that are combined.")] = By.DEPTH,
    count: Annotated[
        int, typer.Option(min=1, help="Questions; with --corpus groups that are tried.")
    ] = 1_000,
    world: Annotated[
        Path | None,
        typer.Option(help="Folder of `afm data world --kind wiki`.", exists=True, file_okay=False),
    ] = None,
    split: Annotated[SplitName, typer.Option(help="Part of the world.")] = SplitName.TRAIN,
    depths: Annotated[str, typer.Option(help="Facts of a chain, with commas.")] = "2,3,4",
    widths: Annotated[str, typer.Option(help="Chains of a question by width, with commas.")] = "2,3",
    corpus: Annotated[
        Path | None, typer.Option(help='JSONL {"id", "contents"}; needs --team.', exists=True, dir_okay=False)
    ] = None,
    team: Annotated[
        Path | None, typer.Option(help="YAML as configs/distill/expand.yaml.", exists=True, dir_okay=False)
    ] = None,
    size: Annotated[int, typer.Option(min=1, max=20, help="Passages that a question of a corpus needs.")] = 2,
    seed: Annotated[int, typer.Option(help="Fixes every choice that no model makes.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, help="Groups worked on at the same time.")] = 4,
) -> None:
    """Build questions that need several pages, each with its answer, its path and a proof that no page is needless.

    Killed, the same command goes on.
    """
    if (world is None) == (corpus is None):
        raise UsageError(
            "expected either --world DIR (by rule) or --corpus FILE with --team YAML (by models)"
        )
    if world is not None:
        if team is not None or overrides:
            raise UsageError("--team and key=value are for --corpus; a --world needs no model")
        _by_rule(world, out, by, SplitName(split), _numbers(depths), _numbers(widths), count, seed)
        return
    if corpus is None or team is None:
        raise UsageError("--corpus needs --team YAML, e.g. configs/distill/expand.yaml")
    asyncio.run(_by_model(corpus, team, overrides or [], out, by, size, count, seed, parallel))


def _by_rule(
    world: Path,
    out: Path,
    by: By,
    split: SplitName,
    depths: list[int],
    widths: list[int],
    count: int,
    seed: int,
) -> None:
    from afm.datasets import write_tasks
    from afm.datasets.encyclopaedia.growth import Growth
    from afm.datasets.encyclopaedia.growth import expand as grown
    from afm.datasets.manifest import write_manifest
    from afm.datasets.mini_world import Split

    made = grown(
        _world(world),
        Split(split.value),
        count,
        seed=seed,
        growth=Growth(by.value),
        depths=depths,
        widths=widths,
    )
    rows = write_tasks(made, out)
    write_manifest(
        out.with_name(f"{out.stem}.manifest.json"),
        counts={"questions": rows},
        inputs=[world / "manifest.json"],
        seed=seed,
        split=split.value,
        growth=by.value,
        depths=depths,
        widths=widths if by is By.WIDTH else [1],
    )
    print(f"{out}: {rows} questions, each proved to need its pages")


def _world(folder: Path) -> Encyclopaedia:
    """The encyclopaedia that a folder was made of.

    Raises:
        DataError: Its manifest is of another kind.
    """
    from afm.datasets.encyclopaedia import Encyclopaedia

    manifest = folder / "manifest.json"
    try:
        told = json.loads(manifest.read_text(encoding="utf-8"))
        pages, seed = int(told["counts"]["pages"]), int(told["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"tells no encyclopaedia: {type(error).__name__}; expected a folder of `afm data world --kind wiki`",
            path=str(manifest),
        ) from None
    return Encyclopaedia(
        pages, seed=seed, wordings=int(told.get("wordings", 1)), brief=bool(told.get("brief", False))
    )


async def _by_model(
    corpus: Path,
    team: Path,
    overrides: list[str],
    out: Path,
    by: By,
    size: int,
    count: int,
    seed: int,
    parallel: int,
) -> None:
    from afm.cli.progress import ProgressView
    from afm.datasets.encyclopaedia.growth import Growth
    from afm.distill.expand import expand_corpus, read_expansion

    view = ProgressView()
    summary = await expand_corpus(
        corpus,
        read_expansion(team, overrides),
        out,
        growth=Growth(by.value),
        size=size,
        count=count,
        seed=seed,
        parallel=parallel,
        progress=view.update,
    )
    spent = summary.spent
    view.line(
        f"{summary.path}: {summary.kept} questions of {count} groups, {spent.tokens} tokens, {spent.usd:.4f} USD in all"
    )
    for reason, number in sorted(summary.rejected.items()):
        print(f"  rejected: {number} {reason}")
    if summary.failed:
        print(f"  failed: {summary.failed}; the same command tries them again")
    if summary.stopped:
        raise BudgetSpentError(summary.stopped)


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"{text!r}: expected numbers with commas, for example 2,3") from None
