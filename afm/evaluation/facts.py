"""What was run, in the words of a report: agent, models, settings, machine, time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from afm.evaluation.manifest import Manifest
from afm.evaluation.report_input import Fact

_STAGES_FILE = "stages.jsonl"


def facts_of(run_dir: Path, stages: Sequence[tuple[str, Manifest | None]]) -> Iterator[Fact]:
    """Facts of a run folder and its evaluations, in the order a reader asks for them."""
    known = [(name, manifest) for name, manifest in stages if manifest is not None]
    if known:
        first = known[0][1]
        agent = first.settings["agent"]
        yield Fact("Agent", f"{agent['name']} (digest {agent['digest']})")
        yield from _each("Model", [(name, _model(manifest)) for name, manifest in known])
        yield from _each("Prompt", [(name, _prompt(manifest)) for name, manifest in known])
        yield from _each("Questions", [(name, _data(manifest)) for name, manifest in known])
        yield from _each("Sampling", [(name, _sampling(manifest)) for name, manifest in known])
        yield from _each("Limits", [(name, _limits(manifest)) for name, manifest in known])
        yield from _each("Tools", [(name, _tools(manifest.settings["tools"])) for name, manifest in known])
        yield from _each("Reward", [(name, _reward(manifest.settings["reward"])) for name, manifest in known])
        yield from _each("Prices", [(name, _prices(manifest)) for name, manifest in known])
        yield from _each("Protocol", [(name, _protocol(manifest)) for name, manifest in known])
        yield from _each("Seed", [(name, str(manifest.settings["seed"])) for name, manifest in known])
        yield Fact("Machine", _machine(first.machine))
        yield Fact("Versions", ", ".join(f"{name} {version}" for name, version in first.versions.items()))
        yield Fact(
            "Evaluated", " and ".join(sorted({manifest.started[:10] for _, manifest in known})) + " (UTC)"
        )
    times = _stage_seconds(run_dir / _STAGES_FILE)
    if times:
        total = sum(seconds for _, seconds in times)
        parts = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in times)
        yield Fact("Time", f"{_duration(total)} in all: {parts}")


def _each(label: str, values: Sequence[tuple[str, str]]) -> Iterator[Fact]:
    """One fact: the value all stages share, or each value with the stages that have it."""
    stages: dict[str, list[str]] = {}
    for name, value in values:
        stages.setdefault(value, []).append(name)
    if len(stages) == 1:
        yield from [Fact(label, value) for value in stages if value]
    else:
        yield Fact(
            label, "; ".join(f"{', '.join(names)}: {value or 'none'}" for value, names in stages.items())
        )


def _model(manifest: Manifest) -> str:
    model = manifest.settings["model"]
    if manifest.team is not None:
        members = ", ".join(f"{name} {model}" for name, model in manifest.team["members"].items())
        return f"the team {model['name']}{f': {members}' if members else ''}"
    digest = f" ({model['digest'][:12]})" if model["digest"] else ""
    return f"{model['name']}{digest}"


def _prompt(manifest: Manifest) -> str:
    """Whose words asked, where they are not the agent's own."""
    prompt = manifest.settings.get("prompt")
    if prompt is None:
        return ""
    return f"text of a file (digest {prompt['digest']})" if "digest" in prompt else "each row's"


def _data(manifest: Manifest) -> str:
    data = manifest.settings["data"]
    files = ", ".join(Path(path).name for path in manifest.sources.get("data", ()))
    return f"{data['tasks']:,}{f' of {files}' if files else ''} (sha256 {data['sha256'][:12]})"


def _sampling(manifest: Manifest) -> str:
    settings = manifest.settings
    sampling = settings["sampling"]
    if manifest.team is not None:
        return f"each member's own, {settings['rounds']} round{'s' if settings['rounds'] > 1 else ''}"
    if sampling["temperature"] == 0:
        text = "greedy"
    else:
        top_k = f", top-k {sampling['top_k']}" if sampling["top_k"] else ""
        text = f"temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}{top_k}"
    rounds = settings["rounds"]
    return f"{text}, {rounds} round{'s' if rounds > 1 else ''}"


def _protocol(manifest: Manifest) -> str:
    """Whose way to play episodes where it is not ours."""
    protocol = manifest.settings.get("protocol")
    return "" if protocol is None else f"{protocol['name']}: as AFM's script plays its web agent"


def _limits(manifest: Manifest) -> str:
    if manifest.team is not None:
        own = manifest.team.get("limits", {})
        return ", ".join(f"{key.replace('_', ' ')} {limit:,}" for key, limit in own.items())
    limits, published = manifest.settings["limits"], "protocol" in manifest.settings
    words = {
        "max_turns": "steps" if published else "tool calls",
        "max_agent_tokens": "sampled tokens",
        "max_response_tokens": "tokens of context" if published else "response tokens",
        "max_seconds": "seconds",
        "max_tool_seconds": "seconds in tools",
    }
    return ", ".join(f"{limits[key]:,} {word}" for key, word in words.items() if limits.get(key) is not None)


def _tools(tools: Mapping[str, Any] | None) -> str:
    if not tools:
        return ""
    entries = tools.get("tools", ())
    return ", ".join(str(entry.get("class_name", "?")).rpartition(".")[2] for entry in entries)


def _reward(reward: Mapping[str, Any] | None) -> str:
    if not reward:
        return "built-in table by data source, correct * format"
    return f"formula {reward.get('formula', 'correct * format')}"


def _prices(manifest: Manifest) -> str:
    prices = manifest.prices
    if prices is None:
        return ""
    cached = "" if prices.cached is None else f", {prices.cached:g} cached"
    judge = "" if prices.judge is None else f", {prices.judge:g} of the judge"
    tools = "".join(f", {usd:g} a call of {name}" for name, usd in prices.tools.items())
    return f"USD {prices.prompt:g} prompt{cached}, {prices.completion:g} completion{judge} (a million tokens){tools}"


def _machine(machine: Mapping[str, Any]) -> str:
    parts = [str(machine.get("system", "unknown system")), f"{machine.get('cpus', '?')} CPU cores"]
    return ", ".join([*parts, *machine.get("gpus", ())])


def _stage_seconds(path: Path) -> list[tuple[str, float]]:
    """Name and seconds of each finished stage of a job; a half-written last line is ignored."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(str(row["name"]), float(row["seconds"])) for row in rows]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
