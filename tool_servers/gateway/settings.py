"""Settings of the gateway."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import ClassVar

from pydantic import Field, field_validator

from afm.configuration import Settings, validated
from afm.endpoints.budget import CachedTokenPrice
from afm.endpoints.connections import address_fault, checked_key, environment_key
from afm.errors import ConfigError
from afm.settings import Environment
from tool_servers.shared.command import ServerSettings


class UpstreamSettings(Settings):
    """One endpoint behind the gateway."""

    url: str
    """Address of the endpoint, with its ``/v1``."""
    models: tuple[str, ...] = ("*",)
    """Patterns of the model names that go to this endpoint. ``*`` matches any text."""
    key_variable: str = "GATEWAY_UPSTREAM_API_KEY"
    """Environment variable that holds its key."""

    @field_validator("url")
    @classmethod
    def _checked(cls, url: str) -> str:
        if fault := address_fault(url):
            raise ValueError(fault)
        return url.rstrip("/")


class GatewaySettings(ServerSettings):
    """The YAML of the gateway."""

    content: ClassVar[str] = "gateway settings"

    upstreams: tuple[UpstreamSettings, ...] = ()
    """Endpoints behind the gateway. A request goes to the first one whose patterns match its model."""
    prices: dict[str, CachedTokenPrice] = Field(default_factory=dict)
    """Prices by model name or pattern. The first match counts."""
    ask_usage: bool = True
    """Request the token counts of streams. Clients that did not ask for them do not get that last event."""
    answer_s: float = Field(default=600.0, gt=0)
    """Seconds until an endpoint begins its answer. Then the client gets status 504."""
    silence_s: float = Field(default=300.0, gt=0)
    """Seconds between two pieces of an answer. Then the answer is cut off."""
    max_request_bytes: int = Field(default=64 << 20, ge=1024)
    """Largest request."""
    max_answer_bytes: int = Field(default=64 << 20, ge=1024)
    """Largest answer."""
    max_parallel: int = Field(default=256, ge=1)
    """Calls that run at the same time."""
    max_waiting: int = Field(default=1024, ge=0)
    finish_s: float = Field(default=60.0, gt=0)

    def price(self, model: str) -> CachedTokenPrice | None:
        """Return the price of ``model``, if it is known."""
        if model in self.prices:
            return self.prices[model]
        return next((price for pattern, price in self.prices.items() if fnmatchcase(model, pattern)), None)


class UpstreamRoute:
    """An endpoint with its key."""

    def __init__(self, upstream: UpstreamSettings, environment: Environment) -> None:
        self.url = upstream.url
        key = environment_key(upstream.key_variable, environment)
        self.key = None if key is None else checked_key(key, upstream.key_variable)
        self._models = upstream.models

    def serves(self, model: str) -> bool:
        """Return whether this endpoint serves ``model``."""
        return any(fnmatchcase(model, pattern) for pattern in self._models)


def open_routes(
    settings: GatewaySettings, environment: Environment, url: str | None = None
) -> list[UpstreamRoute]:
    """Return the endpoints: only ``url`` if given, else those of the settings, else the one of the environment.

    Raises:
        ConfigError: No endpoint is set, or its key is invalid.
    """
    upstreams = settings.upstreams
    only = url or (None if upstreams else environment.gateway_upstream_url)
    if only is not None:
        upstreams = (validated(UpstreamSettings, {"url": only}, "upstream"),)
    if not upstreams:
        raise ConfigError(
            "the gateway has no endpoint behind it; give --upstream http://HOST:PORT/v1, set GATEWAY_UPSTREAM_URL, or "
            "list `upstreams` in its YAML file"
        )
    return [UpstreamRoute(upstream, environment) for upstream in upstreams]
