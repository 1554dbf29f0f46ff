"""Tools as a tools file names them."""

from typing import Any

from afm.tools import load_tools


def entry(kind: str, name: str, **config: Any) -> dict[str, Any]:
    """An entry of a tools file, for a class of a module in ``afm.tools``."""
    schema = {"type": "function", "function": {"name": name}}
    return {"class_name": f"afm.tools.{kind}", "config": config, "tool_schema": schema}


def opened(kind: str, name: str, **config: Any) -> Any:
    """The tool of such an entry."""
    return load_tools({"tools": [entry(kind, name, **config)]})[name]


class Blocking:
    """A tool whose call is not async."""

    @classmethod
    def from_config(cls, _config: object, _context: object) -> "Blocking":
        return cls()

    def call(self, argument: str) -> str:
        return argument


class Nameless(Blocking):
    """A tool that never sets its name."""

    async def call(self, argument: str) -> str:  # type: ignore[override]
        return argument

    async def close(self) -> None: ...
