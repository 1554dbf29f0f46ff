"""The image tool: a picture looked at by an image server's vision model."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afm.configuration import validated
from afm.errors import ConfigError
from afm.settings import load_settings
from afm.tools.base import ToolResult
from afm.tools.registry import ToolContext, ToolSchema
from afm.tools.web_client import WebClient, WebServerError

HOW_TO = (
    'Nothing was looked at: expected a JSON object {"file_path": "path or address of the image", "question": "..."} '
    "between a line ```json and a line ```."
)
_PATH = "/inspect"
_MARGIN_S = 2.0
"""Of the time for a request, kept for the way there and back."""
_FENCE = re.compile(r"\s*```\s*(?:json)?\s*(.*?)\s*```\s*\Z", re.DOTALL | re.IGNORECASE)


class VisualInspectorSettings(BaseModel):
    """Settings of :class:`VisualInspectorTool` in a tools file.

    Attributes:
        urls: Servers, with or without ``/inspect``; asked in turn. By default ``SERVER_HOST`` and ``VISUAL_INSPECTOR_PORT``.
        timeout_s: For one request. The server is told, and gives up by then.
        tries: Requests before a failure counts, each to the next server.
        busy_s: How long to keep asking servers that are well but full.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: tuple[str, ...] = ()
    timeout_s: float = Field(default=95.0, gt=2 * _MARGIN_S)
    tries: int = Field(default=2, ge=1)
    busy_s: float = Field(default=120.0, ge=0)


class _Asked(BaseModel):
    model_config = ConfigDict(extra="ignore")

    file_path: str = Field(min_length=1, max_length=200_000)
    question: str | None = Field(default=None, max_length=8_000)


class _Reply(BaseModel):
    text: str
    kind: str | None = None
    cached: bool = False


class VisualInspectorTool:
    """Looks at one picture a call.

    Args:
        urls: At least one address; the path ``/inspect`` may be left out.
        token: Sent in the header ``Authorization`` and nowhere else.

    Raises:
        ConfigError: No address, or one that is not ``http://`` or ``https://``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        settings: VisualInspectorSettings | None = None,
        token: str | None = None,
        name: str = "visual_inspector",
        schema: ToolSchema | None = None,
    ) -> None:
        self.name = name
        self.schema = schema
        self._settings = settings or VisualInspectorSettings()
        self._client = WebClient(
            urls,
            _PATH,
            token=token,
            timeout_s=self._settings.timeout_s,
            tries=self._settings.tries,
            busy_s=self._settings.busy_s,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> VisualInspectorTool:
        """A tool with the settings of a tools file; see :class:`VisualInspectorSettings`."""
        settings = validated(VisualInspectorSettings, config, context.label, context.at)
        environment = load_settings()
        secret = environment.web_server_token
        urls = settings.urls or (f"http://{environment.server_host}:{environment.visual_inspector_port}",)
        try:
            return cls(
                urls,
                settings=settings,
                token=secret.get_secret_value() if secret else None,
                name=context.schema.function.name,
                schema=context.schema,
            )
        except ConfigError as error:
            raise ConfigError(f"{context.label}: {context.at}: {error}") from None

    async def call(self, argument: str) -> ToolResult:
        """Look at the picture that ``argument`` names: a JSON object, in a fence or not."""
        fenced = _FENCE.fullmatch(argument)
        try:
            asked = _Asked.model_validate_json(fenced[1] if fenced else argument)
        except ValidationError:
            return ToolResult(HOW_TO, meta={"reason": "bad_argument"})
        body = {
            "image": asked.file_path,
            "question": asked.question or "",
            "seconds": self._settings.timeout_s - _MARGIN_S,
        }
        began = time.monotonic()
        try:
            reply = _Reply.model_validate(await self._client.post(body))
        except WebServerError as error:
            if error.kind == "request":
                return ToolResult(f"Nothing was looked at: {error}.", meta={"reason": "bad_argument"})
            text = f"The {self.name} tool failed, nothing was looked at: {error}"
            return ToolResult(text, ok=False, meta={"reason": error.kind or "server", "error": str(error)})
        except ValidationError:
            text = f"The {self.name} tool failed: the server's answer is no look at a picture"
            return ToolResult(text, ok=False, meta={"reason": "broken"})
        meta = {"cached": reply.cached, "wall_s": round(time.monotonic() - began, 4)}
        if reply.kind is not None:
            text = f"This image could not be looked at: {reply.text}."
            return ToolResult(text, meta=meta | {"reason": reply.kind})
        return ToolResult(reply.text, meta=meta)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._client.close()
