"""Where the project's configuration files are."""

from __future__ import annotations

from pathlib import Path

import afm
from afm.errors import ConfigError


def configs_folder() -> Path:
    """The ``configs`` folder: below the current folder, else beside the installed package.

    Raises:
        ConfigError: There is none; the package was installed without its checkout.
    """
    for base in (Path.cwd(), Path(afm.__file__).resolve().parent.parent):
        if (base / "configs/tiny").is_dir():
            return base / "configs"
    raise ConfigError("no configs folder found; run this inside a checkout of the project")
