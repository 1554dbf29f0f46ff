"""The math agent in the OpenAI Agents SDK, over chat completions or, with the argument `responses`, the Responses API."""

import json
import os
import sys
from contextlib import suppress

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from math_agent import run
from openai import AsyncOpenAI


@function_tool
def calculator(expression: str) -> str:
    """Calculate."""
    return run(expression)


set_tracing_disabled(True)
kind = OpenAIResponsesModel if sys.argv[1:] == ["responses"] else OpenAIChatCompletionsModel
model = kind(os.environ["AFM_MODEL"], openai_client=AsyncOpenAI())
agent = Agent("solver", instructions="Solve the problem.", tools=[calculator], model=model)
with suppress(AgentsException):  # an unknown tool, or too many turns: without an answer the episode scores 0
    print(Runner.run_sync(agent, json.load(sys.stdin)["question"], max_turns=3).final_output)
