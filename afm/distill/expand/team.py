"""One question from a group of passages: proposed, then tried with all passages, with none, and without each of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from afm.distill.expand.passages import Passage
from afm.distill.expand.settings import ExpandMembers, ExpandSettings
from afm.distill.model_team.prompts import read_prompt
from afm.distill.model_team.replies import Lenient, Reply
from afm.distill.model_team.voices import NoUsableReplyError, Voices
from afm.distill.record import Recorder
from afm.rewards.exact_match import normalised

PROPOSER, SOLVER, _ = ExpandMembers.model_fields
_SHOWN = 120


class Quote(Lenient):
    """Words of a passage, by its number from 1."""

    passage: int
    quote: str = Field(min_length=1)


class Proposal(Reply):
    """The proposer's: a question, its answer, and what each passage gives to it."""

    question: str = Field(min_length=8)
    answer: str = Field(min_length=1)
    evidence: list[Quote] = Field(min_length=1)


class Solution(Reply):
    """The solver's. An empty answer (``null`` as well) says that it does not know; a reply without the key says nothing."""

    answer: Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class Outcome(BaseModel):
    """What became of a group, as the content of its final event.

    Attributes:
        rejected: Why there is no question.
        read: Addresses of the passages, where they were gathered on the way.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str = ""
    answer: str = ""
    evidence: tuple[Quote, ...] = ()
    rejected: str = ""
    read: tuple[str, ...] = ()


class ExpandTeam:
    """Makes a question of each task's passages (``extra_info.passages``).

    A question is kept when its answer stands in evidence quoted word for word from every passage, when an independent solver finds
    the same answer from the passages, and when it does not find it without all of them or without any one: so many pages are
    needed, as far as this solver can tell.

    Attributes:
        voices: The models of all members.
    """

    def __init__(self, settings: ExpandSettings) -> None:
        self._settings = settings
        self._prompts = {
            name: read_prompt(name, member.prompt, member.says)
            for name, member in settings.all_members.items()
        }
        self.voices = Voices(settings, self._prompts)

    @property
    def name(self) -> str:
        """Identifies the settings that matter, in logs and manifests."""
        told = self._settings.model_dump(mode="json", exclude={"endpoints", "budget", "members"})
        told["prompts"] = {name: prompt.file.model_dump() for name, prompt in self._prompts.items()}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self._settings.name}@{digest}"

    async def solve(self, recorder: Recorder) -> None:
        """Propose and test one question.

        Raises:
            EngineError: A model failed for good.
            BudgetSpentError: The run has nothing left.
        """
        info = recorder.task.extra_info
        most = self._settings.passage_chars
        passages = [Passage.model_validate(row) for row in info["passages"]]
        shown = [passage.model_copy(update={"text": passage.text[:most]}) for passage in passages]
        try:
            outcome = await self.outcome(recorder, shown, str(info["growth"]))
        except NoUsableReplyError as error:
            outcome = Outcome(rejected=str(error))
        recorder.finish(PROPOSER, outcome.model_dump_json())

    async def close(self) -> None:
        """Close the connections to the models."""
        await self.voices.close()

    async def outcome(self, recorder: Recorder, passages: Sequence[Passage], growth: str) -> Outcome:
        """A question from these passages, tested.

        Raises:
            NoUsableReplyError, EngineError, BudgetSpentError: As :meth:`solve` says.
        """
        proposal = await self.voices.ask(
            recorder,
            PROPOSER,
            Proposal,
            {"passages": passages, "growth": growth},
            lambda reply: fault(reply, passages),
        )
        made = Outcome(question=proposal.question, answer=proposal.answer, evidence=tuple(proposal.evidence))
        found = await self._solved(recorder, proposal.question, passages)
        if not same(found, proposal.answer):
            return _rejected(made, f"the solver found {found[:_SHOWN]!r} in the passages")
        if same(await self._solved(recorder, proposal.question, ()), proposal.answer):
            return _rejected(made, "the solver knows the answer without any passage")
        for number in range(len(passages)):
            others = [passage for place, passage in enumerate(passages) if place != number]
            if others and same(await self._solved(recorder, proposal.question, others), proposal.answer):
                return _rejected(made, f"passage {number + 1} is not needed")
        return made

    async def _solved(self, recorder: Recorder, question: str, passages: Sequence[Passage]) -> str:
        view = {"question": question, "passages": passages}
        return (await self.voices.ask(recorder, SOLVER, Solution, view)).answer


def fault(proposal: Proposal, passages: Sequence[Passage]) -> str:
    """What is wrong with a proposal by itself; empty when nothing is."""
    cited = {quote.passage for quote in proposal.evidence}
    if cited != set(range(1, len(passages) + 1)):
        return f"evidence: quotes passages {sorted(cited)}, expected each of 1 to {len(passages)}"
    for quote in proposal.evidence:
        if flat(quote.quote) not in flat(passages[quote.passage - 1].text):
            return (
                f"evidence: {quote.quote[:_SHOWN]!r} does not stand word for word in passage {quote.passage}"
            )
    answer = f" {normalised(proposal.answer)} "
    quoted = " ".join(normalised(quote.quote) for quote in proposal.evidence)
    if not answer.strip() or answer not in f" {quoted} ":
        return f"answer: {proposal.answer[:_SHOWN]!r} does not stand in the evidence"
    if answer in f" {normalised(proposal.question)} ":
        return "question: it holds the answer"
    return ""


def same(one: str, other: str) -> bool:
    """Whether two answers are equal by exact match."""
    return bool(normalised(one)) and normalised(one) == normalised(other)


def _rejected(made: Outcome, reason: str) -> Outcome:
    return made.model_copy(update={"rejected": reason})


def flat(text: str) -> str:
    """With single blanks for white space."""
    return re.sub(r"\s+", " ", text).strip()
