"""The rows that are stored for LLaMA-Factory."""

import json
import re
import shutil

import pytest
from known_tool import KnownTool
from sft_rows import CALL, SEEN, alpaca

from afm.agents import load_agent
from afm.errors import ConfigError, DataError
from afm.models.base import ScriptedModel
from afm.models.tokenizer import ChatTokenizer
from afm.rollout import run_episode

SAID = "<reflection>The result is 42.</reflection><answer>42</answer>"
JOINTS = {
    "rollout": SEEN,
    "tight": "<observation>42</observation>",
    "two newlines": "\n<observation>\n42\n</observation>\n\n",
    "blank": " <observation>\t42 </observation> ",
    "twice": "\n<observation>1</observation>\n<observation>中文 é🙂</observation>\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("boundary", "trained"),
    [("split", CALL + SAID), ("mask", CALL[:-1] + SAID), ("keep", f"{CALL}\n{SAID}")],
)
def test_the_token_over_a_joint_follows_the_boundary(pipeline, data_dir, qwen, boundary, trained):
    # Qwen2.5 encodes ">" and the following newline as one token
    rows = alpaca(CALL + JOINTS["rollout"] + SAID)
    built = pipeline(qwen, data_dir(rows), observation_boundary=boundary)
    assert built.trained() == [f"{trained}<|im_end|>"]


@pytest.mark.slow
def test_every_turn_of_a_conversation_is_masked(pipeline, data_dir, qwen, tiny):
    turns = [
        ("human", "First?"),
        ("gpt", f"{CALL}{JOINTS['rollout']}{SAID}"),
        ("human", "Second, about <observation>?"),
        ("gpt", f"{JOINTS['tight']}<answer>43</answer>"),
    ]
    rows = [{"conversations": [{"from": role, "value": text} for role, text in turns], "system": "Be brief."}]
    folder = data_dir(rows, formatting="sharegpt", columns={"messages": "conversations", "system": "system"})
    built = pipeline(qwen, folder)
    assert built.trained() == [f"{CALL}{SAID}<|im_end|><answer>43</answer><|im_end|>"]
    assert built.masked() == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nFirst?<|im_end|>\n<|im_start|>assistant\n"
        "\n<observation>\n42\n</observation>\n\n"
        "<|im_start|>user\nSecond, about <observation>?<|im_end|>\n<|im_start|>assistant\n"
        "<observation>42</observation>\n"
    ]
    last_only = pipeline(tiny, folder, mask_history=True)
    assert last_only.trained() == ["<answer>43</answer><|im_end|>"]


def test_packed_sequences_keep_their_masks(pipeline, data_dir, tiny):
    rows = alpaca(*(f"{CALL}{JOINTS['tight']}<answer>{n}</answer>" for n in range(6)))
    built = pipeline(tiny, data_dir(rows), neat_packing=True)
    assert len(built.rows) < 6
    trained = "".join(built.trained()).split("<|im_end|>")
    assert sorted(trained) == ["", *(f"{CALL}<answer>{n}</answer>" for n in range(6))]
    for row in built.rows:
        assert max(row["attention_mask"]) == built.text(row, trained=True).count("<|im_end|>")


@pytest.mark.slow
def test_roles_without_loss_stay_in_the_text(pipeline, data_dir, qwen):
    text = f"<plan>P.</plan>{CALL}{JOINTS['rollout']}<plan>\nQ é🙂.\n</plan>\n{SAID}"
    folder = data_dir(alpaca(text))
    whole = pipeline(qwen, folder)
    built = pipeline(qwen, folder, roles_without_loss="plan, reflection")
    assert [row["input_ids"] for row in built.rows] == [row["input_ids"] for row in whole.rows]
    [trained] = built.trained()
    assert not any(role in trained for role in ("plan", "reflection", "Q", "P.", "result"))
    # a token that spans the end of such a role has no loss: "><" of Qwen2.5 between two tags
    assert trained.replace("\n", "") in (
        f"{CALL}<answer>42</answer><|im_end|>",
        f"{CALL[1:]}answer>42</answer><|im_end|>",
    )


def test_a_role_without_loss_that_no_row_has_is_refused(pipeline, data_dir, tiny):
    folder = data_dir(alpaca(SAID, f"<plan>P.</plan><think>about <plann></think>{SAID}"))
    with pytest.raises(ConfigError, match="roles_without_loss: no row has <plann> outside of other roles"):
        pipeline(tiny, folder, roles_without_loss="plan,plann")
    assert len(pipeline(tiny, folder, roles_without_loss="plan").rows) == 2


def test_a_row_of_roles_without_loss_alone_has_nothing_to_train_on(pipeline, data_dir, tiny):
    with pytest.raises(DataError, match=r"row 2 .*: nothing to train on: .*or only the end of a turn"):
        pipeline(tiny, data_dir(alpaca(SAID, "<answer>43</answer>")), roles_without_loss="answer")


@pytest.mark.parametrize("boundary", ["mask", "keep"])
def test_boundaries_over_tokens_leave_the_ids_of_stock_llamafactory(pipeline, data_dir, qwen, boundary):
    folder = data_dir(alpaca(*(CALL + joint + SAID for joint in JOINTS.values())))
    stock = pipeline(qwen, folder, ignore_observation=False)
    ours = pipeline(qwen, folder, observation_boundary=boundary)
    assert [row["input_ids"] for row in ours.rows] == [row["input_ids"] for row in stock.rows]


def test_without_the_option_everything_is_stock(pipeline, data_dir, tiny):
    text = f"{CALL}{JOINTS['rollout']}{SAID}</observation>"
    built = pipeline(tiny, data_dir(alpaca(text)), ignore_observation=False)
    assert built.trained() == [f"{text}<|im_end|>\n"]


def test_other_tags_can_be_the_environments(pipeline, data_dir, tiny):
    rows = alpaca("<a>1</a>\n<seen>2</seen>\n<b>3</b><heard>4</heard>")
    built = pipeline(tiny, data_dir(rows), ignore_observation_token="seen, heard")
    assert built.trained() == ["<a>1</a><b>3</b><|im_end|>"]


def test_a_cut_off_inside_an_observation_trains_on_what_stands_before(pipeline, data_dir, tiny):
    rows = alpaca(f"{CALL}\n<observation>\n{'42 ' * 200}\n</observation>\n{SAID}")
    built = pipeline(tiny, data_dir(rows), cutoff_len=100)
    assert len(built.rows[0]["input_ids"]) == 100
    assert built.trained() == [CALL]


AGENT = load_agent("math").model_copy(update={"prompt": "Write <observation> never.\n{roles}"})
QWEN_CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\n"
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@pytest.fixture
def own_template(tiny, tmp_path):
    """Make a tokenizer with Qwen's own template, which has a default system prompt."""
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = QWEN_CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "own")
    shutil.copy(tiny / "config.json", tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "template"), [("tiny", "qwen3_nothink"), ("qwen", "qwen3_nothink"), ("own_template", "qwen")]
)
async def test_training_sees_the_token_ids_of_a_rollout(pipeline, data_dir, request, model, template):
    model_dir = request.getfixturevalue(model)
    said = iter([CALL, "<reflection>More.</reflection><code>6*7</code>", SAID])
    model = ScriptedModel(lambda text: next(said), ChatTokenizer.load(model_dir))
    episode = await run_episode(AGENT, model, {"code": KnownTool("code", lambda argument: "42")}, "17+25?")
    assert episode.text.count("<observation>") == 2
    row = {"instruction": AGENT.user_message("17+25?"), "input": "", "output": episode.text}
    built = pipeline(model_dir, data_dir([row]), template=template, match_chat_template=True)
    [trained] = built.rows
    end = built.tokenizer.convert_tokens_to_ids("<|im_end|>")
    newline = built.tokenizer.encode("\n")
    rollout = [*episode.prompt_ids, *episode.response_ids]
    assert trained["input_ids"] == [*rollout, end, *newline]
    mask = [*[0] * len(episode.prompt_ids), *episode.response_mask, 1, 0]
    assert [int(label != -100) for label in trained["labels"]] == mask


def test_a_template_that_asks_otherwise_than_rollouts_is_refused(pipeline, data_dir, tiny):
    with pytest.raises(ConfigError, match="You are Qwen, created by Alibaba Cloud"):
        pipeline(tiny, data_dir(alpaca(SAID)), template="qwen", match_chat_template=True)


def test_conversations_that_do_not_end_with_the_assistant_are_named(pipeline, data_dir, tiny):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = [{"conversations": turns}, {"conversations": turns[:1]}]
    message = r"rows.json:1, row 2 .*: conversations: got 1 turns, expected alter"
    with pytest.raises(DataError, match=message):
        pipeline(tiny, data_dir(rows, formatting="sharegpt"))


def test_a_text_may_hold_the_characters_of_the_fence(pipeline, data_dir, tiny):
    rows = alpaca(f"\ue0000\ue001{CALL}{JOINTS['rollout']}\ue0001\ue001{SAID}\ue000")
    built = pipeline(tiny, data_dir(rows))
    assert built.trained() == [f"\ue0000\ue001{CALL}\ue0001\ue001{SAID}\ue000<|im_end|>"]


def test_a_cached_data_set_is_not_reused_with_another_mask(pipeline, data_dir, tiny):
    folder = data_dir(alpaca(CALL + JOINTS["rollout"] + SAID))
    trained = [pipeline(tiny, folder, ignore_observation=flag).trained()[0] for flag in (True, False, True)]
    assert ["<observation>" in text for text in trained] == [False, True, False]


STORED_OTHERWISE = [
    ({"observation_boundary": "mask"}, "observation_boundary: 'split' -> 'mask'"),
    ({"roles_without_loss": "think"}, "roles_without_loss: '' -> 'think'"),
    ({"packing": True}, "cutoff_len: 2048 -> 2047; packing: False -> True"),
    ({"template": "default"}, "template: 'qwen3_nothink' -> 'default'"),
    ({"dataset": "rows,rows"}, "dataset: ['rows'] -> ['rows', 'rows']"),
    ({"seed": 7}, "seed: 42 -> 7"),
    ({"add_tokens": "xyz"}, "add_tokens: None -> ['xyz']"),
    ({"ignore_observation": False}, "ignore_observation: True -> False"),
]


def test_a_stored_data_set_is_refused_by_a_run_that_would_make_another(pipeline, data_dir, tiny, tmp_path):
    folder = data_dir(alpaca(CALL + JOINTS["rollout"] + SAID))
    stored = str(tmp_path / "stored")
    first = pipeline(tiny, folder, tokenized_path=stored).trained()
    assert pipeline(tiny, folder, tokenized_path=stored, preprocessing_num_workers=2).trained() == first
    for options, change in STORED_OTHERWISE:
        with pytest.raises(ConfigError, match=rf"was made with other settings \(.*{re.escape(change)}"):
            pipeline(tiny, folder, tokenized_path=stored, **options)
    moved = tmp_path / "moved"
    shutil.copytree(tiny, moved)
    assert pipeline(moved, folder, tokenized_path=stored).trained() == first
    own = json.loads((moved / "tokenizer.json").read_text("utf-8"))
    own["model"]["merges"].pop()
    (moved / "tokenizer.json").write_text(json.dumps(own), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer: 'sha256:.* -> 'sha256:"):
        pipeline(moved, folder, tokenized_path=stored)
    assert not (tmp_path / ".stored.part").exists()
    note = tmp_path / "stored/masking.json"
    for damage in ('{"revision": 1', "[]"):
        note.write_text(damage, "utf-8")
        with pytest.raises(ConfigError, match=f"{note.name} is damaged; delete its folder"):
            pipeline(tiny, folder, tokenized_path=stored)


def test_a_stored_data_set_is_refused_when_its_files_have_changed_but_not_when_they_are_gone(
    pipeline, data_dir, tiny, tmp_path
):
    folder = data_dir(alpaca(SAID))
    stored = str(tmp_path / "stored")
    for mask in (True, False):
        options = {"tokenized_path": f"{stored}{mask}", "ignore_observation": mask}
        first = pipeline(tiny, data_dir(alpaca(SAID)), **options).trained()
        changed = data_dir(alpaca(SAID, SAID))
        with pytest.raises(ConfigError, match=r"other settings \(data sets\.rows\.files: \["):
            pipeline(tiny, changed, **options)
        (folder / "rows.json").unlink()
        assert pipeline(tiny, folder, **options).trained() == first


def test_rows_are_named_by_workers_too(pipeline, data_dir, tiny):
    rows = alpaca(*[SAID] * 30, "<observation>")
    with pytest.raises(DataError, match="row 31"):
        pipeline(tiny, data_dir(rows), preprocessing_num_workers=2)


def test_rows_held_out_for_validation_are_masked_too(pipeline, data_dir, tiny):
    rows = alpaca(*[CALL + JOINTS["rollout"] + SAID] * 10)
    built = pipeline(tiny, data_dir(rows), val_size=0.2)
    assert built.trained() == [f"{CALL}{SAID}<|im_end|>"] * 8
