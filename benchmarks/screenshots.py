"""Make the pictures of the documentation: viewer, report and terminal for a generated evaluation.

    .venv/bin/python benchmarks/screenshots.py --out docs/images

Two scripted models answer the same problems of the generated math world, with the real tool, loop, reward and metrics. Times
are set afterwards (4 ms per token, 0.2 s per call), so that the pictures are reproducible. Chromium (Debian's, driven by
Playwright) takes the pictures. The committed ones come from a machine with the DejaVu fonts.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from afm.agents import load_agent
from afm.datasets import write_tasks
from afm.datasets.mini_world import WorldSplit, generate, read_problem
from afm.evaluation import Conditions, RunManifest, Sources, evaluate, read_manifest, summarise
from afm.evaluation.prices import Prices
from afm.models.base import Generation, SamplingParams, ScriptedModel
from afm.rewards import load_reward
from afm.rollout import Episode
from afm.tools import load_tools
from afm.trajectory.io import RecordWriter, load_records
from afm.trajectory.record import Cost, Record

ROOT = Path(__file__).resolve().parents[1]
RUN, DATA = Path("runs/coins"), Path("runs/heldout.jsonl")
QUESTIONS, ROUNDS = 60, 4
TOKEN_S, CALL_S = 0.004, 0.2
PRICES = Prices(prompt=0.2, completion=0.6, cached=0.02, tools={"code": 0.0002})
MOST_BYTES = 150_000
DARK = [(40, 46, 56), (240, 113, 120), (126, 198, 132), (229, 192, 105), (106, 164, 245), (198, 146, 233)]
TERMINAL = (
    (16, 20, 26),
    (224, 230, 238),
    [*DARK, (94, 196, 208), (200, 206, 214)],
    [(128, 138, 152), *DARK[1:], (94, 196, 208), (240, 244, 250)],
)
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 780}


class Solver(ScriptedModel):
    """Runs a program for a share of the questions; answers the others without one, mostly wrong."""

    def __init__(self, name: str, tool_share: float) -> None:
        super().__init__(self._say, name=name)
        self._tool_share = tool_share
        self._draw = random.Random(0)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Generate according to the question and the seed."""
        question = self._question(self.decode(prompt_ids))
        digest = hashlib.sha256(f"{self.name}/{question}/{params.seed}".encode()).digest()
        self._draw = random.Random(int.from_bytes(digest[:8]))
        return await super().generate(prompt_ids, params)

    @staticmethod
    def _question(text: str) -> str:
        return text.removeprefix("user: ").partition("\nassistant: ")[0].rpartition("Question: ")[2].strip()

    def _say(self, text: str) -> str:
        response = text.partition("\nassistant: ")[2]
        problem = read_problem(self._question(text))
        if problem is None:
            raise SystemExit(f"not a question of the math world: {text[-300:]}")
        if "</observation>" in response:
            seen = response.split("<observation>\n")[1].split("\n")[0]
            return (
                "\n<reflection>The program printed one number, and its size is plausible.</reflection>\n"
                f"<think>So that is the result.</think>\n<answer>\\boxed{{{seen}}}</answer>"
            )
        plan = "<plan>1. Write the changes as one expression.\n2. Compute it with a program.\n3. Report the number.</plan>\n"
        if self._draw.random() < self._tool_share:
            thought = "The changes follow each other, so brackets matter; a program is safer than my head."
            program = (
                f"# every change in the order of the story\nresult = {problem.expression}\nprint(result)"
            )
            return f"{plan}<think>{thought}</think>\n<code>\n```py\n{program}\n```\n</code>"
        slip = 0 if self._draw.random() < 0.3 else 10
        short = "<plan>1. Add it up.</plan>\n<think>This one is easy, I know it.</think>\n"
        broken = "" if self._draw.random() < 0.9 else "The answer is clear.\n"
        return f"{short}{broken}<answer>\\boxed{{{problem.answer - slip}}}</answer>"


def measured(record: Record) -> Record:
    """Return the episode with times that depend only on its tokens."""
    calls = tuple(call.model_copy(update={"seconds": CALL_S}) for call in record.calls)
    return record.model_copy(update={"calls": calls, "cost": timed_cost(record.cost)})


def timed_cost(cost: Cost) -> Cost:
    """Return the cost with such times."""
    writing, tools = TOKEN_S * cost.agent_tokens, CALL_S * cost.tool_calls
    times = {"generation_seconds": writing, "tool_seconds": tools, "wall_seconds": writing + tools}
    return cost.model_copy(update=times)


async def evaluated(out: Path, model: ScriptedModel, questions: int) -> None:
    """Write an evaluation as `afm eval` does."""
    tools, reward = load_tools(ROOT / "configs/tools/code_executor.yaml"), load_reward()
    tasks = list(generate(WorldSplit.HELDOUT, questions, seed=0))
    try:
        await evaluate(
            tasks,
            load_agent("math"),
            model,
            tools,
            reward,
            out,
            Conditions(
                SamplingParams(2000), rounds=ROUNDS, sources=Sources(data=("heldout.jsonl",), prices=PRICES)
            ),
            parallel=1,
        )
    finally:
        await asyncio.gather(reward.close(), *(tool.close() for tool in tools.values()))
    settled(out)


def settled(out: Path) -> None:
    """Set the times of a finished evaluation, and the date and machine in its manifest."""
    records = [measured(record) for record in load_records(out / "episodes.jsonl")]
    (out / "episodes.jsonl").unlink()
    with RecordWriter(out / "episodes.jsonl") as writer:
        for record in records:
            writer.write(record)
    manifest = read_manifest(out / "manifest.json")
    metrics = summarise(records, spec=manifest.spec, prices=manifest.prices)
    (out / "metrics.json").write_text(metrics.model_dump_json(indent=2) + "\n")
    facts: dict[str, Any] = {
        "started": "2026-01-01T00:00:00+00:00",
        "machine": {"system": "Linux", "cpus": 2},
    }
    settled_manifest: RunManifest = manifest.model_copy(update=facts)
    (out / "manifest.json").write_text(settled_manifest.model_dump_json(indent=2) + "\n")


def make_run(questions: int) -> None:
    """Make a run folder in the working folder: before and after the model learned to use its tool."""
    for name, share in (("eval_sft", 0.45), ("eval_rl", 0.93)):
        asyncio.run(evaluated(RUN / name, Solver("coins-" + name.removeprefix("eval_"), share), questions))
    write_tasks(generate(WorldSplit.HELDOUT, questions, seed=0), DATA)


@contextmanager
def viewing() -> Iterator[str]:
    """Run `afm view` for the run; yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "afm.cli.main", "view", str(RUN)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise SystemExit("`afm view` did not start")
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def terminal(command: str, show: Callable[[Any], None], width: int = 104) -> str:
    """Return the terminal output of ``show`` as a page."""
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme

    console = Console(
        record=True,
        force_terminal=True,
        color_system="truecolor",
        width=width,
        file=io.StringIO(),
        highlight=False,
        legacy_windows=False,
        force_interactive=False,
    )
    console.print(f"[bold]$ {command}[/bold]")
    show(console)
    svg = re.sub(
        r"@font-face \{.*?\}",
        "",
        console.export_svg(title="afm", theme=TerminalTheme(*TERMINAL)),
        flags=re.DOTALL,
    )
    svg = svg.replace(
        "Fira Code", "DejaVu Sans Mono"
    )  # otherwise the browser loads that font over the network
    return f'<body style="margin:0;width:1100px">{svg}</body>'


def show_answer(console: Any) -> None:
    """Show a turn of `afm ask`, with the times of the pictures."""
    from afm.cli.ask_chat import EpisodeView
    from afm.rollout import CallFinished, EpisodeEvent, run_episode

    tools = load_tools(ROOT / "configs/tools/code_executor.yaml")
    question = next(generate(WorldSplit.HELDOUT, 1, seed=3)).question
    events: list[EpisodeEvent] = []

    async def ask() -> Episode:
        try:
            return await run_episode(
                load_agent("math"), Solver("coins-rl", 1.0), tools, question, seed=0, on_event=events.append
            )
        finally:
            await asyncio.gather(*(tool.close() for tool in tools.values()))

    episode = asyncio.run(ask())
    console.print(f"you> {question}\n")
    view = EpisodeView(load_agent("math"), console, PRICES)
    for event in events:
        if isinstance(event, CallFinished):
            event = replace(event, call=event.call.model_copy(update={"seconds": CALL_S}))
        view.show(event)
    view.summarise(replace(episode, cost=timed_cost(episode.cost)))


def show_doctor(console: Any) -> None:
    """Show `afm doctor` for an evaluation without a judge and with a missing model."""
    from afm.cli.doctor import print_table
    from afm.evaluation.doctor import diagnose

    words = ["model=models/code_agent_7b", f"data={DATA}", f"output_dir={RUN}/eval_new"]
    for name in ("GRM_BASE_URL", "GRM_API_KEY"):
        os.environ.pop(name, None)
    found = diagnose(ROOT / "configs/tiny/eval/math_world.yaml", words)
    print_table([one for one in found if one.subject != "disk"], "", console)


def photograph(out: Path) -> None:
    """Take all pictures."""
    from playwright.sync_api import sync_playwright

    report = subprocess.run(
        [sys.executable, "-m", "afm.cli.main", "report", str(RUN)], check=True, capture_output=True, text=True
    )
    terminals = {  # before the browser starts, which runs the event loop
        "ask": terminal("afm ask --agent math --model runs/coins/rl --prices prices.yaml", show_answer),
        "doctor": terminal(
            "afm doctor configs/tiny/eval/math_world.yaml model=models/code_agent_7b", show_doctor
        ),
    }
    with viewing() as address, sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)

        def page(size: Any, scheme: Any = "light") -> Any:
            return browser.new_page(viewport=size, color_scheme=scheme)

        def save(found: Any, name: str, **options: Any) -> None:
            kept(found.screenshot(animations="disabled", **options), out / f"{name}.png")
            found.close()

        def opened(size: Any, scheme: Any = "light") -> Any:
            found = page(size, scheme)
            found.goto(
                f"{address}#tool=code", wait_until="networkidle"
            )  # the list is complete, so a click has an effect
            found.click("#list a >> nth=0")
            found.wait_for_selector(".block")
            return found

        found = page({"width": 1280, "height": 300})
        found.goto(address)
        found.wait_for_selector("table.files tbody tr")
        save(found, "viewer_files")
        found = page({"width": 1280, "height": 600})
        found.goto(f"{address}#verdict=failed&text=farm")
        found.wait_for_selector("#list a")
        save(found, "viewer_list")
        save(opened(WIDE), "viewer_episode")
        save(opened(WIDE, "dark"), "viewer_episode_dark")
        save(opened(NARROW), "viewer_narrow")
        found = opened(WIDE)
        found.keyboard.press("c")
        found.click(".others button >> text=eval_sft >> nth=0")
        found.wait_for_selector(".side >> nth=1")
        found.keyboard.press("d")
        found.wait_for_selector(".pairs")
        save(found, "viewer_differences")
        found = page({"width": 1280, "height": 1840})
        found.goto(Path(report.stdout.strip()).resolve().as_uri())
        save(found, "report")
        for name, shown in terminals.items():
            found = page({"width": 1100, "height": 400})
            found.set_content(shown)
            kept(found.locator("svg").screenshot(), out / f"{name}.png")
            found.close()
        browser.close()


def kept(png: bytes, path: Path) -> None:
    """Write a picture, with 256 colours if it would otherwise be too large."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {image.width} x {image.height}, {size / 1000:.0f} kB")
    if size > MOST_BYTES:
        raise SystemExit(f"{path}: larger than {MOST_BYTES // 1000} kB")


def main() -> None:
    """Make the run, then its pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.gettempdir(), "afm-pictures")  # the pictures show its name
    try:
        folder.mkdir()
    except FileExistsError:
        raise SystemExit(
            f"{folder} exists: another run is active, or was killed; in that case remove the folder"
        ) from None
    try:
        with chdir(folder):
            make_run(arguments.questions)
            photograph(out)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
