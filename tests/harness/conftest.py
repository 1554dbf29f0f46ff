"""A small tokenizer, sessions, and a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from recording_model import RecordingModel

from afm.harness import ChatRenderer, HarnessServer, Session
from afm.models.tiny import train_tokenizer
from afm.models.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["Tom has 12 apples and 3 pears."] * 50, folder, vocab_size=300)
    return folder


@pytest.fixture(scope="session")
def codec(tokenizer_folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(tokenizer_folder)


@pytest.fixture
def recording(codec: ChatTokenizer) -> Callable[..., RecordingModel]:
    return lambda *texts, seed=0: RecordingModel(codec, texts, seed=seed)


@pytest.fixture
def opened(codec: ChatTokenizer) -> Callable[..., Session]:
    """A session of this model."""
    return lambda model, **options: Session("key", model, ChatRenderer(codec), **options)


@pytest.fixture
async def server() -> AsyncIterator[HarnessServer]:
    async with HarnessServer() as server:
        yield server
