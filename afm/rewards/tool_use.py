"""Score the use of tools in a reply, by the two measures of Agent-FLAN's paper.

T-Eval (arXiv 2312.14033) measures how well a reply follows instructions, plans, retrieves and understands tools. Items
score 0 to 1 as in its published evaluators. Agent-H (Agent-FLAN, arXiv 2403.12881, section 4.3, equation 1) measures
hallucination.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from afm.configuration import Settings
from afm.errors import ConfigError
from afm.rewards import t_eval_plans as plans
from afm.rewards.base import Part, Sample, Scorer
from afm.rewards.t_eval_plans import Sentences, Similarity, Words, plan_f1
from afm.trajectory.call_forms import written_calls
from afm.trajectory.tags import Author, Segment

T_EVAL, AGENT_H = "t_eval", "agent_h"
"""Keys of a task's ``extra_info``: kind, form, template and tools of an item of T-Eval, or, for Agent-H, the names of the
offered tools and whether the question needs one."""
REACT = ("Thought:", "Action:")
GENERAL = ("I will use", "I need to call")
"""Phrases that count as talk of tools, in ReAct's form and in plain words."""

_FUNCTION_CALL = re.compile(r"""<functioncall>\s*\{\s*["']name["']\s*:\s*["']([^"']+)""")


class TEvalSettings(Settings):
    """The ``t_eval`` section of a reward file."""

    embeddings: Literal["words"] | Path | None = None
    """Folder of a sentence-transformers model, all-mpnet-base-v2 as published, for plans and reasons.
    ``words`` compares words instead, and the evidence reports it. Without either, the first of these items is
    an error."""


class TEval(Scorer):
    """Compares the whole reply with the item's expected one."""

    def __init__(self, settings: TEvalSettings) -> None:
        self._similarity: Similarity | None = None
        if settings.embeddings is not None:
            self._similarity = (
                Words() if settings.embeddings == "words" else Sentences(Path(settings.embeddings))
            )

    async def judge(self, sample: Sample) -> Part:
        """Score the item. Abstains if the row is not an item of T-Eval.

        Raises:
            ConfigError: The item is a plan or a reason, and there is no model to compare it with.
        """
        item = sample.extra_info.get(T_EVAL)
        if not isinstance(item, Mapping):
            return Part(None, "the row is not an item of T-Eval; read its files with reader: t_eval")
        return await asyncio.to_thread(self._scored, _reply(sample), sample.ground_truth, item)

    async def form(self, sample: Sample) -> Part:
        """Return 1 if the reply has the requested form, which T-Eval calls the parse rate."""
        item = sample.extra_info.get(T_EVAL)
        if not isinstance(item, Mapping):
            return Part(None)
        return Part(float(_readable(_reply(sample), sample.ground_truth, item)))

    def _scored(self, reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
        scorers = {
            "instruct": _instruct,
            "plan": self._plan,
            "reason": self._reason,
            "retrieve": _retrieve,
            "understand": _understand,
            "review": _review,
        }
        if scorer := scorers.get(item["kind"]):
            return scorer(reply, gold, item)
        return Part(None, f"T-Eval's items of kind {item['kind']!r} are not scored here")

    def _plan(self, reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
        plan, similarity = _plan(reply, item), self._compared()
        score = plan_f1(plan, plans.plan_of_json(gold), similarity)
        return Part(score, f"{len(plan)} steps, F1 {score:.3f}{similarity.note}")

    def _reason(self, reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
        """Score the similarity of the thoughts."""
        similarity = self._compared()
        actual, expected = _calls(reply, gold, item)
        if actual is None or expected is None:
            return Part(0.0, _unread(expected))
        thought = actual["thought"] if item["form"] == "json" else reply
        score = similarity.matrix([thought], [expected["thought"]])[0][0]
        return Part(score, f"thoughts alike by {score:.3f}{similarity.note}")

    def _compared(self) -> Similarity:
        if self._similarity is None:
            raise ConfigError(
                "t_eval.embeddings: a sentence model compares plans and reasons; give the folder of all-mpnet-base-v2 "
                "(afm eval: rewards.t_eval.embeddings=DIR), or `words` for a stand-in that does not compare with published figures"
            )
        return self._similarity


def _instruct(reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
    """Score the mean of 1 for the form and the share of action and arguments that are as expected."""
    parts = plans.instructed(reply, item["form"], item["template"])
    if parts is None:
        return Part(0.0, "the reply is not in the form asked for")
    action, args = parts
    right = int(action == gold["action"]) + sum(
        args.get(key, "") == value for key, value in gold["args"].items()
    )
    share = right / (len(gold["args"]) + 1)
    return Part((1 + share) / 2, f"{right} of {len(gold['args']) + 1} parts as expected")


def _retrieve(reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
    """Score 1 for the expected tool. In text, no other tool may be named."""
    actual, expected = _calls(reply, gold, item)
    if actual is None or expected is None:
        return Part(0.0, _unread(expected))
    name = expected["name"]
    right = actual["name"] == name if item["form"] == "json" else plans.names_alone(reply, name)
    return Part(float(right), f"expected {name}")


def _understand(reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
    """Score the share of expected arguments with the expected text. In text, all must match.

    The published program divides by their number plus 0.00001, so its best score is 0.99999. Here it is 1.
    """
    actual, expected = _calls(reply, gold, item)
    if actual is None or expected is None:
        return Part(0.0, _unread(expected))
    wanted = expected["args"]
    if item["form"] != "json":
        return Part(float(reply.strip("'").strip('"') == wanted), f"expected {wanted}")
    if not wanted:
        return Part(float(not actual["args"]), "expected no argument")
    right = sum(key in actual["args"] and str(actual["args"][key]) == str(wanted[key]) for key in wanted)
    return Part(right / len(wanted), f"{right} of {len(wanted)} arguments as expected")


def _review(reply: str, gold: Any, item: Mapping[str, Any]) -> Part:
    """Score 1 for the expected option."""
    option = plans.option(reply, item["form"])
    return Part(float(option is not None and option == gold["answer"]), f"expected {gold['answer']}")


def _calls(
    reply: str, gold: Any, item: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the reply's call (empty for the form text) and the expected one, each ``None`` if it is not a call."""
    actual = plans.call(reply) if item["form"] == "json" else plans.call({})
    return actual, plans.call(gold, item["form"])


def _unread(expected: Mapping[str, Any] | None) -> str:
    return "the reply is not a call" if expected else "the row has no expected call"


def _readable(reply: str, gold: Any, item: Mapping[str, Any]) -> bool:
    if item["kind"] == "instruct":
        return plans.instructed(reply, item["form"], item["template"]) is not None
    if item["kind"] == "plan":
        return bool(_plan(reply, item)) and bool(plans.plan_of_json(gold))
    if item["kind"] == "review":
        return plans.option(reply, item["form"]) is not None
    return item["form"] != "json" or None not in _calls(reply, gold, item)


def _plan(reply: str, item: Mapping[str, Any]) -> list[tuple[str, str]]:
    return plans.plan_of_json(reply) if item["form"] == "json" else plans.plan_of_text(reply, item["tools"])


def _reply(sample: Sample) -> str:
    return plans.cleaned(agent_text(sample.segments))


def tool_talk(segments: Sequence[Segment]) -> tuple[bool, bool]:
    """Return whether the agent's text contains a keyword of ReAct, and whether it contains one in plain words."""
    text = agent_text(segments)
    return any(word in text for word in REACT), any(word in text for word in GENERAL)


def agent_text(segments: Sequence[Segment]) -> str:
    """Return the agent's text."""
    return "".join(part.text for part in segments if part.author is Author.AGENT)


class AgentH(Scorer):
    """Scores replies without talk of tools, or calls if a tool is offered and needed."""

    async def judge(self, sample: Sample) -> Part:
        """Score the mean of 1 for no ReAct keyword and 1 for no plain one. The mean over questions is H_Score.

        If a tool is offered and needed, a case that H_Score leaves out, a call of the expected tool scores 1.
        """
        item = sample.extra_info.get(AGENT_H)
        if not isinstance(item, Mapping):
            return Part(None, "the row is not an item of Agent-H; read its files with reader: glaive")
        if item["asked"] and item["tools"]:
            right = sample.ground_truth in _called(sample)
            return Part(float(right), f"expected a call of {sample.ground_truth}")
        react, general = tool_talk(sample.segments)
        kinds = [name for name, there in (("ReAct", react), ("general", general)) if there]
        return Part(1 - len(kinds) / 2, f"talk of tools: {', '.join(kinds) or 'none'}")

    async def form(self, sample: Sample) -> Part:
        """Return 0 if the reply calls a tool that is not offered, in any form."""
        item = sample.extra_info.get(AGENT_H)
        if not isinstance(item, Mapping):
            return Part(None)
        tools = item["tools"]
        invented = sorted(name for name in _called(sample) if name not in tools and (name or not tools))
        return Part(
            float(not invented),
            f"calls of tools that were not offered: {', '.join(invented)}" if invented else "",
        )


def _called(sample: Sample) -> set[str]:
    """Return the names of the tools that the reply calls, with an empty name for a call without a name."""
    calls = {call.name for call in written_calls(sample.segments, sample.spec)}
    named = set(_FUNCTION_CALL.findall(agent_text(sample.segments)))
    return named | {name for name in calls if name != "functioncall"}
