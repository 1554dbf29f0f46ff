"""Every command and option that a message or a help text advises is one that the command line knows."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from afm.cli.commands import command

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("afm", "llamafactory_patch", "verl_ext", "tool_servers")
# Options of other programs: pip, bubblewrap, nsjail, docker, verl's and LLaMA-Factory's own command lines.
FOREIGN = (
    "afm/sandbox",
    "llamafactory_patch/launcher.py",
    "llamafactory_patch/checks.py",
    "afm/findings.py",
    "afm/cli/train.py",
)
OWNERS = {"verl_ext/export.py": ["export"], "afm/cli/ask.py": ["ask"], "afm/cli/ask_chat.py": ["ask"]}
"""Modules that one command alone reaches: an option that they advise must be its own."""
ADVICE = re.compile(r"(?P<tick>`?)(?<![\w./'-])afm (?P<words>[^`;,()\n]+)")
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def texts(root: ast.AST) -> Iterator[tuple[int, str]]:
    """Every text of a module; values in f-strings are X."""
    inner: set[int] = set()
    for node in ast.walk(root):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


def options(one: Any) -> set[str]:
    return {name for parameter in one.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help",
        "-h",
    }


@cache
def tree() -> Any:
    return command(load=True)


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that ``words`` name, and the rest of them."""
    one = tree()
    while words and words[0] in getattr(one, "commands", {}):
        one, words = one.commands[words[0]], words[1:]
    return (one.commands["run"] if one.name == "eval" and words else one), words


def faults(text: str) -> Iterator[str]:
    """What is advised in a text and cannot be typed."""
    for match in ADVICE.finditer(text):
        words = match["words"].rstrip(".: ").split()
        if not words:
            continue
        one, rest = find(words)
        if len(rest) == len(words) and not words[0].startswith("-"):
            if match["tick"] and not words[0].isupper():
                yield f"`afm {match['words']}`: no such command"
            continue
        known = options(one)
        for word in rest:
            if (
                word.startswith("--")
                and (name := word.partition("=")[0].rstrip(".:'\"")) not in known
                and name != "--"
            ):
                yield f"afm {match['words']}: no option {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_advised_commands_can_be_typed(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sources()
        if path.is_relative_to(ROOT / package)
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        for fault in faults(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_in_the_headers_of_configurations_can_be_typed() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in sorted((ROOT / "configs").rglob("*.yaml"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
        for fault in faults(line)
    ]
    assert not wrong, "\n".join(wrong)


def commands_below(one: Any) -> Iterator[Any]:
    yield one
    for below in getattr(one, "commands", {}).values():
        yield from commands_below(below)


def test_options_that_errors_advise_are_options_of_their_command() -> None:
    everything = list(commands_below(tree()))
    every_option = set().union(*map(options, everything))
    by_module: dict[str, set[str]] = {}
    for one in everything:
        if one.callback is not None:
            by_module.setdefault(one.callback.__module__.replace(".", "/") + ".py", set()).update(
                options(one)
            )
    wrong = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        if name.startswith(FOREIGN):
            continue
        owners = [options(find([word])[0]) for word in OWNERS.get(name, ())]
        known = set().union(*owners) if owners else by_module.get(name, every_option)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                wrong += [
                    f"{name}:{line}: {option}"
                    for line, text in texts(node.exc)
                    for option in OPTION.findall(ADVICE.sub("", text))
                    if option not in known
                ]
    assert not wrong, "\n".join(wrong)


def test_the_check_itself_finds_what_cannot_be_typed() -> None:
    assert list(faults("try `afm sfft FILE`")) == ["`afm sfft FILE`: no such command"]
    assert list(faults("run afm convert FILE --to coa --agnt NAME")) != []
    assert list(faults("run afm convert FILE --to coa -o OUT; or `afm eval choose DIR`")) == []
