"""Scores of T-Eval's items, 0 to 1, after its published evaluators."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from afm.rewards.base import Sample
from afm.rewards.part import Part
from afm.rewards.t_eval import replies
from afm.rewards.t_eval.plans import plan_f1
from afm.rewards.t_eval.similarity import Sentences, Similarity, Words
from afm.trajectory.types import Author

ITEM = "t_eval"
"""Where a task's ``extra_info`` holds kind, form, template and tools of the item."""


class TEvalSettings(BaseModel):
    """The ``t_eval`` part of a reward file.

    Attributes:
        embeddings: Folder of a sentence-transformers model, all-mpnet-base-v2 as published; ``None`` compares words, which
            the evidence says.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    embeddings: Path | None = None


class TEval:
    """The whole reply against the item's expected one."""

    def __init__(self, settings: TEvalSettings) -> None:
        self._similarity: Similarity = Sentences(settings.embeddings) if settings.embeddings else Words()

    async def judge(self, sample: Sample) -> Part:
        """The item's score; no score where the row is no item of T-Eval."""
        item = sample.extra_info.get(ITEM)
        if not isinstance(item, Mapping):
            return Part(None, "the row is no item of T-Eval: read its files with reader: t_eval")
        return await asyncio.to_thread(self._scored, _reply(sample), sample.ground_truth, item)

    async def form(self, sample: Sample) -> Part:
        """1 when the reply can be read as the item asks, which T-Eval calls its parse rate."""
        item = sample.extra_info.get(ITEM)
        if not isinstance(item, Mapping):
            return Part(None)
        return Part(float(_readable(_reply(sample), item)))

    async def close(self) -> None:
        """Nothing to free."""

    def _scored(self, reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
        match item["kind"]:
            case "instruct":
                return _instruct(reply, gold, item)
            case "plan":
                return self._plan(reply, gold, item)
            case "retrieve":
                return _retrieve(reply, gold, item)
            case "understand":
                return self._understand(reply, gold, item)
        return Part(None, f"T-Eval's items of kind {item['kind']!r} are not scored here")

    def _plan(self, reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
        given = _plan(reply, item)
        score = plan_f1(given, replies.plan_of_json(gold), self._similarity)
        return self._noted(Part(score, f"{len(given)} steps, F1 {score:.3f}"))

    def _understand(self, reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
        expected, given = _gold(gold), replies.call(reply) if item["form"] == "json" else {"args": reply}
        if expected is None or given is None:
            return Part(0.0, "the reply is no call" if expected else "the row has no expected call")
        args = given["args"] if item["form"] != "json" or isinstance(given["args"], dict) else {}
        score = self._similarity.matrix([str(args)], [str(expected["args"])])[0][0]
        return self._noted(Part(score, f"arguments alike by {score:.3f}"))

    def _noted(self, part: Part) -> Part:
        note = f" ({self._similarity.note})" if self._similarity.note else ""
        return Part(part.score, part.evidence + note)


def _instruct(reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
    """Mean of 1 for the form and the share of action and arguments that are as expected."""
    found = replies.instructed(reply, item["form"], item["template"])
    if found is None:
        return Part(0.0, "the reply is not in the form asked for")
    action, args = found
    right = int(action == gold["action"]) + sum(
        args.get(key, "") == value for key, value in gold["args"].items()
    )
    share = right / (len(gold["args"]) + 1)
    return Part((1 + share) / 2, f"{right} of {len(gold['args']) + 1} parts as expected")


def _retrieve(reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
    expected = _gold(gold)
    if expected is None:
        return Part(0.0, "the row has no expected call")
    name = expected["name"]
    if item["form"] == "json":
        given = replies.call(reply)
        right = given is not None and given["name"] == name
    else:
        right = replies.names_alone(reply, name)
    return Part(float(right), f"expected {name}")


def _readable(reply: str, item: Mapping[str, Any]) -> bool:
    if item["kind"] == "instruct":
        return replies.instructed(reply, item["form"], item["template"]) is not None
    if item["kind"] == "plan":
        return bool(_plan(reply, item))
    return item["form"] != "json" or replies.call(reply) is not None


def _plan(reply: str, item: Mapping[str, Any]) -> list[tuple[str, str]]:
    return (
        replies.plan_of_json(reply) if item["form"] == "json" else replies.plan_of_text(reply, item["tools"])
    )


def _gold(gold: Any) -> dict[str, Any] | None:
    """The expected call; its arguments as text stay text."""
    found = replies.call(gold)
    return found if found and (found["name"] or found["args"]) else None


def _reply(sample: Sample) -> str:
    return "".join(part.text for part in sample.segments if part.author is Author.AGENT)
