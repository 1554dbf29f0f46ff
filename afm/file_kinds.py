"""The kinds of YAML that the commands read: how to recognise each, its command, and the folder of the shipped ones."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from afm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of YAML that commands read, and how it differs from the others.

    Attributes:
        name: Its name in messages.
        content: The values of ``what`` with which :func:`afm.configuration.read_file` reads it.
        keys: Top-level keys that few or no other kinds have.
        use: The next step after the file was given to the wrong command. ``FILE`` is its path, ``FOLDER`` its folder.
    """

    name: str
    content: tuple[str, ...]
    keys: frozenset[str]
    use: str

    def use_of(self, path: object) -> str:
        """Return the next step for the file at ``path``."""
        folder = shlex.quote(str(Path(str(path)).parent))
        return self.use.replace("FILE", shlex.quote(str(path))).replace("FOLDER", folder)

    def matches(self, data: Mapping[str, Any]) -> int:
        """Return how many keys belong to this kind."""
        listed = isinstance(data.get("tools"), list) and "tools" in self.content
        return len(self.keys & set(data)) + listed


def _kind(name: str, content: str, keys: str, use: str) -> FileKind:
    return FileKind(name, tuple(content.split(", ")), frozenset(keys.split()), use)


def _server(name: str, content: str, keys: str) -> FileKind:
    typed = f"afm serve {name}"
    use = f"start the server, which checks it first: {typed} --config FILE"
    return _kind(f"an `{typed}` file", content, f"{keys} max_waiting max_wait_s finish_s", use)


SFT_FILE = _kind(
    "an `afm sft` file",
    "training arguments",
    "model_name_or_path dataset dataset_dir stage finetuning_type template cutoff_len",
    "run afm sft FILE",
)
RL_FILE = _kind(
    "an `afm rl` file", "afm rl settings", "train_files val_files verl platform", "run afm rl FILE"
)
EVAL_FILE = _kind(
    "an `afm eval` file",
    "evaluation settings",
    "benchmark data rounds sampling parallel",
    "run afm eval FILE model=DIR",
)
TOOLS_FILE = _kind(
    "a list of tools",
    "tools, tools settings",
    "cassette",
    "name it in a run: afm eval EVAL.yaml tools=FILE model=DIR, or check it: afm doctor FILE",
)
AGENT_FILE = _kind(
    "an agent",
    "agent settings",
    "transitions question_format answer_format answer_separator",
    "name it in a run: afm eval EVAL.yaml agent=FILE model=DIR, or talk to it: afm ask --agent FILE --model DIR "
    "(with tools of your own: --tools TOOLS.yaml)",
)
CODE_SERVER_FILE = _server(
    "code",
    "code server settings",
    "sandbox max_limits max_request_bytes max_held_bytes backend python binds packages warm",
)
REWARD_FILE = _kind(
    "a reward",
    "reward settings",
    "formula by_source exact_match text_match code_tests overlong judge",
    "name it in a run: afm rl RL.yaml rewards=FILE, or try it: afm reward ROWS.jsonl --rewards FILE",
)
FILTER_FILE = _kind(
    "a list of filters",
    "filter settings",
    "stages",
    "run afm data filter ROWS.jsonl --config FILE --output-dir DIR",
)
TEAM_FILE = _kind(
    "a team",
    "a team",
    "members tool_agents replan reflect accept_score class_name config",
    "run afm data distill TASKS.jsonl --team FILE --output-dir DIR",
)
FILE_KINDS = (
    SFT_FILE,
    RL_FILE,
    EVAL_FILE,
    TOOLS_FILE,
    AGENT_FILE,
    REWARD_FILE,
    FILTER_FILE,
    TEAM_FILE,
    _kind(
        "an `afm data queries` file",
        "a selection of queries",
        "tasks target max_rate samples with_tools",
        "run afm data queries FILE",
    ),
    _kind(
        "an `afm data expand` file",
        "an expansion",
        "members world corpus growth asks topics search_tool",
        "run afm data expand FILE",
    ),
    _kind(
        "a map of a team's log",
        "team map",
        "finals delegates programs messages ignored",
        "run afm data merge LOG.jsonl --map FILE --tasks TASKS.jsonl --output-dir DIR",
    ),
    _kind("a list of data sets", "data sets", "sets mixes", "run afm data download FILE --output-dir DIR"),
    _kind(
        "a model's config",
        "a model",
        "architectures model_type transformers_version hidden_size vocab_size",
        "give the model's folder: afm eval EVAL.yaml model=FOLDER",
    ),
    CODE_SERVER_FILE,
    _server("crawl", "page reader settings", "reader max_urls shown_chars parse_s cached_pages"),
    _server("gateway", "gateway settings", "upstreams ask_usage answer_s silence_s max_answer_bytes"),
    _server("search", "web search settings", "searches_per_run try_s total_s tries cached_searches"),
    _server("visual", "image server settings", "max_pixels max_side decode_s model_s cached_answers"),
    _server("wiki", "wiki server settings", "index topk max_topk max_queries max_query_chars search_s"),
)
"""Every kind of YAML. ``tests/cli/test_wrong_inputs.py`` compares them with the files in ``configs``."""

_SCORE = "reward responses.jsonl --agent agent.yaml --rewards rewards.yaml"
_DISTILL = "data distill questions/train.csv --team team.yaml --rewards rewards.yaml --output-dir runs/team"
_FILTER = (
    "data filter runs/team/trajectories.jsonl --config filters.yaml --agent agent.yaml --output-dir runs/kept"
)
_STARTER = {
    TOOLS_FILE: ("tools.yaml", _SCORE),
    REWARD_FILE: ("rewards.yaml", _SCORE),
    AGENT_FILE: ("agent.yaml", _DISTILL),
    TEAM_FILE: ("team.yaml", _DISTILL),
    FILTER_FILE: ("filters.yaml", _FILTER),
}
"""The files of the starter of ``afm init`` and the next command of its README. A test compares both."""


def starter_command(kind: FileKind, config: Path, command: str) -> str:
    """Return the next command of the starter that a file belongs to; empty for other files."""
    name, words = _STARTER.get(kind, ("", ""))
    folder = config.parent
    if config.name != name or not (folder / "responses.jsonl").is_file():
        return ""
    read = [word for word in words.partition(" --output-dir")[0].split() if Path(word).suffix]
    if not all((folder / word).is_file() for word in read):
        words = _DISTILL if kind is FILTER_FILE else ""
    place = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    return f"{place}{command} {words}" if words else ""


def kind_of(data: Mapping[str, Any]) -> FileKind | None:
    """Return the kind to which most keys belong, or ``None`` if no key does, or two kinds tie."""
    second, best = sorted(FILE_KINDS, key=lambda kind: kind.matches(data))[-2:]
    return best if best.matches(data) > second.matches(data) else None


def configs_folder() -> Path:
    """Return the ``configs`` folder: in the current folder, else next to the installed package.

    Raises:
        ConfigError: It was not found, because the package was installed without its checkout.
    """
    for base in (Path.cwd(), Path(__file__).resolve().parent.parent):
        if (base / "configs/tiny").is_dir():
            return base / "configs"
    raise ConfigError("no configs folder found; run this inside a checkout of the project")


def shipped_near(absent: str, *folders: str) -> str:
    """Return a question in brackets that names the shipped YAMLs called after an absent file, or nearly so; empty without any.

    Args:
        folders: Folders of ``configs`` in which to look. Files for this computer (``tiny``) come first.
    """
    stem, near = Path(absent).name.removesuffix(".yaml").removesuffix(".yml"), list[Path]()
    with suppress(ConfigError):
        places = [[configs_folder() / base / folder for base in ("tiny", "")] for folder in folders]
        for bases in places:
            named = [
                sorted(base.glob(f"{stem}.yaml")) or sorted(base.glob(f"{stem}*.yaml")) for base in bases
            ]
            near += next(filter(None, named), [])[:3]
        files = {file.stem: file for bases in places for base in bases[::-1] for file in base.glob("*.yaml")}
        near = near or [files[name] for name in get_close_matches(stem, files, n=1)]
    return f" (did you mean {' or '.join(map(os.path.relpath, near))}?)" if near else ""
