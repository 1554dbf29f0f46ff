"""The embedded teacher: planner, coder, critic and writer as rules, for the generated math world.

No model is behind it, but the work is real: the planner reads the question's wording, the coder's program
runs in the sandboxed tool, the critic judges what came back. The planner has a habit that is kept on
purpose: it often skips the tool on easy problems. A tiny model copies that habit without the ability to
calculate, and reinforcement learning then teaches it when the tool is worth a call.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from afm.agents import AgentSpec, RoleKind
from afm.agents.spec import START
from afm.datasets.mini_world import StoryProblem, read_problem
from afm.distill.event_log import Recorder
from afm.distill.filters.rules import checking_role
from afm.distill.merge import RoleMap
from afm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Casting:
    """The roles of an agent that has one tool and, for each part to play, one role.

    Every property raises ``ConfigError`` when the agent leaves no choice or more than one.

    Attributes:
        team: What the team is called in errors.
        example: A shipped agent that the team can play.
    """

    spec: AgentSpec
    team: str
    example: str

    @property
    def thought(self) -> str:
        """The role of free reasoning."""
        return self._only("a thought role", self.spec.thought_roles)

    @property
    def first(self) -> str:
        """The text role that may begin."""
        return self._only("a first role", self._texts_after(START))

    @property
    def judge(self) -> str:
        """The text role that may follow the tool."""
        tag = self._only("a tool role", tuple(self.spec.tool_roles))
        return self._only("a role behind the tool", self._texts_after(tag))

    @property
    def tool(self) -> str:
        """The name of the tool."""
        return self._only("a tool", tuple(self.spec.tool_roles.values()))

    @property
    def check(self) -> str:
        """The text role whose good grade lets the agent answer."""
        role = checking_role(self.spec)
        return self._only("a check of the answer", (role,) if role is not None else ())

    @property
    def proposal(self) -> str:
        """The text role that the check, and nothing else, follows."""
        check = self.check
        return self._only("a proposed answer", self._before((check,)))

    @property
    def reflection(self) -> str:
        """The text role that may follow the tool and is no proposed answer."""
        behind = self._texts_after(self._only("a tool role", tuple(self.spec.tool_roles)))
        return self._only("a reflection", tuple(tag for tag in behind if tag != self.proposal))

    def _before(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(tag for tag, followers in self.spec.transitions.items() if followers == targets)

    def _texts_after(self, source: str) -> tuple[str, ...]:
        targets = self.spec.transitions[source]
        return tuple(tag for tag in targets if self.spec.roles[tag].kind is RoleKind.TEXT)

    def _only(self, what: str, choices: tuple[str, ...]) -> str:
        if len(choices) != 1:
            raise ConfigError(
                f"agent {self.spec.name!r}: the {self.team} needs exactly one choice for {what}, "
                f"got {list(choices)}; use an agent like `{self.example}`"
            )
        return choices[0]


PLANNER, CODER, CRITIC, WRITER = "planner", "coder", "critic", "writer"

P_DIRECT: Mapping[int, float] = {1: 0.75, 2: 0.2}
"""How often the planner skips the tool, by the number of operations in the problem."""

_ATTEMPTS = 2
_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class ScriptedMathTeam:
    """Solves problems of :mod:`afm.datasets.mini_world` by rules.

    Attributes:
        spec: The agent its work will become; names the tool and the roles.
        seed: With a task's id it fixes every choice, whatever else runs in parallel.
        p_direct: Chance of answering without the tool, by number of operations.
        p_slip: Chance that an answer found without the tool lacks a carry; the quality filter must catch it.
    """

    spec: AgentSpec
    seed: int = 0
    p_direct: Mapping[int, float] = field(default_factory=lambda: P_DIRECT)
    p_slip: float = 0.01

    @property
    def name(self) -> str:
        """Identifies the team in logs."""
        return "scripted_math"

    @property
    def roles(self) -> RoleMap:
        """Which function of the agent each member's messages become, found by what may follow what."""
        cast = self._cast
        return RoleMap(
            messages={
                PLANNER: cast.first,
                CODER: cast.thought,
                CRITIC: cast.judge,
                WRITER: cast.thought,
            }
        )

    async def solve(self, recorder: Recorder) -> None:
        """Read, plan, calculate with or without the tool, check, write."""
        problem = read_problem(recorder.task.question)
        if problem is None:
            recorder.decline("the planner cannot read this question; it knows only the generated math world")
            return
        rng = random.Random(f"{self.seed}/{recorder.task.id}")
        if rng.random() < self.p_direct.get(len(problem.changes), 0.0):
            self._answer_directly(recorder, problem, rng)
        else:
            await self._answer_with_tool(recorder, problem)

    def _answer_directly(self, recorder: Recorder, problem: StoryProblem, rng: random.Random) -> None:
        slip = 10 if rng.random() < self.p_slip else 0
        recorder.say(PLANNER, "Answer at once.")
        recorder.say(WRITER, "This one is easy.")
        recorder.finish(WRITER, str(problem.answer - slip))

    async def _answer_with_tool(self, recorder: Recorder, problem: StoryProblem) -> None:
        recorder.say(PLANNER, "Write one expression and run it.")
        tool, value = self._cast.tool, ""
        for _ in range(_ATTEMPTS):
            recorder.say(CODER, f"The expression is {problem.expression}.")
            result = await recorder.use(CODER, tool, f"\n```py\nprint({problem.expression})\n```\n")
            value = result.text.strip()
            if result.ok and _INTEGER.fullmatch(value):
                recorder.say(CRITIC, "A number came back.")
                recorder.say(WRITER, "Done.")
                recorder.finish(WRITER, value)
                return
            recorder.say(CRITIC, "No number came back. Run it again.")
        recorder.fail(f"{_ATTEMPTS} tool calls returned no number, the last one: {value}")

    @property
    def _cast(self) -> Casting:
        return Casting(self.spec, "scripted math team", "math")
