"""A tiny agent that recites episodes with a tool call, and questions about which it has to guess."""

from __future__ import annotations

from pathlib import Path

import yaml
from reciting import learn_by_heart

from afm.agents import load_agent, save_agent
from afm.datasets import Task
from afm.models.tiny import create_tiny_model, train_tokenizer

KNOWN = ((12, 13), (7, 5))
LONG, MOST = "all?", "most?"
"""Questions whose programs print more than a response of 160 tokens has room for, and most of it."""


def recited(first: int, second: int) -> list[tuple[str, bool]]:
    """An episode with a tool call, in pieces; True is the model's."""
    question, total = f"{first}+{second}?", first + second
    return [
        (asked(question), False),
        (
            f"<plan>Run it.</plan><think>{question}</think><code>\n```py\nprint({first}+{second})\n```\n</code>",
            True,
        ),
        (f"\n<observation>\n{total}\n</observation>\n", False),
        (f"<reflection>{total}.</reflection><think>Done.</think><answer>\\boxed{{{total}}}</answer>", True),
    ]


def asked(question: str) -> str:
    """The prompt of a question."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def write_agent(folder: Path) -> Path:
    """Model, ``agent.yaml`` and tokenizer in ``folder``; returns the model's folder.

    Its vocabulary is small: closing tags are several tokens.
    """
    model = folder / "model"
    long = [
        [(asked(question), False), (f'<code>\n```py\nprint("7"*{count})\n```\n</code>', True)]
        for question, count in ((LONG, 900), (MOST, 90))
    ]
    texts = [*(recited(*pair) for pair in KNOWN), *long]
    train_tokenizer(["".join(piece for piece, _ in text) for text in texts] * 5, model, vocab_size=320)
    create_tiny_model(model, model, hidden_size=64, layers=2, heads=2, mlp=128)
    learn_by_heart(model, texts)
    (folder / "agent.yaml").write_text(
        yaml.safe_dump({"extends": "math", "prompt": "", "question_format": "{question}"})
    )
    save_agent(load_agent(folder / "agent.yaml"), model / "agent.yaml")
    return model


def questions(guessed: int) -> list[Task]:
    """What the model knows, what is too long, and sums that it has to guess."""
    pairs = [*KNOWN, *((number, 3 * number + 1) for number in range(3, 3 + guessed))]
    sums = [
        Task(id=f"q{a}_{b}", question=f"{a}+{b}?", data_source="mini_math", ground_truth=str(a + b))
        for a, b in pairs
    ]
    long = [Task(id=one, question=one, data_source="mini_math", ground_truth="7") for one in (LONG, MOST)]
    return [*sums, *long]
