"""Our own agent as an outside program: it knows the gateway's completions and nothing of the trainer.

Usage: python outside_agent.py AGENT TOOLS    (the task on standard input)
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


def complete(**body: Any) -> dict[str, Any]:
    """One request for a completion."""
    address = f"{os.environ['OPENAI_BASE_URL']}/completions"
    data = json.dumps({"model": os.environ["AFM_MODEL"], "include_stop_str_in_output": True, **body}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, data, headers)) as reply:
        return dict(json.load(reply))


async def main(agent: str, tools_file: str) -> None:
    """One episode, with the agent's own limits on turns and on the tokens of one."""
    spec, tools = load_agent(agent), load_tools(tools_file)
    task, parser = json.load(sys.stdin), StreamParser(spec)
    prompt = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in task["messages"])
    text, segments, calls, turn = f"{prompt}<|im_start|>assistant\n", [], 0, 0
    while (room := spec.limits.max_turn_tokens - turn) > 0:
        reply = complete(prompt=text, stop=list(spec.stop_strings), max_tokens=room)
        said = reply["choices"][0]
        turn += reply["usage"]["completion_tokens"]
        text += said["text"]
        segments.append(Segment(Author.AGENT, said["text"]))
        step = next((event for event in parser.feed(said["text"]) if decides(event, spec)), None)
        if step is None and said["stop_reason"] is not None:
            continue  # a stop string inside another role
        if step is None or isinstance(step, StepOpened) or step.step.role == spec.answer_role:
            break
        if calls == spec.limits.max_turns:
            break
        calls, turn = calls + 1, 0
        result = await tools[spec.tool_roles[step.step.role]].call(step.step.content)
        content = observation_content(result.text, spec, spec.limits.max_observation_chars)
        observed = tagged_observation(content, spec)
        text += observed
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
