"""A tiny model behind a real OpenAI-compatible server (transformers' own) as the teacher of the whole pipeline.

The model is trained in the test until it knows the team's replies to a short problem by heart: what is tested is the way from
a served model over HTTP to trajectories, not what such a model can think of.
"""

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from reciting import learn_by_heart

from afm.datasets import Task, write_tasks
from afm.distill.event_log import EventKind, read_events
from afm.models.tiny import create_tiny_model, train_tokenizer
from afm.processes import tied_environment
from afm.trajectory import load_records

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]

ROOT = Path(__file__).parents[3]
PROBLEMS = {"What is 6*7?": ("6*7", "42")}
GOOD = {"grade": "good", "why": "Fine."}
PROMPTS = {
    "planner": ("Plan.", "{{ question }}", "{{ reply.steps[0].goal }}"),
    "coder": ("Code.", "{{ question }}{% if calls_left < 3 %} Report.{% endif %}", ""),
    "reflector": ("Reflect.", "{{ question }}", "{{ reply.advice }}"),
    "writer": ("Write.", "{{ question }}", ""),
    "verifier": ("Check.", "{{ question }} {{ answer }}", ""),
}


def replies(question, expression, answer):
    """What the model learns: system text, user text, reply."""
    three = {"information_conflict": GOOD, "tool_effectiveness": GOOD, "trajectory_monitoring": GOOD}
    return [
        ("Plan.", question, {"steps": [f"Run {expression}."]}),
        ("Code.", question, {"tool": "code", "argument": f"print({expression})"}),
        ("Code.", f"{question} Report.", {"finding": f"It is {answer}."}),
        ("Reflect.", question, {**three, "advice": "Go on."}),
        ("Write.", question, {"answer": answer}),
        ("Check.", f"{question} {answer}", {"findings": "It was run.", "score": 4}),
    ]


def by_heart(folder):
    """A tiny model that replies as it was taught, greedily."""
    from transformers import AutoTokenizer

    taught = [
        [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
            {"role": "assistant", "content": json.dumps(reply)},
        ]
        for question, (expression, answer) in PROBLEMS.items()
        for system, user, reply in replies(question, expression, answer)
    ]
    train_tokenizer([message["content"] for chat in taught for message in chat] * 5, folder, vocab_size=512)
    create_tiny_model(folder, folder, seed=0)
    template = AutoTokenizer.from_pretrained(folder).apply_chat_template
    texts = [
        [
            (template(chat[:2], add_generation_prompt=True, tokenize=False), False),
            (f"{chat[2]['content']}<|im_end|>", True),
        ]
        for chat in taught
    ]
    learn_by_heart(folder, texts, loss=0.01)


@pytest.mark.proof
def test_a_served_tiny_model_teaches(tmp_path):
    by_heart(tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("transformers")), "serve", str(tmp_path / "model")),
            *("--port", str(port), "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"),
        ],
        env=tied_environment() | {"HF_HUB_OFFLINE": "1"},
        stdout=(tmp_path / "server.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, tmp_path / "server.log")
        distil(tmp_path, f"http://127.0.0.1:{port}/v1")
    finally:
        server.terminate()
        server.wait()


def wait_for(url, server, log):
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        try:
            if httpx.get(url).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError("the server did not start")


def distil(folder, url):
    """The real command with the served model as every member."""
    tasks = [
        Task(id=f"t{number}", question=question, ground_truth=answer, data_source="mini_math")
        for number, (question, (_, answer)) in enumerate(PROBLEMS.items())
    ]
    write_tasks(tasks, folder / "tasks.jsonl")
    overrides = []
    for name, (system, user, says) in PROMPTS.items():
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps({"system": system, "user": user, "says": says}))
        group = "tool_agents" if name == "coder" else "members"
        overrides.append(f"{group}.{name}={{model: tiny, prompt: {file}}}")
    overrides[1] = overrides[1].replace(
        "{model", '{tools: [code], argument: "\\n```py\\n{{ argument }}\\n```\\n", model'
    )
    model = f"{{endpoint: teacher, name: {folder / 'model'}, temperature: 0.0, max_tokens: 256}}"
    words = [sys.executable, "-m", "afm.cli.main", "data", "distill", str(folder / "tasks.jsonl"), *overrides]
    words += [f"models={{tiny: {model}}}", f"endpoints.teacher.url={url}", "budget.usd="]
    words += [f"--output-dir={folder / 'out'}", "--team", str(ROOT / "configs/distill/math.yaml")]

    done = subprocess.run(words, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    kept = load_records(folder / "out/trajectories.jsonl")
    assert [record.id for record in kept] == ["t0"]
    assert [re.findall(r"boxed{(\d+)}", record.text) for record in kept] == [["42"]]
    assert [call.observation.strip() for record in kept for call in record.calls] == ["42"]
    calls = [event for event in read_events(folder / "out/events.jsonl") if event.kind is EventKind.CALL]
    assert all(event.prompt_tokens > 0 and event.completion_tokens > 0 for event in calls if event.ok)
