"""Looking at a picture for an agent: source, unpacking, model, cache."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from tool_servers.shared.cache import Cache
from tool_servers.shared.fetch import Fault, FetchError
from tool_servers.shared.metrics import Count
from tool_servers.shared.upstream import UpstreamError
from tool_servers.visual_inspector.picture import Picture
from tool_servers.visual_inspector.sources import Decoder, PictureSource
from tool_servers.visual_inspector.vision import VisionModel

_MARGIN_S = 1.0
"""Of the caller's time, kept for the way back."""


class InspectRequest(BaseModel):
    """The body of ``POST /inspect``.

    Attributes:
        image: An address, a path below the server's folder, or ``data:image/...;base64,...``.
        question: What to find out; empty for a description.
        seconds: How long the sender waits, a place in the queue included.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    image: str = Field(min_length=1, max_length=200_000)
    question: str = Field(default="", max_length=8_000)
    seconds: float | None = Field(default=None, gt=0)
    _arrived: float = PrivateAttr(default_factory=time.monotonic)

    def until(self, longest_s: float) -> float:
        """When the answer must be on its way, on the monotonic clock."""
        return self._arrived + min(self.seconds or longest_s, longest_s) - _MARGIN_S


class Inspector:
    """Looks at pictures.

    Args:
        request_s: For a request whose sender does not say how long it waits; no request takes longer.
    """

    def __init__(
        self, source: PictureSource, decoder: Decoder, model: VisionModel, cache: Cache, *, request_s: float
    ) -> None:
        self._source = source
        self._decoder = decoder
        self._model = model
        self._cache = cache
        self._request_s = request_s
        self.pictures = Count(
            "afm_vision_pictures_total",
            "Pictures asked for, by how they ended.",
            "end",
            ("seen", "cached", "model", *Fault),
        )

    async def answer(self, asked: InspectRequest) -> dict[str, Any]:
        """What the picture shows; when it cannot be had, why, in ``text`` and ``kind``.

        Raises:
            UpstreamError: The model gave no answer.
        """
        until = asked.until(self._request_s)
        question = asked.question.strip()
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                picture = await self._decoder.decode(await self._source.read(asked.image))
        except FetchError as error:
            self.pictures.add(error.fault)
            return {"text": str(error), "kind": error.fault.value}
        except TimeoutError:
            self.pictures.add(Fault.TIMEOUT)
            return {"text": "getting the picture took too long", "kind": Fault.TIMEOUT.value}
        text, cached = await self._seen(picture, question, until)
        self.pictures.add("cached" if cached else "seen")
        about = {"width": picture.width, "height": picture.height, "format": picture.kind}
        return {"text": text, "kind": None, "cached": cached} | about

    async def close(self) -> None:
        """Close everything."""
        for part in (self._source, self._model, self._cache):
            await part.close()

    async def _seen(self, picture: Picture, question: str, until: float) -> tuple[str, bool]:
        key = hashlib.sha256(
            b"\0".join((self._model.name.encode(), question.encode("utf-8", "replace"), picture.body))
        ).hexdigest()
        kept = await self._cache.get(key)
        if kept is not None:
            return kept, True
        try:
            text = await self._model.look(picture, question, until - time.monotonic())
        except UpstreamError:
            self.pictures.add("model")
            raise
        await self._cache.put(key, text)
        return text, False
