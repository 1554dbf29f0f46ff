"""Sessions keep the ids that were sampled, whatever a program does with its history."""

from __future__ import annotations

import pytest
from extras import LazyPackage

from afm.harness import Branch, ChatRenderer, HarnessServer, Session, SessionLimits
from afm.models import ScriptedModel
from afm.models.tiny import train_tokenizer
from afm.models.tokenizer import ChatTokenizer

openai = LazyPackage("openai")


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["Tom has 12 apples and 3 pears."] * 50, folder, vocab_size=300)
    return ChatTokenizer.load(folder)


async def test_a_script_of_its_own_gives_one_trajectory_of_sampled_ids(codec: ChatTokenizer) -> None:
    model = ScriptedModel(["  Four. ", "Five."], codec)
    session = Session("a/b", model, ChatRenderer(codec), limits=SessionLimits(max_tokens=500))
    async with HarnessServer() as server:
        client = openai.AsyncOpenAI(base_url=server.open(session), api_key="none")
        history = [{"role": "user", "content": "How many?"}]
        for question in ("And now?", "Done."):
            answer = await client.chat.completions.create(model="tiny", messages=history)
            history += [answer.choices[0].message.model_dump(), {"role": "user", "content": question}]
        [sampled] = await server.end("a/b")
        with pytest.raises(openai.NotFoundError, match="no session of this key"):
            await client.chat.completions.create(model="tiny", messages=history)

    said = [[*codec.encode(text), codec.end_id] for text in ("  Four. ", "Five.")]
    new = codec.encode("\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")
    assert sampled.reason is Branch.FIRST
    assert list(sampled.prompt_ids) == codec.encode_prompt(history[:1])
    assert list(sampled.response_ids) == [*said[0], *new, *said[1]]
    assert list(sampled.response_mask) == [1] * len(said[0]) + [0] * len(new) + [1] * len(said[1])
