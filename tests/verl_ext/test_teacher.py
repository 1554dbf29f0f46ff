"""On-policy distillation: advantages by hand, the gradient of the reverse KL divergence, one tokenizer, a whole run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from extras import needs

needs("verl")
torch = pytest.importorskip("torch")

from tensordict import TensorDict  # noqa: E402

from afm.agents import load_agent  # noqa: E402
from afm.datasets import Task  # noqa: E402
from afm.datasets.rl_files import write_rl  # noqa: E402
from afm.errors import ConfigError  # noqa: E402
from afm.findings import Level  # noqa: E402
from afm.models import load_model  # noqa: E402
from afm.models.tiny import create_tiny_model, train_tokenizer  # noqa: E402
from afm.trajectory import read_records  # noqa: E402
from afm.trajectory.record import Record, load_advantages  # noqa: E402
from verl_ext.kept_episodes import episodes_file  # noqa: E402
from verl_ext.launcher import run_rl  # noqa: E402
from verl_ext.metrics import METRICS_FILE, read_metrics  # noqa: E402
from verl_ext.teacher import (  # noqa: E402
    REVERSE_KL,
    TeacherChoice,
    check_teacher,
    reverse_kl_advantages,
    tokenizer_finding,
    write_reverse_kl,
)

ROOT = Path(__file__).resolve().parents[2]


class Queue:
    """Returns jagged fields as verl's transfer queue does."""

    def __init__(self, **fields: list[list[float]]) -> None:
        self.fields = {
            key: torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
            for key, rows in fields.items()
        }

    def kv_batch_get(self, *, keys: Any, partition_id: str, select_fields: list[str]) -> Mapping[str, Any]:
        return {name: self.fields[name] for name in select_fields}

    def kv_batch_put(self, *, keys: Any, partition_id: str, fields: TensorDict) -> str:
        self.fields |= dict(fields.items())
        return "written"


class Batch(list[str]):
    keys = property(lambda self: list(self))
    partition_id = "train"


def test_advantages_by_hand() -> None:
    """Sample 1: -1 + 2 = 1; an observation; -30 + 1 = -29, bounded by -10. Sample 2: -0.5 + 0.25 = -0.25.

    The third row is padding. verl gives it scores of the whole text and one token that is not trained on.
    """
    queue = Queue(
        teacher_logprobs=[[-1.0, -7.0, -30.0], [-0.5], [0.0] * 128],
        old_log_probs=[[-2.0, -1.0, -1.0], [-0.25], [0.0]],
        response_mask=[[1, 0, 1], [1], [0]],
    )
    written, metrics = write_reverse_kl(queue, Batch(["a", "b", "pad"]), clip=10.0)
    assert written == "written"
    for field in ("advantages", "returns"):
        assert [row.tolist() for row in queue.fields[field].unbind()] == [
            [1.0, 0.0, -10.0],
            [-0.25],
            [0.0],
        ]
    assert metrics == {
        "teacher/reverse_kl": pytest.approx((-1 + 29 + 0.25) / 3),
        "teacher/clipped": pytest.approx(1 / 3),
    }


def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence() -> None:
    """Over all tokens of a small vocabulary: sum over y of pi(y) A(y) grad log pi(y) = -grad KL(pi || teacher)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    (student.exp() * (student - teacher)).sum().backward()
    expected, logits.grad = logits.grad.clone(), None
    student = logits.log_softmax(0)
    advantages = reverse_kl_advantages(teacher, student.detach(), torch.ones(7), clip=1e9)
    (-(student.detach().exp() * advantages * student).sum()).backward()
    assert logits.grad.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize(
    ("teacher", "platform", "temperature", "message"),
    [
        (None, "cpu", 1.0, "reverse_kl, which needs a teacher; give teacher.model=FOLDER"),
        ("http://localhost:1", "gpu", 0.7, "temperature is 0.7; expected 1.0"),
        ("models/32b", "gpu", 1.0, "`vllm serve models/32b` on separate GPUs"),
    ],
)
def test_what_cannot_be_distilled_is_refused(
    teacher: str | None, platform: str, temperature: float, message: str
) -> None:
    config = SimpleNamespace(
        algorithm=SimpleNamespace(adv_estimator=REVERSE_KL),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(temperature=temperature)),
    )
    with pytest.raises(ConfigError) as caught:
        check_teacher(TeacherChoice(model=teacher) if teacher else None, config, platform=platform)
    assert message in str(caught.value)


def test_teacher_and_student_share_a_tokenizer(tmp_path: Path, tokenizer_dir: Path) -> None:
    train_tokenizer(["abc abd 123 456 <plan>"] * 20, tmp_path / "other", vocab_size=290)
    same = tokenizer_finding(TeacherChoice(model=str(tokenizer_dir)), str(tokenizer_dir))
    other = tokenizer_finding(TeacherChoice(model=str(tmp_path / "other")), str(tokenizer_dir))
    assert (same.level, other.level) == (Level.OK, Level.ERROR)
    assert "different tokenizer" in other.text
    with pytest.raises(ConfigError, match="nowhere"):
        tokenizer_finding(TeacherChoice(model=str(tmp_path / "nowhere")), str(tokenizer_dir))


@pytest.mark.proof
def test_a_run_is_taught_by_the_teachers_log_probabilities(tmp_path: Path, tokenizer_dir: Path) -> None:
    """Before the first update the student is the model on disk, so each kept advantage can be computed again."""
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    for seed, folder in enumerate((student, teacher)):
        create_tiny_model(tokenizer_dir, folder, seed=seed, hidden_size=32, layers=1)
    agent = load_agent(str(ROOT / "configs/tiny/agents/math.yaml"))
    tasks = [
        Task(id=f"q{n}", question=f"{n}+1?", data_source="mini_math", ground_truth=str(n + 1))
        for n in range(16)
    ]
    write_rl(tasks, agent, tmp_path / "rl.parquet")
    overrides = [
        f"model={student}",
        f"teacher.model={teacher}",
        f"train_files={tmp_path / 'rl.parquet'}",
        f"output_dir={tmp_path / 'run'}",
        "limits.max_response_tokens=64",
        "rewards.overlong.max_tokens=64",
        "episodes_per_step=1000",
        "verl.trainer.total_training_steps=3",
        "verl.trainer.save_freq=3",
    ]
    assert run_rl(ROOT / "configs/tiny/rl/math_distillation.yaml", overrides) == 0
    steps = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps[2]["teacher_kl"] < steps[0]["teacher_kl"]
    assert all(row["token_drift"] == 0 for row in steps)
    asyncio.run(assert_first_step(tmp_path / "run", student, teacher))


async def assert_first_step(run: Path, student: Path, teacher: Path) -> None:
    file = episodes_file(run, 1)
    advantages = load_advantages(file)
    models = load_model(student), load_model(teacher)
    checked = 0
    for record in read_records(file):
        assert isinstance(record, Record)
        assert record.prompt_ids
        assert record.response_ids
        assert record.response_mask
        ids = [*record.prompt_ids, *record.response_ids]
        ours, theirs = [(await model.score(ids))[len(record.prompt_ids) - 1 :] for model in models]
        mask = record.response_mask
        expected = [(b - a) * m for a, b, m in zip(ours, theirs, mask, strict=True)]
        kept = advantages[record.id]
        assert kept == pytest.approx(expected[: len(kept)], abs=1e-4)
        checked += sum(mask)
    assert checked > 500
    for model in models:
        await model.close()
