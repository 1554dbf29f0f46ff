import pytest

from afm.errors import EngineError
from afm.models.base import FinishReason, SamplingParams, ScriptedModel


async def say(model, limit=1000, stop=("</a>",), prompt=()):
    generation = await model.generate(list(prompt), SamplingParams(limit, stop=stop))
    return bytes(token for token in generation.token_ids if token < 256).decode(), generation.finish


async def test_what_follows_a_stop_string_comes_next():
    model = ScriptedModel(["x</a>y</a>", "z"])
    assert await say(model) == ("x</a>", FinishReason.STOP)
    assert await say(model) == ("y</a>", FinishReason.STOP)
    assert await say(model) == ("z", FinishReason.END_OF_TEXT)
    with pytest.raises(EngineError, match="used up after 3"):
        await say(model)


async def test_the_limit_cuts():
    model = ScriptedModel("abcdef</a>")
    assert await say(model, limit=4) == ("abcd", FinishReason.LENGTH)
    assert await say(model) == ("ef</a>", FinishReason.STOP)


async def test_a_function_sees_the_text_so_far():
    model = ScriptedModel(lambda text: "b</a>tail" if text.endswith("a") else "end")
    assert await say(model, prompt=b"aaa") == ("b</a>", FinishReason.STOP)
    assert await say(model, prompt=b"aab") == ("end", FinishReason.END_OF_TEXT)


async def test_the_completing_token_is_kept_whole(tiny_dir):
    from afm.models.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(tiny_dir)
    text = "<code>print(1)</code>\n\n<plan>"
    ids = tokenizer.encode(text)
    model = ScriptedModel(text, tokenizer)
    first = await model.generate([], SamplingParams(99, stop=("</code>",)))
    rest = await model.generate([], SamplingParams(99, stop=("</code>",)))
    assert [*first.token_ids, *rest.token_ids] == [*ids, tokenizer.end_id]
    assert "</code>" in tokenizer.decode(first.token_ids)
    assert "</code>" not in tokenizer.decode(first.token_ids[:-1])
