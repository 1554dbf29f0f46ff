"""Scripted teachers: rule-based teams for the generated worlds, and for problems that come with a program.

They use no model, but their tool calls are real, and they repeat only the tools' results. On easy questions they often
skip the tool. A tiny model copies this habit, and reinforcement learning then teaches it when a call is useful.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from afm.agents import AgentSpec, RoleKind
from afm.agents.spec import START
from afm.datasets.encyclopaedia.relations import (
    ATTRIBUTES,
    RELATIONS,
    Chain,
    StatedFact,
    find_fact,
    read_chain,
)
from afm.datasets.mini_world import StoryProblem, read_problem
from afm.distill.event_log import Recorder
from afm.distill.filters.rules import checking_role
from afm.distill.merge import RoleMap
from afm.errors import ConfigError
from afm.rewards.text_match import gold_answers

PLANNER, WRITER, CRITIC = "planner", "writer", "critic"
CODER = "coder"
LEADER, SEARCHER, REFLECTOR, PROPOSER, CHECKER = "leader", "searcher", "reflector", "proposer", "checker"


@dataclass(frozen=True, slots=True)
class _Casting:
    """The roles of an agent that has one tool and one role for each part.

    Every property raises ``ConfigError`` if the agent has no role or several for the part. ``team`` is the team's name in
    errors, and ``example`` a shipped agent that suits it.
    """

    spec: AgentSpec
    team: str
    example: str

    @property
    def thought(self) -> str:
        return self._only("a thought role", self.spec.thought_roles)

    @property
    def first(self) -> str:
        return self._only("a first role", self._texts_after(START))

    @property
    def judge(self) -> str:
        return self._only("a role after the tool", self._texts_after_tool())

    @property
    def tool(self) -> str:
        return self._only("a tool", tuple(self.spec.tool_roles.values()))

    @property
    def check(self) -> str:
        role = checking_role(self.spec)
        return self._only("a check of the answer", (role,) if role is not None else ())

    @property
    def proposal(self) -> str:
        sources = (tag for tag, next_tags in self.spec.transitions.items() if next_tags == (self.check,))
        return self._only("a proposed answer", tuple(sources))

    @property
    def reflection(self) -> str:
        behind = self._texts_after_tool()
        return self._only("a reflection", tuple(tag for tag in behind if tag != self.proposal))

    def _texts_after_tool(self) -> tuple[str, ...]:
        return self._texts_after(self._only("a tool role", tuple(self.spec.tool_roles)))

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


MATH_P_DIRECT: Mapping[int, float] = {1: 0.75, 2: 0.2}
"""Probability that the planner skips the tool, by number of operations."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class ScriptedMathTeam:
    """Solves problems of :mod:`afm.datasets.mini_world` by rules, and tasks with ``extra_info.program`` by running it.

    The answer is the printed text of the program. The quality filter drops a task with a different gold answer.

    Attributes:
        spec: The agent that the work becomes. It defines the tool and the roles.
        seed: Determines every choice, together with the task's id.
        p_direct: Probability of an answer without the tool, by number of operations.
        p_slip: Probability that an answer without the tool lacks a carry, which the quality filter must catch.
        p_corrected: Probability that ``extra_info.slip``, if there is one, is run first. The critic rejects its result.
    """

    spec: AgentSpec
    seed: int = 0
    p_direct: Mapping[int, float] = field(default_factory=lambda: MATH_P_DIRECT)
    p_slip: float = 0.01
    p_corrected: float = 0.2

    @property
    def name(self) -> str:
        """Name of the team in logs."""
        return "scripted_math"

    @property
    def roles(self) -> RoleMap:
        """The role of the agent for each member, derived from the agent's transitions."""
        cast = self._cast
        members = {PLANNER: cast.first, CODER: cast.thought, CRITIC: cast.judge, WRITER: cast.thought}
        return RoleMap(messages=members)

    async def solve(self, recorder: Recorder) -> None:
        """Read, plan, calculate with or without the tool, check, write."""
        task = recorder.task
        problem, program = read_problem(task.question), task.extra_info.get("program")
        if problem is not None:
            await self._solve_story(recorder, problem)
        elif isinstance(program, str):
            rng = random.Random(f"{self.seed}/{task.id}")
            first = task.extra_info.get("slip", program) if rng.random() < self.p_corrected else program
            await self._run(recorder, "program", f"Lines: {len(program.splitlines())}.", first, program)
        else:
            recorder.decline("the planner cannot read this question, and the task has no extra_info.program")

    async def _solve_story(self, recorder: Recorder, problem: StoryProblem) -> None:
        rng, text = random.Random(f"{self.seed}/{recorder.task.id}"), problem.expression
        if rng.random() >= self.p_direct.get(len(problem.changes), 0.0):
            await self._run(recorder, "expression", f"The expression is {text}.", *[f"print({text})"] * 2)
            return
        recorder.say(PLANNER, "Answer at once.")
        recorder.say(WRITER, "This one is easy.")
        recorder.finish(WRITER, str(problem.answer - (10 if rng.random() < self.p_slip else 0)))

    async def _run(self, recorder: Recorder, kind: str, thought: str, *programs: str) -> None:
        recorder.say(PLANNER, f"Write one {kind} and run it.")
        tool, value = self._cast.tool, ""
        for code in programs:
            recorder.say(CODER, thought)
            result = await recorder.use(CODER, tool, f"\n```py\n{code}\n```\n")
            value = result.text.strip()
            is_number = result.ok and _NUMBER.fullmatch(value)
            if is_number and code == programs[-1]:
                recorder.say(CRITIC, "A number came back.")
                recorder.say(WRITER, "Done.")
                recorder.finish(WRITER, value.removesuffix(".0"))
                return
            fault = "A negative number" if value.startswith("-") else "Not a whole number"
            recorder.say(CRITIC, f"{fault if is_number else 'No number came back'}. Read the question again.")
        recorder.fail(f"2 tool calls returned no number, the last one: {value}")

    @property
    def _cast(self) -> _Casting:
        return _Casting(self.spec, "scripted math team", "math")


WIKI_P_DIRECT: Mapping[int, float] = {1: 0.6, 2: 0.4}
"""Probability that the leader answers from memory, by number of facts that a question needs."""

_NUMBERS = {1: "One fact", 2: "Two facts", 3: "Three facts", 4: "Four facts"}
_ASKS = tuple(fact.name for fact in (*RELATIONS, *ATTRIBUTES))


@dataclass(frozen=True, slots=True)
class Flaws:
    """Probabilities of mistakes of a team that checks its answers.

    Attributes:
        misread: The last fact is read from a wrong line of the right passage.
        overlooked: The checker accepts a misread fact, and the answer is wrong. Otherwise it is corrected.
        repeated: The first search is made twice.
        unchecked: The answer is given without a check, which violates the agent's declaration.
    """

    misread: float = 0.0
    overlooked: float = 0.0
    repeated: float = 0.0
    unchecked: float = 0.0


@dataclass(frozen=True)
class ScriptedWikiTeam:
    """Answers questions by depth of :mod:`afm.datasets.encyclopaedia` by rules.

    If the agent's answers must be checked, the team proposes an answer, a checker compares it with the passage, and the
    team may reflect on its searches. With ``flaws`` it also makes the mistakes that filters detect.

    Attributes:
        spec: The agent that the work becomes. It defines the tool and the roles.
        seed: Determines every choice, together with the task's id.
        p_direct: Probability of an answer from memory (the task's gold answer), by number of facts. The default is
            :data:`WIKI_P_DIRECT`, and 0 if answers are checked.
        reflects: Probability that a team that checks its answers reflects on a task's searches.
    """

    spec: AgentSpec
    seed: int = 0
    p_direct: Mapping[int, float] | None = None
    flaws: Flaws = Flaws()
    reflects: float = 0.5

    @property
    def checks(self) -> bool:
        """Whether the agent's answers must be checked."""
        return checking_role(self.spec) is not None

    @property
    def name(self) -> str:
        """Name of the team in logs."""
        return "checking_wiki" if self.checks else "scripted_wiki"

    @property
    def roles(self) -> RoleMap:
        """The role of the agent for each member."""
        cast = self._cast
        members = {LEADER: cast.thought, PLANNER: cast.first}
        if self.checks:
            members |= {REFLECTOR: cast.reflection, PROPOSER: cast.proposal, CHECKER: cast.check}
        else:
            members[CRITIC] = cast.judge
        return RoleMap(messages=members)

    async def solve(self, recorder: Recorder) -> None:
        """Read, plan, look up facts or answer from memory, check if the agent does, and answer."""
        chain = read_chain(recorder.task.question)
        if chain is None:
            recorder.decline(
                "the leader cannot read this question; the scripted teams know only questions by depth, "
                "a team of models (--team) knows any"
            )
            return
        rng = random.Random(f"{self.seed}/{recorder.task.id}")
        by_default = {} if self.checks else WIKI_P_DIRECT
        p_direct = self.p_direct if self.p_direct is not None else by_default
        from_memory = rng.random() < p_direct.get(len(chain.asks), 0.0)
        work = _WikiTask(recorder, chain, self._cast.tool, rng, checks=self.checks)
        if from_memory:
            work.answer_from_memory()
        else:
            await work.solve(self.flaws, self.reflects)

    @property
    def _cast(self) -> _Casting:
        kind, example = ("checking", "wiki") if self.checks else ("scripted", "mhqa")
        return _Casting(self.spec, f"{kind} wiki team", example)


class _WikiTask:
    """One task of :class:`ScriptedWikiTeam`."""

    def __init__(
        self, recorder: Recorder, chain: Chain, tool: str, rng: random.Random, *, checks: bool
    ) -> None:
        self._recorder, self._chain, self._tool, self._rng = recorder, chain, tool, rng
        self._checks = checks

    def answer_from_memory(self) -> None:
        self._think("I know this.")
        self._say(PLANNER, "Answer at once.")
        self._think("Easy.")
        known = StatedFact("Easy.", gold_answers(self._recorder.task.ground_truth)[0])
        if self._checks:
            self._propose(known)
            self._check(known, 4)
            self._think("Sure.")
        self._answer(known)

    async def solve(self, flaws: Flaws, reflects: float) -> None:
        # Every choice is drawn, even if it has no effect, so that one probability does not change the other draws.
        chances = (flaws.misread, flaws.overlooked, flaws.repeated, flaws.unchecked, reflects)
        misread, overlooked, repeated, unchecked, reflected = (
            self._checks and self._rng.random() < chance for chance in chances
        )
        reading = await self._look_up(repeated=repeated, reflected=reflected)
        if reading is None:
            return
        passage, name, fact = reading
        read = self._misread(passage, name, fact) if misread else fact
        self._think(read.sentence)
        if unchecked or not self._checks:
            self._answer(read)
            return
        self._propose(read)
        if read != fact and not overlooked:
            self._check(fact, 2)
            corrected = await self._read_again(name)
            if corrected is None:
                return
            read = corrected
            self._propose(read)
        self._check(read, 4)
        self._think("Sure.")
        self._answer(read)

    async def _look_up(self, *, repeated: bool, reflected: bool) -> tuple[str, str, StatedFact] | None:
        """Return the last passage, its subject and its fact. ``None`` if the attempt has failed."""
        asks, name = self._chain.asks, self._chain.start
        self._think(f"{_NUMBERS.get(len(asks), f'{len(asks)} facts')} to find.")
        self._say(PLANNER, f"Search for the {', then the '.join(asks)}.")
        for number, asked in enumerate(asks, 1):
            self._think(f"Now the {asked} of {name}.")
            read = await self._search(f"{asked} of {name}", asked, name)
            if read is not None and repeated and number == 1:
                self._think("Once more.")
                read = await self._search(f"{asked} of {name}", asked, name)
            if read is None:
                return None
            last = number == len(asks)
            if not last or reflected:
                self._think(read[1].sentence if not last else "Found.")
            if reflected:
                self._say(REFLECTOR, "Trajectory monitoring: good")
            elif not self._checks and not last:
                self._say(CRITIC, "One more.")
            if last:
                return read[0], name, read[1]
            name = read[1].gives
        raise AssertionError("a question asks for something")

    async def _read_again(self, name: str) -> StatedFact | None:
        """Search for the last fact again in other words."""
        asked = self._chain.asks[-1]
        self._think("Read again.")
        read = await self._search(f"{name} {asked}", asked, name)
        if read is None:
            return None
        self._think(read[1].sentence)
        return read[1]

    async def _search(self, query: str, asked: str, name: str) -> tuple[str, StatedFact] | None:
        result = await self._recorder.use(SEARCHER, self._tool, query)
        fact = find_fact(result.text, asked, name) if result.ok else None
        if fact is None:
            self._recorder.fail(f"no passage gives the {asked} of {name}: {result.text[:200]}")
            return None
        return result.text, fact

    def _misread(self, passage: str, name: str, fact: StatedFact) -> StatedFact:
        """Return another fact of the passage, or the same if there is no other."""
        facts = [other for asked in _ASKS if (other := find_fact(passage, asked, name)) is not None]
        others = [other for other in facts if other.gives != fact.gives]
        return self._rng.choice(others) if others else fact

    # Words with a leading space are different tokens to a small model. Answers have the space, as in a text.

    def _propose(self, read: StatedFact) -> None:
        self._say(PROPOSER, f" {read.gives}")

    def _answer(self, read: StatedFact) -> None:
        self._recorder.finish(WRITER, f" {read.gives}")

    def _check(self, fact: StatedFact, score: int) -> None:
        """Let the checker read the line again and grade it."""
        self._think(fact.sentence)
        self._say(CHECKER, f"Score: {score}")

    def _think(self, text: str) -> None:
        self._say(LEADER, text)

    def _say(self, member: str, text: str) -> None:
        self._recorder.say(member, text)


ScriptedTeam = ScriptedMathTeam | ScriptedWikiTeam


def scripted_team(spec: AgentSpec, seed: int = 0) -> ScriptedTeam:
    """Return the team for the only tool of ``spec``: ``code`` or ``wiki_search``.

    Raises:
        ConfigError: There is no such team.
    """
    tools = tuple(spec.tool_roles.values())
    if tools == ("code",):
        return ScriptedMathTeam(spec, seed)
    if tools == ("wiki_search",):
        return ScriptedWikiTeam(spec, seed)
    raise ConfigError(
        f"agent {spec.name!r} has the tools {list(tools)}; the scripted teams need exactly one of code and wiki_search"
    )
