"""Real frameworks as programs: the page's own blocks call tools, in parallel and in streams, and no token is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import re
import runpy
import string
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from recording_model import RecordingModel, wrong_tokens

from afm.harness import Session
from afm.harness.episode import environment

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs/harness.md").read_text(encoding="utf-8")
TASK = {"question": "12+13?", "messages": [{"role": "user", "content": "12+13?"}], "id": "q", "seed": 1}


def block(title: str) -> str:
    """The program under a heading of the page."""
    section = PAGE.split(f"\n### {title}\n")[1]
    match = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert match is not None
    return match[1]


def calls(*pairs: tuple[int, int], name: str = "calculator") -> str:
    """Tool calls as a model writes them."""
    written = [json.dumps({"name": name, "arguments": {"a": a, "b": b}}) for a, b in pairs]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written)


@pytest.fixture
def play(server, monkeypatch, tmp_path) -> Callable[..., Any]:
    """Runs a program in this process against a session, as the runner does in one of its own; what it printed."""

    async def played(program: str, model: RecordingModel, session: Session) -> str:
        for name, value in environment(session, server.open(session)).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(TASK)))
        if provider := sys.modules.get("agents.models.openai_provider"):
            monkeypatch.setattr(
                provider, "_http_client", None
            )  # it lives longer than one program's event loop
        printed, file = io.StringIO(), tmp_path / "my_agent.py"
        file.write_text(program)

        def run() -> None:
            with contextlib.redirect_stdout(printed), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runpy.run_path(str(file), run_name="__main__")

        await asyncio.to_thread(run)
        assert wrong_tokens(session, model) == 0
        return printed.getvalue()

    return played


@pytest.fixture(scope="module")
def engine(tokenizer_folder: Path) -> Any:
    """A real engine with a model that half knows an answer, whatever it is asked, and then ends its turn."""
    from reciting import learn_by_heart

    from afm.models.load import load_model
    from afm.models.tiny import create_tiny_model

    folder, shape = tokenizer_folder, {"hidden_size": 32, "layers": 1, "heads": 2, "mlp": 32}
    create_tiny_model(folder, folder, max_positions=32768, **shape)
    words = random.Random(0).choices(string.printable, k=8 * 300)
    asked = [
        "".join(words[at : at + 300]) + "<|im_end|>\n<|im_start|>assistant\n" for at in range(0, 2400, 300)
    ]
    learn_by_heart(folder, [[(text, False), ("It is 25.<|im_end|>", True)] for text in asked], loss=0.1)
    return load_model(folder, threads=1)


@pytest.fixture
def acting(codec, engine) -> Callable[..., RecordingModel]:
    """Says these texts, and samples where there is none."""
    return lambda *texts: RecordingModel(codec, texts, engine=engine)


TITLES = {
    "A script with streaming": "openai",
    "OpenAI Agents SDK": "agents",
    "LangGraph": "langgraph",
    "Anthropic's client": "anthropic",
    "smolagents": "smolagents",
}
RUN = 'Runner.run_sync(agent, json.load(sys.stdin)["messages"]).final_output'
STREAMED = """
async def shown():
    run = Runner.run_streamed(agent, json.load(sys.stdin)["messages"])
    events = [event async for event in run.stream_events() if event.type == "raw_response_event"]
    deltas = [event.data.delta for event in events if event.data.type == "response.output_text.delta"]
    assert "".join(deltas).endswith(run.final_output)
    return run.final_output
import asyncio
print(asyncio.run(shown()))
"""
CHAT = (
    "set_tracing_disabled(True)",
    "set_tracing_disabled(True)\nagents.set_default_openai_api('chat_completions')",
)
AGENTS = ("import json", "import agents, json")
VARIANTS = {
    "the page's": (),
    "chat": (AGENTS, CHAT),
    "stream": ((f"print({RUN})", STREAMED),),
    "chat stream": (AGENTS, CHAT, (f"print({RUN})", STREAMED)),
    "model stream": (('os.environ["AFM_MODEL"])', 'os.environ["AFM_MODEL"], streaming=True)'),),
    "runner stream": (
        ('"tools": [calculator]}', '"tools": [calculator], "stream": True}'),
        (
            "print(runner.until_done().content[-1].text)",
            "for stream in runner:\n    said = ''.join(stream.text_stream)\nprint(said)",
        ),
    ),
}
PROGRAMS = [
    ("A script with streaming", "the page's"),
    ("OpenAI Agents SDK", "the page's"),
    ("OpenAI Agents SDK", "stream"),
    ("OpenAI Agents SDK", "chat"),
    ("OpenAI Agents SDK", "chat stream"),
    ("LangGraph", "the page's"),
    ("LangGraph", "model stream"),
    ("Anthropic's client", "the page's"),
    ("Anthropic's client", "runner stream"),
]


def program_of(title: str, variant: str = "the page's") -> str:
    """The page's block, with the changes of a variant; skips where its package is absent."""
    package = TITLES[title]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install --no-deps -r requirements/frameworks.txt")
    program = block(title)
    for old, new in VARIANTS[variant]:
        assert program.count(old) == 1, (old, program)
        program = program.replace(old, new)
    return program


@pytest.mark.parametrize(("title", "variant"), PROGRAMS)
async def test_a_framework_gives_one_trajectory_of_what_was_sampled(
    play, acting, opened, title, variant
) -> None:
    """One call behind words, then two in parallel, then an answer that the engine samples."""
    program = program_of(title, variant)
    name = "Calculator" if "Calculator(" in program else "calculator"
    model = acting(f"I add.\n{calls((12, 13), name=name)}", calls((1, 2), (3, 4), name=name))
    session = opened(model, seed=2)  # whose answer ends by itself: else the openai client raises
    said = await play(program, model, session)

    [trajectory] = session.trajectories()
    assert [turn.trained for turn in trajectory.turns] == [True] * 3
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert results == ["25", "3", "7"]
    assert said.strip() == model.decode(model.sampled[-1][1]).strip() != ""


async def test_smolagents_reads_its_calls_and_recovers_from_what_the_engine_samples(
    play, acting, opened
) -> None:
    """The second reply is the engine's, no call: the framework says so, and the model tries again."""
    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "25"}}</tool_call>'
    model = acting(calls((12, 13), (1, 2)), None, final)
    session = opened(model, seed=1)
    said = await play(program_of("smolagents"), model, session)

    trained = [turn.trained for trajectory in session.trajectories() for turn in trajectory.turns]
    assert sum(trained) == 3
    assert said.strip().splitlines()[-1] == "25"


async def test_a_code_agent_calculates_in_programs(play, acting, opened) -> None:
    program = program_of("smolagents").replace("ToolCallingAgent", "CodeAgent")
    texts = ["Thought: I add.\n<code>\nprint(calculator(12, 13))\n</code>", None]
    model = acting(*texts, "Thought: Done.\n<code>\nfinal_answer(calculator(12, 13))\n</code>")
    session = opened(model, seed=1)
    said = await play(program, model, session)

    trained = [turn.trained for trajectory in session.trajectories() for turn in trajectory.turns]
    assert sum(trained) == 3
    assert "25" in json.dumps(session.trajectories()[-1].messages[:-1])
    assert said.strip().splitlines()[-1] == "25"
