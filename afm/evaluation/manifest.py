"""The manifest of a run: what its scores depend on. It is written before the first episode and checked on resume."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

import afm
from afm.agents import AgentSpec, Limits, PromptSource, adapter_base, model_folder
from afm.configuration import Settings, validated
from afm.datasets import Task
from afm.errors import DataError, first_fault, without_password
from afm.evaluation.agents import Agents, RowAgents, describe_agent, describe_prompt, describe_row_agents
from afm.evaluation.benchmarks import BENCHMARKS, PUBLISHED_REMARKS, published_scores
from afm.evaluation.prices import Prices
from afm.evaluation.tallies import UnseenTool
from afm.models.base import SamplingParams
from afm.rewards import RewardSettings
from afm.rewards.code_tests.problem import without_complete_tests
from afm.rollout import PublishedProtocol
from afm.runs.atomic import replace_text
from afm.runs.folder import RunFolder, changes, flatten

EPISODES_FILE = "episodes.jsonl"
MANIFEST_FILE = "manifest.json"

_PACKAGES = ("torch", "transformers", "math-verify")
_MODEL_FILES = (
    *(
        "adapter_config.json",
        "config.json",
        "generation_config.json",
        "*token*.json",
        "*.jinja",
        "vocab*",
        "merges.txt",
    ),
    *("*.safetensors", "pytorch_model*.bin"),
)
_WHOLE_BYTES = 8 << 20
_PIECE_BYTES = 1 << 16
_PIECES = 64
_NO_SETTING = re.compile(
    r"(agents\.[\w-]+\.)?(agent\.(spec|without_tools_of)\.|reward\.judge\.price_per_million_tokens)"
)
"""The digest covers a whole declaration, and prices do not change scores."""


class Sources(Settings):
    """Sources of the parts of a run. ``reward: None`` is the built-in table. ``parallel`` and ``prices`` do not change scores."""

    model: str | None = None
    team: dict[str, Any] | None = None
    harness: dict[str, Any] | None = None
    tools: dict[str, Any] | None = None
    reward: dict[str, Any] | None = None
    data: tuple[str, ...] = ()
    benchmark: str | None = None
    parallel: int | None = None
    prices: Prices | None = None


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a score depends on, in addition to the questions, the agent and the player.

    Attributes:
        limits: Replace the limits of the agent.
        prompt: Source of prompts, by default the agent.
        protocol: How AFM's script plays episodes, ``None`` for ours.
        original: The agent before its tools were removed, so that its tags are known.
        unseen: Tools that the model was not trained with, by role. Their arguments are checked.
        row_agents: All agents with what they need, if rows choose their agents.
        sources: Sources of model, tools and reward.
    """

    sampling: SamplingParams
    limits: Limits | None = None
    rounds: int = 1
    seed: int = 0
    prompt: PromptSource | None = None
    protocol: PublishedProtocol | None = None
    original: AgentSpec | None = None
    unseen: Mapping[str, UnseenTool] | None = None
    row_agents: RowAgents | None = None
    sources: Sources = field(default_factory=Sources)

    def agents(self, spec: AgentSpec) -> Agents:
        """Return all agents. ``spec`` is the first."""
        return Agents.of(spec, self.original) if self.row_agents is None else self.row_agents.agents


class RunManifest(Settings):
    """Everything a score depends on. Two runs with equal ``settings`` and ``versions`` measure the same thing."""

    format: Literal[1] = 1
    settings: dict[str, Any]
    versions: dict[str, str]
    sources: dict[str, Any] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)
    started: str = ""

    @property
    def spec(self) -> AgentSpec:
        """The agent as declared at the start of the run. If there are several, the first."""
        return AgentSpec.model_validate(self.settings["agent"]["spec"])

    @property
    def team(self) -> dict[str, Any] | None:
        """The team that played, ``None`` if a model played."""
        team: dict[str, Any] | None = self.settings["model"].get("team")
        return team

    @property
    def prices(self) -> Prices | None:
        """The prices of the run."""
        dumped = self.sources.get("prices")
        return None if dumped is None else Prices.model_validate(dumped)

    @property
    def agents(self) -> Agents:
        """All agents as declared at the start of the run, and before their tools were removed."""
        several = self.settings.get("agents") or {"": {"agent": self.settings["agent"]}}
        specs: dict[str, AgentSpec] = {}
        originals: dict[str, AgentSpec] = {}
        for entry in (part["agent"] for part in several.values()):
            spec = specs.setdefault(entry["name"], AgentSpec.model_validate(entry["spec"]))
            if (before := entry.get("without_tools_of")) is not None:
                originals[spec.name] = AgentSpec.model_validate(before)
        return Agents(specs, originals)


def make_manifest(
    tasks: Iterable[Task],
    spec: AgentSpec,
    model_name: str,
    conditions: Conditions,
    *,
    token_exact: bool = True,
) -> RunManifest:
    """Make the manifest of a new run.

    Args:
        token_exact: Whether the model's token ids are known.

    Raises:
        DataError: A task id occurs twice.
    """
    sources = conditions.sources
    settings = _settings(list(tasks), spec, model_name, conditions, token_exact=token_exact)
    settings = json.loads(json.dumps(settings))
    return RunManifest(
        settings=settings,
        versions=_versions(),
        sources={
            "model": sources.model and without_password(sources.model),
            "data": list(sources.data),
            **({} if sources.parallel is None else {"parallel": sources.parallel}),
            **({} if sources.prices is None else {"prices": sources.prices.model_dump(mode="json")}),
            **({} if sources.benchmark is None else {"benchmark": _benchmark(sources.benchmark, settings)}),
        },
        machine=_machine(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _settings(
    tasks: list[Task], spec: AgentSpec, model_name: str, conditions: Conditions, *, token_exact: bool
) -> dict[str, Any]:
    sources, sampling = conditions.sources, conditions.sampling
    agent = describe_agent(spec, conditions.original)
    if conditions.unseen:
        agent["unseen_tools"] = {
            role: tool.model_dump(mode="json") for role, tool in conditions.unseen.items()
        }
    count, checksum = data_checksum(tasks)
    sample_tests = _sample_tests_only(tasks, sources)
    settings = {
        "agent": agent,
        "model": {"name": model_name, "digest": model_digest(sources.model) if sources.model else None}
        | ({} if sources.team is None else {"team": sources.team})
        | ({} if sources.harness is None else {"harness": sources.harness})
        | ({} if token_exact else {"token_exact": False}),
        "tools": sources.tools,
        "reward": sources.reward,
        "data": {"tasks": count, "sha256": checksum}
        | ({"sample_tests_only": sample_tests} if sample_tests else {}),
        "sampling": {**asdict(sampling), "stop": list(sampling.stop)},
        "limits": (conditions.limits or spec.limits).model_dump(mode="json"),
        "rounds": conditions.rounds,
        "seed": conditions.seed,
    }
    if conditions.protocol is not None:
        settings["protocol"] = {"name": "published", **asdict(conditions.protocol)}
    if conditions.row_agents is not None:
        return settings | {"agents": describe_row_agents(conditions.row_agents, tasks)}
    return settings | ({} if conditions.prompt is None else describe_prompt(tasks, spec, conditions.prompt))


def _sample_tests_only(tasks: Iterable[Task], sources: Sources) -> int:
    """Count the problems of LiveCodeBench that only have sample tests."""
    if not (sources.benchmark or "").startswith("livecodebench"):
        return 0
    reward = validated(RewardSettings, sources.reward or {}, "reward")
    return without_complete_tests((task.ground_truth for task in tasks), reward.code_tests.complete_tests)


def _benchmark(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was published of a benchmark, and where this run differs."""
    benchmark = BENCHMARKS[name]
    return {
        "name": name,
        "published": {
            "questions": benchmark.questions,
            **(benchmark.settings.as_dict() if benchmark.settings else {}),
        },
        "published_scores": {score.label: score.percent for score in published_scores().get(name, ())},
        "departures": list(benchmark.departures(settings)),
        "remarks": list(PUBLISHED_REMARKS) if "protocol" in settings else [],
    }


def read_manifest(path: str | Path) -> RunManifest:
    """Read a manifest.

    Raises:
        DataError: The file does not exist or is no manifest of this format.
    """
    try:
        return RunManifest.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except ValidationError as error:
        raise DataError(f"invalid manifest: {first_fault(error, 'file')}", path=str(path)) from None


def holds_episodes(output_dir: Path) -> bool:
    """Whether a run in this folder has finished an episode."""
    episodes = output_dir / EPISODES_FILE
    return episodes.is_file() and episodes.stat().st_size > 0


def claim(output_dir: Path, manifest: RunManifest) -> None:
    """Write the manifest into a folder without episodes, or check that the run in it has the same. Prices may change.

    A run without a finished episode does not claim its folder.

    Raises:
        ConfigError: The folder holds another run.
    """
    path = output_dir / MANIFEST_FILE
    if not path.exists() or not holds_episodes(output_dir):
        replace_text(path, manifest.model_dump_json(indent=2) + "\n")
        return
    before = read_manifest(path)
    changed = differences(before, manifest)
    RunFolder(output_dir, "output_dir").check(changed)
    if before.prices != manifest.prices:
        sources = {key: value for key, value in before.sources.items() if key != "prices"}
        if manifest.prices is not None:
            sources["prices"] = manifest.sources["prices"]
        priced = before.model_copy(update={"sources": sources})
        replace_text(path, priced.model_dump_json(indent=2) + "\n")


def differences(before: RunManifest, after: RunManifest) -> list[str]:
    """Return the settings that differ between two runs, as ``key: old -> new``, in the order of the keys."""
    old = flatten({"versions": before.versions, **before.settings})
    new = flatten({"versions": after.versions, **after.settings})
    if old.get("model.digest") is not None and old["model.digest"] == new.get("model.digest"):
        # The same files under another path are the same model.
        old["model.name"] = new["model.name"]
    for key in (key for key in old if key.endswith("agent.digest") and key in new):
        agent = key.removesuffix("digest")
        declared = _without_limits(old, agent)
        if declared and declared == _without_limits(new, agent):
            old[key] = new[key]  # the limits that applied are a setting of their own
    settings = ({key: flat[key] for key in flat if not _NO_SETTING.match(key)} for flat in (old, new))
    return changes(*settings)


def _without_limits(flat: Mapping[str, Any], agent: str) -> dict[str, Any]:
    """Return an agent's declaration without its limits."""
    declared, limits = f"{agent}spec.", f"{agent}spec.limits."
    return {key: flat[key] for key in flat if key.startswith(declared) and not key.startswith(limits)}


def model_digest(source: str) -> str | None:
    """Return the fingerprint of a model folder, ``None`` for an address.

    It is a SHA-256 over names, sizes and contents of configuration, tokenizer and weights. For a LoRA adapter it covers
    the base model too. Of a file larger than 8 MiB only 64 evenly spaced pieces of 64 KiB are read, which takes well
    under a second for a model of any size.
    """
    folder = model_folder(source)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    base = Path(adapter_base(folder) or folder)
    files = sorted(folder.iterdir()) + (sorted(base.iterdir()) if base != folder and base.is_dir() else [])
    for file in files:
        if any(fnmatch(file.name, pattern) for pattern in _MODEL_FILES):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            _add_file(digest, file)
    return digest.hexdigest()[:32]


def _add_file(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _WHOLE_BYTES:
            digest.update(stream.read())
            return
        for piece in range(_PIECES):
            stream.seek((size - _PIECE_BYTES) * piece // (_PIECES - 1))
            digest.update(stream.read(_PIECE_BYTES))


def data_checksum(tasks: Iterable[Task]) -> tuple[int, str]:
    """Return the number of tasks and a SHA-256 over them in order, without prompts and abilities.

    Raises:
        DataError: An id occurs twice.
    """
    digest = hashlib.sha256()
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise DataError(f"task id {task.id!r} occurs twice; ids must be unique within one evaluation")
        seen.add(task.id)
        row = task.model_dump(mode="json", exclude={"prompt", "ability"})
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return len(seen), digest.hexdigest()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "afm": afm.__version__}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _machine() -> dict[str, Any]:
    facts: dict[str, Any] = {"system": platform.platform(), "cpus": os.cpu_count()}
    if (commit := _commit()) is not None:
        facts["commit"] = commit
    # torch is used only if a model has imported it already, because the import takes seconds.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def _commit() -> str | None:
    """Return the commit of the checkout that runs, ``None`` outside a checkout."""
    git = Path(afm.__file__).resolve().parents[1] / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        branch = git / head.removeprefix("ref: ")
        if branch.is_file():
            return branch.read_text(encoding="utf-8").strip()
        packed = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(head.removeprefix("ref:"))), None)
