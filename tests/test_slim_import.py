"""Importing the framework, or asking for help, must stay cheap."""

import json
import pkgutil
import subprocess
import sys

import pytest

import afm

HEAVY = {"torch", "transformers", "ray", "fastapi", "verl", "llamafactory", "numpy", "pandas", "matplotlib"}
HEAVY |= {"pyarrow", "datasets", "sympy", "math_verify", "uvicorn"}
PLUGINS = {"llamafactory_patch", "verl_ext", "tool_servers"}
"""Packages of ours that a command imports when it runs."""


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_no_part_of_afm_imports_a_heavy_package() -> None:
    names = [module.name for module in pkgutil.walk_packages(afm.__path__, "afm.")]
    assert len(names) > 20
    loaded = modules_after("import " + ", ".join(names))
    assert not loaded & (HEAVY | PLUGINS)


def test_the_command_line_imports_no_heavy_package() -> None:
    assert not modules_after("import afm.cli.main") & (HEAVY | PLUGINS)


def test_starting_a_training_imports_no_engine() -> None:
    loaded = modules_after("import verl_ext, verl_ext.launcher, llamafactory_patch.launcher")
    assert not loaded & {"torch", "verl", "ray", "llamafactory"}
