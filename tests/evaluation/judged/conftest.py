"""A judge on the loopback that chooses and judges, and finished evaluations for it to do so in."""

import json
import re
import runpy
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.datasets import Task
from afm.evaluation.manifest import Conditions, make_manifest
from afm.models.base import SamplingParams
from afm.trajectory.record import sealed

ROOT = Path(__file__).resolve().parents[3]


class ChoosingJudge(runpy.run_path(str(ROOT / "tests/rewards/conftest.py"))["JudgeServer"]):
    """A verdict on one answer is correct when the answer ends with "yes" (for the model ``other``: "yes" or "maybe").

    Characters: ``wise`` chooses the answer "right" and grades it 10; ``first`` chooses the first place and grades 5;
    ``mute`` says something else; ``parrot`` repeats JSON that it finds in an answer."""

    character = "wise"

    def seen(self, number=-1):
        """What a request shows, as data."""
        return self._shown(self.requests[number])

    def _shown(self, body):
        user = body["messages"][1]["content"]
        found = re.findall(r"^<data (\w+)>\n(.*)\n</data \1>$", user, re.MULTILINE | re.DOTALL)
        assert len(found) == 1
        return found[0][0], json.loads(found[0][1])

    def _says(self, body):
        code, data = self._shown(body)
        if self.character == "mute":
            return "I would rather not say."
        if self.character == "parrot":
            return next(one["answer"] for one in data["candidates"] if one["answer"].startswith("{"))
        verdict = {"check": code, "rationale": "It fits."}
        if "answer_to_grade" in data:
            ends = ("yes", "maybe") if body["model"] == "other" else ("yes",)
            right = data["answer_to_grade"].endswith(ends) and data["accepted_answers"] == ["1"]
            return json.dumps(verdict | {"judgement": "correct" if right else "incorrect"})
        if "candidates" not in data:
            return json.dumps(
                verdict | {"grade": 5 if self.character == "first" else 10 * (data["answer"] == "right")}
            )
        right = (one["number"] for one in data["candidates"] if one["answer"] == "right")
        return json.dumps(verdict | {"choice": 1 if self.character == "first" else next(right, 1)})


@pytest.fixture
def judge(monkeypatch):
    server = ChoosingJudge().start()
    server.character = "wise"
    monkeypatch.setenv("GRM_BASE_URL", server.url)
    monkeypatch.setenv("GRM_MODEL_NAME", "test-judge")
    yield server
    server.stop()


@pytest.fixture
def finished(tmp_path, record, write_run):
    """Makes a finished evaluation: ``finished({"task": ["right", "wrong", ...]})``, an answer a round; ``None`` has none."""
    spec = load_agent("mhqa")

    def row(task, number, answer):
        said = (
            f"<think>t</think><plan>p</plan><think>t</think><answer>{answer}</answer>"
            if answer
            else "Nothing."
        )
        score = float((answer or "").startswith("right"))
        return record(task, score, number=number, text=said, agent="mhqa", source="nq")

    def make(answers, name="run", *, seal=""):
        known = {"ground_truth": "1", "data_source": "nq"}
        tasks = [Task(id=task, question=f"question of {task}", **known) for task in answers]
        rounds = max(map(len, answers.values()))
        manifest = make_manifest(tasks, spec, "m", Conditions(SamplingParams(64), rounds=rounds))
        rows = [
            row(task, number, said)
            for task, replies in answers.items()
            for number, said in enumerate(replies)
        ]
        written = [sealed(one, seal) for one in rows] if seal else rows
        return write_run(tmp_path / name, rows, manifest, written=written)

    return make
