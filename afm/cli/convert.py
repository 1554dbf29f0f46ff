"""``afm convert``, ``validate`` and ``mask``: formats, rules and the loss mask of trajectories."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from afm.choices import Boundary
from afm.cli.options import (
    AgentOfRowsOption,
    CallReadersOption,
    OnBadRows,
    RowsJsonOption,
    TrustOption,
    agent_option,
    file_argument,
    overrides_argument,
    rows_file,
)
from afm.errors import (
    DataError,
    MissingExtraError,
    RepeatedErrors,
    TrajectoryError,
    UsageError,
    no_such_file,
    reasons_by_kind,
)
from afm.palette import terminal_style
from afm.terminal import ProgressView, plural, visible

if TYPE_CHECKING:
    from afm.masking import MaskedIds
    from afm.tools.registry import Reader
    from afm.trajectory.convert import Converted, TrajectoryRow


FormatName = Literal[
    "coa",
    "alpaca",
    "sharegpt",
    "openai",
    "messages",
    "react",
    "agent_flan",
    "smolagents",
    "atif",
    "openai_agents",
]
"""A test compares them with :data:`afm.trajectory.convert.FORMATS`."""


_FileArgument = Annotated[Path, file_argument("JSONL, a JSON array, or one JSON object.", callback=rows_file)]
_FORMATS = ", ".join(get_args(FormatName))
_WRITTEN = _FORMATS.removesuffix(", openai_agents")  # which is only read
_ReadAsOption = Annotated[
    FormatName | None,
    typer.Option(
        "--from", metavar="FORMAT", help=f"Format of FILE: {_FORMATS} [default: detected from the first row]."
    ),
]
_ToolOption = Annotated[
    list[str] | None,
    typer.Option(help="THEIRS=OURS renames a tool, THEIRS= drops its calls; may be repeated."),
]
_MissingThoughtOption = Annotated[
    str,
    typer.Option(help="Thought to insert where the agent requires one and a row lacks it [default: none]."),
]
_BareOption = Annotated[
    bool, typer.Option("--bare", help="Write only what the format itself defines, and report what is lost.")
]
_OnBadRowsOption = Annotated[
    OnBadRows, typer.Option(help="error: write nothing if a row is bad; drop: leave bad rows out.")
]


def convert(
    file: _FileArgument,
    write_as: Annotated[
        FormatName, typer.Option("--to", metavar="FORMAT", help=f"Format to write: {_WRITTEN}.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: JSONL, or one JSON array if it ends in .json.")
    ],
    read_as: _ReadAsOption = None,
    agent: AgentOfRowsOption = None,
    tool: _ToolOption = None,
    missing_thought: _MissingThoughtOption = "",
    bare: _BareOption = False,
    on_bad_rows: _OnBadRowsOption = OnBadRows.ERROR,
    atif_version: Annotated[str, typer.Option(help="Version of ATIF to write, 1.0 to 1.8.")] = "1.7",
) -> None:
    """Convert trajectories between formats.

    The key `afm` keeps what the target format cannot express. Bad rows are reported with file and line. After three
    faults of one kind, the rest are only counted. Trajectories that break their agent's rules, or whose run failed,
    are converted and marked `kept: false`.

    Example: afm convert runs.jsonl --from atif --to coa --agent mhqa -o trajectories.jsonl
    """
    from afm.runs.atomic import replacing
    from afm.trajectory.convert import FORMATS, Context, convert_file, detected

    if out.resolve() == file.resolve():
        raise UsageError(f"{out}: input and output are the same file; choose another --out")
    if atif_version not in {f"1.{minor}" for minor in range(9)}:
        raise UsageError(f"--atif-version {atif_version}: expected 1.0 to 1.8")
    context = Context(
        agent=agent_option(agent) if agent is not None else None,
        missing_thought=missing_thought,
        tools=_names(tool or ()),
        bare=bare,
        atif_version=atif_version,
    )
    source, view = detected(file) if read_as is None else FORMATS[read_as], ProgressView()
    with replacing(out) as temporary:
        done = convert_file(
            file,
            source,
            temporary,
            FORMATS[write_as],
            context,
            array=out.suffix == ".json",
            on_row=lambda rows: view.rows("rows", rows),
        )
        view.clear()
        _report_bad(done, file, on_bad_rows)
    for warning in done.warnings(context, source.name):
        print(f"warning: {warning}", file=sys.stderr)
    reasons = visible(reasons_by_kind(done.refused)) if done.refused else ""
    broken = f", {len(done.refused):,} kept: false ({reasons})" if done.refused else ""
    print(f"{out}: {plural(done.rows, 'row')}, {source.name} to {write_as}{broken}")


def _report_bad(done: Converted, file: Path, on_bad_rows: OnBadRows) -> None:
    """Print the bad rows, and raise an error if they keep the file from being written."""
    repeats = RepeatedErrors()
    for line in [*filter(repeats.is_new, done.bad), *repeats.rest()]:
        print(line, file=sys.stderr)
    if done.bad and on_bad_rows is OnBadRows.ERROR:
        advice = "--on-bad-rows drop leaves bad rows out" if done.rows else "correct the faults above"
        message = f"{plural(len(done.bad), 'row')} cannot be converted, so nothing was written; {advice}"
        raise DataError(message, path=str(file))
    if not done.rows:
        raise DataError("holds no rows that can be converted; correct the faults above", path=str(file))


def _names(pairs: Sequence[str]) -> Mapping[str, str]:
    names = {}
    for pair in pairs:
        theirs, equals, ours = pair.partition("=")
        if not equals or not theirs:
            raise UsageError(f"--tool {pair!r}: expected THEIRS=OURS, for example search=wiki_search")
        names[theirs] = ours
    return names


def validate(
    file: _FileArgument,
    agent: AgentOfRowsOption = None,
    read_as: _ReadAsOption = None,
    tools: CallReadersOption = None,
    as_json: RowsJsonOption = False,
    trust: TrustOption = False,
) -> None:
    """Check every trajectory in FILE against its agent's rules.

    Each tool also checks its own calls. Faults are printed with file, line and character. After three faults of one
    kind, the rest are only counted; `--json` lists all. The exit status is 1 if there is a fault.
    """
    from afm.tools.registry import readers_of
    from afm.trajectory.convert import read_rows

    if agent is not None:
        agent_option(agent)
    readers, repeats = readers_of(tools), RepeatedErrors()
    rows = faulty = 0
    for row in read_rows(file, agent, read_as=read_as):
        rows += 1
        faults = _faults(row, str(file), readers)
        faulty += bool(faults)
        if as_json:
            print(_as_json(row, faults))
        else:
            for fault in filter(repeats.is_new, faults):
                print(fault)
    if not rows:
        raise DataError("holds no trajectories", path=str(file))
    if not as_json:
        for line in repeats.rest():
            print(line)
        count = plural(rows, "trajectory", "trajectories")
        print(f"{count}: {rows - faulty:,} valid, {faulty:,} with faults")
    if faulty:
        raise typer.Exit(1)


def _faults(row: TrajectoryRow | DataError, path: str, readers: Mapping[str, Reader]) -> Sequence[DataError]:
    from afm.tools.registry import faults_of

    if isinstance(row, DataError):
        return [row]
    faults = faults_of(row.segments, row.spec, readers=readers)
    return [fault.located(path, row.line) for fault in faults]


def _as_json(row: TrajectoryRow | DataError, faults: Sequence[DataError]) -> str:
    listed = [
        {
            "kind": fault.kind if isinstance(fault, TrajectoryError) else "unreadable",
            "character": fault.character if isinstance(fault, TrajectoryError) else None,
            "message": fault.message,
        }
        for fault in faults
    ]
    identity = None if isinstance(row, DataError) else row.id
    return json.dumps({"id": identity, "line": row.line, "valid": not faults, "faults": listed})


_BATCH_ROWS = 256


_OverridesArgument = Annotated[
    list[str] | None, overrides_argument("Overrides for the YAML of a training run, as for `afm sft`.")
]
_TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder with tokenizer.json; required for a file of rows [default: the tokenizer of the YAML's model].",
        show_default=False,
    ),
]
_ExamplesOption = Annotated[
    int, typer.Option(help="Number of sequences to show for the YAML of a training run.", min=1)
]
_BoundaryOption = Annotated[
    Boundary,
    typer.Option(
        help="A token with text of both agent and environment: split it, mask it, or keep it in the loss."
    ),
]
_WithoutLossOption = Annotated[
    list[str] | None,
    typer.Option(help="Role to leave out of the loss, in addition to the observations; may be repeated."),
]


def mask(
    file: Annotated[
        Path, file_argument("Rows in any format of `afm convert`, or the YAML of a training run.")
    ],
    overrides: _OverridesArgument = None,
    tokenizer: _TokenizerOption = None,
    agent: AgentOfRowsOption = None,
    read_as: _ReadAsOption = None,
    boundary: _BoundaryOption = Boundary.SPLIT,
    without_loss: _WithoutLossOption = None,
    examples: _ExamplesOption = 3,
    as_json: RowsJsonOption = False,
) -> None:
    """Show which tokens are trained on; masked text is in ⟦ ⟧.

    For a file of rows, every response is shown whole, before training cuts it. Faulty rows are reported, and the exit
    status is then 1. For the YAML of a training run, the data is prepared exactly as in training: the command prints token
    statistics and some sequences with their prompts, cut and packed. Control characters are shown as symbols.
    """
    if file.suffix in (".yaml", ".yml"):
        _show_training(file, overrides or [], examples, as_json, (tokenizer, agent, read_as, without_loss))
        return
    if overrides:
        raise UsageError(
            f"{overrides[0]!r}: only the YAML of a training run takes overrides, {file} holds rows"
        )
    if tokenizer is None:
        raise UsageError("--tokenizer is missing; give the folder that holds tokenizer.json: --tokenizer DIR")
    rows_file(file)
    from afm.masking import encode_batch
    from afm.trajectory.convert import read_rows

    if agent is not None:
        agent_option(agent)
    silent = tuple(without_loss or ())
    loaded = _load_tokenizer(tokenizer)
    show = _print_json if as_json else _print_preview
    faulty, unseen, repeats = 0, set(silent), RepeatedErrors()
    rows = read_rows(file, agent, read_as=read_as)
    while batch := list(islice(rows, _BATCH_ROWS)):
        sound, faults = _sorted_out(batch, str(file))
        for fault in filter(repeats.is_new, faults):
            print(fault, file=sys.stderr)
        faulty += len(faults)
        unseen -= _roles_in(sound, unseen)
        encoded = encode_batch(loaded, [row.segments for row in sound], boundary, roles_without_loss=silent)
        for row, masked in zip(sound, encoded, strict=True):
            show(loaded, row, masked)
    for line in repeats.rest():
        print(line, file=sys.stderr)
    if unseen:
        raise UsageError(
            f"--without-loss {' '.join(sorted(unseen))}: no row has it outside of other roles, and `afm sft` would "
            "refuse it"
        )
    if faulty:
        raise typer.Exit(1)


def _show_training(
    config: Path, overrides: list[str], examples: int, as_json: bool, of_rows: tuple[object, ...]
) -> None:
    if any(of_rows):
        raise UsageError(
            f"--tokenizer, --agent, --from and --without-loss are for files of rows; {config} sets its own"
        )
    from llamafactory_patch.doctor import show_examples

    show_examples(config, overrides, examples, as_json=as_json)


def _load_tokenizer(folder: Path) -> Any:
    from afm.findings import fetch_advice

    if not (folder / "tokenizer.json").is_file():
        state = "" if folder.is_dir() else f"{no_such_file(folder, 'folder')}; "
        advice = fetch_advice(str(folder)) or "; docs/tutorials/own_logs.md makes a small one"
        wanted = f"expected a folder that holds tokenizer.json{advice}"
        raise UsageError(f"--tokenizer {folder}: {state}{wanted}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError("transformers", "sft") from None
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _sorted_out(
    batch: Iterable[TrajectoryRow | DataError], path: str
) -> tuple[list[TrajectoryRow], list[DataError]]:
    """Rows that can be encoded, and what is wrong with these and the others."""
    from afm.trajectory import structure_faults

    rows: list[TrajectoryRow] = []
    faults: list[DataError] = []
    for row in batch:
        if isinstance(row, DataError):
            faults.append(row)
            continue
        rows.append(row)
        text = "".join(segment.text for segment in row.segments)
        faults += [issue.located(path, row.line) for issue in structure_faults(text, row.spec)]
    return rows, faults


def _roles_in(rows: Iterable[TrajectoryRow], roles: Collection[str]) -> set[str]:
    """Those of ``roles`` that the agent takes somewhere, outside of other roles."""
    from afm.masking import role_spans

    texts = [part.text for row in rows if roles for part in row.segments if part.author == "agent"]
    return {role for role in roles if any(next(role_spans(text, [role]), None) for text in texts)}


def _runs(masked: MaskedIds) -> Iterator[tuple[int, list[int]]]:
    for kept, pairs in groupby(zip(masked.mask, masked.ids, strict=True), key=lambda pair: pair[0]):
        yield kept, [token for _, token in pairs]


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _print_json(tokenizer: Any, row: TrajectoryRow, masked: MaskedIds) -> None:
    trained = [token for kept, ids in _runs(masked) if kept for token in ids]
    hidden = [token for kept, ids in _runs(masked) if not kept for token in ids]
    shown = {
        "id": row.id,
        "tokens": len(masked.ids),
        "trained": len(trained),
        "trained_text": _text(tokenizer, trained),
        "masked_text": _text(tokenizer, hidden),
    }
    print(json.dumps(shown))


def _print_preview(tokenizer: Any, row: TrajectoryRow, masked: MaskedIds) -> None:
    from rich.console import Console
    from rich.text import Text

    preview = Text(
        f"{visible(row.id)}: {plural(len(masked.ids), 'token')}, {sum(masked.mask):,} trained on\n",
        style="bold",
    )
    for kept, ids in _runs(masked):
        text = visible(_text(tokenizer, ids))
        preview.append(text if kept else f"⟦{text}⟧", style=terminal_style("good" if kept else "soft"))
    Console(soft_wrap=True, highlight=False).print(preview, end="\n\n")
