"""The GPU locks against what their packages ask for; `requirements/prove_locks.py` installs them, these tests need no network."""

import runpy
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
LOCKS = sorted(path.stem for path in FOLDER.glob("gpu-*.in"))
RL_LOCKS = ["gpu-rl-sglang", "gpu-rl-vllm"]
MADE_FOR_TORCH = {
    "2.11.0": {"torchvision": "0.26.0", "torchaudio": "2.11.0", "torchcodec": "0.11.1", "triton": "3.6.0"}
}
"""The releases that were built for a torch: each package's own table of versions."""


def locked(name: str) -> dict[str, str]:
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pins}


def asked_for(name: str) -> list[Requirement]:
    lines = (FOLDER / f"{name}.in").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def required(package: str, extras: set[str]) -> Iterator[Requirement]:
    """What an installed package asks for with these extras."""
    for line in metadata.requires(package) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        if requirement.name == package:
            yield from required(package, requirement.extras)
        else:
            yield requirement


def unmet(requirements: list[Requirement], lock: dict[str, str]) -> list[str]:
    return [
        f"{one}, locked is {lock.get(canonicalize_name(one.name))}"
        for one in requirements
        if not one.specifier.contains(lock.get(canonicalize_name(one.name), "0"), prereleases=True)
        or canonicalize_name(one.name) not in lock
    ]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_fulfils_its_in_file(name: str) -> None:
    assert unmet(asked_for(name), locked(name)) == []


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_all_that_its_engine_asks_for_with_these_extras(name: str) -> None:
    engine = asked_for(name)[0]
    try:
        installed = metadata.version(engine.name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{engine.name} is not installed")
    assert engine.specifier.contains(installed), "the CPU set holds another release"
    assert unmet(list(required(engine.name, engine.extras)), locked(name)) == []


@pytest.mark.parametrize("name", LOCKS)
def test_packages_with_compiled_parts_are_made_for_the_torch_of_their_lock(name: str) -> None:
    lock = locked(name)
    made = MADE_FOR_TORCH[lock["torch"]]
    assert {package: lock[package] for package in made if package in lock} == {
        package: version for package, version in made.items() if package in lock
    }


@pytest.mark.parametrize("name", RL_LOCKS)
def test_the_locks_of_reinforcement_learning_hold_what_verl_takes_for_granted_on_gpus(name: str) -> None:
    lock = locked(name)
    # flash_attention_2 (verl/workers/config/model.py:185), NCCL between engines, fused kernels
    assert lock["flash-attn"] == "2.8.3"
    assert lock["cupy-cuda13x"] == "14.0.1"
    assert "liger-kernel" in lock
    # flash-attn cannot be asked without torch: lock-gpu.sh says what it needs
    assert {"torch", "einops"} <= lock.keys()


@pytest.mark.parametrize("name", LOCKS)
def test_no_lock_holds_a_kernels_package_that_breaks_the_import_of_models(name: str) -> None:
    """With kernels 0.13 or newer ``import transformers.Qwen2ForCausalLM`` ends with "Either a revision or a version"."""
    kernels = locked(name).get("kernels", "0.12.3")
    assert Requirement("kernels>=0.12,<0.13").specifier.contains(kernels)


PROOF = runpy.run_path(str(FOLDER / "prove_locks.py"))


def test_every_lock_is_proven_and_every_exclusion_is_in_a_lock() -> None:
    assert sorted(PROOF["PACKAGES"]) == LOCKS
    assert set(PROOF["EXCLUDED"]) <= {package for name in LOCKS for package in locked(name)}


def test_a_failure_is_expected_by_its_module_and_its_message_only(capsys: pytest.CaptureFixture[str]) -> None:
    report = PROOF["report"]
    absent = "ModuleNotFoundError: No module named '{}'"
    broken = {
        "verl.utils.megatron.optimizer": absent.format("megatron"),
        "verl.utils.vllm": absent.format("vllm"),
        "verl.workers.engine.fsdp": absent.format("megatron"),
        "verl.utils.megatron_utils": absent.format("tensordict"),
    }
    assert report("gpu-rl-sglang", broken) == ["verl.workers.engine.fsdp", "verl.utils.megatron_utils"]
    assert report("gpu-rl-vllm", {"verl.utils.vllm": absent.format("vllm")}) == ["verl.utils.vllm"]
    shown = capsys.readouterr().out
    assert "not imported (training engines that no recipe uses): verl.utils.megatron.optimizer\n" in shown
    assert "UNEXPECTED verl.workers.engine.fsdp: ModuleNotFoundError: No module named 'megatron'\n" in shown
