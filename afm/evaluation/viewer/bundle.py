"""A run as a static folder to share: the page of the viewer, with episodes of the run as data.

The data files are scripts, because a page that is opened from a disk cannot fetch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from afm.errors import DataError, UsageError
from afm.evaluation.viewer.episodes import episode_view, read_episode
from afm.evaluation.viewer.index import NAMED, EpisodeIndex
from afm.evaluation.viewer.query import Filters, file_rows, listing, place_of
from afm.evaluation.viewer.run_files import LOG_PIECE_BYTES, RunFiles
from afm.evaluation.viewer.server import PAGE, POLICY, assets
from afm.runs.atomic import replace_text
from afm.terminal import plural

_INDEX = "index.html"
_CHUNK = 25
_PAGE_ROWS = 500
_HOME = "~"


def write_bundle(
    index: EpisodeIndex, out: Path, hide: Callable[[str], str], *, max_episodes: int = 2000
) -> list[str]:
    """Write the run of an up-to-date index into the folder ``out``. The page is ``out/index.html``.

    Args:
        hide: Removes secrets from a text. It is applied to every text in the bundle.
        max_episodes: Limit on the episodes. Every file gets an equal share, and longer ones what shorter ones leave.

    Returns:
        One sentence for each part that was left out. The page lists the same.

    Raises:
        UsageError: ``out`` holds other files, or is the run itself.
        DataError: There are no episodes and no logs, or a file changed since it was indexed.
    """
    _clear(out)
    hide_all = _Hider(hide)
    root = index.path if index.path.is_dir() else index.path.parent
    run_files = RunFiles(root, hide=hide_all.text)
    with closing(index.connect()) as connection:
        table = run_files.table(file_rows(connection))
        chosen, left_out = _choose(connection, table, max_episodes)
        left_out += _unread(file_rows(connection), run_files)
        if not chosen and not run_files.logs():
            raise DataError(
                "no episodes and no logs to share; expected the folder of a run", path=str(index.path)
            )
        _begin(out)
        has_tokens = False
        for number in range(0, len(chosen), _CHUNK):
            views = {}
            for row in chosen[number : number + _CHUNK]:
                path, start, length = place_of(connection, row["id"])
                view = episode_view(read_episode(path, start, length), path)
                has_tokens = has_tokens or view["has_tokens"]
                views[row["id"]] = view | {"has_tokens": False}
            _write(out / "data" / f"episodes-{number // _CHUNK}.js", "episodes", hide_all.within(views))
    logs = [run_files.read_log(log["name"]) | {"name": log["name"]} for log in run_files.logs()]
    long_logs = [log["name"] for log in logs if log["begin"]]
    left_out += ["Tokens, masks and log-probabilities."] if has_tokens else []
    left_out += [
        f"The beginning of {name}: only its last {LOG_PIECE_BYTES >> 10} KiB are kept." for name in long_logs
    ]
    data = {
        "name": root.name,
        "chunk": _CHUNK,
        "left_out": left_out,
        "rows": [row | {"file": run_files.name_of(Path(row["file"]))} for row in chosen],
        "kinds": [*NAMED, "tool"],
        "files": [row | {"path": row["name"]} for row in table],
        "about": {row["id"]: run_files.about(Path(row["path"])) | {"path": row["name"]} for row in table},
        "logs": logs,
    }
    _write(out / "data" / "run.js", "run", hide_all.within(data))
    _write_page(out)
    return left_out


def _begin(out: Path) -> None:
    """Make the folder. Its file marks it as a bundle, so one that fails half-way can be written again."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    _write(out / "data" / "run.js", "run", {})


def _clear(out: Path) -> None:
    """Remove an earlier bundle, or raise an error if other files would be lost."""
    # A full disk may have left folders only.
    others = not (out / "data" / "run.js").is_file() and any(file.is_file() for file in out.rglob("*"))
    if out.exists() and (not out.is_dir() or others):
        raise UsageError(
            f"--bundle {out}: holds other files; expected a new folder, or that of an earlier bundle"
        )
    # Without its page, a bundle that fails half-way does not look whole.
    for old in (*out.glob(_INDEX), *out.glob("data/*.js")):
        old.unlink()


def _shares(episodes: list[int], limit: int) -> list[int]:
    """Return how many episodes of each file to keep. What a short file does not need, the longer ones share."""
    shares = [0] * len(episodes)
    by_length = sorted(range(len(episodes)), key=episodes.__getitem__)
    for position, number in enumerate(by_length):
        shares[number] = min(episodes[number], limit // (len(episodes) - position))
        limit -= shares[number]
    return shares


def _choose(
    connection: Any, table: list[dict[str, Any]], max_episodes: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the episodes to write, and a sentence for each file with fewer than all episodes."""
    chosen: list[dict[str, Any]] = []
    left_out = []
    for row, count in zip(table, _shares([row["episodes"] for row in table], max_episodes), strict=True):
        for offset in range(0, count, _PAGE_ROWS):
            filters = Filters({"file": row["path"]})
            rows = listing(connection, filters, offset=offset, limit=min(_PAGE_ROWS, count - offset)).rows
            chosen += rows
        if count < row["episodes"]:
            left_out.append(
                f"{row['episodes'] - count:,} of {row['episodes']:,} episodes of {row['name']}: "
                f"--bundle-episodes {max_episodes} keeps its first {count:,}."
            )
    tools = dict(connection.execute("SELECT id, tools FROM episodes").fetchall()) if chosen else {}
    names = [row[0] for row in connection.execute("SELECT name FROM names WHERE kind = 'tool' ORDER BY id")]
    for row in chosen:
        row["tool"] = [name for bit, name in enumerate(names) if tools[row["id"]] >> min(bit, 62) & 1]
    return chosen, left_out


def _unread(rows: list[dict[str, Any]], run_files: RunFiles) -> Iterator[str]:
    """Yield a sentence for the unreadable lines of each file, and one for a last line that is only half written."""
    for row in rows:
        name = run_files.name_of(Path(row["path"]))
        if row["bad"]:
            yield f"{plural(row['bad'], 'unreadable line')} of {name}."
        with Path(row["path"]).open("rb") as file:
            file.seek(row["indexed"])
            if file.read().strip():
                file.seek(0)
                line = 1 + file.read(row["indexed"]).count(b"\n")
                yield f"{name}:{line}: a half-written last line. If the job still runs, write the bundle again later."


class _Hider:
    """Removes secrets and the path of the home folder from texts and JSON values."""

    def __init__(self, hide: Callable[[str], str]) -> None:
        self._hide = hide
        home = str(Path.home())
        self._home = home if len(home) > 1 else None

    def text(self, text: str) -> str:
        hidden = self._hide(text)
        return hidden.replace(self._home, _HOME) if self._home else hidden

    def within(self, value: Any) -> Any:
        """Return ``value`` without secrets in its texts. Keys become text, NaN and infinity ``None``."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {self.text(str(key)): self.within(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.within(inner) for inner in value]
        return value


def _write(path: Path, name: str, value: Any) -> None:
    text = json.dumps(value, default=str, allow_nan=False)  # ASCII, which is the same in every encoding
    replace_text(path, f"AFM_BUNDLE.take({json.dumps(name)}, {text});\n")


def _write_page(out: Path) -> None:
    texts = assets()
    page = texts.pop(PAGE)
    # A page that is opened from a disk has no origin, so 'self' matches nothing there.
    policy = POLICY.replace("'self'", "'self' file:").replace(
        "connect-src 'self' file:", "connect-src 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}')
    page = page.replace(
        "<!-- bundle -->", '<script src="bundle.js"></script>\n<script src="data/run.js"></script>'
    )
    for name, text in texts.items():
        replace_text(out / name, text)
    replace_text(out / _INDEX, page)
