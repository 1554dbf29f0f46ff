"""The embedded teacher of the generated encyclopaedia: leader, planner, searcher, critic and writer as rules.

No model is behind it, but the work is real: the leader reads the question's wording, the searcher's queries go to
the real search tool, and what the leader repeats stands in the passage that came back. The leader has a habit that is
kept on purpose: for easy questions it often answers from memory. A tiny model copies that habit without the memory, and
reinforcement learning then teaches it to look things up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from afm.agents import AgentSpec
from afm.datasets.encyclopaedia.reading import Chain, find_fact, read_chain
from afm.distill.casting import Casting
from afm.distill.merge import RoleMap
from afm.distill.record import Recorder
from afm.rewards.gold import gold_answers

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
