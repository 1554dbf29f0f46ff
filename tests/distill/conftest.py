"""Agent and tools of the math world, and a teacher on the loopback."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from loopback import LoopbackServer
from starlette.requests import ClientDisconnect

from afm.agents import load_agent
from afm.datasets.encyclopaedia.relations import find_fact, read_chain
from afm.tools import load_tools

ROOT = Path(__file__).parents[2]


@pytest.fixture
def spec():
    return load_agent("math")


@pytest.fixture
async def tools():
    loaded = load_tools(ROOT / "configs" / "tools" / "code_executor.yaml")
    yield loaded
    for tool in loaded.values():
        await tool.close()


MEMBERS = {
    "You plan the work": "planner",
    "You work for a team": "searcher",
    "You watch over": "reflector",
    "You write the final": "writer",
    "You check a suggested": "verifier",
}


_NOTED = re.compile(r"\(([\w ]+) of (\w+ \w+): ([\w ]+)\)")


def _followed(name, asks, known):
    for asked in asks:
        name = known[asked, name]
    return name


class Teacher(LoopbackServer):
    """A real OpenAI-compatible server that plays all members for questions by depth of the generated encyclopaedia.

    Attributes:
        faults: Chance of each kind of fault, for any request.
        arrived: When each request came, by the monotonic clock.
        doubt: Questions whose first suggested answer gets a 2.
        worry: Questions whose first reflection finds something poor.
    """

    def __init__(self, seed=0):
        self.faults = {}
        self.retry_after = "1"
        self.hang_s = 30.0
        self.delay_s = 0.0
        self.members = MEMBERS
        self.doubt, self.worry = (lambda question: False), (lambda question: False)
        self.replies = None
        self.asked = Counter()
        self.requests, self.arrived = [], []
        self.served = Counter()
        self._random = random.Random(seed)
        self._doubted, self._worried = set(), set()
        app = FastAPI()
        app.post("/v1/chat/completions", response_model=None)(self.completions)
        super().__init__(app, log_level="error", lifespan="off")
        self.url = f"{self.origin}/v1"

    def stop(self):
        super().stop(forced=True)

    async def completions(self, request: Request):
        try:
            body = await request.json()
        except ClientDisconnect:  # it was killed
            return Response(status_code=400)
        self.arrived.append(time.monotonic())
        self.requests.append(body)
        roles = [message["role"] for message in body["messages"]]
        if roles != ["system", "user"]:
            return JSONResponse({"error": "roles must alternate user/assistant"}, status_code=400)
        await asyncio.sleep(self.delay_s)
        fault = self._fault()
        self.served[fault] += 1
        match fault:
            case "429":
                return JSONResponse({"error": "slow down"}, 429, {"Retry-After": self.retry_after})
            case "500":
                return JSONResponse({"error": "oops"}, 500)
            case "hang":
                await asyncio.sleep(self.hang_s)
        system, user = (message["content"] for message in body["messages"])
        member = next(name for words, name in self.members.items() if system.startswith(words))
        self.asked[member] += 1
        text = json.dumps(self.says(member, user))
        if fault == "other member":
            text = json.dumps({"grade": "good"})
        if fault == "half reply":
            text = text[: len(text) // 2]
        role = "user" if fault == "wrong role" else "assistant"
        answer = {
            "choices": [
                {
                    "message": {"role": role, "content": f"Let me see {{so}}.\n{text}"},
                    "finish_reason": "length" if fault == "length" else "stop",
                }
            ],
            "usage": {"prompt_tokens": len(system + user) // 4, "completion_tokens": len(text) // 4},
        }
        data = json.dumps(answer).encode()
        if fault == "half JSON":
            data = data[: len(data) // 2]
        return Response(data, media_type="application/json")

    def _fault(self):
        draw = self._random.random()
        for kind, chance in self.faults.items():
            draw -= chance
            if draw < 0:
                return kind
        return ""

    def says(self, member, user):
        if self.replies is not None:
            return self.replies(member, user)
        question = re.search(r"^Question: (.*)$", user, re.MULTILINE)[1]
        known = {(asks, name): gives for asks, name, gives in _NOTED.findall(user)}
        return getattr(self, f"_{member}")(question, read_chain(question), known, user)

    def _planner(self, question, chain, known, user):
        steps = [f"Find fact {number}: the {asks}" for number, asks in enumerate(chain.asks)]
        return {"thought": f"{len(steps)} facts are needed.", "steps": [{"goal": goal} for goal in steps]}

    def _searcher(self, question, chain, known, user):
        place = int(re.search(r"^Your sub-task: Find fact (\d+)", user, re.MULTILINE)[1])
        name = _followed(chain.start, chain.asks[:place], known)
        asks = chain.asks[place]
        fact = find_fact(user, asks, name)
        if (asks, name) not in known and fact is None:
            return {"thought": f"I look up {name}.", "tool": "wiki_search", "argument": f"{asks} of {name}"}
        gives = known.get((asks, name)) or fact.gives
        return {"thought": "It is there.", "finding": f"({asks} of {name}: {gives})"}

    def _reflector(self, question, chain, known, user):
        poor = self.worry(question) and question not in self._worried
        self._worried.add(question)
        good = {"grade": "good", "why": "As it should be."}
        return {
            "thought": "I compare.",
            "information_conflict": good,
            "tool_effectiveness": {"grade": "Poor", "why": "Too slow."} if poor else good,
            "trajectory_monitoring": good,
            "advice": "Begin again." if poor else "Go on.",
        }

    def _writer(self, question, chain, known, user):
        answer = _followed(chain.start, chain.asks, known)
        return {"thought": "All is known.", "answer": answer, "facts": "As found."}

    def _verifier(self, question, chain, known, user):
        doubtful = self.doubt(question) and question not in self._doubted
        self._doubted.add(question)
        score, conclusion = (2, "Look again.") if doubtful else (4, "Done.")
        return {"thought": "I test it.", "findings": "Stated.", "score": score, "conclusion": conclusion}


@pytest.fixture
def teacher(monkeypatch):
    server = Teacher().start()
    monkeypatch.setenv("TEACHER_BASE_URL", server.url)
    monkeypatch.setenv("TEACHER_API_KEY", "sk-teacher-secret")
    yield server
    server.stop()
