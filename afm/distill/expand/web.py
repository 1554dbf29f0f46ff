"""Questions from the web tools: a scout searches and reads, one page leads to the next, and the question is tested as any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from afm.distill.expand.passages import Passage
from afm.distill.expand.settings import SCOUT, ExpandSettings
from afm.distill.expand.team import PROPOSER, ExpandTeam, Outcome, flat
from afm.distill.model_team.replies import Reply
from afm.distill.model_team.voices import NoUsableReplyError
from afm.distill.record import Recorder
from afm.errors import ConfigError, DataError, ToolError
from afm.tools import Tool
from afm.tools.goal import working_toward

_SHOWN = 120


class Subject(Reply):
    """The scout's: what the next page shall be about."""

    subject: str = Field(min_length=1)
    query: str = ""


class Choice(Reply):
    """The scout's: which of the pages found is read."""

    address: str = Field(min_length=1)


class _NoPagesError(Exception):
    """The web gives no further page for this topic; the message says why."""


class WebExpandTeam:
    """Makes a question of each task's topic (``extra_info.topic``): gathers its passages by tools, then does as :class:`ExpandTeam`.

    By depth the subject of each page is named, word for word, by the page before; by width the pages are about comparable subjects.
    Every search and every page stands in the event log as the tool returned it.

    Raises:
        ConfigError: The settings have no scout.
    """

    def __init__(self, settings: ExpandSettings) -> None:
        if settings.members.scout is None:
            raise ConfigError(
                "members.scout: missing; questions from web tools need one, e.g. {model: strong}"
            )
        self._settings = settings
        self._tester = ExpandTeam(settings)

    @property
    def name(self) -> str:
        """Identifies the settings that matter, in logs and manifests."""
        return f"web_{self._tester.name}"

    def checked(self, tools: dict[str, Tool]) -> dict[str, Tool]:
        """The same tools.

        Raises:
            ConfigError: One that the settings name is not among them.
        """
        for key in ("search_tool", "page_tool"):
            if (name := getattr(self._settings, key)) not in tools:
                raise ConfigError(f"{key}: {name!r} is not among the tools {sorted(tools)}")
        return tools

    async def solve(self, recorder: Recorder) -> None:
        """Gather, propose and test one question.

        Raises:
            EngineError: A model failed for good.
            ToolError: A tool's infrastructure failed; the next run tries again.
            BudgetSpentError: The run has nothing left.
        """
        info = recorder.task.extra_info
        growth, pages = str(info["growth"]), list[Passage]()
        try:
            await self._gather(recorder, str(info["topic"]), growth, int(info["size"]), pages)
            outcome = await self._tester.outcome(recorder, pages, growth)
        except (_NoPagesError, NoUsableReplyError) as error:
            outcome = Outcome(rejected=str(error))
        read = tuple(page.id for page in pages)
        recorder.finish(PROPOSER, outcome.model_copy(update={"read": read}).model_dump_json())

    async def close(self) -> None:
        """Close the connections to the models."""
        await self._tester.close()

    async def _gather(
        self, recorder: Recorder, topic: str, growth: str, size: int, pages: list[Passage]
    ) -> None:
        subject = query = topic
        while True:
            pages.append(await self._page(recorder, topic, growth, subject, query, pages))
            if len(pages) == size:
                return
            chosen = await self._tester.voices.ask(
                recorder,
                SCOUT,
                Subject,
                {"topic": topic, "growth": growth, "subject": "", "pages": pages, "results": ""},
                lambda reply: _subject_fault(reply, pages, growth),
            )
            subject = chosen.subject.strip()
            query = chosen.query.strip() or subject

    async def _page(
        self,
        recorder: Recorder,
        topic: str,
        growth: str,
        subject: str,
        query: str,
        pages: Sequence[Passage],
    ) -> Passage:
        """One page about ``subject``, found and read."""
        results = await self._used(recorder, self._settings.search_tool, query)
        view = {"topic": topic, "growth": growth, "subject": subject, "pages": pages, "results": results}
        chosen = await self._tester.voices.ask(
            recorder, SCOUT, Choice, view, lambda reply: _address_fault(reply, results, pages)
        )
        address = chosen.address.strip()
        with working_toward(subject, ""):
            text = await self._used(recorder, self._settings.page_tool, address)
        return Passage(id=address, title=subject, text=text[: self._settings.passage_chars])

    async def _used(self, recorder: Recorder, tool: str, argument: str) -> str:
        """What a tool returned; its meta counts ``hits`` or ``pages`` where it knows them."""
        result = await recorder.use(SCOUT, tool, argument)
        if not result.ok:
            raise ToolError(f"{tool}: {result.text[:_SHOWN]}")
        if not result.text.strip() or 0 in (result.meta.get("hits"), result.meta.get("pages")):
            raise _NoPagesError(f"{tool} gave nothing for {argument[:_SHOWN]!r}")
        return result.text


def _subject_fault(reply: Subject, pages: Sequence[Passage], growth: str) -> str:
    name = flat(reply.subject)
    if name.casefold() in (flat(page.title).casefold() for page in pages):
        return f"subject: {name[:_SHOWN]!r} was read already"
    if growth == "depth" and name not in flat(pages[-1].text):
        return f"subject: {name[:_SHOWN]!r} does not stand word for word in page {len(pages)}"
    return ""


def _address_fault(reply: Choice, results: str, pages: Sequence[Passage]) -> str:
    address = reply.address.strip()
    if address not in results.split():
        return f"address: {address[:_SHOWN]!r} is not among the results"
    if address in (page.id for page in pages):
        return f"address: {address[:_SHOWN]!r} was read already"
    return ""


def read_topics(path: Path) -> list[str]:
    """A topic a line, blank lines and repetitions left out.

    Raises:
        DataError: There is none, or the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", path=str(path)) from None
    topics = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not topics:
        raise DataError("names no topic; expected one a line", path=str(path))
    return topics
