"""Install every GPU lock into a temporary environment, and import as much as possible without a GPU.

Usage: python requirements/prove_locks.py [gpu-sft gpu-rl-vllm gpu-rl-sglang]

Needs uv on the PATH, 30 GB below TMPDIR and about 20 minutes.
Exit status 1 if a lock cannot be installed, or if a module fails in a way that is not listed here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXCLUDED = {"flash-attn": "a source package whose build needs nvcc and hours"}
"""Packages of the locks that are not installed, and why."""

PACKAGES = {
    "gpu-sft": ("torchvision", "torchaudio", "deepspeed", "liger_kernel.transformers", "llamafactory", "llamafactory_patch"),
    "gpu-rl-vllm": ("torchvision", "torchaudio", "torchcodec", "cupy", "liger_kernel.transformers", "fla", "vllm.v1.engine.async_llm", "verl", "verl_ext"),
    "gpu-rl-sglang": ("torchvision", "torchaudio", "torchcodec", "cupy", "liger_kernel.transformers", "fla", "kernels", "sglang.srt.entrypoints.engine", "verl", "verl_ext"),
}  # fmt: skip
"""Modules to import in the environment of each lock."""
WALKED = ("llamafactory", "llamafactory_patch", "verl", "verl_ext")
"""Packages of which all modules are imported."""

_ABSENT = r"No module named '{}'"
_OTHER_ENGINES = r"megatron|torchtitan|veomni|nemo_automodel|mindspeed"
EXPECTED = {
    "gpu-sft": [
        (r"llamafactory\.train\.mca", r"mcore_adapter is not installed", "Megatron's adapter, not used"),
    ],
    "gpu-rl": [
        (r"torchcodec", r"FFmpeg is not properly installed", "needs FFmpeg of the system; text needs none"),
        (
            r"verl\..*(megatron|mcore|mindspeed|torchtitan|veomni|automodel).*",
            _ABSENT.format(_OTHER_ENGINES),
            "training engines that no recipe uses",
        ),
        (
            r"verl\.checkpoint_engine\.(hccl|kimi|mooncake|nixl)_.*",
            _ABSENT.format(r"(vllm|checkpoint_engine|mooncake|nixl)") + r"|torch\.npu module is not",
            "ways to send weights that no recipe uses",
        ),
        (r"verl\.(models|utils)\..*(npu_patch|mstx_profile)", _ABSENT.format("torch_npu"), "Ascend devices"),
        (
            r"verl\..*(inner_sglang_router|prefix_grouper_utils|modelopt|qat\.quantizer)",
            _ABSENT.format(r"(sglang_router|prefix_grouper|modelopt|compressed_tensors\.\S*)"),
            "options that no recipe uses",
        ),
    ],
    "gpu-rl-vllm": [
        (r"verl\.workers\.rollout\.sglang_rollout\..*", _ABSENT.format("sglang"), "the other lock's engine"),
    ],
    "gpu-rl-sglang": [
        (r"verl\.(utils\.vllm|workers\.rollout\.vllm_rollout)", r"'vllm'", "the other lock's engine"),
        (
            r"(verl\.workers\.rollout\.sglang_rollout|sglang)\..*",
            r"libcuda\.so\.1: cannot open shared object",
            "SGLang's kernels load the GPU's driver when they are imported",
        ),
    ],
}
"""Expected failures: module, message (both regular expressions), and why the lock is not the cause."""


def main(names: list[str]) -> int:
    """Prove each lock; return 1 if anything unexpected happened."""
    broken = 0
    with tempfile.TemporaryDirectory(prefix="prove-locks-") as folder:
        env = os.environ | {"UV_CACHE_DIR": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        for name in names or sorted(PACKAGES):
            started = time.monotonic()
            place = Path(folder) / name
            count = install(name, place, env)
            installed = time.monotonic()
            failures = imported(name, place, env)
            unexpected = report(name, failures)
            broken += len(unexpected)
            print(
                f"{name}: {count} packages installed in {installed - started:.0f} s, imports took "
                f"{time.monotonic() - installed:.0f} s, {len(unexpected)} unexpected failures\n",
                flush=True,
            )
    return 1 if broken else 0


def install(name: str, place: Path, env: dict[str, str]) -> int:
    """Create the environment, without the packages of :data:`EXCLUDED`; return its number of packages.

    Raises:
        subprocess.CalledProcessError: uv failed, and has printed the reason.
    """
    lines = (HERE / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    kept = [pin for pin in pins if pin.partition("==")[0] not in EXCLUDED]
    for pin in sorted(set(pins) - set(kept)):
        print(f"{name}: skipped {pin}: {EXCLUDED[pin.partition('==')[0]]}", flush=True)
    subprocess.run(["uv", "venv", "--quiet", "--python", "3.11", f"{place}"], env=env, check=True)
    wanted = place / "wanted.txt"
    wanted.write_text("\n".join(kept), encoding="utf-8")
    command = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", f"{place}/bin/python"]
    subprocess.run([*command, "-r", f"{wanted}"], env=env, check=True)
    return len(kept)


def imported(name: str, place: Path, env: dict[str, str]) -> dict[str, str]:
    """Return the failures in the environment: the message by module.

    Raises:
        RuntimeError: The process of the environment died.
    """
    command = [f"{place}/bin/python", __file__, "--inside", name]
    done = subprocess.run(
        command, env=env | {"PYTHONPATH": str(HERE.parent)}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"{name}: the imports ended with status {done.returncode}; the lines above show where"
        )
    *lines, last = done.stdout.splitlines()
    print("\n".join(lines))
    failures: dict[str, str] = json.loads(last)
    return failures


def report(name: str, failures: dict[str, str]) -> list[str]:
    """Print the failures by reason; return the modules with unexpected failures."""
    rules = [rule for prefix, some in EXPECTED.items() if name.startswith(prefix) for rule in some]
    reasons: dict[str, list[str]] = {}
    unexpected = []
    for module, message in failures.items():
        for modules, messages, reason in rules:
            if re.fullmatch(modules, module) and re.search(messages, message):
                reasons.setdefault(reason, []).append(module)
                break
        else:
            unexpected.append(module)
            print(f"{name}: UNEXPECTED {module}: {message[-600:]}")
    for reason, expected in reasons.items():
        print(f"{name}: not imported ({reason}): {', '.join(expected)}")
    return unexpected


def inside(name: str) -> None:
    """Import everything in the environment of this lock; print the failures as JSON in the last line."""
    warnings.simplefilter("ignore")
    failures: dict[str, str] = {}
    count = 0
    for package in PACKAGES[name]:
        for module in walk(package, failures):
            count += 1
            print(f"\r{name}: {count} modules, {module:<90.90}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    try:
        print(f"{name}: {count} modules; {tiny_qwen2()}")
    except Exception as error:  # noqa: BLE001 - any error of the model is a result
        failures["transformers.models.qwen2"] = f"{type(error).__name__}: {error}"
    print(json.dumps(failures))


def walk(module: str, failures: dict[str, str]) -> Iterator[str]:
    """Import a module and, for walked packages, all modules below it; record failures."""
    yield module
    below = getattr(sys.modules[module], "__path__", ()) if attempt(module, failures) else ()
    if module.partition(".")[0] in WALKED:
        for info in pkgutil.iter_modules(below, f"{module}."):
            if not info.name.endswith(".__main__"):
                yield from walk(info.name, failures)


def attempt(module: str, failures: dict[str, str]) -> bool:
    """Return whether a module can be imported; record its failure."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party modules can raise anything
        failures[module] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return False
    return True


def tiny_qwen2() -> str:
    """Build Qwen2 as a policy and as a critic, and take a step; return a description.

    Raises:
        Exception: The error of transformers or torch.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=64, num_key_value_heads=1, num_labels=1, **sizes)
    ids = torch.arange(8).reshape(1, 8)
    loss = Qwen2ForCausalLM(config)(input_ids=ids, labels=ids).loss
    loss.backward()
    values = Qwen2ForTokenClassification(config)(input_ids=ids).logits
    if not torch.isfinite(loss) or values.shape != (1, 8, 1):
        raise ValueError(f"Qwen2 has the loss {loss} and values of shape {tuple(values.shape)}")
    versions = {one: importlib.metadata.version(one) for one in ("transformers", "torch")}
    return f"Qwen2 built and trained for a step with {versions}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]))
