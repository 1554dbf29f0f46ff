"""What reinforcement through the gateway gains for a harness on the quickstart's math world, next to our own loop.

    PYTHON benchmarks/harness_gain.py own --seeds 0 1 2 --out runs/harness_gain --record benchmarks/harness_gain.json
    PYTHON benchmarks/harness_gain.py script langgraph --seeds 0 --out runs/harness_gain --record benchmarks/harness_gain.json

PYTHON is a virtual environment with this project and `requirements/frameworks.txt`. Programs run with the same Python.

Each run has the quickstart's stages. The questions are the same for all harnesses with one seed. A scripted teacher
answers through the gateway, so the tiny model learns the chats that the harness itself sends: two episodes give the
pattern of a direct answer and of a calculated one, and six other episodes must be equal to the pattern with their own
question, expression and answer in it. The teacher skips the calculator as often as the quickstart's team. `own` is the
quickstart itself. Reinforcement has the same number of steps and episodes for all, without group filtering.
Programs are forked from a process that has imported their packages (`harness.preload`).

Finished stages are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure_quickstart import comparison
from timing import REPO, environment

from afm.cli.options import configs_folder
from afm.cli.pipeline import STAGES_FILE, Quickstart, read_stages, run_stages
from afm.cli.recipes import MATH, RecipeSizes
from afm.datasets import Task
from afm.datasets.mini_world import read_problem
from afm.distill.scripted_teams import MATH_P_DIRECT
from afm.harness import ChatRenderer, Session
from afm.harness.episode import HarnessEpisode, HarnessRunner
from afm.harness.settings import HarnessSettings
from afm.models.base import ScriptedModel
from afm.models.tiny import create_tiny_model, train_tokenizer
from afm.models.tokenizer import ChatTokenizer
from afm.terminal import ProgressView

CHECKED = 6
"""Episodes of the teacher that must be equal to their pattern."""
VOCABULARY = 1024
MAX_PROMPT_TOKENS = 448
SFT_STEPS = ("max_steps=2800", "save_steps=700")
"""Twice the quickstart's, unless the sizes say otherwise. A chat has fewer tokens with a loss: after 1,400 steps the model
still copied numbers wrong (script, seed 0: .33, and .57 after reinforcement)."""
PATTERN = "Tom has 1000003 coins. Then the number of coins grows 1000003 times. How many coins does Tom have?"
"""A question whose numbers are in no other text, so that they can be replaced in what a harness sends."""
TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML with results of tools in the form of Qwen. The gateway writes tools and calls into the text."""
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL)
_CALL_ID = re.compile(r"\bc[0-9a-f]{8}\b")

Chat = list[dict[str, Any]]
"""Messages of an SFT row: ``role``, ``content``, and ``loss`` on the assistant's."""


def _call(tool: str, argument: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{"{argument}": "%s"}}}}\n</tool_call>'


@dataclass(frozen=True)
class Harness:
    """A program of ``examples/harness`` and what its model writes: a calculation, and an answer.

    The calculation begins with the expression, as the quickstart's team does. Without that second copy, the tiny model
    copied numbers wrong in a quarter of its calls after 2,800 steps.
    """

    words: tuple[str, ...]
    calculation: str = f"The expression is %s.\n{_call('calculator', 'expression')}"
    answer: str = "%s"

    @property
    def settings(self) -> HarnessSettings:
        """The section ``harness`` of evaluation and training."""
        script, *rest = self.words
        command = ("python", str(REPO / "examples/harness" / script), *rest)
        return HarnessSettings(command=command, preload=True, concurrency=8, timeout_s=120, retries=1)


OWN = "own"
HARNESSES = {
    "script": Harness(("script.py",)),
    "langgraph": Harness(("langgraph_agent.py",)),
    "openai_agents": Harness(("openai_agent.py",)),
    "openai_agents_responses": Harness(("openai_agent.py", "responses")),
    "smolagents_tools": Harness(("smolagents_agent.py",), answer=_call("final_answer", "answer")),
    "smolagents_code": Harness(
        ("smolagents_agent.py", "code"),
        "The expression is %s.\n<code>\nprint(%s)\n</code>",
        "<code>\nfinal_answer(%s)\n</code>",
    ),
}

FULL = RecipeSizes(
    train_tasks=6000,
    rl_tasks=1024,
    heldout_tasks=200,
    rl=(
        "verl.trainer.total_training_steps=12",
        "verl.algorithm.filter_groups.enable=false",
        "verl.actor_rollout_ref.rollout.n=6",
        # Parts of a mini batch, which has 4 * 6 samples.
        "verl.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24",
        "verl.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=24",
    ),
)
SMOKE = replace(
    FULL,
    train_tasks=400,
    rl_tasks=64,
    heldout_tasks=8,
    sft=("max_steps=60", "save_steps=30"),
    rl=(
        "verl.trainer.total_training_steps=1",
        "verl.trainer.save_freq=1",
        "verl.algorithm.filter_groups.enable=false",
        "verl.data.train_batch_size=4",
        "verl.actor_rollout_ref.rollout.n=2",
        "verl.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "verl.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    ),
)


@dataclass(frozen=True)
class HarnessQuickstart(Quickstart):
    """The quickstart with a program as the agent: only data, training files and evaluation differ."""

    harness: Harness = HARNESSES["script"]

    def distill(self) -> str:
        """Let the scripted teacher answer the program; write the pattern of its chats, checked by further episodes."""
        folder = self.out / "distill"
        tasks = self._tasks("train")[:CHECKED]
        pattern = [Task(id=name, question=PATTERN, ground_truth="") for name in ("direct", "calculated")]
        direct = {"direct"} | {task.id for task in tasks if self._is_direct(task)}
        train_tokenizer(["Tom has 12 apples."], folder / "teacher", vocab_size=300)
        episodes = asyncio.run(self._play([*pattern, *tasks], direct, folder / "teacher"))
        codec = _tokenizer(folder / "teacher")
        chats = {task.id: chats_of(episodes[task.id], codec) for task in (*pattern, *tasks)}
        patterns = {name: chats[name] for name in ("direct", "calculated")}
        for task in tasks:
            expected = _without_ids(self._fill(patterns, task))
            if _without_ids(chats[task.id]) != expected:
                raise SystemExit(
                    f"{task.id}: the chats of the program differ from the pattern: got\n{chats[task.id]}\nexpected\n{expected}"
                )
        (folder / "patterns.json").write_text(json.dumps(patterns, indent=1) + "\n", encoding="utf-8")
        sizes = ", ".join(f"{len(rows)} {name}" for name, rows in patterns.items())
        return f"{len(episodes)} episodes of the teacher, {CHECKED} of them equal to the pattern (chats: {sizes})"

    def prepare(self) -> str:
        """Write the demonstrations, the questions for reinforcement learning, and a fresh model with its tokenizer."""
        from afm.datasets.rl_files import write_rl
        from afm.datasets.sft_files import register, write_array

        data = self.out / "data"
        patterns = json.loads((self.out / "distill/patterns.json").read_text(encoding="utf-8"))
        chats = [chat for task in self._tasks("train") for chat in self._fill(patterns, task)]
        data.mkdir(exist_ok=True)
        write_array(({"messages": chat} for chat in chats), data / "chats.json", "the teacher said nothing")
        register(data, "chats", "chats.json", {"messages": "messages"}, "openai_messages")
        write_rl(self._tasks("rl"), self.spec, data / "rl.parquet", inputs=[self.world / "rl.jsonl"])
        texts = (message["content"] for chat in chats for message in chat)
        train_tokenizer(texts, self.start, vocab_size=VOCABULARY, whole_tags=True)
        codec = _tokenizer(self.start)
        create_tiny_model(self.start, self.start, seed=self.seed, heads=self.recipe.heads)
        longest = max(_tokens(chat, codec) for chat in chats[:500])
        return (
            f"{len(chats)} demonstrations of at most {longest} tokens, {self.plan.rl_tasks} problems for RL"
        )

    def training(self, kind: str) -> tuple[Path, list[str]]:
        """The tiny recipes, with the program as the agent."""
        config, overrides = super().training(kind)
        if kind == "sft":
            chats = ["agent=null", "ignore_observation=false", "match_chat_template=true", "dataset=chats"]
            return config, [*SFT_STEPS, *overrides, *chats]
        command = json.dumps(list(self.harness.settings.command))
        program = [
            f"harness.command={command}",
            "harness.preload=true",
            f"verl.data.max_prompt_length={MAX_PROMPT_TOKENS}",
        ]
        return config.with_name("math_harness.yaml"), [*overrides, *program]

    def evaluate(self, model: str, data: Path, name: str) -> str:
        """Play the held-out questions with the program."""
        from afm.evaluation.config import EvalConfig, ModelSettings
        from afm.evaluation.job import run_job

        settings = EvalConfig(
            name=name,
            data=(data,),
            agent=self.spec.name,
            model=ModelSettings(path=str(self.out / model)),
            harness=self.harness.settings,
            seed=self.seed,
            output_dir=self.out / name,
        )
        score = asyncio.run(run_job(settings, on_progress=self._count_episodes)).pass_at_1
        return f"pass@1 {score.value:.3f} ({score.low:.3f} to {score.high:.3f})" if score else "no score"

    async def _play(
        self, tasks: Sequence[Task], direct: Iterable[str], tokenizer: Path
    ) -> dict[str, HarnessEpisode]:
        """The teacher's episodes, by task."""
        codec = _tokenizer(tokenizer)
        runner = HarnessRunner(self.harness.settings)
        played = {}
        try:
            for number, task in enumerate(tasks, start=1):
                model = ScriptedModel(self._teacher(task, task.id in direct), codec, name="teacher")
                episode = await runner.play(task, [], _sessions(model, codec), self.seed)
                if episode.failure:
                    raise SystemExit(f"{task.id}: {episode.failure}")
                played[task.id] = episode
                self.progress("episodes", number, len(tasks))
        finally:
            await runner.close()
        return played

    def _teacher(self, task: Task, direct: bool) -> Callable[[str], str]:
        """A function from the text so far to the teacher's reply."""
        expression, answer = _solved(task.question)

        def reply(text: str) -> str:
            asked = text.rpartition("<|im_start|>user\n")[2]
            observed = task.question not in asked and answer in asked
            if direct or observed:
                return self.harness.answer.replace("%s", answer)
            return self.harness.calculation.replace("%s", expression)

        return reply

    def _is_direct(self, task: Task) -> bool:
        """Whether the teacher skips the calculator, as the quickstart's team does."""
        problem = read_problem(task.question)
        assert problem is not None
        return random.Random(f"{self.seed}/{task.id}").random() < MATH_P_DIRECT[len(problem.changes)]

    def _fill(self, patterns: dict[str, list[Chat]], task: Task) -> list[Chat]:
        """The pattern's chats with the words of a task."""
        chats = patterns["direct" if self._is_direct(task) else "calculated"]
        expression, answer = _solved(task.question)
        old_expression, old_answer = _solved(PATTERN)
        text = json.dumps(chats).replace(PATTERN, task.question)
        text = text.replace(old_expression, expression).replace(old_answer, answer)
        rng = random.Random(task.id)
        fresh = {name: f"c{rng.getrandbits(32):08x}" for name in sorted(set(_CALL_ID.findall(text)))}
        filled: list[Chat] = json.loads(_CALL_ID.sub(lambda match: fresh[match[0]], text))
        return filled


def chats_of(episode: HarnessEpisode, codec: ChatTokenizer) -> list[Chat]:
    """The text of each trajectory, message by message; only what was sampled has a loss."""
    chats = []
    for trajectory in episode.trajectories:
        ids = [*trajectory.prompt_ids, *trajectory.response_ids]
        text = codec.backend.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        chat: Chat = [{"role": role, "content": content} for role, content in _TURN.findall(text)]
        replies = [message for message in chat if message["role"] == "assistant"]
        trained = [turn.trained for turn in trajectory.turns]
        trained = [False] * (len(replies) - len(trained)) + trained  # others were in the prompt
        for message, loss in zip(replies, trained, strict=True):
            message["loss"] = loss
        chats.append(chat)
    return chats


def _solved(question: str) -> tuple[str, str]:
    """Expression and answer."""
    problem = read_problem(question)
    assert problem is not None
    return problem.expression, str(problem.answer)


def _sessions(model: ScriptedModel, codec: ChatTokenizer) -> Callable[[str, int], Session]:
    return lambda key, seed: Session(key, model, ChatRenderer(codec), seed=seed)


def _tokenizer(folder: Path) -> ChatTokenizer:
    """The tokenizer with results of tools in its template; the folder keeps it."""
    codec = ChatTokenizer.load(folder)
    if codec.backend.chat_template != TEMPLATE:
        codec.backend.chat_template = TEMPLATE
        codec.backend.save_pretrained(str(folder))
    return codec


def _tokens(chat: Chat, codec: ChatTokenizer) -> int:
    return sum(len(codec.encode(f"<|im_start|>{row['role']}\n{row['content']}<|im_end|>\n")) for row in chat)


def _without_ids(chats: list[Chat]) -> Any:
    return json.loads(_CALL_ID.sub("ID", json.dumps(chats)))


def run(name: str, seed: int, out: Path, smoke: bool) -> dict[str, Any]:
    """Train and evaluate one harness with one seed, and return its row of the record."""
    view, load = ProgressView(), os.getloadavg()[0]
    plan = SMOKE if smoke else FULL
    common = (out, configs_folder(), MATH, plan, seed, None, view.update)
    job = Quickstart(*common) if name == OWN else HarnessQuickstart(*common, harness=HARNESSES[name])
    settings = {"harness": name, "seed": seed, "smoke": smoke, "recipe": job.recipe_digest()}
    print(f"\n{name}, seed {seed}", flush=True)
    run_stages(job.stages(), out, settings, view.line)
    scores = {
        stage: json.loads((out / stage / "metrics.json").read_text()) for stage in ("eval_sft", "eval_rl")
    }
    steps = [json.loads(line) for line in (out / "rl/metrics.jsonl").read_text("utf-8").splitlines()]
    failed = ("program_timeouts", "program_crashes", "program_floods", "program_silences", "program_retries")
    return {
        "harness": name,
        "seed": seed,
        "smoke": smoke,
        "before": scores["eval_sft"]["pass_at_1"],
        "after": scores["eval_rl"]["pass_at_1"],
        "gain": comparison(out),
        "steps": len(steps),
        "reward": [round(step["reward"], 4) for step in steps],
        "wrong_tokens": sum(step["token_drift"] for step in steps),
        "programs": {key: sum(step.get(key, 0) for step in steps) for key in failed},
        "trajectories": [round(step.get("trajectories", 1), 3) for step in steps],
        "seconds": {stage.name: stage.seconds for stage in read_stages(out / STAGES_FILE)},
        "load_before_and_after": [load, os.getloadavg()[2]],
        "environment": environment(["torch", "verl", "openai", "langgraph", "openai-agents", "smolagents"]),
    }


def keep(row: dict[str, Any], record: Path) -> None:
    """Put a row into the record, in place of an older one of the same harness and seed."""
    rows = json.loads(record.read_text("utf-8"))["runs"] if record.exists() else []
    same = (row["harness"], row["seed"])
    rows = [other for other in rows if (other["harness"], other["seed"]) != same] + [row]
    rows.sort(key=lambda each: ([OWN, *HARNESSES].index(each["harness"]), each["seed"]))
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"benchmark": "harness_gain", "runs": rows}, indent=1) + "\n", "utf-8")


def table_row(row: dict[str, Any]) -> str:
    """One line of the Markdown table."""
    scores = [
        f"{each['value']:.3f} ({each['low']:.3f} to {each['high']:.3f})"
        for each in (row["before"], row["after"], row["gain"])
    ]
    minutes = sum(row["seconds"].values()) / 60
    return f"| {row['harness']} | {row['seed']} | {' | '.join(scores)} | {row['steps']} | {row['wrong_tokens']:.0f} | {minutes:.1f} |"


def main() -> None:
    """Run what is not finished, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="+", choices=[OWN, *HARNESSES], metavar="NAME", help=", ".join([OWN, *HARNESSES])
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/harness_gain"))
    parser.add_argument(
        "--record", type=Path, help="JSON file that keeps the rows [default: OUT/harness_gain.json]"
    )
    parser.add_argument("--smoke", action="store_true", help="very few training steps")
    options = parser.parse_args()
    out = options.out.resolve()
    rows = []
    for name in options.names:
        for seed in options.seeds:
            rows.append(run(name, seed, out / name / f"seed{seed}", options.smoke))
            keep(rows[-1], options.record or out / "harness_gain.json")
    print(
        "| harness | seed | pass@1 after SFT | after RL | paired difference (95 %) | steps | wrong tokens | minutes |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(map(table_row, rows)))


if __name__ == "__main__":
    main()
