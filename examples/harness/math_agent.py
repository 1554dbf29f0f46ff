"""An agent in one file, without a framework: the model writes a program, the agent runs it, the model answers.

It does not use `afm`. It reads the task from standard input, finds the model by `OPENAI_BASE_URL` and `OPENAI_API_KEY`,
and prints the answer in its last line. See docs/harness.md and configs/tiny/rl/math_harness.yaml.
"""

import ast
import json
import operator
import os
import re
import sys

from openai import OpenAI

CHAT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
STOPS = ["</code>", "</answer>"]
MAX_TOKENS = 160
TURNS = 3
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}


def calculate(node):
    """Return the value of an expression of whole numbers, sums, differences and products. Reject anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**12:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](calculate(node.operand))
    raise ValueError("expected whole numbers with + - *")


def run(program):
    """Return the output of a program of the form `print(EXPRESSION)`. The program itself is never executed."""
    match = re.search(r"print\((.*)\)", program)
    try:
        return str(calculate(ast.parse(match[1] if match else program, mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return f"Error: {error}"


def main():
    """Play one episode."""
    task = json.load(sys.stdin)
    client, model = OpenAI(), os.environ["AFM_MODEL"]
    text = CHAT.format(question=task["question"])
    begin = len(text)
    for _ in range(TURNS):
        reply = client.completions.create(model=model, prompt=text, stop=STOPS, max_tokens=MAX_TOKENS)
        text += reply.choices[0].text
        opened = max(STOPS, key=lambda stop: text.rfind(stop.replace("/", ""), begin))
        opening = text.rfind(opened.replace("/", ""), begin)
        if opening < 0 or reply.choices[0].finish_reason != "stop":
            break  # neither a program nor an answer
        content = text[opening + len(opened) - 1 :]
        if opened == "</answer>":
            boxed = re.search(r"\\boxed\{(.*)\}", content)
            print(boxed[1] if boxed else content)
            break
        text += f"</code>\n<observation>\n{run(content)}\n</observation>\n"


if __name__ == "__main__":
    main()
