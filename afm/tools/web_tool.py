"""What the tools that ask a server of ours have in common: settings, construction, asking, failures in words."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from afm.configuration import validated
from afm.errors import BadArgumentError, ConfigError
from afm.settings import load_settings
from afm.tools.base import ToolResult
from afm.tools.registry import ToolContext, ToolSchema
from afm.tools.web_client import ServerKind, WebClient, WebServerError

MARGIN_S = 2.0
"""Of the time for a request that a server is told, kept for the way there and back."""


class WebToolSettings(BaseModel):
    """What every such tool can be told in a tools file.

    Attributes:
        urls: Servers, with or without the path of their requests; asked in turn. By default where the environment says.
        timeout_s: For one request.
        tries: Requests before a failure counts, each to the next server.
        busy_s: How long to keep asking servers that are well but full.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: tuple[str, ...] = ()
    timeout_s: float = Field(default=95.0, gt=0)
    tries: int = Field(default=2, ge=1)
    busy_s: float = Field(default=120.0, ge=0)


SettingsT = TypeVar("SettingsT", bound=WebToolSettings)
AskedT = TypeVar("AskedT")
ReplyT = TypeVar("ReplyT", bound=BaseModel)


class WebTool(ABC, Generic[SettingsT, AskedT, ReplyT]):
    """A tool that asks a server of one kind.

    Attributes:
        settings_type: What ``config`` is in a tools file.
        reply_type: What the server answers.
        usual_name: Of a tool that is made without a tools file.
        failure: What did not happen, e.g. ``nothing was searched``.

    Args:
        urls: At least one address; the path of the requests may be left out.
        token: Sent in the header ``Authorization`` and nowhere else.

    Raises:
        ConfigError: No address, or one that is not ``http://`` or ``https://``.
    """

    settings_type: type[SettingsT]
    reply_type: type[ReplyT]
    server: ClassVar[ServerKind]
    usual_name: ClassVar[str]
    failure: ClassVar[str]

    def __init__(
        self,
        urls: Sequence[str],
        *,
        settings: SettingsT | None = None,
        token: str | None = None,
        name: str | None = None,
        schema: ToolSchema | None = None,
    ) -> None:
        self.name = name or self.usual_name
        self.schema = schema
        self.settings = settings or self.settings_type()
        self._client = WebClient(
            urls,
            self.server,
            token=token,
            timeout_s=self.settings.timeout_s,
            tries=self.settings.tries,
            busy_s=self.settings.busy_s,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> Self:
        """A tool with the settings of a tools file; see its ``settings_type``.

        Raises:
            ConfigError: Names the file, the key path, the value and what was expected.
        """
        settings = validated(cls.settings_type, config, context.label, context.at)
        environment = load_settings()
        try:
            return cls(
                settings.urls or (cls.server.address(environment),),
                settings=settings,
                token=cls.server.secret(environment),
                name=context.schema.function.name,
                schema=context.schema,
            )
        except ConfigError as error:
            raise ConfigError(f"{context.label}: {context.at}: {error}") from None

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the servers that it asks."""
        return self._client.servers

    @classmethod
    @abstractmethod
    def read(cls, argument: str) -> AskedT:
        """See :class:`afm.tools.base.ReadingTool`."""

    @abstractmethod
    def request(self, asked: AskedT) -> Mapping[str, Any]:
        """The body of the request for what :meth:`read` gave."""

    @abstractmethod
    def shown(self, reply: ReplyT) -> ToolResult:
        """What the agent reads of an answer."""

    async def call(self, argument: str) -> ToolResult:
        """See :class:`afm.tools.base.Tool`; ``meta`` says ``wall_s`` of a call that was answered."""
        try:
            body = self.request(self.read(argument))
        except BadArgumentError as error:
            return ToolResult(error.message, meta={"reason": "bad_argument"})
        began = time.monotonic()
        try:
            reply = await self._client.post(body, self.reply_type)
        except WebServerError as error:
            if error.kind == "request":
                refused = self.refusal(str(error))
                return ToolResult(refused.message, meta={"reason": "bad_argument"})
            text = f"The {self.name} tool failed, {self.failure}: {error}"
            return ToolResult(text, ok=False, meta={"reason": error.kind or "server", "error": str(error)})
        result = self.shown(reply)
        return ToolResult(
            result.text, result.ok, {**result.meta, "wall_s": round(time.monotonic() - began, 4)}
        )

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._client.close()

    @classmethod
    def refusal(cls, reason: str) -> BadArgumentError:
        """The error of an argument that the tool can do nothing with."""
        return BadArgumentError(f"{cls.failure[0].upper()}{cls.failure[1:]}: {reason}.")
