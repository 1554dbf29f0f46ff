import json
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from loopback import LoopbackServer

from afm.datasets import Task, write_tasks
from afm.evaluation.config import load_config
from afm.evaluation.job import run_job
from afm.evaluation.report import write_run_report
from afm.trajectory.io import load_records

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "```py\nprint(6 * 7)\n```"
CONFIG = ROOT / "configs/tiny/eval/math_world.yaml"


class Closed(LoopbackServer):
    """Calls the code tool once and answers with what it printed; by tags, or by tool calls where tools are offered."""

    def __init__(self):
        app = FastAPI()
        app.post("/v1/chat/completions")(self.chat)
        super().__init__(app)

    async def chat(self, request: Request):
        body = await request.json()
        last = body["messages"][-1]["content"]
        finish, message = "stop", {}
        if "<observation>" in last and len(body["messages"]) > 1:
            message["content"] = (
                f"<reflection>done</reflection><think>so</think><answer>\\boxed{{{last.split()[1]}}}"
            )
        elif "tools" in body:
            name = body["tools"][0]["function"]["name"]
            function = {"name": name, "arguments": json.dumps({"input": PROGRAM})}
            message["content"] = "<plan>compute</plan><think>with the tool</think>"
            message["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
            finish = "tool_calls"
        else:
            message["content"] = f"<plan>compute</plan><think>with the tool</think><code>{PROGRAM}"
        return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}


@pytest.fixture(scope="module")
def closed():
    server = Closed().start()
    yield server
    server.stop()


@pytest.mark.sandbox
@pytest.mark.parametrize("chat", ["tags", "native"])
async def test_a_baseline_with_real_tools_is_marked_as_not_token_exact(tmp_path, closed, chat) -> None:
    tasks = [Task(id="a", question="What is 6 * 7?", ground_truth="42", data_source="gsm8k")]
    write_tasks(tasks, tmp_path / "tasks.jsonl")
    words = [f"model={closed.origin}", "model.name=closed-1", f"model.chat={chat}"]
    words += [f"data={tmp_path / 'tasks.jsonl'}", f"output_dir={tmp_path / 'out'}"]
    words += [f"tools={ROOT / 'configs/tools/code_executor.yaml'}"]
    metrics = await run_job(load_config(CONFIG, words))
    assert (metrics.scored, metrics.pass_at_1.value) == (1, 1.0)
    [record] = load_records(tmp_path / "out/episodes.jsonl")
    called = f"<plan>compute</plan><think>with the tool</think><code>{PROGRAM}</code>"
    answered = "<reflection>done</reflection><think>so</think><answer>\\boxed{42}</answer>"
    assert record.text == f"{called}\n<observation>\n42\n</observation>\n{answered}"
    assert record.provenance["token_exact"] is False
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["settings"]["model"] == {"name": "closed-1", "digest": None, "token_exact": False}
    page = write_run_report(tmp_path / "out", tmp_path / "report.html").read_text()
    assert "closed-1, not token-exact" in page
