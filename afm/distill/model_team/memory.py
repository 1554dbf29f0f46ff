"""What a team remembers of a task: sub-tasks, what was found, the last results; never the whole conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from afm.distill.model_team.replies import SubTask
from afm.trajectory.programs import call_form

_CUT = "\n[... {count} characters left out ...]\n"


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a sub-task."""

    goal: str
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool returned, as the members see it."""

    tool: str
    argument: str
    text: str


@dataclass(slots=True)
class Memory:
    """One task's.

    What every member sees is made from this anew each time (:meth:`view`): the finished sub-tasks in a line each and the
    last results whole. Earlier results are there as what was found in them, earlier calls by their arguments, so that
    no text stands in a request twice.

    Attributes:
        shown_results: How many of the last results are shown whole.
        plan: Sub-tasks of the current plan.
        done: How many of them are finished.
        criticism: What was wrong since the last plan.
        refused: Suggested answers that the verifier refused.
    """

    question: str
    shown_results: int
    plan: tuple[SubTask, ...] = ()
    done: int = 0
    findings: list[Finding] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    criticism: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def start(self, plan: tuple[SubTask, ...]) -> None:
        """Work by a new plan; what was wrong before is dealt with."""
        self.plan, self.done = plan, 0
        self.criticism.clear()

    def called(self, tool: str, argument: str) -> bool:
        """Whether this call was made already: blanks and letter case aside, but for programs."""
        wanted = (tool, call_form(tool, argument))
        return any((result.tool, call_form(tool, result.argument)) == wanted for result in self.results)

    def found(self, goal: str, text: str) -> None:
        """Note what came of a sub-task; the same one twice counts once, with its last result."""
        self.findings = [finding for finding in self.findings if finding.goal != goal]
        self.findings.append(Finding(goal, text))

    def view(self) -> dict[str, Any]:
        """Names for the templates."""
        recent = self.results[-self.shown_results :]
        return {
            "question": self.question,
            "plan": self.plan,
            "done": self.done,
            "findings": tuple(self.findings),
            "results": tuple(recent),
            "calls": tuple(self.results[: len(self.results) - len(recent)]),
            "criticism": tuple(dict.fromkeys(self.criticism)),
            "refused": tuple(dict.fromkeys(self.refused)),
        }


def shortened(text: str, most: int) -> str:
    """``text`` without its middle when it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    half = (most - len(_CUT)) // 2
    return f"{text[:half]}{_CUT.format(count=len(text) - 2 * half)}{text[-half:]}"
