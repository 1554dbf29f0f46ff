"""One question from a group of passages: proposed, then tested with all passages, with none, and without each of them.

Without a corpus, a scout gathers the passages with web tools. It searches and reads, and each page leads to the next.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from afm.configuration import Settings
from afm.datasets.encyclopaedia.growth import Growth
from afm.distill.event_log import Recorder
from afm.distill.model_team.members import (
    Lenient,
    MemberModels,
    MemberReply,
    NoUsableReplyError,
    digest_of,
    read_prompt,
)
from afm.distill.model_team.settings import MemberSettings, TeacherSettings
from afm.errors import ConfigError, ToolError
from afm.rewards.text_match import normalised
from afm.tools.base import working_toward


class ExpandMembers(Settings):
    """The members: one proposes questions, one answers them without the proposed answer, one gathers web pages."""

    proposer: MemberSettings
    solver: MemberSettings
    scout: MemberSettings | None = None


class ExpandSettings(TeacherSettings):
    """Questions by models, from passages of a ``corpus``, or from pages that tools find for ``topics``."""

    output_dir: Path
    """Folder for everything that the run writes. ``tasks.jsonl`` holds the questions."""
    corpus: Path | None = None
    """JSONL of ``{"id", "contents"}`` (contents: title, line feed, text) or ``{"id", "title", "text"}``."""
    topics: Path | None = None
    """Topics, one per line, from which a web search with ``tools`` begins. Requires ``members.scout``."""
    tools: Path | None = None
    """YAML with a search tool and a page tool, for ``topics``."""
    growth: Growth = Growth.DEPTH
    """``depth`` (passages that name each other) or ``width`` (comparable passages)."""
    size: int = Field(default=2, ge=1, le=20)
    """Number of passages or pages that a question needs."""
    count: int = Field(default=1_000, ge=1)
    """Number of groups of passages, or of topics, to try."""
    seed: int = 0
    """Seed of every draw."""
    max_parallel: int = Field(default=4, ge=1)
    """Number of questions in progress at the same time."""
    members: ExpandMembers
    """``proposer`` and ``solver``, and ``scout`` for ``topics``."""
    data_source: str = "expanded"
    """Data source of each question, which selects its reward."""
    asks: int = Field(default=3, ge=1, le=1_000)
    """Maximum number of requests to a member for one usable reply."""
    passage_chars: int = Field(default=4_000, ge=200)
    """Maximum number of characters of a passage. Longer ones lose their end."""
    search_tool: str = "web_search"
    """Name of the search tool."""
    page_tool: str = "crawl_page"
    """Name of the page tool."""

    @model_validator(mode="after")
    def _check(self) -> ExpandSettings:
        if (self.corpus is None) == (self.topics is None):
            raise ValueError("expected either `corpus` or `topics`: the file that questions are made from")
        return self

    @property
    def source(self) -> Path:
        """The file of passages or topics."""
        return next(path for path in (self.corpus, self.topics) if path is not None)


PROPOSER, SOLVER, SCOUT = ExpandMembers.model_fields
_SHOWN = 120
_MATTERS = {"name", "models", "data_source", "asks", "passage_chars", "search_tool", "page_tool"}


class SourcePassage(BaseModel):
    """One passage of a corpus."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    title: str
    text: str = Field(min_length=1)


class Quote(Lenient):
    """Words of a passage, by its number from 1."""

    passage: int
    quote: str = Field(min_length=1)


class Proposal(MemberReply):
    """The proposer's reply: a question, its answer, and the evidence from each passage."""

    question: str = Field(min_length=8)
    answer: str = Field(min_length=1)
    evidence: list[Quote] = Field(min_length=1)


class Solution(MemberReply):
    """The solver's reply. An empty answer or ``null`` means that it does not know. A reply without the key is unusable."""

    answer: Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class GroupOutcome(Settings):
    """Outcome of a group, as the content of its final event."""

    question: str = ""
    answer: str = ""
    evidence: tuple[Quote, ...] = ()
    rejected: str = ""
    """Why there is no question."""
    read: tuple[str, ...] = ()
    """Addresses of the passages, if the scout gathered them."""


class ExpandTeam:
    """Makes a question from each task's passages (``extra_info.passages``), or from pages about ``extra_info.topic``.

    A question is kept on three conditions. Evidence quoted word for word from every passage contains its answer. An
    independent solver finds the same answer from the passages. The solver does not find it without any passages, or
    with one passage missing. So every page is needed, as far as this solver can tell.

    For a topic, a scout gathers the passages with ``tools``. By depth, each page names the subject of the next one word
    for word. By width, the pages are about comparable subjects. The event log holds every search and page as the tool
    returned it.

    Raises:
        ConfigError: Topics lack the scout or a tool.
    """

    def __init__(self, settings: ExpandSettings, tools: Collection[str] = ()) -> None:
        self._settings = settings
        if settings.topics is not None:
            _check_scout(settings, tools)
        self._prompts = {
            name: read_prompt(name, member.prompt, member.says)
            for name, member in settings.all_members.items()
        }
        self._models = MemberModels(settings, self._prompts, settings.asks)

    @property
    def name(self) -> str:
        """Name with a digest of all settings that affect the questions, for logs and manifests."""
        content = self._settings.model_dump(mode="json", include=_MATTERS)
        source = "web_" if self._settings.topics is not None else ""
        return f"{source}{self._settings.name}@{digest_of(content, self._prompts)}"

    async def solve(self, recorder: Recorder) -> None:
        """Gather the passages if they are missing, then propose and test one question.

        Raises:
            EngineError: A model failed permanently.
            ToolError: A tool's infrastructure failed. The next run tries again.
            BudgetSpentError: The budget of the run is spent.
        """
        info = recorder.task.extra_info
        limit, growth = self._settings.passage_chars, str(info["growth"])
        passages = [SourcePassage.model_validate(row) for row in info.get("passages", ())]
        passages = [passage.model_copy(update={"text": passage.text[:limit]}) for passage in passages]
        pages: list[SourcePassage] = []
        try:
            if "topic" in info:
                await self._gather(recorder, str(info["topic"]), growth, int(info["size"]), pages)
            outcome = await self._outcome(recorder, passages or pages, growth)
        except (_NoPagesError, NoUsableReplyError) as error:
            outcome = GroupOutcome(rejected=str(error))
        read = tuple(page.id for page in pages)
        recorder.finish(PROPOSER, outcome.model_copy(update={"read": read}).model_dump_json())

    async def close(self) -> None:
        """Close the connections to the models."""
        await self._models.close()

    async def _outcome(
        self, recorder: Recorder, passages: Sequence[SourcePassage], growth: str
    ) -> GroupOutcome:
        """Propose and test a question from the passages."""
        view = {"passages": passages, "growth": growth}
        proposal = await self._models.ask(
            recorder, PROPOSER, Proposal, view, lambda reply: fault(reply, passages)
        )

        async def solved(shown: Sequence[SourcePassage]) -> str:
            view = {"question": proposal.question, "passages": shown}
            return (await self._models.ask(recorder, SOLVER, Solution, view)).answer

        rejected = ""
        answer = await solved(passages)
        if not same(answer, proposal.answer):
            rejected = f"the solver found {answer[:_SHOWN]!r} in the passages"
        elif same(await solved(()), proposal.answer):
            rejected = "the solver knows the answer without any passage"
        for number in range(len(passages)) if len(passages) > 1 and not rejected else ():
            others = [passage for place, passage in enumerate(passages) if place != number]
            if same(await solved(others), proposal.answer):
                rejected = f"passage {number + 1} is not needed"
                break
        return GroupOutcome(
            question=proposal.question,
            answer=proposal.answer,
            evidence=tuple(proposal.evidence),
            rejected=rejected,
        )

    async def _gather(
        self, recorder: Recorder, topic: str, growth: str, size: int, pages: list[SourcePassage]
    ) -> None:
        """Gather ``size`` pages into ``pages``, one after another."""
        subject = query = topic
        while True:
            view = {"topic": topic, "growth": growth, "subject": subject, "pages": pages}
            pages.append(await self._page(recorder, view, subject, query, pages))
            if len(pages) == size:
                return
            chosen = await self._models.ask(
                recorder,
                SCOUT,
                Subject,
                {**view, "subject": "", "results": ""},
                lambda reply: _subject_fault(reply, pages, growth),
            )
            subject = chosen.subject.strip()
            query = chosen.query.strip() or subject

    async def _page(
        self,
        recorder: Recorder,
        view: Mapping[str, Any],
        subject: str,
        query: str,
        pages: Sequence[SourcePassage],
    ) -> SourcePassage:
        """Find and read one page about ``subject``."""
        results = await self._use(recorder, self._settings.search_tool, query)
        chosen = await self._models.ask(
            recorder,
            SCOUT,
            Choice,
            {**view, "results": results},
            lambda reply: _address_fault(reply, results, pages),
        )
        address = chosen.address.strip()
        with working_toward(subject, ""):
            text = await self._use(recorder, self._settings.page_tool, address)
        return SourcePassage(id=address, title=subject, text=text[: self._settings.passage_chars])

    async def _use(self, recorder: Recorder, tool: str, argument: str) -> str:
        """Return a tool's result. Its meta may count ``hits`` or ``pages``."""
        result = await recorder.use(SCOUT, tool, argument)
        if not result.ok:
            raise ToolError(f"{tool}: {result.text[:_SHOWN]}")
        if not result.text.strip() or 0 in (result.meta.get("hits"), result.meta.get("pages")):
            raise _NoPagesError(f"{tool} returned nothing for {argument[:_SHOWN]!r}")
        return result.text


def _check_scout(settings: ExpandSettings, tools: Collection[str]) -> None:
    if settings.members.scout is None:
        raise ConfigError("members.scout: missing; questions from web tools need one, e.g. {model: strong}")
    for key in ("search_tool", "page_tool"):
        if (name := getattr(settings, key)) not in tools:
            raise ConfigError(f"{key}: {name!r} is not among the tools {sorted(tools)}")


def fault(proposal: Proposal, passages: Sequence[SourcePassage]) -> str:
    """Return what is wrong with a proposal. Empty if nothing is."""
    cited = {quote.passage for quote in proposal.evidence}
    if cited != set(range(1, len(passages) + 1)):
        return f"evidence: quotes passages {sorted(cited)}, expected each of 1 to {len(passages)}"
    for quote in proposal.evidence:
        if flat(quote.quote) not in flat(passages[quote.passage - 1].text):
            return (
                f"evidence: {quote.quote[:_SHOWN]!r} does not occur word for word in passage {quote.passage}"
            )
    answer = f" {normalised(proposal.answer)} "
    quoted = " ".join(normalised(quote.quote) for quote in proposal.evidence)
    if not answer.strip() or answer not in f" {quoted} ":
        return f"answer: {proposal.answer[:_SHOWN]!r} does not occur in the evidence"
    if answer in f" {normalised(proposal.question)} ":
        return "question: it holds the answer"
    return ""


def same(first: str, other: str) -> bool:
    """Return whether two answers are equal by exact match."""
    return bool(normalised(first)) and normalised(first) == normalised(other)


def flat(text: str) -> str:
    """Return ``text`` with every run of whitespace as one space."""
    return re.sub(r"\s+", " ", text).strip()


class Subject(MemberReply):
    """The scout's reply: the subject of the next page."""

    subject: str = Field(min_length=1)
    query: str = ""


class Choice(MemberReply):
    """The scout's reply: the address of the page to read."""

    address: str = Field(min_length=1)


class _NoPagesError(Exception):
    """The web has no further page for this topic. The message holds the reason."""


def _subject_fault(reply: Subject, pages: Sequence[SourcePassage], growth: str) -> str:
    name = flat(reply.subject)
    if name.casefold() in (flat(page.title).casefold() for page in pages):
        return f"subject: {name[:_SHOWN]!r} was read already"
    if growth == "depth" and name not in flat(pages[-1].text):
        return f"subject: {name[:_SHOWN]!r} does not occur word for word in page {len(pages)}"
    return ""


def _address_fault(reply: Choice, results: str, pages: Sequence[SourcePassage]) -> str:
    address = reply.address.strip()
    if address not in results.split():
        return f"address: {address[:_SHOWN]!r} is not among the results"
    if address in (page.id for page in pages):
        return f"address: {address[:_SHOWN]!r} was read already"
    return ""
