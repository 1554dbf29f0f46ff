"""``python -m tool_servers.model --model DIR [--name NAME] [--host H] [--port N]``: serve a model's completions."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from afm.errors import AfmError, MissingExtraError
from afm.settings import load_settings
from tool_servers.shared.access import check_exposure
from tool_servers.shared.serve import serve

_FINISH_S = 5.0
_TOKEN = "AFM_MODEL_API_KEY"


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    given = _parser().parse_args()
    try:
        for package in ("fastapi", "uvicorn"):
            if find_spec(package) is None:
                raise MissingExtraError(package, "servers")
        _serve(given)
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(given: argparse.Namespace) -> None:
    from afm.models import load_model
    from tool_servers.model.app import ModelServer

    secret = load_settings().afm_model_api_key
    key = secret.get_secret_value() if secret is not None else None
    check_exposure(given.host, key, _TOKEN)
    model = load_model(given.model, name=given.name, threads=given.threads, max_batch=given.max_batch)
    serve(ModelServer(model, key).app(), given.host, given.port, token=key, finish_s=_FINISH_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tool_servers.model",
        description=f"Serve a model's completions with token ids. The key comes from {_TOKEN}.",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--name", help="what clients call it; by default its folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for a free one (8000)")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--max-batch", type=int, default=64, help="generations at once (64)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
