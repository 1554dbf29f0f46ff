"""Where the project's configuration files are."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import afm
from afm.errors import ConfigError


def afm_command() -> str:
    """How a person calls this command line: ``afm``, or its path where that is not on the PATH."""
    if shutil.which("afm"):
        return "afm"
    script = Path(sys.executable).with_name("afm")
    return shlex.quote(str(script)) if script.is_file() else f"{shlex.quote(sys.executable)} -m afm.cli.main"


def configs_folder() -> Path:
    """The ``configs`` folder: below the current folder, else beside the installed package.

    Raises:
        ConfigError: There is none; the package was installed without its checkout.
    """
    for base in (Path.cwd(), Path(afm.__file__).resolve().parent.parent):
        if (base / "configs/tiny").is_dir():
            return base / "configs"
    raise ConfigError("no configs folder found; run this inside a checkout of the project")
