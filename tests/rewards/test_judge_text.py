"""A judge's prompt in the user's own words, against a real HTTP server."""

from pathlib import Path
from typing import Any

import pytest
from answered import answered
from fastapi.responses import JSONResponse

from afm.errors import ConfigError
from afm.rewards.base import Part
from afm.rewards.judge import JudgeSettings, ModelJudge
from afm.rewards.judge_prompt import JudgeText

TEXT = "Same thing?\nQ: {question}\nA: {gt_answer}\nB: {pred_answer}\nAs {{'judgement': ..}}, {whatever}"
"""Laid out as the published prompt, in words of our own."""


def says(content: str) -> JSONResponse:
    return JSONResponse({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]})


async def judged(answer: str, **settings: Any) -> Part:
    judge = ModelJudge(JudgeSettings.model_validate({"attempts": 2, "control": False} | settings))
    try:
        return await judge.judge(answered("web", "gaia", answer, ["x", "y"], "Who {pred_answer}?"))
    finally:
        await judge.close()


async def test_the_judge_is_asked_in_these_words_even_about_an_exact_answer(
    judge_server: Any, tmp_path: Path
) -> None:
    file = tmp_path / "judge.yaml"
    file.write_text(f"system: Be fair.\nuser: |-\n  {TEXT.replace(chr(10), chr(10) + '  ')}\n")
    judge_server.faults = [says('{"rationale": "no", "judgement": "Incorrect"}')]
    part = await judged("x", prompt=file, reply_format="text", request={"temperature": 0.6})
    assert part == Part(0.0, "judge test-judge: incorrect: no")
    (request,) = judge_server.requests
    assert [message["content"] for message in request["messages"]] == [
        "Be fair.",
        "Same thing?\nQ: Who {pred_answer}?\nA: x | y\nB: x\nAs {'judgement': ..}, {whatever}",
    ]
    assert request["temperature"] == 0.6
    assert "response_format" not in request


async def test_a_reply_without_a_judgement_is_no_score(judge_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "judge.txt"
    file.write_text(TEXT)
    judge_server.faults = [says("correct"), says('```json\n{"judgement": "correct"}\n```')]
    assert (await judged("z", prompt=file)).score == 1.0
    judge_server.faults = [says("correct"), says('{"judgement": "perhaps"}')]
    assert (await judged("z", prompt=file)).score is None


def test_a_text_without_a_gap_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "judge.txt"
    file.write_text("{question} {{gt_answer}}")
    with pytest.raises(
        ConfigError, match=r"judge\.txt: no \{gt_answer\}, \{pred_answer\}; expected a text with"
    ):
        JudgeText.load(file)
    with pytest.raises(ConfigError, match=r"judge\.prompt: .*absent\.txt: cannot be read"):
        JudgeText.load(tmp_path / "absent.txt")
