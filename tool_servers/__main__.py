"""``python -m tool_servers NAME [options]`` serves in the foreground; ``start``, ``stop``, ``status`` and ``test`` in the background."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from afm.errors import AfmError, UsageError
from afm.settings import load_settings
from tool_servers.shared import control
from tool_servers.shared.command import KINDS, load_server, parse_launch, serve_command


def main() -> int:
    """Exit status 0 when all is well, 1 when a server cannot serve, 2 for wrong usage."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in KINDS and "--dry-run" in words:
        print(shlex.join(serve_command(name, [word for word in words if word != "--dry-run"])))
        return 0
    if name in control.VERBS or name.startswith("-"):
        return control.main([name, *words])
    return _serve(name, words)


def _serve(name: str, words: Sequence[str]) -> int:
    try:
        launch = parse_launch(name, words, load_settings())
        module = load_server(name)
        if not (hasattr(module, "serve_streams") and module.serve_streams(launch)):
            from tool_servers.shared.serve import serve

            serve(module.open_app(launch), launch.address())
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
