"""Preference data: both responses of a pair have masks, and errors explain which stages cannot mask."""

import pytest
from sft_rows import CALL, FEEDBACK, PAIRS, SEEN, bad_rows, pairs

from afm.errors import ConfigError, DataError

SAID = "<answer>42</answer>"


@pytest.mark.slow
def test_both_responses_of_a_pair_are_masked(pipeline, data_dir, model_dir):
    folder = data_dir(pairs((f"{CALL}{SEEN}{SAID}", f"{SEEN}<answer>7</answer>")), **PAIRS)
    built = pipeline(model_dir, folder, stage="dpo")
    [row] = built.rows
    assert built.trained("chosen_") == [f"{CALL}{SAID}<|im_end|>"]
    assert built.trained("rejected_") == ["<answer>7</answer><|im_end|>"]
    asked = "<|im_start|>user\nQuestion 0?<|im_end|>\n<|im_start|>assistant\n"
    whole = built.tokenizer.decode(row["rejected_input_ids"])
    assert whole == f"{asked}{SEEN}<answer>7</answer><|im_end|>\n"


def test_a_pair_is_wrong_when_either_response_is(pipeline, data_dir, tiny):
    good = (SAID, f"{CALL}{SEEN}{SAID}")
    cut = f"<observation>{'42 ' * 200}</observation>{SAID}"
    unclosed, stray = ("<observation>", SAID), (SAID, "x</observation>")
    empty = (SAID, " <observation>1</observation>")
    folder = data_dir(pairs(good, unclosed, stray, (SAID, cut), (cut, SAID), (SAID, 7), empty), **PAIRS)
    with pytest.raises(DataError) as caught:
        pipeline(tiny, folder, stage="dpo", cutoff_len=100)
    faults = [line.split(": ", 1)[1] for line in str(caught.value).splitlines()]
    assert faults == [
        "<observation> opened at character 0 is never closed",
        "</observation> at character 1 closes nothing",
        "rejected: got number, expected a text",
        "the response is empty, or has only observations and blanks",
    ]
    built = pipeline(tiny, folder, stage="dpo", cutoff_len=100, on_bad_rows="drop")
    assert built.trained("rejected_") == [f"{CALL}{SAID}<|im_end|>"]
    reasons = [row["reason"] for row in bad_rows(folder)]
    assert len(reasons) == 6
    for side in ("chosen", "rejected"):
        assert any(f"nothing to train on in the {side} response" in reason for reason in reasons)


def test_desired_and_undesired_responses_are_masked(pipeline, data_dir, tiny):
    outputs = [(f"{CALL}{SEEN}{SAID}", True), ("<observation>", False), (f"{SEEN}<answer>7</answer>", False)]
    rows = [{"instruction": "Q?", "input": "", "output": text, "good": good} for text, good in outputs]
    options = {"stage": "kto", "on_bad_rows": "drop", "preprocessing_batch_size": 9}
    built = pipeline(tiny, data_dir(rows, **FEEDBACK), **options)
    assert [row["kto_tags"] for row in built.rows] == [True, False]
    texts = [f"{CALL}{SAID}<|im_end|>", "<answer>7</answer><|im_end|>"]
    assert built.trained() == texts
    # the divergence is estimated on the response of the other row, whose observation is masked too
    assert built.trained("kl_") == texts[::-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "rm"}, r"got 'rm': a reward model scores whole responses"),
        (
            {"stage": "ppo", "reward_model": "x", "reward_model_type": "full"},
            r"got 'ppo': .*use `afm rl`",
        ),
        ({"stage": "pt"}, r"got 'pt': pre-training trains on every token"),
        ({"stage": "dpo", "ld_alpha": 0.5}, r"does not work with ld_alpha"),
    ],
)
def test_stages_that_cannot_mask_say_why(pipeline, data_dir, tiny, options, message):
    with pytest.raises(ConfigError, match=message):
        pipeline(tiny, data_dir([]), **options)


def test_a_pair_of_equal_responses_is_a_bad_row(pipeline, data_dir, tiny):
    """The second differs only after the cut."""
    begun = f"<think>{'a b ' * 60}</think>"
    rows = pairs((SAID, SAID), (f"{begun}<answer>1</answer>", f"{begun}<answer>2</answer>"), (SAID, CALL))
    folder = data_dir(rows, **PAIRS)
    same = "the chosen and the rejected response are the same"
    with pytest.raises(DataError, match=rf"row 1 \('Question 0\?'\): {same}"):
        pipeline(tiny, folder, stage="dpo")
    built = pipeline(tiny, folder, stage="dpo", cutoff_len=60, on_bad_rows="drop")
    assert built.trained("rejected_") == [f"{CALL}<|im_end|>"]
    assert [same in row["reason"] for row in bad_rows(folder)] == [True, True]


@pytest.mark.parametrize(
    ("stage", "info", "message"),
    [
        (
            "sft",
            FEEDBACK,
            "got 'sft', .* according to dataset_info.json rows.json has answers marked as desired or not",
        ),
        ("dpo", {}, "got 'dpo', which trains on pairs .* rows.json has rows of one answer"),
        ("kto", PAIRS, "rows.json has pairs of a chosen"),
    ],
)
def test_rows_of_another_kind_of_training_are_told_apart(pipeline, data_dir, tiny, stage, info, message):
    with pytest.raises(ConfigError, match=message):
        pipeline(tiny, data_dir([], **info), stage=stage)
