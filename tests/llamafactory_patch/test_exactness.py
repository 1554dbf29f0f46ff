"""The trained tokens are exactly the agent's text, for any trajectory, tokenizer and format.

``AFM_EXACTNESS_ROWS=10000`` runs the full check, which takes about half an hour on two cores.
"""

import os
import random
import unicodedata
from dataclasses import dataclass

import pytest
from sft_rows import FEEDBACK, PAIRS, alpaca, pairs

ROWS = int(os.environ.get("AFM_EXACTNESS_ROWS", "60"))
ROLES = ("think", "plan", "reflection", "answer", "code")
JOINTS = ("", "\n", "\n\n", "\r\n", " ", "\t", "\n ", "\u00a0", "\u2003\n", "\u3000")
ENDS = (
    *(" ", "\r\n", "\n\n\n", "\t", "> <", "</", "<", ">", "\u200d"),
    *("\u0301", ".", "}\n", "&amp;", "<|", "``` "),
)
PLANES = (
    [(0x20, 0x7E)] * 6
    + [(0xA0, 0x24F), (0x300, 0x36F), (0x400, 0x4FF), (0x5D0, 0x6FF), (0x900, 0x97F), (0xD3F, 0xD46)]
    + [(0x1100, 0x11FF), (0x2000, 0x206F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
    + [(0xE000, 0xF8FF), (0xFE00, 0xFFFD), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0x30000, 0x3134A)]
    + [(0x40000, 0xDFFFF), (0xE0000, 0xE01EF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)]
)


@dataclass(frozen=True)
class Made:
    """A response; only its ``agent`` texts, in order, may be trained on."""

    text: str
    agent: tuple[str, ...]


def some_text(draw, longest=12):
    """Generate a few characters of any plane, sometimes words, and a difficult end."""
    parts = []
    for _ in range(draw.randrange(1, longest)):
        if draw.random() < 0.3:
            parts.append(draw.choice(["the ", "42", "print(x)", "\r\n", "naïve ", "中文", "  ", "🙂"]))
            continue
        first, last = draw.choice(PLANES)
        parts.append(chr(draw.randint(first, last)))
    return "".join(parts) + draw.choice([*ENDS, *[""] * len(ENDS)])


def tag(role, content):
    """Generate one step."""
    return f"<{role}>{content}</{role}>"


def trajectory(draw):
    """Generate steps of the agent, with observations between some of them and any white space around these."""
    text, agent, run = "", [], ""
    for _ in range(draw.randrange(1, 5)):
        for _ in range(draw.randrange(1, 3)):
            run += tag(draw.choice(ROLES), some_text(draw)) + draw.choice(["", "", "\n", " "])
        if draw.random() < 0.8:
            seen = "".join(
                draw.choice(JOINTS) + tag("observation", some_text(draw, 30))
                for _ in range(draw.choice([1, 1, 2]))
            )
            run = run.rstrip()
            text += run + seen + draw.choice(JOINTS)
            agent.append(run)
            run = ""
    run += tag("answer", some_text(draw))
    return Made(text + run, (*agent, run))


def trajectories(count, seed=0):
    """Generate ``count`` responses."""
    draw = random.Random(seed)
    return [trajectory(draw) for _ in range(count)]


def normal(tokenizer, made):
    """Return the text that a tokenizer can restore: some tokenizers (Qwen2.5) normalise text to Unicode's form C."""
    pieces = made.agent
    normalizer = tokenizer.backend_tokenizer.normalizer
    if normalizer is not None and "NFC" in str(normalizer):
        pieces = [unicodedata.normalize("NFC", piece) for piece in pieces]
    return "".join(pieces)


@pytest.fixture(scope="module")
def tags(tiny, tmp_path_factory):
    """Make a byte-level BPE in which some tags are single tokens, ordinary or special."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["<think>", "</think>", "<observation>", "</observation>"])
    tokenizer.add_tokens(["<answer>", "</answer>", "</code>"], special_tokens=True)
    return saved(tokenizer, tiny, tmp_path_factory.mktemp("tags"))


@pytest.fixture(scope="module")
def llama(tiny, tmp_path_factory):
    """Make a BPE like that of Llama-2: a blank before every text, blanks as U+2581, bytes for unknown characters."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    replace = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special)
    texts = [made.text for made in trajectories(300, seed=5)]
    tokenizer.train_from_iterator(["".join(c for c in text if ord(c) < 128) for text in texts], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return saved(fast, tiny, tmp_path_factory.mktemp("llama"))


def saved(tokenizer, tiny, folder):
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_bytes((tiny / "config.json").read_bytes())
    return folder


TOKENIZERS = ("tags", "llama", "qwen", "tiny")


def answers(made):
    return alpaca(*(one.text for one in made)), {}


def sharegpt(made):
    rows = []
    for first, second in zip(made[0::2], made[1::2], strict=True):
        values = ["1?", first.text, "2?", second.text]
        turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(values)]
        rows.append({"conversations": turns})
    return rows, {"formatting": "sharegpt"}


def agent_flan(made):
    rows = []
    for number, one in enumerate(made):
        turns = [("user", "1?"), ("assistant", "no"), ("user", "2?"), ("assistant", one.text)]
        said = [{"role": role, "content": text, "loss": text == one.text} for role, text in turns]
        rows.append({"id": str(number), "conversation": said})
    return rows, {"formatting": "agent_flan"}


def tool_calls(made):
    rows = []
    for one in made:
        asked = [{"role": "system", "content": "S."}, {"role": "user", "content": "1?"}]
        rows.append({"messages": [*asked, {"role": "assistant", "content": one.text}]})
    return rows, {"formatting": "openai_messages"}


def preferences(made):
    return pairs(*((one.text, two.text) for one, two in zip(made[0::2], made[1::2], strict=True))), PAIRS


def feedback(made):
    return [{**row, "good": bool(n % 2)} for n, row in enumerate(answers(made)[0])], FEEDBACK


def turns_of(tokenizer, labels):
    """Return the text of each trained turn; turns end with the end token."""
    turns = [[]]
    for label in labels:
        if label == tokenizer.eos_token_id:
            turns.append([])
        elif label != -100:
            turns[-1].append(label)
    assert not turns.pop()
    return [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in turns]


MODES = {
    "alpaca": (answers, {}),
    "alpaca, packed": (answers, {"packing": True}),
    "alpaca, neatly packed": (answers, {"neat_packing": True}),
    "sharegpt": (sharegpt, {}),
    "agent_flan": (agent_flan, {}),
    "openai_messages": (tool_calls, {}),
    "dpo": (preferences, {"stage": "dpo"}),
    "kto": (feedback, {"stage": "kto"}),
}


WHOLE = "AFM_EXACTNESS_ROWS" in os.environ
CASES = [
    (tokenizer, mode)
    for tokenizer in TOKENIZERS
    for number, mode in enumerate(MODES)
    if WHOLE or tokenizer == TOKENIZERS[number % 2] or mode == "sharegpt"
]


@pytest.mark.slow
@pytest.mark.parametrize(("tokenizer_name", "mode"), CASES)
def test_the_trained_tokens_are_exactly_the_agents_text(pipeline, data_dir, request, tokenizer_name, mode):
    """Return each mode with a difficult tokenizer, and each tokenizer with turns; in the full check, all pairs."""
    folder = request.getfixturevalue(tokenizer_name)
    template = "llama2" if tokenizer_name == "llama" else "qwen3_nothink"
    write, options = MODES[mode]
    made = trajectories(ROWS)
    rows, info = write(made)
    built = pipeline(
        folder, data_dir(rows, name="rows.jsonl", **info), template=template, cutoff_len=4096, **options
    )
    tokenizer = built.tokenizer
    found = []
    for row in built.rows:
        for key in ("labels", "chosen_labels", "rejected_labels"):
            ids = row.get(key.replace("labels", "input_ids"), ())
            assert all(label in (-100, token) for label, token in zip(row.get(key, ()), ids, strict=True))
            found += turns_of(tokenizer, row.get(key, ()))
    expected = [normal(tokenizer, one) for one in made]
    assert sorted(found) == sorted(expected)
