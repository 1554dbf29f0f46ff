"""The web agent on a generated encyclopaedia: searched, served over HTTP, read and followed by its links."""

from __future__ import annotations

import re

from afm.agents import load_agent
from afm.models.scripted import ScriptedModel
from afm.rollout import run_episode
from afm.trajectory.record import StopReason


async def test_two_hops_by_search_and_by_a_link(tools, encyclopaedia, page_url):
    first = encyclopaedia.page(120)
    link = first.links[0]
    second = next(
        page
        for page in map(encyclopaedia.page, range(200))
        if page.title == first.text[link.start : link.end]
    )
    observed = []

    def script(text):
        """Searches, reads the first hit, follows its first link, answers."""
        observed.append(text)
        if len(observed) == 1:
            return f"<think>search</think><web_search>{first.title}</web_search>"
        if len(observed) == 2:
            return f"<think>read</think><crawl_page>{address}</crawl_page>"
        if len(observed) == 3:
            followed = re.findall(r"\]\((http[^)]+/wiki/[^)]+)\)", text)[0]
            return f"<think>follow</think><crawl_page>[next]({followed})</crawl_page>"
        return "<think>done</think><answer>x</answer>"

    address = page_url.replace("{title}", first.title.replace(" ", "_"))
    episode = await run_episode(load_agent("web"), ScriptedModel(script), tools, f"Who is {first.title}?")
    assert episode.stop is StopReason.ANSWER
    hits, page, next_page = (call.observation for call in episode.calls)
    assert hits.startswith(f"[1] {first.title}\n{address}\n")
    assert all(word in page for word in first.text.split()[:3])
    assert next_page.startswith(f"{second.title}\n")
    assert [call.ok for call in episode.calls] == [True] * 3
