"""The ``afm`` command: its table of sub-commands, each imported at its use, and the errors of wrong usage."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from afm import __version__
from afm.cli.options import FOREIGN_OPTIONS
from afm.errors import UsageError, expectation, no_such_file, suggestion
from afm.file_kinds import shipped_near

_STYLE = re.compile(r"\[(?=[a-z#/@])")
"""Text that Typer reads as a style. A backslash before it keeps it."""

_BadUsage: Any = typer.BadParameter.__base__
"""Typer's error of wrong usage. Typer exports only a subclass of it."""

_COMMANDS = {
    "Start here": {
        "quickstart": (
            "quickstart:quickstart",
            "Run the whole path on a CPU, from questions to a report.",
        ),
        "init": (
            "quickstart:init",
            "Write a starter project for your own task.",
        ),
        "doctor": (
            "doctor:doctor",
            "Check this computer or a YAML, and report what would fail.",
        ),
        "list": ("listing:app", "List the shipped agents, recipes, tools, rewards and benchmarks."),
    },
    "Make and check data": {
        "validate": (
            "convert:validate",
            "Check every trajectory in FILE against its agent's rules.",
        ),
        "convert": ("convert:convert", "Convert trajectories between formats."),
        "mask": ("convert:mask", "Show which tokens are trained on; masked text is in ⟦ ⟧."),
        "data": ("data:app", "Make questions, trajectories and training files."),
    },
    "Train": {
        "sft": ("train:sft", "Fine-tune a model on trajectories with LLaMA-Factory."),
        "rl": ("train:rl", "Train an agent by reinforcement learning, with verl."),
        "export": (
            "train:export",
            "Export a checkpoint of `afm rl` as a model folder.",
        ),
        "import": (
            "train:import_model",
            "Write a model as a Hugging Face folder.",
        ),
        "reproduce": (
            "reproduce:reproduce",
            "Reproduce one of AFM's agents from its published data.",
        ),
    },
    "Ask, evaluate, look": {
        "ask": ("ask:ask", "Answer QUESTION with a model, its agent and real tools."),
        "eval": ("eval:app", "Evaluate a model or a team with the agent's own loop."),
        "reward": (
            "reward:reward",
            "Score every response in FILE, with verdict and evidence.",
        ),
        "report": (
            "report:report",
            "Write a report as one self-contained HTML page.",
        ),
        "view": (
            "report:view",
            "Filter, search, read and compare episodes in a browser.",
        ),
    },
    "Tools and servers": {
        "serve": ("serve:app", "Start a tool server or a model server."),
        "sandbox": ("sandbox:app", "Run model-written programs in isolation."),
        "cassette": (
            "report:cassette",
            "Show what a cassette of recorded tool calls holds.",
        ),
    },
}
"""The commands by panel: the place and the summary of each.

``afm --help`` prints this table without importing a command. A test compares the summaries with those of the commands.
"""


class DeferredCommand(TyperCommand):
    """A command whose module is imported when the command or its help is used."""

    def __init__(self, name: str, place: str, summary: str, panel: str) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)
        self.place = place

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        """Return the context of the loaded command, which replaces this one."""
        command = self.load()
        _correct_help(command)
        return command.make_context(info_name, args, *more, **extra)

    def load(self) -> Any:
        """Import and return the command."""
        module, _, attribute = self.place.partition(":")
        part = getattr(import_module(f"afm.cli.{module}"), attribute)
        if not isinstance(part, typer.Typer):
            function, part = part, typer.Typer()
            part.command(context_settings=FOREIGN_OPTIONS if self.name in ("sft", "rl") else None)(function)
        part._add_completion = False
        command = typer.main.get_command(part)
        command.name = self.name
        return command


class _Commands(TyperGroup):
    """The group of all commands, each deferred."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for panel, commands in _COMMANDS.items():
            for name, (place, summary) in commands.items():
                self.add_command(DeferredCommand(name, place, summary, panel))


app = typer.Typer(
    name="afm",
    cls=_Commands,
    help="Train one language model to work like a team of agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


def run() -> Any:
    """Run the command line and return its exit status. Errors of a command pass through."""
    try:
        return command()(prog_name="afm", standalone_mode=False)
    except _BadUsage as error:
        _print_usage_error(error)
        return 2
    except typer.Abort:
        return 130


def command(*, load: bool = False) -> Any:
    """Return Typer's command line with our help texts and argument names. ``load`` imports every command."""
    group: Any = typer.main.get_command(app)
    if load:
        group.commands = {name: deferred.load() for name, deferred in group.commands.items()}
    _correct_help(group)
    return group


def _correct_help(command: Any) -> None:
    """Make help texts readable in 80 columns: keep brackets, join the lines of paragraphs, shorten types."""
    if command.help:
        paragraphs = _STYLE.sub(r"\\[", command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        if text:
            parameter.help = _STYLE.sub(r"\\[", text)
        _shorten_type(parameter)
        _refuse_values(parameter)
    help_option = command.get_help_option
    command.get_help_option = lambda context: _shorten_type(help_option(context))
    _name_in_errors(command)
    for below in getattr(command, "commands", {}).values():
        _correct_help(below)


def _name_in_errors(command: Any) -> None:
    """Let usage errors name the command in which they were raised."""
    make, invoke = command.make_context, command.invoke

    def make_named(name: str, words: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return make(name, words, parent=parent, **extra)
        except UsageError as error:
            error.command = error.command or f"{parent.command_path if parent else ''} {name}".strip()
            raise

    def invoke_named(context: Any) -> Any:
        try:
            return invoke(context)
        except UsageError as error:
            error.command = error.command or context.command_path
            raise

    command.make_context, command.invoke = make_named, invoke_named


_TYPES = {
    "bool": "",
    "str": "TEXT",
    "int": "N",
    "float": "NUMBER",
    "path": "PATH",
    "file": "FILE",
    "dir": "DIR",
}
"""Names in the help for Typer's names of types."""


def _shorten_type(parameter: Any) -> Any:
    """Write an argument in capitals and without a type, and the type of an option with its limits, as in ``N>=1``."""
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        usage = (name if parameter.required else f"[{name}]") + ("..." if parameter.nargs != 1 else "")
        parameter.metavar = name
        parameter.get_usage_pieces = lambda _: [usage]
        parameter.display_type_rich = lambda ctx: ""
        return parameter
    display, low, high = parameter.display_type_rich, parameter.min, parameter.max

    def describe(ctx: Any) -> str:
        name = display(ctx).removeprefix("<").removesuffix(">").removesuffix(" range")
        name = name.removeprefix("list[").removesuffix("]")
        short = _TYPES.get(name.lower(), name)
        if high is not None:
            return f"{low}-{high}"
        return short if low is None else f"{short}>={low:g}"

    parameter.display_type_rich = describe
    parameter._get_number_range_help_str = lambda: None
    return parameter


def _refuse_values(parameter: Any) -> None:
    """Refuse infinite numbers, and empty values: an empty path would be this folder.

    Commands check optional arguments themselves.
    """
    if parameter.default == "" or not (parameter.required or parameter.param_type_name == "option"):
        return
    process = parameter.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        if value == "" or (isinstance(value, list | tuple) and "" in value):
            raise typer.BadParameter("got an empty value", ctx=ctx, param=parameter)
        result = process(ctx, value)
        if isinstance(result, float) and not isfinite(result):
            raise typer.BadParameter("Input should be a finite number", ctx=ctx, param=parameter)
        return result

    parameter.process_value = process_value


def _print_usage_error(error: Any) -> None:
    """Print one line, as for all errors: command, fault, expectation, and where the help is.

    A group without a command prints its help.
    """
    context, parameter = error.ctx, getattr(error, "param", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return
    typed = [word for word in sys.argv[1:2] for commands in _COMMANDS.values() if word in commands]
    place = " ".join(["afm", *typed]) if context is None else context.command_path
    text = error.format_message().rstrip(".").removeprefix("Invalid value for ")
    text = re.sub(r"^'([^']+)'", r"\1", text.replace(". Did ", "; did ").replace("Value error, ", ""))
    for pattern, words in _TYPER_WORDS.items():
        text = re.sub(pattern, words, text, flags=re.IGNORECASE | re.DOTALL)
    if context and (absent := getattr(error, "option_name", None)) and text.startswith("No such option"):
        text = f"no such option: {absent}{_near_option(absent, context.command.params)}"
    absent = re.fullmatch(r"No such command '(.*)'", text)
    if context and absent and (known := list(getattr(context.command, "commands", {}))):
        text += f"; {suggestion(absent[1], known)}"
    argument = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    for each in () if context is None else context.command.params:
        if each.name == argument and each.param_type_name == "argument":
            text = f"no such option: {error.option_name}; give {each.metavar} without it: `{place} {each.metavar}`"
    if parameter and text.find(": Input should ") > 0 and (values := _typed_values(parameter.opts)):
        text = text.replace(": Input should ", f" {values[-1]}: should ")
    text = re.sub(r"\(env var: '(\w+)'\)", r"(\1)", text)
    text = re.sub(r"\((\w+)\): Input ", lambda found: f"({found[1]}) {os.environ.get(found[1])}: ", text)
    text = re.sub("should be (.*)", lambda found: f"should be {expectation(found[1])}", text)
    meaning = (getattr(parameter, "help", None) or "").replace("\\[", "[")
    meaning = re.split(r"\. |\.$| \[default", meaning, maxsplit=1)[0]
    meaning = meaning if meaning[1:2].isupper() else meaning[:1].lower() + meaning[1:]
    if choice := re.fullmatch(r"(.*): '(.*)' is not one of (.*)", text):
        known = re.findall(r"'([^']+)'", choice[3])
        text, meaning = f"{choice[1]} {choice[2]}: {suggestion(choice[2], known)}", ""
    expected = f"; expected: {meaning}" if meaning else ""
    if "no such file" in text and (
        shipped := re.search(r"configs/(?!tools|rewards)(?:tiny/)?(\w+)", meaning)
    ):
        expected += f" (`afm list {'benchmarks' if shipped[1] == 'eval' else 'recipes'}` prints the paths)"
        if absent := re.search(r"CONFIG (\S+): no such file$", text):
            text += shipped_near(absent[1], shipped[1])
    text = text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text
    usage = UsageError(text + expected)
    usage.command = place
    print(f"error: {usage.described()}", file=sys.stderr)


def _near_option(typed: str, parameters: Iterable[Any]) -> str:
    """Name the options that begin like the typed one, or else the nearest one."""
    words = [word.lstrip("-") for each in parameters for word in each.opts if word.startswith("--")]
    name = typed.lstrip("-")
    near = [word for word in words if word.startswith(name) or name.startswith(word)]
    near = near or get_close_matches(name, words, n=1)
    return f"; did you mean {', '.join(f'--{word}' for word in near)}?" if near else ""


def _rows_in(folder: str) -> str:
    """Name the trajectories of an output folder as what was probably meant."""
    files = [Path(folder) / f"{name}.jsonl" for name in ("trajectories", "kept", "episodes")]
    return next((f" (did you mean {file}?)" for file in files if file.is_file()), "")


_TYPER_WORDS: dict[str, Any] = {
    r": (?:file|path) '(\S*=.*)' does not exist": r" \1: no such file; an override comes after the file",
    r": (?:file|path) '(.*)' does not exist": lambda match: f" {match[1]}: {no_such_file(match[1])}",
    r": dir(?:ectory)? '(.*)' does not exist": lambda match: (
        f" {match[1]}: {no_such_file(match[1], 'folder')}"
    ),
    r": file '(.*)' is a directory": lambda match: f" {match[1]}: is a folder{_rows_in(match[1])}",
    r": dir(?:ectory)? '(.*)' is a file": r" \1: is a file",
    r"got unexpected extra arguments? ?\(s\)? ?\((.*)\)": r"unexpected argument: \1",
    r"\. choose from:.*": "",
    r" / '-\w'": "",
}
"""Patterns of Typer's messages, and the words of our own errors."""


def _typed_values(names: Sequence[str]) -> list[str]:
    """Return the values that were typed for an option."""
    words = sys.argv[1:]
    apart = [value for name, value in pairwise(words) if name in names]
    return apart + [
        word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word
    ]
