"""The main job in stages: world, team, trajectories, SFT, DAPO, evaluations, report."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from afm.agents import AgentSpec, load_agent
from afm.cli.stages import Stage
from afm.configuration import read_file
from afm.errors import EngineError
from afm.processes import tied_environment

if TYPE_CHECKING:
    from afm.datasets import Task

Progress = Callable[[str, int, int | None], None]
"""Receives what is counted, how many are done, and how many there are (``None``: unknown)."""

DATASET_NAME = "math"
VOCABULARY_SIZE = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything; the overrides are ``key=value`` arguments of ``afm sft`` and ``afm rl``."""

    train_tasks: int
    rl_tasks: int
    heldout_tasks: int
    sft: tuple[str, ...] = ()
    rl: tuple[str, ...] = ()


FULL = Plan(train_tasks=6000, rl_tasks=4096, heldout_tasks=200)
SMOKE = Plan(
    train_tasks=400,
    rl_tasks=64,
    heldout_tasks=20,
    sft=("max_steps=120", "save_steps=40"),
    rl=("verl.trainer.total_training_steps=2", "verl.algorithm.filter_groups.enable=false"),
)
"""The same path with so little training that it proves the machinery and nothing else; groups are not filtered, since
hardly any of them would differ yet."""


@dataclass(frozen=True)
class Job:
    """One quickstart run.

    Attributes:
        out: Folder of everything the run makes.
        configs: The project's ``configs`` folder.
        real_data: Benchmark file to evaluate on as well.
    """

    out: Path
    configs: Path
    plan: Plan
    seed: int
    real_data: Path | None
    progress: Progress

    def stages(self) -> list[Stage]:
        """Everything to do, in order."""
        stages = [
            Stage("world", "generate the world of problems", self.make_world),
            Stage("distill", "let the team solve the training problems", self.distill),
            Stage("prepare", "write training files, tokenizer and a fresh model", self.prepare),
            Stage("sft", "fine-tune on what the agent wrote (LLaMA-Factory)", self.sft),
            Stage(
                "eval_sft",
                "evaluate after fine-tuning",
                lambda: self.evaluate("sft", self.world / "heldout.jsonl", "eval_sft"),
            ),
            Stage("rl", "reinforce with real tool calls (DAPO on verl)", self.rl),
            Stage(
                "eval_rl",
                "evaluate after reinforcement",
                lambda: self.evaluate("rl", self.world / "heldout.jsonl", "eval_rl"),
            ),
        ]
        if (real := self.real_data) is not None:
            folder = f"eval_{real.stem}_{hashlib.sha256(real.read_bytes()).hexdigest()[:8]}"
            title = f"evaluate on {real.name}"
            stages.append(Stage(folder, title, lambda: self.evaluate("rl", real, folder)))
        return stages

    @property
    def spec(self) -> AgentSpec:
        """The math agent for tiny models."""
        return load_agent(self.configs / "tiny/agents/math.yaml")

    @property
    def world(self) -> Path:
        """Folder of the three sets of problems."""
        return self.out / "world"

    @property
    def report_path(self) -> Path:
        """The report a person opens at the end."""
        return self.out / "report.html"

    def make_world(self) -> str:
        """Write the three disjoint sets of problems as JSONL."""
        from afm.datasets import write_tasks
        from afm.datasets.mini_world import Split, generate

        sizes = {
            Split.TRAIN: self.plan.train_tasks,
            Split.RL: self.plan.rl_tasks,
            Split.HELDOUT: self.plan.heldout_tasks,
        }
        for split, count in sizes.items():
            write_tasks(generate(split, count, seed=self.seed), self.world / f"{split}.jsonl")
        return ", ".join(f"{count} {split}" for split, count in sizes.items())

    def distill(self) -> str:
        """Let the scripted team work with the real sandbox; merge its log into trajectories."""
        from afm.distill import distill
        from afm.tools import load_tools

        async def work() -> str:
            tools = load_tools(self.tools_config)
            try:
                summary = await distill(
                    self._tasks("train"),
                    self.spec,
                    tools,
                    self.out / "distill",
                    seed=self.seed,
                    progress=self.progress,
                )
            finally:
                await asyncio.gather(*(tool.close() for tool in tools.values()))
            return f"{summary.kept} of {summary.tasks} trajectories kept, {summary.tool_calls} tool calls"

        return asyncio.run(work())

    def prepare(self) -> str:
        """Write the files both trainers read, and a tokenizer and model from scratch."""
        from afm.datasets.prepare import write_rl, write_sft
        from afm.models.tiny import create_tiny_model, train_tokenizer
        from afm.trajectory.io import load_records

        data, start = self.out / "data", self.out / "start"
        source = self.out / "distill/trajectories.jsonl"
        rows = write_sft(load_records(source), self.spec, data, name=DATASET_NAME, inputs=[source])
        write_rl(self._tasks("rl"), self.spec, data / "rl.parquet", inputs=[self.world / "rl.jsonl"])
        alpaca = json.loads((data / f"{DATASET_NAME}.json").read_text(encoding="utf-8"))
        train_tokenizer(_texts(alpaca), start, vocab_size=VOCABULARY_SIZE)
        create_tiny_model(start, start, seed=self.seed)
        return f"{rows} demonstrations, {self.plan.rl_tasks} problems for reinforcement"

    def sft(self) -> str:
        """Run LLaMA-Factory through its plugin, in a process of its own."""
        self._run_engine(
            "sft",
            "--quiet",
            str(self.configs / "tiny/sft/math.yaml"),
            f"model_name_or_path={self.out / 'start'}",
            f"dataset_dir={self.out / 'data'}",
            f"dataset={DATASET_NAME}",
            f"output_dir={self.out / 'sft'}",
            f"seed={self.seed}",
            *self.plan.sft,
        )
        return f"model in {self.out / 'sft'}"

    def rl(self) -> str:
        """Run verl through its plugin, in a process of its own."""
        self._run_engine(
            "rl",
            str(self.configs / "tiny/rl/math.yaml"),
            f"model={self.out / 'sft'}",
            f"train_files={self.out / 'data/rl.parquet'}",
            f"val_files={self.out / 'data/rl.parquet'}",
            f"output_dir={self.out / 'rl'}",
            f"seed={self.seed}",
            *self.plan.rl,
        )
        return f"model in {self.out / 'rl'}"

    def evaluate(self, model: str, data: Path, name: str) -> str:
        """Evaluate a trained model at temperature 1, resuming where an earlier try stopped."""
        from afm.evaluation.config import EvalConfig
        from afm.evaluation.job import run_job

        settings = EvalConfig(
            name=name,
            data=(data,),
            agent=self.spec.name,
            model=str(self.out / model),
            tools=self.tools_config,
            seed=self.seed,
            out_dir=self.out / name,
        )
        metrics = asyncio.run(run_job(settings, on_progress=self._count_episodes))
        score = metrics.pass_at_1
        return (
            f"pass@1 {score.value:.3f} ({score.low:.3f} to {score.high:.3f})"
            if score
            else "no episode was scored"
        )

    def check_real_data(self) -> None:
        """Find out before all the work whether the benchmark file can be read and judged."""
        from afm.datasets import read_tasks
        from afm.rewards.sources import BY_SOURCE, scorer_name

        if self.real_data is not None:
            for task in read_tasks(self.real_data):
                scorer_name(task.data_source, BY_SOURCE)

    def recipe_digest(self) -> str:
        """Fingerprint of the settings the results depend on; comments are none."""
        names = ("agents/math", "sft/math", "rl/math", "tools/code_executor")
        settings = [read_file(self.configs / f"tiny/{name}.yaml") for name in names]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    def report(self) -> None:
        """Write the report of everything that is finished."""
        from afm.evaluation.report import write_run_report

        write_run_report(self.out, self.report_path)

    @property
    def tools_config(self) -> Path:
        """The sandboxed code tool, with limits for short programs."""
        return self.configs / "tiny/tools/code_executor.yaml"

    def _tasks(self, split: str) -> list[Task]:
        from afm.datasets import read_tasks

        return list(read_tasks(self.world / f"{split}.jsonl"))

    def _count_episodes(self, done: int, total: int) -> None:
        self.progress("episodes", done, total)

    def _run_engine(self, command: str, *arguments: str) -> None:
        """Run ``afm COMMAND`` as a process that ends when this one does."""
        words = [sys.executable, "-P", "-m", "afm.cli.main", command, *arguments]
        with subprocess.Popen(words, env=tied_environment()) as child:
            status = self._wait(child, self.out / command)
        if status != 0:
            raise EngineError(
                f"`afm {command}` ended with status {status}; see {self.out / command / 'training.log'}. "
                "Run the same quickstart again to continue from what is finished."
            )

    def _wait(self, child: subprocess.Popen[bytes], folder: Path) -> int:
        try:
            while True:
                try:
                    return child.wait(timeout=1.0)
                except subprocess.TimeoutExpired:
                    self._count_steps(folder / "trainer_log.jsonl")
        except KeyboardInterrupt:  # the child got it, too, and leaves what is finished
            child.wait()
            raise

    def _count_steps(self, log: Path) -> None:
        if not log.exists():
            return
        whole = [
            line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
        ]
        if whole:
            last = json.loads(whole[-1])
            self.progress("training steps", last["current_steps"], last["total_steps"])


def _texts(alpaca: Sequence[dict[str, str]]) -> Iterable[str]:
    for row in alpaca:
        yield row["instruction"]
        yield row["output"]
