"""A tool server in a thread of this process: what ``python -m tool_servers NAME`` serves, without a process to start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml
from loopback import LoopbackServer

from afm.settings import Environment
from tool_servers.shared.command import KINDS, parse_launch


class ToolServer(LoopbackServer):
    """Runs from its making to :meth:`stop`.

    Args:
        folder: For its settings and its log.
        words: Of its command line.
        settings: Of its YAML.
        variables: Environment variables.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *words: object,
        settings: dict[str, Any] | None = None,
        **variables: object,
    ) -> None:
        options = list(map(str, words))
        if KINDS[name].config is not None:
            config = folder / f"{name} {id(self)}.yaml"
            config.write_text(yaml.safe_dump({"finish_s": 1} | (settings or {})))
            options += ["--config", str(config)]
        environment = Environment(**{key.lower(): str(value) for key, value in variables.items() if value})
        launch = parse_launch(name, ["--host", "127.0.0.1", *options], environment)
        served = KINDS[name].load().open_app(launch)
        super().__init__(served.config())
        self.log = folder / f"{name} {id(self)}.log"
        self._handler = logging.FileHandler(self.log)
        logging.getLogger().addHandler(self._handler)
        self.url = self.origin
        self.start()

    def stop(self, *, forced: bool = False) -> None:
        super().stop(forced=forced)
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()
