"""The math agent in smolagents: a `ToolCallingAgent` or, with the argument `code`, a `CodeAgent`.

The prompts of smolagents have 2,000 tokens. A small model is taught a short one: `prompt_templates`.
"""

import json
import os
import sys
from copy import deepcopy

from math_agent import run
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES


@tool
def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: Numbers and signs.
    """
    return run(expression)


prompts = deepcopy(EMPTY_PROMPT_TEMPLATES)
prompts["system_prompt"] = "Solve the problem."
prompts["final_answer"] = {"pre_messages": "Answer.", "post_messages": "{{task}}"}
place = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
model = OpenAIServerModel(os.environ["AFM_MODEL"], **place)
options = {"prompt_templates": prompts, "max_steps": 3, "verbosity_level": 0}
if sys.argv[1:] == ["code"]:
    agent = CodeAgent([], model, **options)
else:
    agent = ToolCallingAgent([calculator], model, **options)
print(agent.run(json.load(sys.stdin)["question"]))
