import dataclasses
import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from extras import needs

from afm.agents import load_agent
from afm.configuration import read_file
from afm.datasets.sft_files import write_sft
from afm.errors import ConfigError, UsageError
from afm.presets import published
from afm.trajectory.record import Record
from llamafactory_patch.checks import check_data, check_model, check_sources, stale_data
from llamafactory_patch.config import engine_keys, fsdp_settings, resolve
from llamafactory_patch.settings import split_config

needs("llamafactory")

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_keys_read_from_the_source_are_those_of_the_classes():
    from llamafactory_patch.engine import load_engine

    load_engine()
    from llamafactory.hparams.parser import _TRAIN_ARGS

    fields = (field for cls in _TRAIN_ARGS for field in dataclasses.fields(cls))
    assert engine_keys().keys() == {field.name for field in fields if field.init}


def test_overrides_replace_values_and_reach_into_mappings(config):
    path = config("output_dir: a\nlearning_rate: 3e-5\nlr_scheduler_kwargs: {num_cycles: 2}")
    job = resolve(path, ["learning_rate=1e-4", "lr_scheduler_kwargs.min_lr=0.1", "dataset=a,b", "bf16=true"])
    stock = {"stage": "sft", "do_train": True, "output_dir": "a"}
    schedule = {"learning_rate": 1e-4, "lr_scheduler_kwargs": {"num_cycles": 2, "min_lr": 0.1}}
    assert job.config == stock | schedule | {"dataset": "a,b", "bf16": True}
    assert resolve(path).config["learning_rate"] == 3e-5


@pytest.mark.parametrize("override", ["learning_rate", "=1", "learning_rate.x=1", "dataset=[a"])
def test_overrides_that_are_none_are_wrong_usage(config, override):
    with pytest.raises(UsageError, match="override"):
        resolve(config("output_dir: a\nlearning_rate: 1"), [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected a mapping"),
        ("a: [", "cannot be read as YAML"),
        ("bf16: true", "output_dir: missing, expected a folder; give output_dir=DIR"),
        ("output_dir: a\nthreads: 0", "threads: got 0"),
        ("output_dir: a\nagent: mathe", "agent 'mathe' is not shipped .did you mean 'math'"),
        (
            "output_dir: a\nlearn_rate: 1",
            r"run.yaml: unknown key 'learn_rate'; did you mean 'learning_rate'\?",
        ),
        (
            "output_dir: a\nagent: math\nignore_observation_token: result",
            "agent 'math' writes 'observation'; remove the key",
        ),
        ("output_dir: a\nagent: math\nroles_without_loss: [nope]", "agent 'math' has no role 'nope'"),
    ],
)
def test_bad_configurations_are_explained(config, text, message):
    with pytest.raises(ConfigError, match=message):
        resolve(config(text))
    with pytest.raises(ConfigError, match=r"absent.yaml: no such file"):
        resolve("absent.yaml")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "dataset_info.json: no such file; `afm data prepare sft`"),
        ("{", "cannot be read as JSON"),
        ("[]", "got list, expected an object of data sets by name"),
        ('{"row": {}}', "has no 'rows'; did you mean 'row'"),
        ('{"rows": "r.json"}', "got 'r.json', expected an object with one of cloud_file_name, file_name"),
        ('{"rows": {"file_name": "r.json"}}', "r.json is missing, but .*dataset_info.json lists it"),
        (
            '{"rows": {"file_name": "r.json", "columns": 5}}',
            "rows.columns: got 5, expected an object of names",
        ),
    ],
)
def test_a_missing_or_malformed_index_of_data_sets_is_explained(config, tmp_path, index, message):
    if index:
        (tmp_path / "dataset_info.json").write_text(index, encoding="utf-8")
    job = resolve(config("output_dir: a\ndataset: rows"), [f"dataset_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=message):
        check_data(job)


def test_data_of_an_agent_whose_yaml_changed_is_refused_or_named(config, tmp_path):
    segments = [{"author": "agent", "text": "<think>T.</think><answer>7</answer>"}]
    record = {"id": "a", "agent": "mine", "agent_digest": "d", "question": "q", "segments": segments}
    agent, log = tmp_path / "my agent.yaml", tmp_path / "my logs" / "kept.jsonl"
    log.parent.mkdir()
    log.write_text("")

    def job(text):
        agent.write_text(f"extends: react\nname: mine\n{text}", encoding="utf-8")
        places = [f"dataset_dir={tmp_path}", "dataset=mine", f"agent={agent}"]
        return resolve(config("output_dir: a"), places)

    same = job("")
    write_sft([Record.model_validate(record)], load_agent(agent), tmp_path, name="mine", inputs=[log])
    for unchanged in (same, job("limits: {max_turns: 3}\ndescription: Mine.\n")):
        check_data(unchanged)
        assert list(stale_data(unchanged)) == []

    reworded = job('rules: ["Be brief."]\n')
    check_data(reworded)
    [stale] = stale_data(reworded)
    again = f"afm data prepare sft '{log}' --agent '{agent}' --name mine --output-dir {tmp_path}"
    assert (stale.tags, stale.prompt) == ((), ("rules",))
    assert str(stale).endswith(f"puts the new prompt into the rows. To prepare it again: {again}")
    with pytest.raises(ConfigError, match=r"mine\.json .* 'mine', which differs in roles\.code\. To prepare"):
        check_data(job("roles: {code: null}\n"))
    with pytest.raises(ConfigError, match="which differs in answer_format"):
        check_data(job("answer_format: boxed\n"))
    (tmp_path / "mine.json").write_text("[]", encoding="utf-8")  # no longer the file of the manifest
    check_data(job("roles: {code: null}\n"))


def test_trajectories_of_another_agent_are_refused_unless_some_may_be_of_this_one(config, tmp_path):
    def job(agent, names="react"):
        places = [f"dataset_dir={tmp_path}", f"dataset={names}", f"agent={agent}"]
        return resolve(config("output_dir: a"), places)

    for name in ("react", "math"):
        text = "<plan>P.</plan>" * (name == "math") + "<think>T.</think><answer>\\boxed{7}</answer>"
        record = {
            "id": "a",
            "agent": name,
            "agent_digest": "d",
            "question": "q",
            "segments": [{"author": "agent", "text": text}],
        }
        write_sft([Record.model_validate(record)], load_agent(name), tmp_path, name=name)
    check_data(job("react"))
    check_data(job("math", "react,math"))
    message = r"react\.json belongs to agent 'react', expected 'math'; give agent=react"
    with pytest.raises(ConfigError, match=message):
        check_data(job("math"))
    (tmp_path / "react.json").write_text("[]", encoding="utf-8")  # no longer the file of the manifest
    check_data(job("math"))


def test_missing_models_are_found_before_anything_starts(config, tmp_path):
    path = config(f"output_dir: a\ndataset: rows\ndataset_dir: {tmp_path}")
    (tmp_path / "dataset_info.json").write_text('{"rows": {"file_name": "r.json"}}', encoding="utf-8")
    (tmp_path / "r.json").write_text("[]", encoding="utf-8")
    check_sources(resolve(path, [f"model_name_or_path={tmp_path}"]))
    for name in ("nope", "runs/start", ""):
        message = f"model_name_or_path: '{name}' is not a folder; expected a folder, or ORGANISATION/NAME on the hub"
        with pytest.raises(ConfigError, match=message):
            check_sources(resolve(path, [f'model_name_or_path="{name}"']))


def test_an_agent_switches_its_mask_on_and_is_not_llamafactorys_business(config):
    job = resolve(config("output_dir: a\nagent: math\nthreads: 3"))
    assert job.agent.name == "math"
    stock = {"stage": "sft", "do_train": True, "output_dir": "a"}
    mask = {"ignore_observation": True, "ignore_observation_token": "observation"}
    assert job.config == stock | mask | {"agent": "math", "match_chat_template": True, "threads": 3}
    assert split_config(job.config)[0] == stock


def test_further_tags_may_be_masked_beside_the_agents(config):
    job = resolve(config("output_dir: a\nagent: math\nignore_observation_token: result,observation"))
    assert job.own.masked_tags == ("result", "observation")


def test_files_beside_the_configuration_are_found_from_anywhere(config, tmp_path):
    path = config("output_dir: a\nagent: own.yaml\ndeepspeed: ../z.json")
    (tmp_path / "own.yaml").write_text("extends: math\nname: own", encoding="utf-8")
    job = resolve(path)
    assert job.agent.name == "own"
    assert job.config["agent"] == str(tmp_path / "own.yaml")
    assert job.dependencies()["agent"] == job.agent.digest
    assert job.config["deepspeed"] == str(tmp_path.parent / "z.json")
    assert resolve(path, ["deepspeed=z.json"]).config["deepspeed"] == "z.json"


@pytest.mark.parametrize(
    "path", [*CONFIGS.glob("sft/*.yaml"), *CONFIGS.glob("tiny/sft/*.yaml")], ids=lambda p: p.stem
)
def test_every_shipped_configuration_resolves(path):
    job = resolve(path)
    assert job.config["ignore_observation"] is (job.agent is not None)
    assert Path(job.config.get("deepspeed") or path).is_file()
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert all(word in header for word in ("Hardware:", "Expected:", "Example"))


@pytest.mark.parametrize("name", published().sft)
def test_every_recipe_has_a_lora_variant_that_differs_in_the_adapters_only(name):
    full = resolve(CONFIGS / f"sft/{name}.yaml").config
    lora = resolve(CONFIGS / f"sft/{name}_lora.yaml").config
    assert lora["finetuning_type"] == "lora"
    changed = {key for key in lora if lora[key] != full.get(key)} | (full.keys() - lora.keys())
    adapters = {"finetuning_type", "lora_rank", "lora_alpha", "lora_target"}
    assert changed <= adapters | {"learning_rate", "deepspeed", "output_dir"}


@pytest.mark.parametrize("kind", ["", "_lora"])
@pytest.mark.parametrize("agent", ["web", "mhqa", "code"])
def test_twins_are_their_recipes_but_for_what_makes_them_small(agent, kind):
    twin = resolve(CONFIGS / f"tiny/sft/{agent}_agent{kind}.yaml")
    recipe = resolve(CONFIGS / f"sft/{agent}_agent_qwen2.5_7b{kind}.yaml")
    small = read_file(CONFIGS / "tiny/sft/base/shrink.yaml").keys() | {"output_dir"}
    assert twin.agent == recipe.agent
    keys = (twin.config.keys() | recipe.config.keys()) - small
    assert {key: twin.config.get(key) for key in keys} == {key: recipe.config.get(key) for key in keys}


def test_one_key_changes_the_engine(config):
    recipe = CONFIGS / "sft/web_agent_qwen2.5_7b.yaml"
    fsdp2 = CONFIGS / "fsdp/fsdp2.json"
    with pytest.raises(ConfigError, match="deepspeed and fsdp are both set"):
        resolve(recipe, [f"fsdp_config={fsdp2}"])
    job = resolve(recipe, ["deepspeed=", f"fsdp_config={fsdp2}"])
    assert job.config["fsdp"] == "full_shard auto_wrap"
    assert fsdp_settings(job)["version"] == 2
    with pytest.raises(ConfigError, match=r"nope.json cannot be read as JSON"):
        fsdp_settings(resolve(config("output_dir: a"), ["fsdp_config=nope.json"]))


@pytest.mark.parametrize("key", ["quantization_bit=4", "adapter_name_or_path=a"])
def test_what_needs_an_adapter_is_refused_in_full_training(config, key):
    path = config("output_dir: a\nfinetuning_type: full")
    with pytest.raises(ConfigError, match=f"{key.partition('=')[0]}: .* got finetuning_type=full"):
        resolve(path, [key])
    assert resolve(path, [key, "finetuning_type=lora"])


def test_the_limit_of_generated_texts_is_not_taken_for_the_longest_row(config):
    path = config("output_dir: a")
    with pytest.raises(UsageError, match=r"generates, and cuts no row; write cutoff_len=512"):
        resolve(path, ["max_length=512"])
    assert resolve(path, ["max_length=512", "predict_with_generate=true"])


def test_every_key_that_holds_a_secret_is_refused(config):
    message = r"swanlab_api_key: .* environment variable SWANLAB_API_KEY"
    with pytest.raises(ConfigError, match=message) as error:
        resolve(config("output_dir: a"), ["swanlab_api_key=hush-hush"])
    assert "hush-hush" not in str(error.value)
    secret = re.compile(r"(?:api_key|hub_token|secret|webhook_url|password)$")
    keys = [key for key in engine_keys() if secret.search(key)]
    assert {"hub_token", "ms_hub_token", "swanlab_lark_secret"} <= set(keys)
    for key in keys:
        with pytest.raises(ConfigError, match=f"{key}: the secret would be saved with the configuration"):
            resolve(config(f"output_dir: a\n{key}: hush-hush"))


def test_null_for_a_checkpoint_is_no_checkpoint(config):
    """LLaMA-Factory's own examples contain the key; with it, no checkpoint would be renamed and no history cut."""
    path = config("output_dir: out\nresume_from_checkpoint: null\n")
    assert "resume_from_checkpoint" not in resolve(path).config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ignore_observation_token=", "ignore_observation_token: expected the name of a tag, or several"),
        ("template=5", "template: got 5, expected a text"),
        ("deepspeed=[1]", r"deepspeed: got \[1\], expected a mapping or a text"),
        ("dataset={}", "dataset: got {}, expected a text or a list"),
        ("agent=5", r"agent: got 5 \(number\), expected text"),
        ("xyzzy=1", "override 'xyzzy=1': unknown key 'xyzzy'; see LLaMA-Factory's"),
        ("model=a", "override 'model=a': unknown key 'model'; write model_name_or_path=DIR"),
        ("batch_size=4", "unknown key 'batch_size'; write per_device_train_batch_size=1"),
        ("nproc_per_node=8", "unknown key 'nproc_per_node'; set NPROC_PER_NODE=8 before the command"),
        ("learning_rate=abc", "'learning_rate=abc': learning_rate: got 'abc', expected a number"),
        ("num_train_epochs=.nan", "num_train_epochs: got nan, expected a number above 0"),
        ("gradient_accumulation_steps=0", "accumulation_steps: got 0, expected a whole number above 0"),
        ("packing=5", "packing: got 5, expected true or false"),
        ("on_bad_rows=maybe", "on_bad_rows: got 'maybe' .*expected 'error' or 'drop'"),
    ],
)
def test_values_of_a_wrong_kind_are_refused_in_one_line(config, override, message):
    with pytest.raises((ConfigError, UsageError), match=message) as caught:
        resolve(config("output_dir: a"), [override])
    assert "\n" not in str(caught.value)


def test_names_may_stand_in_a_list(config):
    text = "output_dir: a\nagent: math\nroles_without_loss: [plan]\nignore_observation_token: [observation]"
    assert resolve(config(text)).config["roles_without_loss"] == "plan"


def test_masks_of_a_set_of_programs_and_mathematics_do_not_depend_on_which_agent_is_named(config):
    """One agent is therefore enough for rows of both: they share the tag of the environment, which is masked."""
    code, math = (resolve(config(f"output_dir: a\nagent: {agent}")).config for agent in ("code", "math"))
    assert code | {"agent": "math"} == math


@pytest.mark.parametrize(
    ("target", "accepted"),
    [("all", True), ("q_proj,nope", True), ("attn.q_proj", True), ("lm_head", True), ("proj", False), ("norm,v", False)],
)  # fmt: skip
def test_a_lora_target_is_a_module_of_the_model(tmp_path: Path, target: str, accepted: bool) -> None:
    shapes = {"embed.weight": [9, 4], "layers.0.attn.q_proj.weight": [4, 4], "layers.0.norm.weight": [4]}
    tensors = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    header = json.dumps(tensors).encode()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "sft.yaml").write_text(f"model_name_or_path: {tmp_path}\noutput_dir: out\nstage: sft\n")
    job = resolve(tmp_path / "sft.yaml", ["finetuning_type=lora", f"lora_target={target}"])
    message = f"^lora_target: no module of {tmp_path} is named .*; set lora_target=all, or some of q_proj$"
    with nullcontext() if accepted else pytest.raises(ConfigError, match=message):
        check_model(job)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    check_model(job)
