"""When two calls of a tool ask the same: words in any case and layout, programs character by character."""

from __future__ import annotations

from afm.trajectory.fenced import CODE_TOOL

_FENCE = "```"


def is_program(tool: str, argument: str) -> bool:
    """Whether an argument is a program, in which indentation and letter case matter: of the tool ``code``, or in a fence."""
    return tool == CODE_TOOL or _FENCE in argument


def call_form(tool: str, argument: str) -> str:
    """The same text for calls of ``tool`` that ask the same."""
    return exact_form(argument) if is_program(tool, argument) else " ".join(argument.split()).casefold()


def exact_form(argument: str) -> str:
    """``argument`` without blanks at the end of its lines and without blank lines around it."""
    return "\n".join(line.rstrip() for line in argument.splitlines()).strip("\n")
