"""The embedded teacher of the generated encyclopaedia for agents that reflect and check an answer before they give it.

It works like :mod:`afm.distill.wiki_team`, real searches included, and proposes an answer that a checker compares with the
passage. Told to be careless, it makes the mistakes for which there are filters: it answers from memory, misreads a
passage, overlooks that, searches twice for the same, and answers unchecked. Nobody of the team sees the gold answer, but
the one who answers from memory.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from afm.agents import AgentSpec
from afm.datasets.encyclopaedia.reading import Chain, Fact, find_fact, read_chain
from afm.datasets.encyclopaedia.relations import ATTRIBUTES, RELATIONS
from afm.distill.casting import Casting
from afm.distill.merge import RoleMap
from afm.distill.record import Recorder
from afm.distill.wiki_team import NOT_READ
from afm.rewards.gold import gold_answers

LEADER, PLANNER, SEARCHER, REFLECTOR = "leader", "planner", "searcher", "reflector"
PROPOSER, CHECKER, WRITER = "proposer", "checker", "writer"

_NUMBERS = {1: "One fact", 2: "Two facts", 3: "Three facts", 4: "Four facts"}
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
        work = _Work(recorder, chain, self._cast.tool, random.Random(f"{self.seed}/{recorder.task.id}"))
        await work.solve(self.flaws, self.reflects)

    @property
    def _cast(self) -> Casting:
        return Casting(self.spec, "checking wiki team", "wiki")


class _Work:
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
        found = await self._look_up(repeated=repeated, reflected=reflected)
        if found is None:
            return
        passage, name, fact = found
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
        known = Fact("Easy.", gold_answers(self._recorder.task.ground_truth)[0])
        self._say(LEADER, known.sentence)
        self._propose(known)
        self._check(known, 4)
        self._say(LEADER, "Sure.")
        self._answer(known)

    async def _look_up(self, *, repeated: bool, reflected: bool) -> tuple[str, str, Fact] | None:
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

    async def _read_again(self, name: str) -> Fact | None:
        """The last fact, searched for in other words."""
        asked = self._chain.asks[-1]
        self._say(LEADER, "Read again.")
        read = await self._search(f"{name} {asked}", asked, name)
        if read is None:
            return None
        self._say(LEADER, read[1].sentence)
        return read[1]

    async def _search(self, query: str, asked: str, name: str) -> tuple[str, Fact] | None:
        result = await self._recorder.use(SEARCHER, self._tool, query)
        fact = find_fact(result.text, asked, name) if result.ok else None
        if fact is None:
            self._recorder.fail(f"no passage told the {asked} of {name}: {result.text[:200]}")
            return None
        return result.text, fact

    def _misread(self, passage: str, name: str, fact: Fact) -> Fact:
        """Another fact of the passage; the same when it tells no other."""
        told = [other for asked in _ASKS if (other := find_fact(passage, asked, name)) is not None]
        others = [other for other in told if other.gives != fact.gives]
        return self._rng.choice(others) if others else fact

    def _propose(self, read: Fact) -> None:
        self._say(PROPOSER, _written(read.gives))

    def _check(self, told: Fact, score: int) -> None:
        """The checker reads the line again and grades."""
        self._say(LEADER, told.sentence)
        self._say(CHECKER, f"Score: {score}")

    def _answer(self, read: Fact) -> None:
        self._recorder.finish(WRITER, _written(read.gives))

    def _say(self, member: str, text: str) -> None:
        self._recorder.say(member, text)


def _written(answer: str) -> str:
    """An answer with the blank before it that it has in a text: a small model knows words with theirs as other tokens."""
    return f" {answer}"
