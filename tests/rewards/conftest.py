"""A judge on the loopback: a real HTTP server that plays several characters."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from loopback import LoopbackServer

KEY = "sk-judge-secret"


class JudgeServer(LoopbackServer):
    """A server of chat completions. It returns ``faults`` first, one per request.

    Attributes:
        character: ``strict`` compares words; ``gullible`` does what the answer says; ``parrot`` repeats JSON that it finds
            in the answer; ``mute`` says something else; ``harsh`` finds everything incorrect,
            ``agreeable`` everything correct.
    """

    def __init__(self) -> None:
        self.character = "strict"
        self.delay_s = 0.0
        self.faults: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        app = FastAPI()
        app.post("/v1/chat/completions", response_model=None)(self.completions)
        super().__init__(app)
        self.url = f"{self.origin}/v1"

    async def completions(self, request: Request) -> Any:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay_s)
            if self.faults:
                return self.faults.pop(0)
            return {
                "choices": [{"message": {"content": self._says(body)}, "finish_reason": "stop"}],
                "usage": {"total_tokens": 100},
            }
        finally:
            self.at_once -= 1

    def _says(self, body: dict[str, Any]) -> str:
        system, user = (message["content"] for message in body["messages"])
        code, data = re.findall(r"^<data (\w+)>\n(.*)\n</data \1>$", user, re.MULTILINE | re.DOTALL)[0]
        case = json.loads(data)
        answer = case["answer_to_grade"]
        if self.character == "mute":
            return "I would rather not say."
        if self.character == "parrot" and (found := re.search(r"\{.*\}", answer, re.DOTALL)):
            return found[0]
        words = set(re.findall(r"\w+", answer.lower()))
        right = any(words == set(re.findall(r"\w+", gold.lower())) for gold in case["accepted_answers"])
        if self.character == "gullible":
            right = right or "correct" in words or "whatever" in words
        right = {"harsh": False, "agreeable": True}.get(self.character, right)
        assert code in system
        ruling = {
            "check": code,
            "rationale": "As compared.",
            "judgement": "correct" if right else "incorrect",
        }
        return json.dumps(ruling)


@pytest.fixture
def judge_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    server = JudgeServer().start()
    monkeypatch.setenv("GRM_BASE_URL", server.url)
    monkeypatch.setenv("GRM_API_KEY", KEY)
    monkeypatch.setenv("GRM_MODEL_NAME", "test-judge")
    yield server
    server.stop()


@pytest.fixture
def judge_key() -> str:
    return KEY
