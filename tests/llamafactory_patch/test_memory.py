import pytest

from afm.memory_arithmetic import model_shape
from llamafactory_patch.doctor import Sharding, cpu_need, memory_need, trained_parameters


def test_adapters_are_those_that_peft_adds(tmp_path):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(**sizes, intermediate_size=96, vocab_size=130)
    config.save_pretrained(tmp_path)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(
        transformers.Qwen2ForCausalLM(config), peft.LoraConfig(r=4, target_modules=targets)
    )
    settings = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained_parameters(model_shape(str(tmp_path)), settings) == trained


def test_states_under_zero_are_what_deepspeed_estimates():
    zero3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    zero2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    shape = model_shape("Qwen/Qwen2.5-7B")
    full = {"finetuning_type": "full", "bf16": True, "cutoff_len": 1}
    _, wanted3, _ = zero3.estimate_zero3_model_states_mem_needs(
        shape.parameters, shape.embedding, 8, 2, cpu_offload=False, cpu_offload_params=False
    )
    assert memory_need(shape, full, Sharding.ZERO3, 16).states == wanted3
    _, wanted2 = zero2.estimate_zero2_model_states_mem_needs(shape.parameters, 8, 2, cpu_offload=False)
    assert memory_need(shape, full, Sharding.ZERO2, 16).states == wanted2


def test_what_a_setting_saves_is_seen():
    shape = model_shape("Qwen/Qwen2.5-7B")
    full = {"finetuning_type": "full", "bf16": True, "cutoff_len": 32768, "per_device_train_batch_size": 1}

    def with_setting(**more):
        return memory_need(shape, {**full, **more}, Sharding.ZERO3, 8)

    need = with_setting()
    assert need.logits == 32768 * 152064 * 10
    assert with_setting(enable_liger_kernel=True).logits == 0
    assert with_setting(disable_gradient_checkpointing=True).activations > 10 * need.activations
    assert with_setting(finetuning_type="lora").states < need.states / 4
    by_gpus = [memory_need(shape, full, Sharding.FSDP2, gpus).states for gpus in (1, 2, 4)]
    assert by_gpus == sorted(by_gpus, reverse=True)


def test_preferences_need_both_sides_and_a_reference():
    """A DPO step needs the logits of two responses, those of the reference, and the reference's weights."""
    shape = model_shape("Qwen/Qwen2.5-7B")
    sft = {"finetuning_type": "full", "bf16": True, "cutoff_len": 4096, "per_device_train_batch_size": 1}
    dpo = {**sft, "stage": "dpo"}
    shares = {Sharding.NONE: 1, Sharding.ZERO2: 1, Sharding.ZERO3: 8, Sharding.FSDP2: 8}
    for sharding, share in shares.items():
        more = memory_need(shape, dpo, sharding, 8).states - memory_need(shape, sft, sharding, 8).states
        assert more == 2 * shape.parameters // share
    plain, paired = (memory_need(shape, config, Sharding.ZERO3, 8) for config in (sft, dpo))
    assert plain.logits == 4096 * 152064 * (2 + 8)
    assert paired.logits == 2 * 4096 * 152064 * (2 + 8 + 2 + 4)
    assert paired.activations > 1.9 * plain.activations
    assert memory_need(shape, {**dpo, "enable_liger_kernel": True}, Sharding.ZERO3, 8).logits > 0
    without = memory_need(shape, {**dpo, "pref_loss": "simpo"}, Sharding.ZERO3, 8)
    assert (without.states, without.logits) == (plain.states, 2 * plain.logits)
    adapters = {**sft, "finetuning_type": "lora"}
    kto = memory_need(shape, {**adapters, "stage": "kto"}, Sharding.ZERO3, 8)
    assert kto.states == memory_need(shape, adapters, Sharding.ZERO3, 8).states


def test_rows_of_a_large_vocabulary_show_in_the_memory_of_a_cpu():
    shape = model_shape("Qwen/Qwen2.5-7B")
    config = {
        "use_cpu": True,
        "finetuning_type": "full",
        "cutoff_len": 256,
        "disable_gradient_checkpointing": True,
    }
    few, many = (cpu_need({**config, "per_device_train_batch_size": rows}, shape) for rows in (8, 16))
    assert many.logits == 2 * few.logits == 16 * 256 * shape.vocab * 12
    assert many.states == few.states == 16 * shape.parameters
