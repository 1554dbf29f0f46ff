"""Packages of extras: not installed everywhere, and slow to import, which only the tests that need them should wait for."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


def needs(*packages: str) -> None:
    """Skip a test module unless ``packages`` are installed; ``pytest.importorskip`` imports them while tests are collected."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


class LazyPackage:
    """A package that is imported when a test asks for something in it."""

    def __init__(self, name: str) -> None:
        needs(name)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every name of a module whether it is a test
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
