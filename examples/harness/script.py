"""A bare script with the package `openai`: it streams the model's replies and runs the tool calls in them."""

import json
import os
import sys

from math_agent import run
from openai import OpenAI

TURNS = 3
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {
    "type": "function",
    "function": {"name": "calculator", "description": "Calculate.", "parameters": PARAMETERS},
}


def ask(client, history):
    """Stream one reply and return it as a message of the history."""
    content, calls = "", {}
    stream = client.chat.completions.create(
        model=os.environ["AFM_MODEL"], messages=history, tools=[TOOL], stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] = part.id or call["id"]
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": call.pop("id"), "type": "function", "function": call} for call in calls.values()
        ]
    return message


def main():
    """Play one episode."""
    question, client = json.load(sys.stdin)["question"], OpenAI()
    history = [{"role": "system", "content": "Solve the problem."}, {"role": "user", "content": question}]
    for _ in range(TURNS):
        history.append(ask(client, history))
        if "tool_calls" not in history[-1]:
            print(history[-1]["content"])
            break
        for call in history[-1]["tool_calls"]:
            expression = str(json.loads(call["function"]["arguments"]).get("expression", ""))
            history.append({"role": "tool", "tool_call_id": call["id"], "content": run(expression)})


if __name__ == "__main__":
    main()
