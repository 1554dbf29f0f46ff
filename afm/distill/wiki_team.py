"""The embedded teachers of the generated encyclopaedia, with and without a check, and :func:`scripted_team`, which picks a teacher.

No model is behind it, but the work is real: the leader reads the question's wording, the searcher's queries go to
the real search tool, and what the leader repeats stands in the passage that came back. The leader has a habit that is
kept on purpose: for easy questions it often answers from memory. A tiny model copies that habit without the memory, and
reinforcement learning then teaches it to look things up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from afm.agents import AgentSpec
from afm.datasets.encyclopaedia.relations import (
    ATTRIBUTES,
    RELATIONS,
    Chain,
    StatedFact,
    find_fact,
    read_chain,
)
from afm.distill.event_log import Recorder
from afm.distill.filters.rules import checking_role
from afm.distill.math_team import Casting, ScriptedMathTeam
from afm.distill.merge import RoleMap
from afm.distill.run import Team
from afm.errors import ConfigError
from afm.rewards.text_match import gold_answers

LEADER, PLANNER, SEARCHER, CRITIC, WRITER = "leader", "planner", "searcher", "critic", "writer"

P_DIRECT: Mapping[int, float] = {1: 0.6, 2: 0.4}
"""How often the leader answers from memory, by the number of facts that a question needs."""

NOT_READ = (
    "the leader cannot read this question; the scripted teams know only questions by depth, "
    "a team of models (--team) knows any"
)
"""Why a scripted team of the encyclopaedia declines a task."""

_NUMBERS = {1: "One fact", 2: "Two facts", 3: "Three facts", 4: "Four facts"}


@dataclass(frozen=True)
class ScriptedWikiTeam:
    """Answers questions by depth of :mod:`afm.datasets.encyclopaedia` by rules.

    Attributes:
        spec: The agent its work will become; names the tool and the roles.
        seed: With a task's id it fixes every choice, whatever else runs in parallel.
        p_direct: Chance of answering from memory, by number of facts; the memory is the task's gold answer.
    """

    spec: AgentSpec
    seed: int = 0
    p_direct: Mapping[int, float] = field(default_factory=lambda: P_DIRECT)

    @property
    def name(self) -> str:
        """Identifies the team in logs."""
        return "scripted_wiki"

    @property
    def roles(self) -> RoleMap:
        """Which function of the agent each member's messages become."""
        cast = self._cast
        return RoleMap(messages={LEADER: cast.thought, PLANNER: cast.first, CRITIC: cast.judge})

    async def solve(self, recorder: Recorder) -> None:
        """Read, plan, look up one fact after another or answer from memory."""
        chain = read_chain(recorder.task.question)
        if chain is None:
            recorder.decline(NOT_READ)
            return
        rng = random.Random(f"{self.seed}/{recorder.task.id}")
        if rng.random() < self.p_direct.get(len(chain.asks), 0.0):
            self._answer_from_memory(recorder)
        else:
            await self._look_up(recorder, chain)

    def _answer_from_memory(self, recorder: Recorder) -> None:
        recorder.say(LEADER, "I know this.")
        recorder.say(PLANNER, "Answer at once.")
        recorder.say(LEADER, "Easy.")
        recorder.finish(WRITER, _written(gold_answers(recorder.task.ground_truth)[0]))

    async def _look_up(self, recorder: Recorder, chain: Chain) -> None:
        count = _NUMBERS.get(len(chain.asks), f"{len(chain.asks)} facts")
        recorder.say(LEADER, f"{count} to find.")
        recorder.say(PLANNER, f"Search for the {', then the '.join(chain.asks)}.")
        tool, name = self._cast.tool, chain.start
        for number, asks in enumerate(chain.asks, 1):
            recorder.say(LEADER, f"Now the {asks} of {name}.")
            result = await recorder.use(SEARCHER, tool, f"{asks} of {name}")
            fact = find_fact(result.text, asks, name) if result.ok else None
            if fact is None:
                recorder.fail(f"no passage told the {asks} of {name}: {result.text[:200]}")
                return
            recorder.say(LEADER, fact.sentence)
            if number < len(chain.asks):
                recorder.say(CRITIC, "One more.")
            name = fact.gives
        recorder.finish(WRITER, _written(name))

    @property
    def _cast(self) -> Casting:
        return Casting(self.spec, "scripted wiki team", "mhqa")


def _written(answer: str) -> str:
    """An answer with the blank before it that it has in a text: a small model knows words with theirs as other tokens."""
    return f" {answer}"


REFLECTOR, PROPOSER, CHECKER = "reflector", "proposer", "checker"

_ASKS = tuple(fact.name for fact in (*RELATIONS, *ATTRIBUTES))
_REFLECTION = "Trajectory monitoring: good"


@dataclass(frozen=True, slots=True)
class Flaws:
    """How often the team makes a mistake, each a probability.

    Attributes:
        from_memory: A task is answered without a search; what it remembers is the gold answer.
        misread: The last fact is read from a wrong line of the right passage.
        overlooked: Of those misread: the checker lets it pass, and the answer is wrong. Otherwise it is corrected.
        repeated: The first search is made twice.
        unchecked: The answer is given without a check, which the agent's declaration forbids.
    """

    from_memory: float = 0.0
    misread: float = 0.0
    overlooked: float = 0.0
    repeated: float = 0.0
    unchecked: float = 0.0


@dataclass(frozen=True)
class CheckingWikiTeam:
    """Answers questions by depth of :mod:`afm.datasets.encyclopaedia` by rules, and checks what it answers.

    It searches like :class:`ScriptedWikiTeam` and proposes an answer that a checker compares with the passage. With
    ``flaws`` it makes the mistakes for which there are filters. Nobody in the team sees the gold answer, except when it
    answers from memory.

    Attributes:
        spec: The agent its work will become; names the tool and the roles.
        seed: With a task's id it fixes every choice, whatever else runs in parallel.
        reflects: How often it reflects on a task's searches.
    """

    spec: AgentSpec
    seed: int = 0
    flaws: Flaws = Flaws()
    reflects: float = 0.5

    @property
    def name(self) -> str:
        """Identifies the team in logs."""
        return "checking_wiki"

    @property
    def roles(self) -> RoleMap:
        """Which function of the agent each member's messages become."""
        cast = self._cast
        members = {LEADER: cast.thought, PLANNER: cast.first, REFLECTOR: cast.reflection}
        return RoleMap(messages=members | {PROPOSER: cast.proposal, CHECKER: cast.check})

    async def solve(self, recorder: Recorder) -> None:
        """Read, plan, look up one fact after another, propose, check, answer."""
        chain = read_chain(recorder.task.question)
        if chain is None:
            recorder.decline(NOT_READ)
            return
        work = _CheckedTask(
            recorder, chain, self._cast.tool, random.Random(f"{self.seed}/{recorder.task.id}")
        )
        await work.solve(self.flaws, self.reflects)

    @property
    def _cast(self) -> Casting:
        return Casting(self.spec, "checking wiki team", "wiki")


class _CheckedTask:
    """One task."""

    def __init__(self, recorder: Recorder, chain: Chain, tool: str, rng: random.Random) -> None:
        self._recorder, self._chain, self._tool, self._rng = recorder, chain, tool, rng

    async def solve(self, flaws: Flaws, reflects: float) -> None:
        # Every choice is drawn, whether it matters or not: one probability does not move the others' draws.
        memory, misread, overlooked, repeated, unchecked, reflected = (
            self._rng.random() < chance
            for chance in (
                flaws.from_memory,
                flaws.misread,
                flaws.overlooked,
                flaws.repeated,
                flaws.unchecked,
                reflects,
            )
        )
        if memory:
            self._from_memory()
            return
        reading = await self._look_up(repeated=repeated, reflected=reflected)
        if reading is None:
            return
        passage, name, fact = reading
        read = self._misread(passage, name, fact) if misread else fact
        self._say(LEADER, read.sentence)
        if unchecked:
            self._answer(read)
            return
        self._propose(read)
        if read != fact and not overlooked:
            self._check(fact, 2)
            corrected = await self._read_again(name)
            if corrected is None:
                return
            read = fact = corrected
            self._propose(read)
        self._check(read, 4)
        self._say(LEADER, "Sure.")
        self._answer(read)

    def _from_memory(self) -> None:
        self._say(LEADER, "I know this.")
        self._say(PLANNER, "Answer at once.")
        known = StatedFact("Easy.", gold_answers(self._recorder.task.ground_truth)[0])
        self._say(LEADER, known.sentence)
        self._propose(known)
        self._check(known, 4)
        self._say(LEADER, "Sure.")
        self._answer(known)

    async def _look_up(self, *, repeated: bool, reflected: bool) -> tuple[str, str, StatedFact] | None:
        """The last passage, whom it was to tell about, and what it tells; ``None`` when the attempt has failed."""
        asks, name = self._chain.asks, self._chain.start
        self._say(LEADER, f"{_NUMBERS.get(len(asks), f'{len(asks)} facts')} to find.")
        self._say(PLANNER, f"Search for the {', then the '.join(asks)}.")
        for number, asked in enumerate(asks, 1):
            self._say(LEADER, f"Now the {asked} of {name}.")
            read = await self._search(f"{asked} of {name}", asked, name)
            if read is not None and repeated and number == 1:
                self._say(LEADER, "Once more.")
                read = await self._search(f"{asked} of {name}", asked, name)
            if read is None:
                return None
            if number == len(asks):
                if reflected:
                    self._say(LEADER, "Found.")
                    self._say(REFLECTOR, _REFLECTION)
                return read[0], name, read[1]
            self._say(LEADER, read[1].sentence)
            if reflected:
                self._say(REFLECTOR, _REFLECTION)
            name = read[1].gives
        raise AssertionError("a question asks for something")

    async def _read_again(self, name: str) -> StatedFact | None:
        """The last fact, searched for in other words."""
        asked = self._chain.asks[-1]
        self._say(LEADER, "Read again.")
        read = await self._search(f"{name} {asked}", asked, name)
        if read is None:
            return None
        self._say(LEADER, read[1].sentence)
        return read[1]

    async def _search(self, query: str, asked: str, name: str) -> tuple[str, StatedFact] | None:
        result = await self._recorder.use(SEARCHER, self._tool, query)
        fact = find_fact(result.text, asked, name) if result.ok else None
        if fact is None:
            self._recorder.fail(f"no passage told the {asked} of {name}: {result.text[:200]}")
            return None
        return result.text, fact

    def _misread(self, passage: str, name: str, fact: StatedFact) -> StatedFact:
        """Another fact of the passage; the same when it tells no other."""
        facts = [other for asked in _ASKS if (other := find_fact(passage, asked, name)) is not None]
        others = [other for other in facts if other.gives != fact.gives]
        return self._rng.choice(others) if others else fact

    def _propose(self, read: StatedFact) -> None:
        self._say(PROPOSER, _written(read.gives))

    def _check(self, fact: StatedFact, score: int) -> None:
        """The checker reads the line again and grades."""
        self._say(LEADER, fact.sentence)
        self._say(CHECKER, f"Score: {score}")

    def _answer(self, read: StatedFact) -> None:
        self._recorder.finish(WRITER, _written(read.gives))

    def _say(self, member: str, text: str) -> None:
        self._recorder.say(member, text)


class ScriptedTeam(Team, Protocol):
    """A team of rules that knows which role of the agent each of its members plays."""

    @property
    def roles(self) -> RoleMap:
        """For :func:`afm.distill.run.distill`.

        Raises:
            ConfigError: The agent's roles do not suit the team.
        """
        ...


def scripted_team(spec: AgentSpec, seed: int = 0) -> ScriptedTeam:
    """The team that works with the one tool of ``spec``: ``code`` or ``wiki_search``, with or without a check of the answer.

    Raises:
        ConfigError: No team does.
    """
    tools = tuple(spec.tool_roles.values())
    if tools == ("code",):
        return ScriptedMathTeam(spec, seed)
    if tools == ("wiki_search",):
        return (
            CheckingWikiTeam(spec, seed) if checking_role(spec) is not None else ScriptedWikiTeam(spec, seed)
        )
    raise ConfigError(
        f"agent {spec.name!r} has the tools {list(tools)}; the scripted teams need exactly one of code and wiki_search"
    )
