"""Against a real HTTP server on the loopback, with the tiny model behind it."""

import asyncio

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from loopback import LoopbackServer

from afm.endpoints.chat import EndpointSettings
from afm.errors import ConfigError, EngineError
from afm.evaluation.config import load_config
from afm.evaluation.job import open_model
from afm.models import load_model
from afm.models.base import FinishReason, SamplingParams
from afm.models.load import TransformersModel
from afm.models.openai import OpenAIModel
from afm.models.tokenizer import ChatTokenizer

KEY = "sk-very-secret"


class Server(LoopbackServer):
    """Speaks the part of vLLM's protocol that we use; ``faults`` are answered first, one a request."""

    def __init__(self, folder):
        self.folder = folder
        self.faults = []
        self.form = "token_ids"
        self.requests = []
        self.headers = []
        self._model = None
        app = FastAPI()
        app.get("/v1/models")(self.models)
        app.post("/v1/completions")(self.completions)
        super().__init__(app)
        self.url = self.origin

    async def models(self):
        return {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 4096}]}

    async def completions(self, request: Request):
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.faults:
            fault = self.faults.pop(0)
            return fault if isinstance(fault, Response) else await fault()
        if self._model is None:
            self._model = TransformersModel(self.folder, threads=1, device="cpu")
        params = SamplingParams(
            body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(0, body["top_k"]),
            stop=tuple(body["stop"]),
            seed=body.get("seed"),
        )
        generation = await self._model.generate(body["prompt"], params)
        return {"choices": [self._choice(generation, body)]}

    def _choice(self, generation, body):
        ids = list(generation.token_ids)
        text = self._model.decode(ids)
        stops = [stop for stop in body["stop"] if stop in text]
        words = [f"token_id:{token}" for token in ids]
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": "length" if generation.finish is FinishReason.LENGTH else "stop",
            "stop_reason": stops[0] if stops else None,
            "logprobs": {"tokens": words, "token_logprobs": list(generation.logprobs)},
        }
        return choice | ({"token_ids": ids} if self.form == "token_ids" else {})


@pytest.fixture(scope="module")
def shared_server(tiny_dir):
    server = Server(tiny_dir).start()
    yield server
    server.stop()


@pytest.fixture
def server(shared_server):
    shared_server.faults.clear()
    shared_server.requests.clear()
    shared_server.headers.clear()
    shared_server.form = "token_ids"
    return shared_server


@pytest.fixture
async def model(server, tiny_dir, monkeypatch):
    monkeypatch.setenv("AFM_MODEL_API_KEY", KEY)
    tokenizer = ChatTokenizer.load(tiny_dir)
    endpoint = EndpointSettings(attempts=3)
    model = OpenAIModel(server.url, tokenizer, name="tiny", context_tokens=4096, endpoint=endpoint)
    yield model
    await model.close()


@pytest.fixture
async def local(tiny_dir):
    model = TransformersModel(tiny_dir, threads=1, device="cpu")
    yield model
    await model.close()


async def prompt_and_stop(local):
    """A prompt with a long greedy text, and a string that first occurs in its second half."""
    for first in range(5, 300):
        ids = (await local.generate([first, 6], SamplingParams(60, temperature=0))).token_ids
        text = local.decode(ids)
        for at in range(30, len(text) - 3):
            if text[at : at + 3].isascii() and text.find(text[at : at + 3]) == at:
                return [first, 6], text[at : at + 3]
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("form", ["token_ids", "logprobs"])
async def test_the_server_gives_what_the_same_model_gives_in_process(model, local, server, form):
    server.form = form
    for params in (
        SamplingParams(30, temperature=0),
        SamplingParams(30, seed=5, top_k=40, top_p=0.9, temperature=0.8),
    ):
        over_http = await model.generate([5, 6, 7], params)
        in_process = await local.generate([5, 6, 7], params)
        assert over_http.token_ids == in_process.token_ids
        assert over_http.logprobs == pytest.approx(in_process.logprobs, abs=1e-6)
        assert over_http.finish is in_process.finish is FinishReason.LENGTH


async def test_stop_strings_and_end_tokens_are_told_apart(model, local, server):
    prompt, stop = await prompt_and_stop(local)
    params = SamplingParams(60, temperature=0, stop=("@@nowhere", stop))
    generation = await model.generate(prompt, params)
    assert generation.token_ids == (await local.generate(prompt, params)).token_ids
    assert stop in model.decode(generation.token_ids)
    assert generation.finish is FinishReason.STOP
    assert server.requests[-1]["include_stop_str_in_output"] is True
    assert server.requests[-1]["top_k"] == -1
    stopped = generation.token_ids
    ended = {
        "choices": [{"token_ids": [9, 2], "finish_reason": "stop", "stop_reason": None, "logprobs": None}]
    }
    server.faults.append(JSONResponse(ended))
    generation = await model.generate(prompt, params)
    assert (generation.token_ids, generation.logprobs) == ((9, 2), ())
    assert generation.finish is FinishReason.END_OF_TEXT
    # An end token that only the server knows counts, whatever stands before it.
    ended["choices"][0] |= {"token_ids": [*stopped[:59], 7], "stop_reason": 7}
    server.faults.append(JSONResponse(ended))
    assert (await model.generate(prompt, params)).finish is FinishReason.END_OF_TEXT


async def test_a_busy_server_is_asked_again(model, server):
    server.faults += [PlainTextResponse("busy", status_code=503)] * 2
    assert len((await model.generate([5], SamplingParams(3, seed=1))).token_ids) == 3
    assert len(server.requests) == 3


async def test_a_schema_is_passed_on_in_the_words_of_both_servers(model, server):
    schema = '{"type": "object"}'
    for wanted in (None, schema):
        await model.generate([5], SamplingParams(1, json_schema=wanted))
    free, bound = server.requests
    assert not {"response_format", "json_schema"} & free.keys()
    named = {"name": "reply", "schema": {"type": "object"}}
    assert bound["response_format"] == {"type": "json_schema", "json_schema": named}
    assert bound["json_schema"] == schema


def choice(**parts):
    return JSONResponse({"choices": [{"finish_reason": "length", **parts}]})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (PlainTextResponse("<html>"), "not JSON"),
        (JSONResponse({"error": "x"}), "no single choice"),
        (choice(token_ids=[1], finish_reason="content_filter"), "content_filter"),
        (choice(token_ids=[1, 1]), "at most 1"),
        (choice(logprobs={"tokens": ["a"], "token_logprobs": [0.0]}), "returned no token ids"),
        (choice(token_ids=[9], finish_reason="stop", stop_reason="x"), "cut the stop string 'x' away"),
    ],
)
async def test_strange_answers_are_errors_and_not_asked_again(model, server, answer, words):
    server.faults.append(answer)
    with pytest.raises(EngineError, match=words):
        await model.generate([5], SamplingParams(1))
    assert len(server.requests) == 1


async def test_load_model_asks_the_server_for_name_and_context(server, tiny_dir, monkeypatch):
    monkeypatch.setenv("AFM_MODEL_API_KEY", KEY)
    model = await asyncio.to_thread(load_model, server.url, tokenizer=tiny_dir, max_batch=20_000)
    assert (model.name, model.context_tokens) == ("tiny", 4096)
    await model.generate([5], SamplingParams(1))
    assert server.headers[-1]["authorization"] == f"Bearer {KEY}"
    await model.close()
    with pytest.raises(ConfigError, match="no model 'tinny'; did you mean 'tiny'"):
        await asyncio.to_thread(load_model, server.url, tokenizer=tiny_dir, name="tinny")
    with pytest.raises(ConfigError, match="tokenizer"):
        load_model(server.url)


async def test_as_many_episodes_of_an_evaluation_are_at_the_server_as_it_wants(server, tiny_dir, tmp_path):
    words = [f"model={server.url}", f"model.tokenizer={tiny_dir}", f"output_dir={tmp_path}", "parallel=70"]
    model = await asyncio.to_thread(open_model, load_config("configs/tiny/eval/math_world.yaml", words))
    all_of_them = asyncio.Barrier(70)

    async def with_all_others():
        async with asyncio.timeout(20):
            await all_of_them.wait()
        return JSONResponse({"choices": [{"token_ids": [1], "finish_reason": "length"}]})

    server.faults += [with_all_others] * 70
    found = await asyncio.gather(*(model.generate([5], SamplingParams(1)) for _ in range(70)))
    assert {one.token_ids for one in found} == {(1,)}
    assert len(server.requests) == 70
    await model.close()
