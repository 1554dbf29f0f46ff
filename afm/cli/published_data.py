"""``afm data download``, ``prepare published``, ``mix``, ``tasks``, ``livecodebench``: fetch and prepare published data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import OnBadRows, file_option
from afm.errors import DataError, UsageError, fault_words, suggestion
from afm.terminal import plural

if TYPE_CHECKING:
    from afm.datasets.hub_sets import HubSets
    from afm.datasets.prepared import OnNamedRow, Prepared
    from afm.datasets.published import ReadCounts
    from afm.terminal import ProgressView


_FOLDER = "data"
_SHOWN_REASONS = 10


_SetsArgument = Annotated[
    str,
    typer.Argument(
        help="YAML of data sets, or the name of a shipped one: web_agent, mhqa_agent, code_agent, agent_flan, gsm8k, "
        "svamp, benchmarks, models."
    ),
]
_OnlyOption = Annotated[
    list[str] | None,
    typer.Option(metavar="SET", help="Set to take; may be repeated [default: all that are not optional]."),
]
_EverythingOption = Annotated[bool, typer.Option("--all", help="Take optional sets too.")]
_DataOption = Annotated[Path, typer.Option(help="Folder that `afm data download` filled.", file_okay=False)]
_DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be made from which files; write nothing.")
]


def download(
    sets: _SetsArgument,
    output_dir: Annotated[Path, typer.Option(help="Folder to download into; each set gets a sub-folder.")],
    only: _OnlyOption = None,
    everything: _EverythingOption = False,
    pin: Annotated[
        bool,
        typer.Option("--pin", help="Pin the newest revision on the Hub, even if a set is pinned already."),
    ] = False,
    lock: Annotated[
        Path | None, typer.Option(help="File that pins the sets [default: OUTPUT_DIR/download.lock.json].")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be fetched; fetch nothing.")
    ] = False,
) -> None:
    """Download data sets and models, pinned by commit and checksum.

    The first download of a set pins its commit and the size and checksum of each file. Later downloads must match. The
    environment variables HF_ENDPOINT and GITHUB_RAW_ENDPOINT set mirrors, HF_TOKEN a token. If interrupted, run the
    same command again to resume.

    Example: afm data download benchmarks --only gsm8k --output-dir downloads/benchmarks
    """
    from afm.datasets.download import plan, run
    from afm.datasets.hub import format_size
    from afm.terminal import ProgressView

    chosen = sets_option(sets).chosen(only or [], everything=everything)
    view = ProgressView()
    planned = plan(chosen, output_dir, lock=lock, pin=pin)
    for hub_set in planned.sets:
        view.line(hub_set.summary())
    view.line(f"{output_dir}: {format_size(planned.bytes_missing)} to fetch")
    planned.check_space()
    failed = planned.refused
    if not dry_run:
        failed = run(planned, view.update, lock=lock)
    if failed:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in failed.items())
        raise DataError(f"{len(failed)} of {plural(len(chosen), 'set')} could not be downloaded:{reasons}")
    if not dry_run:
        view.line(f"{output_dir}: {plural(len(chosen), 'set')} downloaded and checked")


def sets_option(name: str) -> HubSets:
    """Return the sets of a YAML, or of the shipped YAML of that name."""
    from afm.cli.options import configs_folder
    from afm.datasets.hub_sets import read_hub_sets

    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return read_hub_sets(path)
    folder = configs_folder() / _FOLDER
    shipped = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if name not in shipped:
        raise UsageError(f"{name}: not a YAML and not a shipped list of sets; {suggestion(name, shipped)}")
    return read_hub_sets(shipped[name])


BadRowsOption = Annotated[
    OnBadRows,
    typer.Option(help="error: stop at a bad row; drop: list bad rows in NAME.bad_rows.jsonl and continue."),
]


def published(
    sets: _SetsArgument,
    data: _DataOption,
    output_dir: Annotated[Path, typer.Option(help="Folder for the files that are made.")],
    only: _OnlyOption = None,
    everything: _EverythingOption = False,
    on_bad_rows: BadRowsOption = OnBadRows.DROP,
    new_counts: Annotated[
        bool,
        typer.Option(
            "--new-counts", help="Accept row counts that differ from download.lock.json, and record them."
        ),
    ] = False,
    dry_run: _DryRunOption = False,
) -> None:
    """Make training and evaluation files from downloaded sets."""
    from afm.datasets.prepared import input_files, prepare_prompts, prepare_set, set_folder
    from afm.datasets.published import PROMPTS_FOLDER
    from afm.terminal import ProgressView

    chosen = sets_option(sets).chosen(only or [], everything=everything)
    view, made = ProgressView(), 0
    for name, hub_set in chosen.items():
        for step in hub_set.prepare:
            count = len(input_files(set_folder(name, hub_set, data), step, name))
            if dry_run:
                view.line(
                    f"{step.name or name}: {plural(count, 'file')} by reader {step.reader}, made into {step.into}"
                )
        for prompt in hub_set.prompts if dry_run else ():
            prompt.text(set_folder(name, hub_set, data))
        if dry_run and hub_set.prompts:
            view.line(f"{name}: {plural(len(hub_set.prompts), 'prompt')}, made into {data / PROMPTS_FOLDER}")
    if dry_run:
        return
    for name, hub_set in chosen.items():
        strict = on_bad_rows is OnBadRows.ERROR
        for prepared in prepare_set(
            name, hub_set, data, output_dir, strict=strict, new_counts=new_counts, on_row=_row_counter(view)
        ):
            _print_prepared(prepared, view)
            made += 1
        for path in prepare_prompts(name, hub_set, data):
            view.line(str(path))
            made += 1
        if not hub_set.prepare and not hub_set.prompts:
            view.line(f"{name}: nothing is made of it; its files are in {set_folder(name, hub_set, data)}")
    if not made:
        raise DataError("nothing was made: the chosen sets have no `prepare`", path=sets)


def mix(
    sets: _SetsArgument,
    name: Annotated[str, typer.Argument(help="Name of a mix in the YAML, for example train.")],
    data: _DataOption,
    output_dir: Annotated[Path, typer.Option(help="Folder for the files that are made.")],
    keep: Annotated[
        list[Path] | None,
        file_option(
            "Take only questions in this file, for example kept.jsonl of `afm data queries`; may be repeated."
        ),
    ] = None,
    own_prompts: Annotated[
        bool,
        typer.Option("--own-prompts", help="Use the agents' own prompts instead of the mix's `prompts`."),
    ] = False,
    on_bad_rows: BadRowsOption = OnBadRows.DROP,
    dry_run: _DryRunOption = False,
) -> None:
    """Mix rows of several sets into one file.

    The key `mixes` of their YAML lists the parts.
    """
    from afm.datasets.mix import mix_sources, prepare_mix
    from afm.terminal import ProgressView

    known, view = sets_option(sets), ProgressView()
    chosen = known.mix(name)
    for part, (step, source) in mix_sources(name, known, data).items():
        view.line(
            f"{part}: {plural(len(source.files), 'file')} by reader {step.reader}, made into {chosen.into}"
        )
    if dry_run:
        return
    strict = on_bad_rows is OnBadRows.ERROR
    mixed = prepare_mix(
        name,
        known,
        data,
        output_dir,
        keep=keep or (),
        own_prompts=own_prompts,
        strict=strict,
        on_row=_row_counter(view),
    )
    view.line(f"{', '.join(map(str, mixed.paths))}: {plural(mixed.rows, 'row')}")
    for part, counts in mixed.parts.items():
        print(f"{part}: {counts.made:,} of {plural(counts.read, 'row')}")
        _print_counts(counts)
    if mixed.bad_rows is not None:
        print(f"  listed in {mixed.bad_rows}")


_ReaderOption = Annotated[
    str,
    typer.Option(
        help="Layout of the rows: plain for any two keys, else the name of a data set, such as gsm8k, nq, hotpotqa."
    ),
]


def tasks(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Published files: JSONL, JSON, parquet, TSV, CSV, or folders written by save_to_disk.",
            exists=True,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="JSONL to write: tasks, or conversations (retool, agent_flan)."),
    ],
    reader: _ReaderOption = "plain",
    question_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key of the question in plain rows [default: question].")
    ] = None,
    answer_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key of the answer in plain rows [default: answer].")
    ] = None,
    data_source: Annotated[
        str | None, typer.Option(help="data_source of rows without one, for rewards [default: the reader's].")
    ] = None,
    on_bad_rows: BadRowsOption = OnBadRows.DROP,
) -> None:
    """Read published questions as tasks.

    `afm data queries`, `afm data prepare rl` and `afm eval` read the file.
    """
    from pydantic import ValidationError

    from afm.datasets.hub_sets import Preparation, Product
    from afm.datasets.prepared import make
    from afm.datasets.readers import READERS, checked_reader
    from afm.terminal import ProgressView

    try:
        name = checked_reader(reader)
    except ValueError as error:
        raise UsageError(f"--reader {reader}: expected {error}") from None
    if out.suffix != ".jsonl" or out.resolve() in {file.resolve() for file in files}:
        raise UsageError(f"--out {out}: expected another file that ends in .jsonl")
    into = Product.CHAT if READERS[name].makes_conversations else Product.TASKS
    try:
        step = Preparation(
            reader=name, into=into, data_source=data_source, question_key=question_key, answer_key=answer_key
        )
    except ValidationError as error:
        raise UsageError(fault_words(error.errors()[0])) from None
    view = ProgressView()
    strict = on_bad_rows is OnBadRows.ERROR
    _print_prepared(make(out.stem, step, files, out.parent, strict=strict, on_row=_row_counter(view)), view)


def _row_counter(view: ProgressView) -> OnNamedRow:
    def show(name: str, rows: int) -> None:
        view.update(f"{name}, rows", rows, None)

    return show


def _print_prepared(prepared: Prepared, view: ProgressView) -> None:
    counts = prepared.counts
    if prepared.of_another:
        view.line(
            f"{prepared.path}: not replaced, because another command made it (a mix, selected questions, your own rows); "
            "move it to get the published rows"
        )
        return
    files = ", ".join(map(str, prepared.paths))
    before = "" if prepared.made_now else " (made before)"
    view.line(f"{files}: {counts.made:,} of {plural(counts.read, 'row')}{before}")
    if prepared.published not in (None, counts.read):
        print(f"  warning: {counts.read:,} rows, {prepared.published:,} were published")
    _print_counts(counts)
    if prepared.bad_rows is not None:
        print(f"  listed in {prepared.bad_rows}")


def _print_counts(counts: ReadCounts) -> None:
    if counts.repeated:
        print(f"  left out: {counts.repeated} repeat an earlier row")
    if counts.renamed:
        print(f"  renamed: {counts.renamed} share an id with another row")
    for reason, count in counts.left_out.most_common():
        print(f"  left out: {count} {reason}")
    for reason, count in counts.refused.most_common(_SHOWN_REASONS):
        print(f"  refused: {count} {counts.placed(reason)}")
    if rest := counts.refused.most_common()[_SHOWN_REASONS:]:
        print(f"  refused: {sum(count for _, count in rest)} more, for {len(rest)} other reasons")


def livecodebench(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of livecodebench/code_generation_lite, or folders of them.", exists=True),
    ],
    output_dir: Annotated[Path, typer.Option(help="Folder of the tests.")] = Path(
        "data/code_agent/livecodebench_testcases"
    ),
) -> None:
    """Write the complete tests of LiveCodeBench.

    Each problem is checked. The reward reads the folder that LIVECODEBENCH_DATA_PATH names.
    """
    from afm.datasets.readers.programs import write_complete_tests

    count = write_complete_tests(files, output_dir)
    print(
        f"{plural(count, 'problem')} with complete tests in {output_dir}; export LIVECODEBENCH_DATA_PATH={output_dir.absolute()}"
    )
