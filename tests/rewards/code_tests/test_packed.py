"""LiveCodeBench's packed tests, and pickles that want to do more."""

from __future__ import annotations

import base64
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from afm.errors import DataError
from afm.rewards.code_tests.problem import pickled_string, unpacked


def packed(value: Any, protocol: int | None = None) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("text", ["", "[]", "ü€\U0001f600\ud800", "x" * 300, "y" * 70_000], ids=len)
def test_a_string_comes_back_in_every_protocol(text: str, protocol: int) -> None:
    assert unpacked(packed(text, protocol)) == text


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    text = packed(Evil(target))
    with pytest.raises(DataError, match=r"the pickle has opcode \w+, expected one string and no more"):
        unpacked(text)
    assert not target.exists()
    pickle.loads(zlib.decompress(base64.b64decode(text)))  # it would have run
    assert target.exists()


@pytest.mark.parametrize("value", [["a"], {"a": 1}, 5, None, b"bytes", ("a", "b"), len])
def test_anything_but_a_string_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="expected one"):
        unpacked(packed(value))


@pytest.mark.parametrize(
    "data", [b"", b".", b"\x80\x04", b"junk", b"\x80\x04\x8d" + b"\xff" * 8, b"\x80\x04X\xff\xff\xff\x7fa."]
)
def test_damaged_pickles(data: bytes) -> None:
    with pytest.raises(DataError, match="packed tests: "):
        pickled_string(data)


def test_several_strings_are_refused() -> None:
    with pytest.raises(DataError, match="has 2 strings, expected one"):
        pickled_string(b"\x80\x04\x8c\x01a\x8c\x01b.")


def test_a_bomb_is_bounded() -> None:
    with pytest.raises(DataError, match="holds more than 1000000 bytes"):
        unpacked(packed("0" * 50_000_000), max_bytes=1_000_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("%%%", "neither base64 nor zlib"),
        ("QUJD", "neither base64 nor zlib"),
        (packed("x" * 99)[:-8], "is cut off"),
    ],
)
def test_damaged_packing(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        unpacked(text)
