"""The stages of the quickstart, and the job that runs them and resumes after ``kill -9``."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm.agents import AgentSpec, load_agent
from afm.cli.recipes import Recipe, RecipeSizes
from afm.cli.train import LAUNCHER, TRAINER, make_model_folder, model_source
from afm.configuration import read_file
from afm.errors import EngineError
from afm.memory_arithmetic import multiplies_bfloat16, rl_in_bfloat16
from afm.processes import tied_environment
from afm.runs.folder import SETTINGS_FILE, RunFolder
from afm.runs.journal import Journal, read_rows
from afm.terminal import plural

if TYPE_CHECKING:
    from afm.datasets import Task


STAGES_FILE = "stages.jsonl"


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of a job. Its end is stored under ``name``. ``run`` returns a note that is shown at the end."""

    name: str
    title: str
    run: Callable[[], str]


@dataclass(frozen=True, slots=True)
class FinishedStage:
    """A finished stage, as stored on disk. An attempt that was stopped is stored with an empty note."""

    name: str
    seconds: float
    note: str


def run_stages(
    stages: Sequence[Stage],
    out_dir: Path,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
) -> list[FinishedStage]:
    """Run the unfinished stages, in order.

    Args:
        settings: Settings that the results depend on, as JSON values. A folder with other settings is refused.
        say: Receives a line at the beginning and at the end of each stage.

    Raises:
        ConfigError: ``out_dir`` holds a run with other settings.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    log = out_dir / STAGES_FILE
    # Before the stages: a stage writes rows before its entry in the log.
    RunFolder(out_dir, "--output-dir").claim(settings, [out_dir / SETTINGS_FILE])
    finished = {stage.name: stage for stage in read_stages(log) if stage.note}
    for number, stage in enumerate(stages, start=1):
        head = f"[{number}/{len(stages)}] {stage.title}"
        if stage.name in finished:
            say(f"{head}: done before ({finished[stage.name].note})")
            continue
        say(head)
        begun, note = time.monotonic(), ""
        try:
            note = stage.run() or "done"
        finally:
            done = FinishedStage(stage.name, round(time.monotonic() - begun, 1), note)
            with Journal(log, sync=True) as journal:
                journal.append_row(asdict(done))
        finished[stage.name] = done
        say(f"      {note} ({done.seconds:.0f} s)")
    return [finished[stage.name] for stage in stages]


def read_stages(log: Path) -> list[FinishedStage]:
    """Read the stages and stopped attempts in order. An incomplete last line is ignored."""
    return [FinishedStage(**row) for _, row in read_rows(log, {"name": str, "note": str})]


Progress = Callable[[str, int, int | None], None]
"""Receives the name of what is counted, the number done, and the total (``None`` if unknown)."""


def run_engine(command: str, *words: str, folder: Path) -> None:
    """Run the launcher of ``afm sft`` or ``afm rl`` to its end. It ends with this process.

    Args:
        folder: Its output folder, with its log.

    Raises:
        EngineError: Its exit status is not 0.
    """
    with subprocess.Popen([sys.executable, "-P", "-m", *words], env=tied_environment()) as child:
        try:
            status = child.wait()
        except KeyboardInterrupt:
            child.wait()  # it got the signal, too, keeps finished work, and says how to resume
            raise SystemExit(130) from None
    if status != 0:
        raise EngineError(
            f"`afm {command}` ended with status {status}; see {folder / 'training.log'}. "
            "Run the same quickstart again to resume."
        )


@dataclass(frozen=True)
class Quickstart:
    """A quickstart run into the folder ``out``, with the project's ``configs``.

    Attributes:
        real_data: Another benchmark file to evaluate on.
        base: The pre-trained model to start from; ``None`` for a small model with random weights.
    """

    out: Path
    configs: Path
    recipe: Recipe
    plan: RecipeSizes
    seed: int
    real_data: Path | None
    progress: Progress
    base: str | None = None

    def stages(self) -> list[Stage]:
        """Return all stages, in order."""
        held_out = self.world / "heldout.jsonl"
        fresh = "write training files, tokenizer and a fresh model"
        stages = [] if self.base is None else [Stage("base", f"take the model {self.base}", self.import_base)]
        stages += [
            Stage("world", "generate the world of problems", self.make_world),
            Stage("distill", "let the team solve the training problems", self.distill),
            Stage("prepare", "write training files" if self.base else fresh, self.prepare),
            Stage("sft", "fine-tune on what the agent wrote (LLaMA-Factory)", self.sft),
            Stage(
                "eval_sft", "evaluate after fine-tuning", lambda: self.evaluate("sft", held_out, "eval_sft")
            ),
            Stage("rl", "reinforce with real tool calls (DAPO on verl)", self.rl),
            Stage(
                "eval_rl", "evaluate after reinforcement", lambda: self.evaluate("rl", held_out, "eval_rl")
            ),
        ]
        if (real := self.real_data) is not None:
            folder = f"eval_{real.stem}_{hashlib.sha256(real.read_bytes()).hexdigest()[:8]}"
            title = f"evaluate on {real.name}"
            stages.append(Stage(folder, title, lambda: self.evaluate("rl", real, folder)))
        return stages

    @property
    def spec(self) -> AgentSpec:
        """Agent of the world for tiny models."""
        return load_agent(self._config("agents"))

    @property
    def world(self) -> Path:
        """Folder of the three sets of problems and the data of the tool."""
        return self.out / "world"

    @property
    def report_path(self) -> Path:
        """The final report."""
        return self.out / "report.html"

    @property
    def start(self) -> Path:
        """Folder of the model that fine-tuning starts from."""
        source = model_source(self.base) if self.base else None
        return source if source is not None and source.is_dir() else self.out / "start"

    def import_base(self) -> str:
        """Make a folder of the pre-trained model, and return the forecast of the run.

        Raises:
            ConfigError: The model cannot be used, or the training run does not fit in memory.
        """
        from afm.cli.train import forecast

        assert self.base is not None
        make_model_folder(self.base, self.out / "start", self.progress)
        return forecast(self.training("sft"), self.training("rl"), 2 * self.plan.heldout_tasks)

    def make_world(self) -> str:
        """Write the three disjoint sets of problems as JSONL, and the data of the tool."""
        self.recipe.make_world(self.world, self.plan, self.seed)
        return ", ".join(f"{count:,} {split}" for split, count in self.plan.splits.items())

    def distill(self) -> str:
        """Let the scripted team work with the real tool, and merge its log into trajectories."""
        from afm.distill.run import distill
        from afm.tools import load_tools

        async def work() -> str:
            spec, tools = self.spec, load_tools(self.tools_config)
            team = self.recipe.team(spec, self.seed)
            try:
                summary = await distill(
                    self._tasks("train"),
                    spec,
                    tools,
                    self.out / "distill",
                    team=team,
                    seed=self.seed,
                    progress=self.progress,
                )
            finally:
                await asyncio.gather(*(tool.close() for tool in tools.values()))
            calls = plural(summary.tool_calls, "tool call")
            return f"{summary.kept:,} of {summary.tasks:,} trajectories kept, {calls}"

        with self.recipe.serving(self.world):
            return asyncio.run(work())

    def prepare(self) -> str:
        """Write the files of both trainers, and a tokenizer and a model from scratch."""
        from afm.datasets.rl_files import write_rl
        from afm.datasets.sft_files import write_sft
        from afm.models.tiny import create_tiny_model, train_tokenizer
        from afm.trajectory.io import load_records

        data, start = self.out / "data", self.out / "start"
        source = self.out / "distill/trajectories.jsonl"
        rows = write_sft(load_records(source), self.spec, data, name=self.recipe.agent, inputs=[source])
        write_rl(self._tasks("rl"), self.spec, data / "rl.parquet", inputs=[self.world / "rl.jsonl"])
        if self.base is None:
            alpaca = json.loads((data / f"{self.recipe.agent}.json").read_text(encoding="utf-8"))
            recipe = self.recipe
            train_tokenizer(
                _texts(alpaca), start, vocab_size=recipe.vocabulary_size, whole_tags=recipe.whole_tags
            )
            create_tiny_model(start, start, seed=self.seed, heads=recipe.heads)
        return f"{rows:,} demonstrations, {self.plan.rl_tasks:,} problems for reinforcement learning"

    def training(self, kind: str) -> tuple[Path, list[str]]:
        """Return configuration and overrides of ``afm sft`` or ``afm rl``."""
        data = self.out / "data"
        own = [f"output_dir={self.out / kind}", f"seed={self.seed}"]
        if kind == "rl":
            files = [f"{key}={data / 'rl.parquet'}" for key in ("train_files", "val_files")]
            own += () if self.base is None else rl_in_bfloat16()
            return self._config(kind), [f"model={self.out / 'sft'}", *files, *own, *self.plan.rl]
        own += [f"model_name_or_path={self.start}", f"dataset_dir={data}", f"dataset={self.recipe.agent}"]
        if self.base is not None and multiplies_bfloat16():
            own.append("bf16=true")
        return self._config(kind), [*own, *self.plan.sft]

    def sft(self) -> str:
        """Run ``afm sft`` (LLaMA-Factory) in another process."""
        config, overrides = self.training("sft")
        run_engine("sft", TRAINER, "--quiet", str(config), *overrides, folder=self.out / "sft")
        return f"model in {self.out / 'sft'}"

    def rl(self) -> str:
        """Run ``afm rl`` (verl) in another process."""
        with self.recipe.serving(self.world):
            config, overrides = self.training("rl")
            run_engine("rl", LAUNCHER, str(config), *overrides, folder=self.out / "rl")
        return f"model in {self.out / 'rl'}"

    def evaluate(self, model: str, data: Path, name: str) -> str:
        """Evaluate a trained model at temperature 1. An interrupted evaluation is resumed."""
        from afm.evaluation.config import EvalConfig, ModelSettings
        from afm.evaluation.job import run_job
        from afm.evaluation.wording import ours

        kind = "bfloat16" if self.base is not None and multiplies_bfloat16() else None
        settings = EvalConfig(
            name=name,
            data=(data,),
            agent=self.spec.name,
            model=ModelSettings(path=str(self.out / model), dtype=kind),
            tools=self.tools_config,
            seed=self.seed,
            output_dir=self.out / name,
        )
        with self.recipe.serving(self.world):
            metrics = asyncio.run(run_job(settings, on_progress=self._count_episodes))
        score = metrics.pass_at_1
        return f"pass@1 {ours(score)}" if score else "no episode was scored"

    def check_real_data(self) -> None:
        """Check that the benchmark file can be read and scored."""
        from afm.datasets import read_tasks
        from afm.rewards.registry import BY_SOURCE, scorer_name

        if self.real_data is not None:
            for task in read_tasks(self.real_data):
                scorer_name(task.data_source, BY_SOURCE)

    def recipe_digest(self) -> str:
        """Return a fingerprint of the settings that the results depend on, without comments."""
        files = [*map(self._config, ("agents", "sft", "rl")), self.tools_config]
        settings = [read_file(file) for file in files]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    def example(self) -> str:
        """Return a question that the model was not trained on."""
        return self.recipe.example or self._tasks("heldout")[0].question

    def report(self) -> None:
        """Write the report of the finished stages."""
        from afm.evaluation.report import write_run_report

        write_run_report(self.out, self.report_path)

    @property
    def tools_config(self) -> Path:
        """Tools YAML of the world, with small limits."""
        return self.configs / f"tiny/tools/{self.recipe.tools}.yaml"

    def _config(self, kind: str) -> Path:
        name = self.recipe.agent if kind == "agents" else self.recipe.training
        return self.configs / f"tiny/{kind}/{name}.yaml"

    def _tasks(self, split: str) -> list[Task]:
        from afm.datasets import read_tasks

        return list(read_tasks(self.world / f"{split}.jsonl"))

    def _count_episodes(self, done: int, total: int) -> None:
        self.progress("episodes", done, total)


def _texts(alpaca: Sequence[dict[str, str]]) -> Iterable[str]:
    for row in alpaca:
        yield row["instruction"]
        yield row["output"]
