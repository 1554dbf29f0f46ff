"""``afm data expand``: larger questions, from a generated encyclopaedia by rule, from a corpus or the web by models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.errors import BudgetSpentError, DataError, UsageError

if TYPE_CHECKING:
    from afm.cli.progress import ProgressView
    from afm.datasets.encyclopaedia import Encyclopaedia
    from afm.distill.expand import ExpandSummary
    from afm.tools import Tool


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
    out: Annotated[Path, typer.Option(help="JSONL of questions; with --corpus or --web a folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value for the file of --team.", show_default=False)
    ] = None,
    by: Annotated[By, typer.Option(help="A chain of facts, or sub-questions that are combined.")] = By.DEPTH,
    count: Annotated[
        int, typer.Option(min=1, help="Questions; with --corpus groups, with --web topics that are tried.")
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
    web: Annotated[
        Path | None,
        typer.Option(
            help="Topics, one a line, to begin from on the web; needs --team.", exists=True, dir_okay=False
        ),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="Tools of --web; configs/tools/search.yaml by default.", exists=True, dir_okay=False
        ),
    ] = None,
    team: Annotated[
        Path | None, typer.Option(help="YAML as configs/distill/expand.yaml.", exists=True, dir_okay=False)
    ] = None,
    size: Annotated[
        int, typer.Option(min=1, max=20, help="Passages, or pages of the web, that a question needs.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Fixes every choice that no model makes.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, help="Groups worked on at the same time.")] = 4,
) -> None:
    """Build questions that need several pages, each with its answer, its path and a proof that no page is needless.

    Killed, the same command goes on.
    """
    if sum(source is not None for source in (world, corpus, web)) != 1:
        raise UsageError(
            "expected either --world DIR (by rule), or --corpus FILE or --web FILE with --team YAML (by models)"
        )
    if tools is not None and web is None:
        raise UsageError("--tools is for --web")
    if world is not None:
        if team is not None or overrides:
            raise UsageError("--team and key=value are for --corpus and --web; a --world needs no model")
        _by_rule(world, out, by, SplitName(split), _numbers(depths), _numbers(widths), count, seed)
        return
    if team is None:
        raise UsageError("--corpus and --web need --team YAML, e.g. configs/distill/expand.yaml")
    asyncio.run(_by_model(corpus, web, tools, team, overrides or [], out, by, size, count, seed, parallel))


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
    from afm.datasets.mini_world import Split
    from afm.runs.folder import write_manifest

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
    corpus: Path | None,
    web: Path | None,
    tools: Path | None,
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
    from afm.distill.expand import expand_corpus, expand_web, read_expansion

    view, settings, growth = ProgressView(), read_expansion(team, overrides), Growth(by.value)
    if corpus is not None:
        summary = await expand_corpus(
            corpus,
            settings,
            out,
            growth=growth,
            size=size,
            count=count,
            seed=seed,
            parallel=parallel,
            progress=view.update,
        )
    else:
        assert web is not None
        async with _opened(tools) as opened:
            summary = await expand_web(
                web,
                settings,
                opened,
                out,
                growth=growth,
                size=size,
                count=count,
                parallel=parallel,
                progress=view.update,
            )
    _tell(summary, view)


@asynccontextmanager
async def _opened(file: Path | None) -> AsyncIterator[dict[str, Tool]]:
    from afm.cli.project import configs_folder
    from afm.tools import load_tools

    tools = load_tools(file or configs_folder() / "tools/search.yaml")
    try:
        yield tools
    finally:
        await asyncio.gather(*(tool.close() for tool in tools.values()))


def _tell(summary: ExpandSummary, view: ProgressView) -> None:
    spent, groups = summary.spent, summary.groups
    view.line(
        f"{summary.path}: {summary.kept} questions of {groups} groups, {spent.tokens} tokens, {spent.usd:.4f} USD in all"
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
