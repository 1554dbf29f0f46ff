"""Our own agent as an outside program: it knows the gateway's completions or chat, and nothing of the trainer.

Usage: python outside_agent.py AGENT TOOLS completions|chat    (the task on standard input)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from typing import Any

from afm.agents import AgentSpec, load_agent
from afm.tools import load_tools
from afm.trajectory import answers
from afm.trajectory.observation import observation_content, tagged_observation
from afm.trajectory.tags import Author, Segment, StepOpened, StreamParser


def post(path: str, **body: Any) -> tuple[dict[str, Any], int]:
    """The one choice of a request's answer, and the number of its tokens."""
    address = f"{os.environ['OPENAI_BASE_URL']}/{path}"
    data = json.dumps({"model": os.environ["AFM_MODEL"], **body}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, data, headers)) as reply:
        answer = json.load(reply)
    return dict(answer["choices"][0]), int(answer["usage"]["completion_tokens"])


class Completions:
    """The conversation as one text, which tags divide."""

    def __init__(self, messages: list[dict[str, str]]) -> None:
        prompt = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        self._text = f"{prompt}<|im_start|>assistant\n"

    def ask(self, **options: Any) -> tuple[str, bool, int]:
        """What the model says, whether a stop string ended it, and its tokens."""
        said, tokens = post("completions", prompt=self._text, include_stop_str_in_output=True, **options)
        self._text += said["text"]
        return said["text"], said["stop_reason"] is not None, tokens

    def observe(self, content: str, spec: AgentSpec) -> None:
        """Show what a tool returned."""
        self._text += tagged_observation(content, spec)


class Chat:
    """The conversation as messages; what a tool returned is one of the role ``tool``."""

    def __init__(self, messages: list[dict[str, str]]) -> None:
        self._messages = list(messages)

    def ask(self, **options: Any) -> tuple[str, bool, int]:
        """As :meth:`Completions.ask`. What a stop string broke off within a turn is continued."""
        begun = self._messages[-1]["role"] == "assistant"
        said, tokens = post(
            "chat/completions", messages=self._messages, continue_final_message=begun, **options
        )
        before = self._messages.pop()["content"] if begun else ""
        stop = said["stop_reason"] or ""
        text = said["message"]["content"] + stop
        self._messages.append({"role": "assistant", "content": before + text})
        return text, bool(stop), tokens

    def observe(self, content: str, spec: AgentSpec) -> None:
        """Show what a tool returned."""
        self._messages.append({"role": "tool", "content": content})


async def main(agent: str, tools_file: str, protocol: str) -> None:
    """One episode, with the agent's own limits on turns and on the tokens of one."""
    spec, tools = load_agent(agent), load_tools(tools_file)
    task, parser = json.load(sys.stdin), StreamParser(spec)
    model = {"completions": Completions, "chat": Chat}[protocol](task["messages"])
    segments, calls, turn = [], 0, 0
    while (room := spec.limits.max_turn_tokens - turn) > 0:
        text, stopped, tokens = model.ask(stop=list(spec.stop_strings), max_tokens=room)
        turn += tokens
        segments.append(Segment(Author.AGENT, text))
        step = next((event for event in parser.feed(text) if decides(event, spec)), None)
        if step is None and stopped:
            continue  # a stop string inside another role
        if step is None or isinstance(step, StepOpened) or step.step.role == spec.answer_role:
            break
        if calls == spec.limits.max_turns:
            break
        calls, turn = calls + 1, 0
        result = await tools[spec.tool_roles[step.step.role]].call(step.step.content)
        content = observation_content(result.text, spec, spec.limits.max_observation_chars)
        model.observe(content, spec)
        observed = tagged_observation(content, spec)
        parser.feed_observation(observed)
        segments.append(Segment(Author.ENVIRONMENT, observed))
    print(*answers(segments, spec))


def decides(event: Any, spec: AgentSpec) -> bool:
    """Whether nothing may follow it."""
    if isinstance(event, StepOpened):
        return event.role == spec.observation_role
    return event.step.role in (spec.answer_role, *spec.tool_roles)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
