"""A scripted solver of the math world that uses the real code tool for a chosen share of the questions.

As a program it runs one evaluation: ``python scripted_solver.py OUTPUT_DIR TASKS PAUSE_S PARALLEL``.
"""

import asyncio
import dataclasses
import hashlib
import sys
import time

from afm.agents import load_agent
from afm.datasets.mini_world import WorldSplit, generate, read_problem
from afm.evaluation import Conditions, evaluate
from afm.models.base import SamplingParams, ScriptedModel
from afm.rewards import load_reward
from afm.tools import ToolResult, load_tools

CODE_TOOL = {
    "tools": [
        {
            "class_name": "afm.tools.code.CodeTool",
            "tool_schema": {"type": "function", "function": {"name": "code"}},
        }
    ]
}
SAMPLING = SamplingParams(max_new_tokens=2000)


def spec():
    return load_agent("math").model_copy(update={"prompt": "", "question_format": "{question}"})


def tasks(count):
    return list(generate(WorldSplit.HELDOUT, count, seed=0))


def timeless(row):
    """What two runs of the same episode share: everything but the time they took."""
    for timed in (row["verdict"], *row["calls"]):
        timed.pop("seconds")
    row["cost"] = {key: value for key, value in row["cost"].items() if not key.endswith("seconds")}
    return row


def share_of(question):
    """A number in [0, 100) that belongs to the question."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:4]) % 100


def solver(tool_percent, pause_s=0.0):
    """Calls the tool for so many percent of the questions and guesses wrong for the rest."""

    def speak(text):
        question, _, response = text.removeprefix("user: ").partition("\nassistant: ")
        problem = read_problem(question)
        if "</observation>" in response:
            seen = response.split("<observation>\n")[1].split("\n")[0]
            return (
                "<reflection>The program printed one number.</reflection>\n"
                f"<think>So that is the result.</think>\n<answer>\\boxed{{{seen}}}</answer>"
            )
        time.sleep(pause_s)
        plan = f"<plan>Compute {problem.expression}.</plan>\n"
        if share_of(question) < tool_percent:
            return (
                f"{plan}<think>A program is safer.</think>\n"
                f"<code>\n```py\nprint({problem.expression})\n```\n</code>"
            )
        return f"{plan}<think>I know it.</think>\n<answer>\\boxed{{{problem.answer + 1}}}</answer>"

    return speak


class Says:
    """A tool whose every call is answered alike."""

    def __init__(self, name, text="seen", *, ok=True):
        self.name, self.text, self.ok = name, text, ok

    async def call(self, argument):
        return ToolResult(f"{self.text} {argument}", ok=self.ok)

    async def close(self):
        pass


async def play(tasks, spec, model, tools, folder, *, rewards=None, sampling=SAMPLING, **options):
    """``evaluate``; options are its own and those of ``Conditions``."""
    reward = load_reward(rewards)
    names = {field.name for field in dataclasses.fields(Conditions)} & options.keys()
    conditions = Conditions(sampling, **{name: options.pop(name) for name in names})
    try:
        return await evaluate(tasks, spec, model, tools, reward, folder, conditions, **options)
    finally:
        await asyncio.gather(reward.close(), *(tool.close() for tool in tools.values()))


async def run(folder, tool_percent, count, *, pause_s=0.0, parallel=8, **options):
    model = ScriptedModel(solver(tool_percent, pause_s), name=f"scripted-{tool_percent}")
    options |= {"parallel": parallel}
    return await play(tasks(count), spec(), model, load_tools(CODE_TOOL), folder, **options)


if __name__ == "__main__":
    folder, number, pause, workers = sys.argv[1:]
    asyncio.run(run(folder, 50, int(number), pause_s=float(pause), parallel=int(workers)))
