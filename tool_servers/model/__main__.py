"""``python -m tool_servers.model --model DIR [--name NAME] [--host H] [--port N]``: serve a model's completions."""

from __future__ import annotations

import sys
from pathlib import Path

from tool_servers.shared.command import Given, ServerCommand
from tool_servers.shared.serve import serve

_FINISH_S = 5.0


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    command = ServerCommand("model", "Serve a model's completions with token ids.", ("fastapi", "uvicorn"))
    command.parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    command.parser.add_argument("--name", help="what clients call it; by default its folder")
    command.parser.add_argument("--threads", type=int, help="CPU threads")
    command.parser.add_argument("--max-batch", type=int, default=64, help="generations at once (64)")
    return command.run(_serve)


def _serve(given: Given) -> None:
    from afm.models import load_model
    from tool_servers.model.app import ModelServer

    options, place = given.options, given.place()
    model = load_model(options.model, name=options.name, threads=options.threads, max_batch=options.max_batch)
    app = ModelServer(model, place.token).app()
    serve(app, place.host, place.port, token=place.token, finish_s=_FINISH_S)


if __name__ == "__main__":
    sys.exit(main())
