import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TWIN = str(ROOT / "configs/tiny/sft/agent_flan.yaml")
SPLITS = (
    "agent_instruct_react",
    "agent_instruct_tflan",
    "toolbench_instruct_j1s1_3k",
    "toolbench_negative",
    "toolbench_react_10p",
    "toolbench_tflan_60p_r10r5u7",
    "toolbench_tflan_cot_30p",
)


def turn(role, content, loss=False):
    return {"role": role, "content": content, "loss": loss}


def rows(split):
    """Two good rows, the second with a turn that is not trained on, and one that teaches nothing."""
    first = [turn("system", "A kettle."), turn("user", "Tea?"), turn("assistant", f"{split} boils. ", True)]
    unlearnt = [turn("user", "More?"), turn("assistant", "unlearnt")]
    spoken = [*unlearnt, turn("user", "So?"), turn("assistant", f"{split} pours.", True)]
    silent = [turn("user", "Hi"), turn("assistant", "Hi")]
    lines = [{"id": f"{split}-{n}", "conversation": said} for n, said in enumerate((first, spoken, silent))]
    return "\n".join(map(json.dumps, lines)).encode()


def chat(*values, begin=0):
    return [{"from": ("human", "gpt")[(begin + n) % 2], "value": value} for n, value in enumerate(values)]


SHAREGPT = [
    {"id": "a_0", "conversations": chat("Why?", "shared reason", "Then?", "shared end")},
    {"id": "a_1", "conversations": chat("cut off before", "Where?", "shared place", "and?", begin=1)},
    {"id": "b_0", "conversations": chat("nobody answers")},
    {"id": "c_0", "conversations": [*chat("One?"), *chat("Two?", "mixed up")]},
    {"id": "d_0", "conversations": [{"from": "robot", "value": "beep"}]},
]


@pytest.fixture(scope="module")
def prepared(afm, tmp_path_factory):
    """The folder with the files that the shipped list makes of both sets."""
    place = tmp_path_factory.mktemp("agent_flan")
    repositories = {
        "internlm/Agent-FLAN": {"README.md": b"#"} | {f"data/{name}.jsonl": rows(name) for name in SPLITS},
        "anon8231489123/ShareGPT_Vicuna_unfiltered": {
            "ShareGPT_V3_unfiltered_cleaned_split.json": json.dumps(SHAREGPT).encode()
        },
    }
    raw, out = place / "raw", place / "made"
    sets = yaml.safe_load((ROOT / "configs/data/agent_flan.yaml").read_text())["sets"]
    for name, entry in sets.items():
        for file, content in repositories[entry["repository"]].items():
            (raw / name / file).parent.mkdir(parents=True, exist_ok=True)
            (raw / name / file).write_bytes(content)
    words = ["prepare", "published", "agent_flan", "--all", "--data", str(raw), "--output-dir", str(out)]
    afm("data", *words)
    return out / "sft"


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_each_split_is_a_file_and_an_entry_of_its_own(prepared):
    info = json.loads((prepared / "dataset_info.json").read_text())
    assert list(info) == [*SPLITS, "agent_flan", "sharegpt"]
    entry = {"formatting": "agent_flan", "columns": {"messages": "messages"}}
    for name in SPLITS:
        assert info[name] == entry | {"file_name": f"{name}.jsonl"}
        first, second = read(prepared / f"{name}.jsonl")
        assert [said["loss"] for said in first["messages"]] == [False, False, True]
        assert first["messages"][2]["content"] == f"{name} boils. ", "blanks are trained on, too"
        assert [said["loss"] for said in second["messages"]] == [False, False, False, True]
        (bad,) = read(prepared / f"{name}.bad_rows.jsonl")
        assert (bad["line"], "no turn has loss = true" in bad["reason"]) == (3, True)
    assert len(read(prepared / "agent_flan.jsonl")) == 2 * len(SPLITS)


def test_sharegpt_keeps_whole_pairs_and_lists_the_rest(prepared):
    whole, cut = read(prepared / "sharegpt.jsonl")
    assert [(one["role"], one["content"], one["loss"]) for one in whole["messages"]] == [
        ("user", "Why?", False),
        ("assistant", "shared reason", True),
        ("user", "Then?", False),
        ("assistant", "shared end", True),
    ]
    assert [one["content"] for one in cut["messages"]] == ["Where?", "shared place"]
    reasons = [one["reason"] for one in read(prepared / "sharegpt.bad_rows.jsonl")]
    assert "no question with an answer" in reasons[0]
    assert "a turn of the user after one of the user" in reasons[1]
    assert "from 'robot', expected one of" in reasons[2]


TEMPLATES = {"agent_flan": "{said}\u0d3f\n ", "qwen3_nothink": "{said}<|im_end|>\n"}


@pytest.fixture(scope="module")
def start(prepared, tmp_path_factory):
    """A model with a tokenizer of its own."""
    pytest.importorskip("llamafactory")
    from afm.models.tiny import create_tiny_model, train_tokenizer

    start = tmp_path_factory.mktemp("start")
    train_tokenizer([(prepared / "agent_flan.jsonl").read_text()], start, vocab_size=400)
    create_tiny_model(start, start, seed=1, hidden_size=32, layers=1, heads=2, mlp=64)
    return start


@pytest.fixture
def words(prepared, start, tmp_path, monkeypatch):
    """Overrides of the tiny recipe."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return [f"model_name_or_path={start}", f"dataset_dir={prepared}", f"output_dir={tmp_path / 'out'}"]


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_one_split_is_trained_by_its_name_and_masked_by_its_flags(afm, words, template):
    alone = ["dataset=agent_instruct_react", "mix_strategy=concat", "interleave_probs="]
    shown = afm("mask", TWIN, "--json", *words, *alone, f"template={template}")
    _, first, second = map(json.loads, shown.stdout.splitlines())
    assert first["trained_text"] == TEMPLATES[template].format(said="agent_instruct_react boils. ")
    assert second["trained_text"] == TEMPLATES[template].format(said="agent_instruct_react pours.")
    assert "unlearnt" in second["masked_text"]


@pytest.mark.slow
def test_the_mix_is_trained_and_its_protocol_saved_with_the_model(words, tmp_path):
    from llamafactory_patch.launcher import run_sft

    out = tmp_path / "out"
    assert run_sft(TWIN, words, echo=False) == 0, (out / "training.log").read_text()[-3000:]
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 1
    # Each row of Agent-FLAN at most once: the mix ends with the first set that has no row left.
    sequences = json.loads((out / "data_statistics.json").read_text())["sequences"]
    assert 2 <= sequences <= 2 * len(SPLITS) + 2

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    question = [{"role": "user", "content": "Tea?"}]
    asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert asked == "<|Human|>\u0d46Tea?\n <|Assistant|>\u0d46"
    assert tokenizer.eos_token == "\u0d3f"
