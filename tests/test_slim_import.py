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
ROOT_HELP = {"afm.choices", "afm.cli", "afm.cli.commands", "afm.cli.main", "afm.cli.options", "afm.errors"}
ROOT_HELP |= {"afm", "afm.file_kinds", "afm.plugins", "afm.processes"}
COMMAND_HELP = {"afm.findings", "afm.memory_arithmetic", "afm.palette", "afm.terminal"}
"""The modules of ours that help may import beside the commands: they define options, or hardly cost time."""


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def packages_after(code: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_after(code)}


@pytest.mark.slow
def test_no_part_of_afm_imports_a_heavy_package() -> None:
    names = [module.name for module in pkgutil.walk_packages(afm.__path__, "afm.")]
    assert len(names) > 20
    loaded = packages_after("import " + ", ".join(names))
    assert not loaded & (HEAVY | PLUGINS)


def test_the_list_of_commands_imports_none_of_them() -> None:
    loaded = modules_after(
        "import sys; sys.argv = ['afm', '--help']; from afm.cli.commands import run; run()"
    )
    assert "typer.rich_utils" in loaded
    assert not loaded & {"pydantic", "yaml", "asyncio", *HEAVY}
    assert {name for name in loaded if name.partition(".")[0] in {"afm", *PLUGINS}} <= ROOT_HELP


def test_the_help_of_no_command_reads_models_or_configurations() -> None:
    loaded = modules_after("from afm.cli.commands import command; command(load=True)")
    assert not loaded & {"pydantic", "yaml", "http.client", *HEAVY}
    ours = {name for name in loaded if name.partition(".")[0] in {"afm", *PLUGINS}}
    assert {name for name in ours if not name.startswith("afm.cli.")} <= ROOT_HELP | COMMAND_HELP


def test_starting_a_training_imports_no_engine() -> None:
    loaded = packages_after("import verl_ext, verl_ext.launcher, llamafactory_patch.launcher")
    assert not loaded & {"torch", "verl", "ray", "llamafactory"}
