"""A model server that knows the gold answers: `afm eval` asks it over HTTP as it asks any other server.

It recognises a question by the token ids of its prompt, so a prompt that differs from the agent's own by one token is a
question it has never heard of.
"""

import ast
import hashlib
import json

from fastapi import FastAPI, Request
from loopback import LoopbackServer

from afm.models.base import FinishReason, SamplingParams, ScriptedModel
from afm.models.tokenizer import ChatTokenizer
from afm.rewards.text_match import gold_answers

CONTEXT = 40_960


class OracleServer(LoopbackServer):
    """Speaks the part of vLLM's protocol that evaluations use.

    Attributes:
        replies: What to say to a prompt, by its token ids; anything else is answered with nothing.
        unknown: Prompts it did not recognise.
        asked: The body of every request.
    """

    def __init__(self, tokenizer_folder):
        self.tokenizer = ChatTokenizer.load(tokenizer_folder)
        self.replies = {}
        self.unknown = 0
        self.asked = []
        self._said = {}
        app = FastAPI()
        app.get("/v1/models")(self.models)
        app.post("/v1/completions")(self.completions)
        super().__init__(app)
        self.url = self.origin

    def learn(self, spec, tasks, reply):
        """Say ``reply(task)`` whenever one of ``tasks`` is asked in the words of ``spec``."""
        self.replies, self.unknown, self.asked, self._said = {}, 0, [], {}
        for task in tasks:
            ids = self.tokenizer.encode_prompt(spec.prompt_messages(task.question))
            self.replies[tuple(ids)] = reply(task)

    async def models(self):
        return {"data": [{"id": "oracle", "max_model_len": CONTEXT}]}

    async def completions(self, request: Request):
        body = await request.json()
        self.asked.append({key: value for key, value in body.items() if key != "prompt"})
        prompt = tuple(body["prompt"])
        if prompt not in self.replies:
            self.unknown += 1
        if prompt not in self._said:
            params = SamplingParams(body["max_tokens"], stop=tuple(body["stop"]))
            model = ScriptedModel(self.replies.get(prompt, ""), codec=self.tokenizer)
            self._said[prompt] = await model.generate(prompt, params)
        said = self._said[prompt]
        reason = "length" if said.finish is FinishReason.LENGTH else "stop"
        return {"choices": [{"index": 0, "token_ids": list(said.token_ids), "finish_reason": reason}]}


def right(spec):
    """From a task to a response of the agent ``spec`` that is right and valid."""
    answers = {"boxed": lambda task: f"\\boxed{{{gold_answers(task.ground_truth)[0]}}}", "fence": program}
    answer = answers.get(str(spec.answer_format), lambda task: gold_answers(task.ground_truth)[0])
    before = {
        "web": "<think>Recall.</think><plan>1. Recall it.</plan><think>There it is.</think>"
        "<suggested_answer>{answer}</suggested_answer><think>Sure?</think><double_check>It fits.\nScore: 4</double_check>",
        "mhqa": "<think>Recall.</think><plan>1. Recall it.</plan>",
        "math": "<plan>Recall it.</plan>",
        "code": "<plan>Recall it.</plan>",
    }[spec.name]

    def reply(task):
        said = answer(task)
        return f"{before.replace('{answer}', said)}<think>Known.</think><answer>{said}</answer>"

    return reply


def silent(task):
    return ""


def program(task):
    """A program that has the expected results of a LiveCodeBench row by heart."""
    tests = task.ground_truth if isinstance(task.ground_truth, dict) else json.loads(task.ground_truth)
    if "functional" in tests:
        calls = list(_calls(tests["functional"]))
        lines = [
            f"KNOWN = { ({given: expected for _, given, expected in calls})!r}",
            "class Solution:",
            f"    def {calls[0][0]}(self, *given):",
            "        return KNOWN[repr(given)]",
        ]
    else:
        pairs = zip(tests["stdin"], tests["expected_output"], strict=True)
        known = {_digest(given): expected for given, expected in pairs}
        lines = [
            "import hashlib, sys",
            f"KNOWN = {known!r}",
            "print(KNOWN[hashlib.md5(sys.stdin.read().strip().encode()).hexdigest()])",
        ]
    return "```py\n" + "\n".join(lines) + "\n```"


def _digest(text):
    return hashlib.md5(text.strip().encode()).hexdigest()


def _calls(asserts):
    """Name, arguments and result of ``result = Solution().f(..)`` followed by ``assert result == ..``."""
    name = given = None
    for node in ast.parse(asserts).body:
        if isinstance(node, ast.Assign):
            name = node.value.func.attr
            given = repr(tuple(ast.literal_eval(argument) for argument in node.value.args))
        elif isinstance(node, ast.Assert):
            yield name, given, ast.literal_eval(node.test.comparators[0])
