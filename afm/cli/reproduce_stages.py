"""The stages of `afm reproduce` for one agent: what each runs, reads and writes, in order. Nothing is run here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from afm.errors import UsageError, suggestion

NAMES = ("download", "prepare", "sft", "rl", "eval", "report")


@dataclass(frozen=True, slots=True)
class Agent:
    """What differs from agent to agent.

    Attributes:
        sizes: Model sizes that have published recipes.
        method: RL algorithm, as in the names of the script and the recipes.
        asked_with_row: Whether its benchmark rows contain the published prompt. Otherwise a downloaded file has it.
        judged: Whether a model judges its answers, which needs an endpoint (GRM_BASE_URL).
        folder: Name of its folders, if not ``SHORT_agent``.
        usual_size: Size that is used without ``--size``.
    """

    short: str
    sizes: tuple[str, ...]
    method: str
    benchmarks: tuple[str, ...]
    tiny_benchmarks: tuple[str, ...]
    asked_with_row: bool = False
    tiny_rl: tuple[str, ...] = ()
    judged: bool = False
    folder: str = ""
    usual_size: str = "7b"

    @property
    def name(self) -> str:
        """Name of the agent's folders."""
        return self.folder or f"{self.short}_agent"


_ENVIRONMENTS = {"sft": ".venv-sft", "rl": ".venv-rl", "eval": ".venv-rl"}
"""Environments that `requirements/install-gpu.sh` makes in the checkout. None of them holds both GPU engines."""
_AS_IT_IS = "browsecomp"
"""Benchmark that is published encrypted and read without a preparation step."""
_MATH = ("aime24", "aime25", "amc23", "math500", "olympiadbench")
_PROGRAMS = ("livecodebench_v4", "livecodebench_v5", "codecontests")
_TINY_SFT = ("max_steps=80", "save_steps=20", "learning_rate=3.0e-3")
"""Overrides with enough steps to memorise the generated rows, so that the model calls tools."""
_ACTOR = "verl.actor_rollout_ref"
AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "web",
            ("7b", "32b"),
            "dapo",
            ("gaia", "webwalker", "browsecomp", "hle"),
            ("gaia", "webwalker"),
            judged=True,
        ),
        Agent(
            "mhqa",
            ("3b", "7b"),
            "ppo",
            ("nq", "triviaqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "popqa"),
            ("nq",),
            tiny_rl=(
                "verl.trainer.total_training_steps=2",
                "verl.trainer.save_freq=1",
                "verl.data.train_batch_size=8",
                "verl.data.max_prompt_length=128",
                f"{_ACTOR}.actor.ppo_mini_batch_size=8",
                f"{_ACTOR}.actor.ppo_micro_batch_size_per_gpu=8",
                f"{_ACTOR}.ref.log_prob_micro_batch_size_per_gpu=8",
                f"{_ACTOR}.rollout.log_prob_micro_batch_size_per_gpu=8",
                "verl.critic.ppo_micro_batch_size_per_gpu=8",
            ),
        ),
        Agent(
            "code",
            ("7b", "32b"),
            "dapo",
            (*_MATH, *_PROGRAMS),
            ("aime24", "livecodebench_v5"),
            asked_with_row=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class StageCommand:
    """A process to run.

    ``variables`` are added to the caller's environment. ``check`` has the arguments of `afm doctor` for these settings.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    check: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChainStage:
    """One stage of the chain. Later stages read the paths that it ``makes``, so they must exist if it is skipped."""

    name: str
    commands: tuple[StageCommand, ...]
    makes: tuple[Path, ...]


@dataclass(frozen=True)
class Reproduction:
    """The settings and paths of one reproduction.

    Attributes:
        root: Folder of ``data``, ``models`` and ``runs``.
        project: The checkout.
        tiny: Whether to run the small version for a CPU.
        sets: YAML that lists the agent's data sets.
        further: Overrides ``sft.KEY=VALUE``, ``rl.KEY=VALUE``, ``eval.KEY=VALUE``.
    """

    agent: Agent
    root: Path
    project: Path
    size: str
    tiny: bool
    sets: Path
    further: tuple[str, ...] = ()
    benchmarks: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether SFT and RL need a GPU."""
        return not self.tiny

    @property
    def serves(self) -> bool:
        """Whether the evaluation uses a model server."""
        return not self.tiny

    @property
    def data(self) -> Path:
        """Folder of the agent's data."""
        return self.root / "data" / self.agent.name

    @property
    def raw(self) -> Path:
        """Folder of the downloaded files."""
        return self.data / "raw"

    def python(self, stage: str) -> Path:
        """Return the Python of a stage: that of its GPU environment if the checkout has one, else this process's own."""
        python = self.project / _ENVIRONMENTS.get(stage, "") / "bin/python"
        return python if python.exists() and not self.tiny else Path(sys.executable)

    @property
    def start(self) -> Path:
        """Folder of the random model of ``TINY=1``."""
        return self.root / "start"

    @property
    def sft_model(self) -> Path:
        """Folder of the model after SFT."""
        return self.root / "models" / f"{self.agent.name}_{self.size}_sft"

    @property
    def rl_run(self) -> Path:
        """``output_dir`` of RL."""
        return self.root / "runs" / f"{self.agent.name}_{self.size}_rl"

    @property
    def model(self) -> Path:
        """Folder of the model after RL."""
        return self.rl_run / "model"

    @property
    def results(self) -> Path:
        """Folder of the evaluations and the report."""
        return self.root / "runs" / f"{self.agent.name}_{self.size}"

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Names of the benchmarks to evaluate. An unknown one is a usage error."""
        chosen = self.benchmarks or (self.agent.tiny_benchmarks if self.tiny else self.agent.benchmarks)
        for name in chosen:
            if name not in self.agent.benchmarks:
                raise UsageError(
                    f"BENCHMARKS: {name} is not a benchmark of {self.agent.name}; {suggestion(name, self.agent.benchmarks)}"
                )
        return chosen

    def stages(self, server: str = "") -> list[ChainStage]:
        """Return all stages in order. The evaluation asks the model at ``server``, or loads it if that is empty."""
        first = [self._download(), self._prepare(), self._sft(), self._rl()]
        return [*first, self._eval(server), self._report()]

    def _own_benchmarks(self) -> set[str]:
        """Return the names of the benchmarks in the agent's own list of data sets."""
        from afm.configuration import read_file

        sets = read_file(self.sets)["sets"].values()
        steps = [step.get("name") or "" for hub_set in sets for step in hub_set.get("prepare", ())]
        return {name.removeprefix("eval/") for name in steps if name.startswith("eval/")}

    def _others(self) -> list[str]:
        """Return the names of the benchmarks that are downloaded from their owners."""
        return [name for name in self.evaluated if name not in self._own_benchmarks()]

    def _download(self) -> ChainStage:
        out = ("--output-dir", str(self.raw))
        commands = [StageCommand(("afm", "data", "download", str(self.sets), *out))]
        if others := self._others():
            commands.append(StageCommand(("afm", "data", "download", "benchmarks", *out, *_only(others))))
        return ChainStage("download", tuple(commands), (self.raw / "download.lock.json",))

    def _prepare(self) -> ChainStage:
        prepare = ("afm", "data", "prepare", "published")
        common = ("--data", str(self.raw), "--output-dir")
        commands = [StageCommand((*prepare, str(self.sets), *common, str(self.data)))]
        if others := [name for name in self._others() if name != _AS_IT_IS]:
            commands.append(
                StageCommand((*prepare, "benchmarks", *common, str(self.data / "eval"), *_only(others)))
            )
        made = [
            self.data / "sft" / "dataset_info.json",
            *self._rl_files(),
            *map(self._benchmark_data, self.evaluated),
            *(Path(text) for text in dict.fromkeys(map(self._prompt, self.evaluated)) if text != "row"),
        ]
        return ChainStage("prepare", tuple(commands), tuple(made))

    def _rl_files(self) -> tuple[Path, Path]:
        return self.data / "rl" / "train.parquet", self.data / "rl" / "val.parquet"

    def _benchmark_data(self, name: str) -> Path:
        return self.raw / name if name == _AS_IT_IS else self.data / "eval" / f"{name}.jsonl"

    def _sft(self) -> ChainStage:
        folder = self.project / "train" / self.agent.name / "sft"
        variables = {"DATA_DIR": str(self.data / "sft"), "OUTPUT_DIR": str(self.sft_model)}
        if self.tiny:
            script, config = "sft_tiny.sh", f"tiny/sft/{self.agent.name}.yaml"
            variables["MODEL"] = str(self.start)
        else:
            script = f"sft_qwen2.5_{self.size}.sh"
            config = f"sft/{self.agent.name}_qwen2.5_{self.size}.yaml"
        overrides = ["prompt=row", *self._overrides("sft")]
        keys = {"dataset_dir": "DATA_DIR", "output_dir": "OUTPUT_DIR", "model_name_or_path": "MODEL"}
        same = [f"{key}={variables[name]}" for key, name in keys.items() if name in variables]
        check = (str(self.project / "configs" / config), *same, *overrides)
        learnt = ["--quiet", *_TINY_SFT] if self.tiny else []
        command = StageCommand((str(folder / script), *learnt, *overrides), variables, check)
        return ChainStage("sft", (command,), (self.sft_model / "config.json",))

    def _rl(self) -> ChainStage:
        script = f"train_{self.agent.method}_{self.agent.name}"
        config = f"rl/{self.agent.short}_{self.agent.method}"
        trained, tested = self._rl_files()
        overrides = [
            f"train_files={trained}",
            f"val_files={tested}",
            f"output_dir={self.rl_run}",
            "prompt=row",
        ]
        variables = {"MODEL": str(self.sft_model)}
        if self.tiny:
            script, config = f"{script}_tiny", f"tiny/{config}"
            variables["RECIPE"] = f"{self.agent.short}_{self.agent.method}"
            overrides += self.agent.tiny_rl
        else:
            config = f"{config}_{self.size}"
            variables["SIZE"] = self.size
        overrides += self._overrides("rl")
        words = (str(self.project / "train" / self.agent.name / "rl" / f"{script}.sh"), *overrides)
        check = (str(self.project / "configs" / f"{config}.yaml"), f"model={self.sft_model}", *overrides)
        return ChainStage("rl", (StageCommand(words, variables, check),), (self.model / "config.json",))

    def _eval(self, server: str) -> ChainStage:
        folder = "configs/tiny/eval" if self.tiny else "configs/eval"
        script = str(self.project / "evaluation" / self.agent.name / "eval.sh")
        commands, made = [], []
        for name in self.evaluated:
            out = self.results / f"eval_{name}"
            overrides = [
                f"data={self._benchmark_data(name)}",
                f"output_dir={out}",
                f"prompt={self._prompt(name)}",
            ]
            if server:
                overrides += [f"model.name={self.model.name}", f"model.tokenizer={self.model}"]
            overrides += self._overrides("eval")
            model = server or str(self.model)
            check = (str(self.project / folder / f"{name}.yaml"), f"model.path={model}", *overrides)
            variables = {"BENCHMARK": name, "CONFIGS": folder, "MODEL": model}
            commands.append(StageCommand((script, *overrides), variables, check))
            made.append(out / "metrics.json")
        return ChainStage("eval", tuple(commands), tuple(made))

    def _prompt(self, benchmark: str) -> str:
        """Return the ``prompt`` setting for a benchmark: the published prompt, as in training."""
        if self.agent.asked_with_row and benchmark in self._own_benchmarks():
            return "row"
        return str(self.raw / "prompts" / f"{self.agent.name}.txt")

    def _report(self) -> ChainStage:
        return ChainStage(
            "report", (StageCommand(("afm", "report", str(self.results))),), (self.results / "report.html",)
        )

    def own_judge(self, stage: str) -> bool:
        """Return whether the overrides of ``stage`` set a judge, or a reward file that may set one."""
        return any(override.startswith(("rewards=", "rewards.judge")) for override in self._overrides(stage))

    def _overrides(self, stage: str) -> list[str]:
        return [
            override.removeprefix(f"{stage}.")
            for override in self.further
            if override.startswith(f"{stage}.")
        ]


def _only(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def check_overrides(further: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides. One without a stage at its start is a usage error."""
    for override in further:
        stage, _, rest = override.partition(".")
        if stage not in ("sft", "rl", "eval") or "=" not in rest:
            raise UsageError(f"{override}: expected sft.KEY=VALUE, rl.KEY=VALUE or eval.KEY=VALUE")
    return tuple(further)


def process_environment(variables: Mapping[str, str], python: Path) -> dict[str, str]:
    """Return the environment of a stage: the caller's with ``variables``, and with the ``afm`` of ``python`` first in PATH."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, **variables}
