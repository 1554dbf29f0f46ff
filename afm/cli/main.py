"""The ``afm`` command: one module a sub-command, nothing heavy imported before it is needed."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import typer

from afm.cli import (
    ask,
    convert,
    data,
    doctor,
    init,
    quickstart,
    report,
    reproduce,
    reward,
    sandbox,
    serve,
    train,
)
from afm.cli import eval as evaluation
from afm.errors import AfmError, UsageError
from afm.processes import follow_parent

_STYLE = re.compile(r"\[(?=[a-z#/@])")
"""What Typer takes for a style; a backslash in front keeps it."""

_FOREIGN = {"ignore_unknown_options": True}
"""Options of other trainers reach ours as words, and the error says what to write."""

app = typer.Typer(
    name="afm",
    help="Train one language model to work like a team of agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(quickstart.quickstart)
app.command()(init.init)
app.command()(ask.ask)
app.command()(doctor.doctor)
app.add_typer(data.app, name="data")
app.command()(convert.validate)
app.command()(convert.mask)
app.command()(convert.convert)
app.command(context_settings=_FOREIGN)(train.sft)
app.command(context_settings=_FOREIGN)(train.rl)
app.command()(reproduce.reproduce)
app.command()(train.export)
app.add_typer(evaluation.app, name="eval")
app.command()(report.report)
app.command()(report.view)
app.command()(reward.reward)
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(serve.app, name="serve")
app.command()(report.cassette)


def main() -> None:
    """Run the command line; expected errors end with one message and a documented exit status."""
    follow_parent()
    try:
        command()()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UsageError as error:
        _fail(error, 2)
    except AfmError as error:
        _fail(error, 1)
    except OSError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)


def command() -> Any:
    """The whole command line, its help texts shown as they are written: Typer takes ``[list]`` in them for a style."""
    group = typer.main.get_command(app)
    _keep_brackets(group)
    return group


def _keep_brackets(command: Any) -> None:
    command.help = command.help and _STYLE.sub(r"\\[", command.help)
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        if text:
            parameter.help = _STYLE.sub(r"\\[", text)
    for below in getattr(command, "commands", {}).values():
        _keep_brackets(below)


def _fail(error: AfmError | OSError, status: int) -> None:
    if os.environ.get("AFM_TRACEBACK", "0") not in ("", "0", "false"):
        raise error
    print(f"error: {_message(error)}", file=sys.stderr)
    sys.exit(status)


def _message(error: AfmError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    main()
