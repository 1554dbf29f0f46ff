"""One question, one prompt: SFT, RL and evaluation give the same token ids, for rows of each published layout.

SFT goes through LLaMA-Factory's pipeline, RL through the agent loop as verl calls it, evaluation through ``afm eval``
against a server that knows no other prompt. The texts of the rows are ours; only the layouts are published.
"""

import json
from functools import cache
from pathlib import Path

import pytest
from extras import needs

from afm.agents import load_agent

needs("llamafactory", "verl", "pyarrow")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
MATH = load_agent("math")
REPLY = "<plan>P.</plan><think>T.</think><answer>\\boxed{2}</answer>"
RULES = "Solve it by functions.\nBegin with <plan>, end with <answer>.  "
FILE = "Use {roles} as you were taught; naïve 中文.\n\nQuestion: {question}\n"
GOLD = json.dumps({"target": ["2"], "question": "q"})


def turns(user, system=""):
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": user}]


def row(name, user, system="", *, gold="2", **columns):
    """A row of RL as published, and the same as a row of SFT."""
    rl = {"data_source": "gsm8k", "prompt": turns(user, system), "reward_model": {"ground_truth": gold}}
    sft = {"instruction": user, "input": "", "output": REPLY} | ({"system": system} if system else {})
    return {**rl, "extra_info": {"index": name}} | columns, sft


def written():
    """Rows of the layouts of web, multi-hop and code, with a system turn and without."""
    rows = {
        "web": row("web", f"{RULES}\n\nQuestion: Who won\n in 1998?", gold=GOLD),
        "mhqa": row("mhqa", f"{RULES.strip()}\n\nQuestion: What is 1 + 1?", gold=GOLD),
        "code": row("code", f"{RULES}\n\nTask:\nWrite f(x).\n\nNote: `x` is a str. "),
        "task": row("task", f"{RULES}\n\nTask: Add 1 and 1."),
        "system": row("system", "How many are 1 and 1?", RULES),
        "system, marked": row("system, marked", "Question: How many?", RULES, gold=GOLD),
        "two columns": row("two columns", f"{RULES}\nTask:\nWhat is 2?"),
    }
    rows["two columns"][1].update(instruction=f"{RULES}\nTask:", input="What is 2?")
    return rows


def real(shared):
    """Rows of the published benchmark files."""
    import pyarrow.parquet as pq

    rows = {}
    for file in shared("data/code_math").glob("*.parquet"):
        [found] = pq.read_table(file).slice(0, 1).to_pylist()
        rows[file.stem] = row(file.stem, found["prompt"][-1]["content"])
    assert len(rows) == 5
    return rows


def raw():
    """Questions without any prompt."""
    questions = {f"raw {number}": f"Who was number {number}?" for number in range(2)}
    return {name: row(name, question, question=question) for name, question in questions.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory, qwen_folder):
    from afm.models.tiny import create_tiny_model

    folder = tmp_path_factory.mktemp("model")
    create_tiny_model(qwen_folder, folder, seed=1, hidden_size=16, layers=1, heads=2, mlp=16)
    for path in qwen_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def server(model):
    """Knows the prompts that a test gives it. Loading its tokenizer takes seconds, so all tests share it."""
    import oracle

    server = oracle.OracleServer(model).start()
    yield server
    server.stop()


def sft_ids(folder, model, rows, prompt, monkeypatch):
    """Token ids before the first that is trained on."""
    from llamafactory_patch.engine import load_engine, parse_arguments

    load_engine()
    from llamafactory_patch.reading import BadRowReport
    from llamafactory_patch.tokenise import tokenise

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder / "rows.json").write_text(json.dumps([sft for _, sft in rows.values()]))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    config = {"model_name_or_path": model, "prompt": prompt, "agent": "math", "dataset": "rows"}
    config |= {"dataset_dir": folder, "output_dir": folder / "sft", "cache_dir": folder / "cache"}
    config = {key: str(value) for key, value in config.items()} | {"stage": "sft", "do_train": True}
    config |= {"template": "qwen3_nothink", "cutoff_len": 8192, "finetuning_type": "full"}
    config |= {"report_to": "none", "ignore_observation": True, "match_chat_template": True}
    arguments = parse_arguments(config)
    found = tokenise(arguments, BadRowReport("error")).sets["train"]
    firsts = [next(i for i, label in enumerate(one["labels"]) if label != -100) for one in found]
    ids = [list(one["input_ids"][:first]) for one, first in zip(found, firsts, strict=True)]
    return dict(zip(rows, ids, strict=True))


async def rl_ids(folder, model, rows, prompt):
    """Token ids that the agent loop gives to the engine, and that are trained on as the prompt."""
    import yaml
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from verl_ext.agent_loop import AfmAgentLoop

    settings = {"agent": "math", "prompt": prompt, "output_dir": str(folder / "rl")}
    settings["tools"] = str(ROOT / "configs/tools/code_executor.yaml")
    file = folder / f"rl {Path(prompt).stem}.yaml"
    file.write_text(yaml.safe_dump(settings))
    tokenizer = tokenizer_of(model)
    rollout = {"name": "afm_cpu", "prompt_length": 8192, "response_length": 65536, "max_model_len": None}
    config = {"rollout": rollout | {"agent": {"num_workers": 1}}, "model": {"path": str(model)}}
    whole = OmegaConf.create({"actor_rollout_ref": config, "data": {}, "trainer": {"nnodes": 1}})
    found = {}
    for name, (rl, _) in rows.items():
        servers = Servers(tokenizer.encode(REPLY + "<|im_end|>", add_special_tokens=False))
        configs = {"trainer_config": DictConfigWrap(whole), "data_config": DictConfigWrap(whole.data)}
        reads = {"tokenizer": tokenizer, "processor": None, "dataset_cls": RLHFDataset}
        loop = AfmAgentLoop(server_manager=servers, settings=str(file), **configs, **reads)
        given = {**rl, "raw_prompt": rl["prompt"], "uid": name, "session_id": 0, "global_steps": 1}
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
        output = await loop.run(sampling, **{k: v for k, v in given.items() if k != "prompt"})
        assert servers.asked == [output.prompt_ids]
        found[name] = list(output.prompt_ids)
    return found


class Servers:
    """Stands where verl's client of its engine stands, and says one thing."""

    def __init__(self, said):
        self.said, self.asked = said, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        from types import SimpleNamespace

        self.asked.append(list(prompt_ids))
        facts = {"log_probs": [-0.5] * len(self.said), "stop_reason": "completed", "num_preempted": None}
        return SimpleNamespace(token_ids=self.said, extra_fields={}, **facts)


async def evaluated(folder, server, model, rows, prompt, known):
    """How many prompts `afm eval` asks that are none of ``known``, and whether it asked all of these."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from afm.evaluation.config import load_config
    from afm.evaluation.job import run_job

    data = folder / "eval.parquet"
    columns = [{"question": None, **rl} for rl, _ in rows.values()]
    pq.write_table(pa.Table.from_pylist(columns), data)
    server.replies, server.unknown, server._said = {tuple(ids): REPLY for ids in known}, 0, {}
    words = [f"model={server.url}", "model.name=oracle", f"model.tokenizer={model}", f"prompt={prompt}"]
    out = folder / f"eval {Path(prompt).stem}"
    config = load_config(ROOT / "configs/eval/math500.yaml", [*words, f"data={data}", f"output_dir={out}"])
    await run_job(config.model_copy(update={"benchmark": None, "rounds": 1}))
    return server.unknown, set(server._said) == set(server.replies)


@pytest.mark.parametrize(
    ("prompt", "layout"),
    [("own", "written"), ("row", "written"), ("file", "written"), ("row", "real"), ("file", "raw")],
)
async def test_a_question_has_one_prompt_in_sft_rl_and_evaluation(
    tmp_path, model, server, shared, monkeypatch, prompt, layout
):
    rows = real(shared) if layout == "real" else {"written": written, "raw": raw}[layout]()
    file = tmp_path / "prompt.txt"
    file.write_text(FILE, encoding="utf-8")
    value = str(file) if prompt == "file" else prompt
    trained = sft_ids(tmp_path, model, rows, value, monkeypatch)
    sampled = await rl_ids(tmp_path, model, rows, value)
    assert sampled == trained
    assert await evaluated(tmp_path, server, model, rows, value, trained.values()) == (0, True)
    texts = {name: tokenizer_of(model).decode(ids) for name, ids in trained.items()}
    for name, (rl, _) in rows.items():
        said = rl["prompt"][-1]["content"]
        question = said.rpartition("Question: ")[2].rpartition("Task:")[2].strip()
        of_file = FILE.removesuffix("\n").replace("{question}", question)
        wanted = {"row": said, "own": MATH.user_message(question), "file": of_file}
        assert texts[name].endswith(f"<|im_start|>user\n{wanted[prompt]}<|im_end|>\n<|im_start|>assistant\n")
        own_system = prompt == "row" and rl["prompt"][0]["role"] == "system"
        assert (f"<|im_start|>system\n{RULES}<|im_end|>" in texts[name]) is own_system


@cache
def tokenizer_of(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
