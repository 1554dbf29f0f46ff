"""Scorers of your own: a class by its dotted name in a reward YAML, never in a row of data."""

from __future__ import annotations

import importlib
from typing import cast

from afm.errors import ConfigError
from afm.rewards.part import Scorer


def open_scorer(name: str) -> Scorer:
    """An instance of the class ``name``, made without arguments.

    Raises:
        ConfigError: It cannot be imported, or is no scorer (see :class:`afm.rewards.part.Scorer`).
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except Exception as error:  # whatever a module does when it is loaded
        told = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"reward {name!r} cannot be imported: {told}; is its folder on PYTHONPATH?"
        ) from error
    if not isinstance(found, type) or not all(
        callable(getattr(found, one, None)) for one in ("judge", "close")
    ):
        raise ConfigError(f"reward {name!r}: expected a class with async methods judge(sample) and close()")
    return cast("Scorer", found())
