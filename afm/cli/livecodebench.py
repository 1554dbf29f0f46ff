"""``afm data livecodebench``: the complete tests of LiveCodeBench, where rows hold the sample tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def livecodebench(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of livecodebench/code_generation_lite, or folders of them.", exists=True),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the tests.")] = Path(
        "data/code_agent/livecodebench_testcases"
    ),
) -> None:
    """Make the folder of complete tests that LIVECODEBENCH_DATA_PATH names, each problem checked."""
    from afm.datasets.livecodebench_tests import write_complete_tests

    count = write_complete_tests(files, out)
    print(f"{count:,} problems with complete tests in {out}; export LIVECODEBENCH_DATA_PATH={out.absolute()}")
