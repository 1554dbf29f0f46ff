"""The ``afm`` command: one module per sub-command, heavy imports only when needed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer

from afm import __version__
from afm.cli import (
    ask,
    convert,
    data,
    doctor,
    listing,
    quickstart,
    report,
    reproduce,
    reward,
    sandbox,
    serve,
    train,
)
from afm.cli import eval as evaluation
from afm.cli.options import FOREIGN_OPTIONS
from afm.errors import AfmError, UsageError
from afm.processes import follow_parent

_STYLE = re.compile(r"\[(?=[a-z#/@])")
"""What Typer takes for a style; a backslash in front keeps it."""

_BadUsage: Any = typer.BadParameter.__base__
"""Typer's error of wrong usage; Typer exports only this class of its own below it."""

app = typer.Typer(
    name="afm",
    help="Train one language model to work like a team of agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_START, _DATA, _TRAIN = "Start here", "Make and check data", "Train"
_MEASURE, _SERVE = "Ask, evaluate, look", "Tools and servers"
app.command(rich_help_panel=_START)(quickstart.quickstart)
app.command(rich_help_panel=_START)(quickstart.init)
app.command(rich_help_panel=_START)(doctor.doctor)
app.add_typer(listing.app, name="list", rich_help_panel=_START)
app.add_typer(data.app, name="data", rich_help_panel=_DATA)
app.command(rich_help_panel=_DATA)(convert.validate)
app.command(rich_help_panel=_DATA)(convert.convert)
app.command(rich_help_panel=_DATA)(convert.mask)
app.command(rich_help_panel=_TRAIN, context_settings=FOREIGN_OPTIONS)(train.sft)
app.command(rich_help_panel=_TRAIN, context_settings=FOREIGN_OPTIONS)(train.rl)
app.command(rich_help_panel=_TRAIN)(train.export)
app.command("import", rich_help_panel=_TRAIN)(train.import_model)
app.command(rich_help_panel=_TRAIN)(reproduce.reproduce)
app.command(rich_help_panel=_MEASURE)(ask.ask)
app.add_typer(evaluation.app, name="eval", rich_help_panel=_MEASURE)
app.command(rich_help_panel=_MEASURE)(reward.reward)
app.command(rich_help_panel=_MEASURE)(report.report)
app.command(rich_help_panel=_MEASURE)(report.view)
app.add_typer(serve.app, name="serve", rich_help_panel=_SERVE)
app.add_typer(sandbox.app, name="sandbox", rich_help_panel=_SERVE)
app.command(rich_help_panel=_SERVE)(report.cassette)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"afm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Train one language model to work like a team of agents."""


def main() -> None:
    """Run the command line; expected errors end with one message and a documented exit status."""
    follow_parent()
    try:
        sys.exit(command()(prog_name="afm", standalone_mode=False))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except _BadUsage as error:
        _print_usage_error(error)
        sys.exit(2)
    except UsageError as error:
        _fail(error, 2)
    except AfmError as error:
        _fail(error, 1)
    except OSError as error:
        _fail(error, 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


def command() -> Any:
    """The whole command line as Typer builds it, with our help texts and argument names."""
    group = typer.main.get_command(app)
    _correct_help(group)
    return group


def _correct_help(command: Any) -> None:
    """Keep words in brackets, which Typer takes for a style, and write arguments in capitals."""
    command.help = command.help and _STYLE.sub(r"\\[", command.help)
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        if text:
            parameter.help = _STYLE.sub(r"\\[", text)
        if parameter.param_type_name == "argument" and parameter.metavar is None:
            name = parameter.name.upper() + "..." * (parameter.nargs != 1)
            parameter.metavar = name if parameter.required else f"[{name}]"
    for below in getattr(command, "commands", {}).values():
        _correct_help(below)


def _print_usage_error(error: Any) -> None:
    """One line as for all errors: the command, the fault, what is expected there, and where the help is.

    A group of commands without any word prints its help.
    """
    context, parameter = error.ctx, getattr(error, "param", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return
    place = "afm" if context is None else context.command_path
    text = error.format_message().rstrip(".").removeprefix("Invalid value for ")
    text = re.sub(r"^'([^']+)'", r"\1", text.replace(". Did ", "; did ").replace("Value error, ", ""))
    if parameter and text.find(": Input should ") > 0 and (values := _typed_values(parameter.opts)):
        text = text.replace(": Input should ", f" {values[-1]}: should ")
    meaning = (getattr(parameter, "help", None) or "").replace("\\[", "[")
    meaning = re.split(r"\. |\.$| \[default", meaning, maxsplit=1)[0]
    meaning = meaning if meaning[1:2].isupper() else meaning[:1].lower() + meaning[1:]
    expected = f"; expected: {meaning}" if meaning else ""
    end = "" if text.endswith("?") else ";"
    text = text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text
    print(f"error: {place}: {text}{expected}{end} see {place} --help", file=sys.stderr)


def _typed_values(names: Sequence[str]) -> list[str]:
    """What was typed for an option."""
    words = sys.argv[1:]
    apart = [value for name, value in pairwise(words) if name in names]
    return apart + [
        word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word
    ]


def _fail(error: AfmError | OSError, status: int) -> None:
    if os.environ.get("AFM_TRACEBACK", "0") not in ("", "0", "false"):
        raise error
    print(f"error: {_message(error)}", file=sys.stderr)
    sys.exit(status)


def _message(error: AfmError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}{_NEXT_STEPS.get(type(error), '')}"
    return str(error)


_NEXT_STEPS: dict[type[OSError], str] = {
    FileExistsError: "; expected a folder, choose another --output-dir",
    NotADirectoryError: "; expected a folder, choose another --output-dir",
    FileNotFoundError: "; check the path",
    PermissionError: "; choose a place that you may read and write",
}


if __name__ == "__main__":
    main()
