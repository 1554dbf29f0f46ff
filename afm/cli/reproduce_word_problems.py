"""The stages of `afm reproduce` for SVAMP and GSM8K, from the published annotations to a table of three models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from afm.cli.reproduce_stages import Agent, ChainStage, Reproduction, StageCommand
from afm.memory_arithmetic import multiplies_bfloat16, rl_in_bfloat16


@dataclass(frozen=True, slots=True)
class _StartModel:
    """A start model: its name for `afm import`, its folder, and the agent whose prompt it is trained with."""

    source: str
    folder: str
    agent: str


_MODELS: Mapping[str, _StartModel] = {
    "135m": _StartModel("smollm2", "smollm2_135m", "configs/tiny/agents/math.yaml"),
    "1.5b": _StartModel("Qwen/Qwen2.5-1.5B-Instruct", "qwen2.5_1.5b_instruct", "math"),
}
_SMALL = "135m"
_EPISODE_TOKENS = {"svamp": 256, "gsm8k": 512}
"""Limit for the small model, which otherwise does not stop. The demonstrations are half as long."""

_SPLIT = {"svamp": ("sft", "rl")}
"""Questions for fine-tuning and for reinforcement, where they are not the same."""

WORD_PROBLEMS = {
    name: Agent(name, tuple(_MODELS), "dapo", (name,), (), folder=name, usual_size=_SMALL)
    for name in _EPISODE_TOKENS
}


@dataclass(frozen=True)
class WordProblems(Reproduction):
    """A chain without a published model: a team runs the annotated programs, and three models are compared.

    The small model is evaluated and trained on a CPU. No stage reads the test questions before ``eval``.
    """

    @property
    def on_gpu(self) -> bool:
        """Whether SFT and RL need a GPU."""
        return self.size != _SMALL

    @property
    def serves(self) -> bool:
        """Whether the evaluation uses a model server: never, because each evaluation loads its own model."""
        return False

    @property
    def base(self) -> Path:
        """Folder of the model that fine-tuning starts from."""
        return self.root / "models" / _MODELS[self.size].folder

    @property
    def tasks(self) -> Path:
        """Folder of the questions for training and validation."""
        return self.data / "tasks"

    def _download(self) -> ChainStage:
        commands = [StageCommand(("afm", "data", "download", str(self.sets), "--output-dir", str(self.raw)))]
        if not (self.base / "config.json").exists():
            commands.append(
                StageCommand(("afm", "import", _MODELS[self.size].source, "--output-dir", str(self.base)))
            )
        made = (self.raw / "download.lock.json", self.base / "config.json")
        return ChainStage("download", tuple(commands), made)

    def _prepare(self) -> ChainStage:
        prepare, agent = ("afm", "data", "prepare"), ("--agent", _MODELS[self.size].agent)
        train, work = self.tasks / "train.jsonl", self.data / "distill"
        names = _SPLIT.get(self.agent.short, ("train", "train"))
        shown, rest = (self.tasks / f"{name}.jsonl" for name in names)
        sft = ("--output-dir", str(self.data / "sft"), "--name", f"{self.agent.short}_sft")
        commands = [
            (*prepare, "published", str(self.sets), "--data", str(self.raw), "--output-dir", str(self.data)),
            ("afm", "data", "distill", str(shown), "--output-dir", str(work), *agent),
            (*prepare, "sft", str(work / "trajectories.jsonl"), *sft, *agent),
        ]
        if shown != train:
            split = ("python", "examples/svamp/variants.py", str(train), str(shown), "--rl", str(rest))
            commands.insert(1, (*split, "--seed", "0"))
        sources = {file.stem: self.tasks / f"{file.stem}.jsonl" for file in self._rl_parts()}
        sources["train"] = rest
        commands += [
            (*prepare, "rl", str(source), "--out", str(self.data / f"rl/{name}.parquet"), *agent)
            for name, source in sources.items()
        ]
        made = [
            self.data / "sft/dataset_info.json",
            *self._rl_parts(),
            *map(self._benchmark_data, self.evaluated),
        ]
        return ChainStage("prepare", tuple(map(StageCommand, commands)), tuple(made))

    def _rl_parts(self) -> list[Path]:
        """Return the files with the questions of each RL run, in order, and of validation."""
        short = ["short"] if self.agent.short == "gsm8k" else []
        return [self.data / "rl" / f"{name}.parquet" for name in (*short, "train", "val")]

    def _sft(self) -> ChainStage:
        name = self.agent.short
        recipe = f"sft/{name}_agent_qwen2.5_{self.size}.yaml" if self.on_gpu else f"tiny/sft/{name}.yaml"
        config = str(self.project / "configs" / recipe)
        overrides = [
            f"model_name_or_path={self.base}",
            f"dataset_dir={self.data / 'sft'}",
            f"output_dir={self.sft_model}",
            *([] if self.on_gpu else [f"bf16={str(multiplies_bfloat16()).lower()}"]),
            *self._overrides("sft"),
        ]
        command = StageCommand(("afm", "sft", config, *overrides), {}, (config, *overrides))
        return ChainStage("sft", (command,), (self.sft_model / "config.json",))

    def _rl(self) -> ChainStage:
        name = self.agent.short
        recipe = f"rl/{name}_dapo_{self.size}.yaml" if self.on_gpu else f"tiny/rl/{name}.yaml"
        config = str(self.project / "configs" / recipe)
        *parts, validation = self._rl_parts()
        commands, model = [], self.sft_model
        for part in parts:
            run = (
                self.rl_run if part == parts[-1] else self.rl_run.with_name(f"{self.rl_run.name}_{part.stem}")
            )
            files = [f"train_files={part}", *([f"val_files={validation}"] if self.on_gpu else [])]
            fast = () if self.on_gpu else rl_in_bfloat16()
            overrides = [f"model={model}", *files, f"output_dir={run}", *fast, *self._overrides("rl")]
            commands.append(StageCommand(("afm", "rl", config, *overrides), {}, (config, *overrides)))
            model = run / "model"
        return ChainStage("rl", tuple(commands), (self.model / "config.json",))

    def _eval(self, server: str) -> ChainStage:
        [benchmark] = self.evaluated
        config = str(self.project / f"configs/eval/{benchmark}.yaml")
        tokens = _EPISODE_TOKENS[benchmark]
        kind = "bfloat16" if multiplies_bfloat16() else "float32"
        small = ["limits.max_turns=2", f"limits.max_response_tokens={tokens}", f"model.dtype={kind}"]
        limits = [] if self.on_gpu else small
        commands, made = [], []
        for stage, model in {"base": self.base, "sft": self.sft_model, "rl": self.model}.items():
            out = self.results / f"eval_{stage}"
            overrides = [
                f"model.path={model}",
                f"data={self._benchmark_data(benchmark)}",
                f"output_dir={out}",
                *limits,
                *self._overrides("eval"),
            ]
            commands.append(StageCommand(("afm", "eval", config, *overrides), {}, (config, *overrides)))
            made.append(out / "metrics.json")
        return ChainStage("eval", tuple(commands), tuple(made))

    def _report(self) -> ChainStage:
        runs = [str(self.results / f"eval_{stage}") for stage in ("sft", "rl")]
        commands = (("afm", "eval", "compare", *runs), ("afm", "report", str(self.results)))
        return ChainStage("report", tuple(map(StageCommand, commands)), (self.results / "report.html",))
