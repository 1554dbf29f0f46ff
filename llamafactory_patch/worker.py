"""What torchrun starts on every rank: LLaMA-Factory's own training."""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def main() -> None:
    """Train as one rank."""
    from afm.processes import die_with_parent
    from llamafactory_patch.process import process_border

    die_with_parent(signal.SIGKILL)
    with process_border():
        from llamafactory_patch.engine import load_engine, mend_trainer

        load_engine()
        mend_trainer()
        from llamafactory.train.tuner import run_exp

        run_exp()


if __name__ == "__main__":
    # Started as a file, this folder stands first on the path and would shadow modules of other packages.
    package = Path(__file__).resolve().parent
    sys.path[:1] = [str(package.parent)]
    main()
