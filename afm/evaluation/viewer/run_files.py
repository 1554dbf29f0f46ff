"""The other files of a run: its settings, its logs, and the tokenizer of its model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from afm.agents import model_folder
from afm.errors import AfmError, ConfigError
from afm.evaluation.viewer.episodes import Decode
from afm.runs.folder import flatten, manifest_of
from afm.terminal import plain
from afm.tools.secrets import Secrets

LOG_PIECE_BYTES = 64 << 10
"""Size of the pieces in which a log is read, from its end."""

_FOLDERS_UP = 4
_SETTINGS_FILES = ("rl_config.yaml", "sft_config.yaml", "settings.json")
_MAX_SETTINGS_BYTES = 4 << 20
_MAX_SETTINGS_FILES = 8
_VALUE_CHARS = 2000
_MODEL_KEYS = ("sources.model", "settings.model.name", "model", "model_name_or_path")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FACTS = {
    "model": _MODEL_KEYS,
    "agent": ("settings.agent.name", "agent.name", "agent"),
    "benchmark": ("sources.benchmark.name",),
    "questions": ("settings.data.tasks",),
    "rounds": ("settings.rounds",),
    "temperature": ("settings.sampling.temperature", "temperature"),
    "seed": ("settings.seed", "seed"),
    "date": ("started",),
    "commit": ("machine.commit",),
    "machine": ("machine.system",),
}
_OVERWRITTEN = re.compile(r"^[^\n]*\r(?![\r\n]|\Z)", re.MULTILINE)
"""Lines that a progress bar has overwritten."""


class RunFiles:
    """Settings, logs and tokenizer of a run. Outside ``root`` it only reads the tokenizer of a model.

    Args:
        root: Folder of the run.
        decode: Turns the token ids of every file into text. The default is the tokenizer of each file's model.
        hide: Removes secrets from a text. The default removes the secrets in the environment of this process.
    """

    def __init__(
        self, root: Path, decode: Decode | None = None, hide: Callable[[str], str] | None = None
    ) -> None:
        self.root = root.resolve()
        self._decode = decode
        self._hide = hide or Secrets().hidden

    def table(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the table of files from rows of :func:`~afm.evaluation.viewer.query.file_rows`: evaluations, then others.

        In each part the newest file is first.
        """
        table = [self._table_row(row) for row in rows if Path(row["path"]).is_file()]
        return sorted(table, key=lambda row: (row["is_evaluation"], row["date"]), reverse=True)

    def about(self, path: Path) -> dict[str, Any]:
        """Return the settings of the run that wrote ``path``: the main ``facts``, and every key of each settings file.

        Both are pairs of a name and a value.
        """
        parts = [(file, flatten(content)) for file, content in self._settings(path)]
        facts = []
        for label, keys in _FACTS.items():
            values = (flat[key] for _, flat in parts for key in keys if flat.get(key) not in (None, ""))
            facts.append((label, self._value(next(values, "not recorded"))))
        versions = {
            key.removeprefix("versions."): value
            for _, flat in reversed(parts)
            for key, value in flat.items()
            if key.startswith("versions.") or key == "afm_version"
        }
        facts.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items())))
        return {
            "name": self.name_of(path),
            "facts": facts if parts else [],
            "parts": [
                {
                    "name": self.name_of(file),
                    "rows": [(key, self._value(value)) for key, value in flat.items()],
                }
                for file, flat in parts
            ],
        }

    def logs(self) -> list[dict[str, Any]]:
        """Return every ``*.log`` file of the run with its size in bytes, the newest first."""
        pattern = "*.log" if self.root.is_dir() else ""
        files = [file for file in self.root.rglob(pattern) if self._is_own(file)]
        files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
        return [{"name": self.name_of(file), "size": file.stat().st_size} for file in files]

    def read_log(self, name: str, *, begin: int | None = None, end: int | None = None) -> dict[str, Any]:
        """Return whole lines of a log: those from byte ``begin``, those up to byte ``end``, or the last ones.

        Raises:
            KeyError: The run has no such log.
        """
        if name not in {log["name"] for log in self.logs()}:
            raise KeyError(name)
        with (self.root / name).open("rb") as file:
            size = file.seek(0, 2)
            last = size if end is None else max(0, min(end, size))
            first = max(0, last - LOG_PIECE_BYTES) if begin is None else max(0, min(begin, size))
            file.seek(first)
            data = file.read(min(LOG_PIECE_BYTES, last - first))
        if first and begin is None and (cut := data.find(b"\n") + 1) < len(data):
            first, data = first + cut, data[cut:]
        text = plain(_OVERWRITTEN.sub("", data.decode("utf-8", "replace")))
        return {"begin": first, "end": first + len(data), "size": size, "text": self._hide(text)}

    def decoder(self, path: Path) -> tuple[Decode | None, str]:
        """Return the decoder of a file's tokens, and a sentence that names its tokenizer, or the reason without one."""
        if self._decode is not None:
            return self._decode, "Decoded with the tokenizer of --tokenizer."
        advice = "The page shows token ids. Start `afm view` with --tokenizer MODEL_FOLDER to see text."
        names = list(self._model_names(path))
        for folder in _model_folders(path, names):
            try:
                return _load_decoder(str(folder)), f"Decoded with the tokenizer of {self._hide(str(folder))}."
            except AfmError as error:
                return None, f"{self._hide(str(error))}. {advice}"
        where = (
            f"There is no tokenizer in {', '.join(names)}" if names else "No settings file here names a model"
        )
        return None, f"{self._hide(where)}. {advice}"

    def name_of(self, file: Path) -> str:
        """Return the path below the run, with slashes."""
        return file.relative_to(self.root).as_posix() if file.is_relative_to(self.root) else file.name

    def _table_row(self, row: dict[str, Any]) -> dict[str, Any]:
        path = Path(row["path"])
        manifest = self._json_beside(path, "manifest.json")
        settings = manifest.get("settings")
        modified = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        keys = ("path", "episodes", "bad", "scored", "agent", "model")
        return {key: row[key] for key in keys} | {
            "id": row["id"],
            "name": self.name_of(path),
            "is_evaluation": isinstance(settings, dict) and "sampling" in settings,
            "pass_at_1": self._pass_at_1(row, path),
            "calls": row["calls"] / row["episodes"],
            "tokens": row["tokens"] / row["episodes"],
            "seconds": row["seconds"] / row["episodes"],
            "date": str(manifest.get("started") or modified),
        }

    def _pass_at_1(self, row: dict[str, Any], path: Path) -> float | None:
        """Return pass@1 of the metrics file, a mean over questions, if it counted the same episodes."""
        metrics = self._json_beside(path, "metrics.json")
        estimate = metrics.get("pass_at_1")
        if metrics.get("episodes") == row["episodes"] and isinstance(estimate, dict):
            value = estimate.get("value")
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value)
        return row["passed"] / row["scored"] if row["scored"] else None

    def _json_beside(self, path: Path, name: str) -> dict[str, Any]:
        file = path.with_name(name)
        return manifest_of(file) if self._is_own(file) else {}

    def _is_own(self, file: Path) -> bool:
        """Whether it is a file of the run: neither hidden nor a link to another place."""
        hidden = any(part.startswith(".") for part in self.name_of(file).split("/"))
        return not hidden and file.is_file() and file.resolve().is_relative_to(self.root)

    def _settings(self, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the settings files in the folder of the episodes and in the folders above, up to the root."""
        count = 0
        for folder in list(path.parents)[:_FOLDERS_UP]:
            if not folder.is_relative_to(self.root):
                return
            own = [folder / name for name in _SETTINGS_FILES]
            for file in (*sorted(folder.glob("*manifest.json")), *own):
                if not self._is_own(file) or file.stat().st_size > _MAX_SETTINGS_BYTES:
                    continue
                content = _content(file)
                if content and count < _MAX_SETTINGS_FILES:
                    count += 1
                    yield file, content

    def _model_names(self, path: Path) -> Iterator[str]:
        for _, content in self._settings(path):
            flat = flatten(content)
            yield from (flat[key] for key in _MODEL_KEYS if isinstance(flat.get(key), str) and flat[key])

    def _value(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        cut = f"{text[:_VALUE_CHARS]} ..." if len(text) > _VALUE_CHARS else text
        return self._hide(cut)


def _content(file: Path) -> dict[str, Any]:
    if file.suffix == ".json":
        return manifest_of(file)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _model_folders(path: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield folders with a tokenizer that a run may mean: relative to the working folder or a folder above the episodes.

    The ``model`` folder of a training run comes last.
    """
    above = list(path.parents)
    for name in names:
        if "://" not in name:
            yield from filter(_has_tokenizer, (model_folder(base / name) for base in (Path.cwd(), *above)))
    yield from filter(_has_tokenizer, (folder / "model" for folder in above[:_FOLDERS_UP]))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


@lru_cache(maxsize=4)
def _load_decoder(folder: str) -> Decode:
    from afm.models.tokenizer import ChatTokenizer

    try:
        return ChatTokenizer.load(folder).decode
    except Exception as error:
        if isinstance(error, AfmError):
            raise
        # An invalid tokenizer can raise any error of its library.
        raise ConfigError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
