"""On-policy distillation: a teacher scores the student's own episodes token by token.

``teacher: {model: FOLDER_OR_ADDRESS}`` in the YAML of ``afm rl`` selects it. The loss is that of the recipe (PPO's
clipped ratio). Only the advantage differs: for each token that the agent wrote it is the negative reverse KL divergence
in its single-sample form, called k1::

    A_t = log pi_teacher(y_t | y_<t) - log pi_student(y_t | y_<t)

Over the student's own samples, the expectation of this gradient is that of -KL(student || teacher), token by token
and without a return over later tokens (Lu et al. 2025, "On-Policy Distillation", Thinking Machines Lab). Rewards are
computed and reported, but not trained on. verl's own ``distillation`` section differs: its default is the k3 estimator
plus the task reward, and its teachers need GPUs of the run.
"""

from __future__ import annotations

import asyncio
import math
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from pydantic import Field

from afm.configuration import Settings
from afm.errors import ConfigError, EngineError
from afm.findings import Finding, Level
from afm.models.base import TokenModel
from afm.models.load import load_model
from afm.models.openai import OpenAIModel
from afm.models.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from torch import Tensor

REVERSE_KL = "reverse_kl"
"""Value of ``algorithm.adv_estimator`` in a run with a teacher."""
SCORES = "teacher_logprobs"
"""Field of a sample: the teacher's log-probability of each response token."""
TEACHER_KL, TEACHER_CLIPPED = "teacher/reverse_kl", "teacher/clipped"

_PROBE = (
    "The year 1984 had 366 days, Zürich has 443,037 people; naïve façade, 東京, Ωmega, 🙂.\n"
    "<b>\n\tx = 3.14 * (57 - 38) ** 2\n</b>\n\\boxed{-12/7}\r\n  def f(a_b): return a_b != 'C'\n"
)
"""Text that tokenizers of different models split differently."""


class TeacherChoice(Settings):
    """The section ``teacher`` of ``afm rl``."""

    model: str
    """Folder of the teacher, loaded by the run itself (on a CPU), or the address of a server that returns
    ``prompt_logprobs`` (vLLM, ``afm serve model``). Several addresses are separated by commas."""
    name: str | None = None
    """Name of the model on a server of several."""
    clip: float = Field(default=10.0, gt=0)
    """Bound on the difference of two log-probabilities. It keeps one token that the teacher finds impossible
    from outweighing a batch."""

    @property
    def served(self) -> bool:
        """Whether a server runs the teacher."""
        return self.model.startswith(("http://", "https://"))


def check_teacher(teacher: TeacherChoice | None, config: Any, *, platform: str) -> None:
    """Reject settings that distillation does not support.

    Args:
        config: verl's composed configuration.

    Raises:
        ConfigError: The estimator needs a missing teacher, a GPU run names a folder, or the temperature is not 1.
    """
    if teacher is None:
        if config.algorithm.adv_estimator == REVERSE_KL:
            raise ConfigError(
                f"verl.algorithm.adv_estimator is {REVERSE_KL}, which needs a teacher; "
                "give teacher.model=FOLDER or teacher.model=http://HOST:8000"
            )
        return
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature != 1.0:
        raise ConfigError(
            f"verl.actor_rollout_ref.rollout.temperature is {temperature}; expected 1.0 with a teacher, which scores "
            "tokens at temperature 1"
        )
    if teacher.served:
        return
    if platform == "gpu":
        raise ConfigError(
            f"teacher.model: {teacher.model}: on GPUs, a teacher needs a server; run "
            f"`vllm serve {teacher.model}` on separate GPUs and set teacher.model=http://HOST:8000"
        )


def tokenizer_finding(teacher: TeacherChoice, student: str) -> Finding:
    """Report whether teacher and student split a test text into the same tokens. Asks the teacher's server, if it has one.

    Args:
        student: Folder of the student.

    Raises:
        ConfigError: The teacher's folder holds no tokenizer.
        EngineError: The teacher's server does not answer, or returns no log-probabilities of a prompt.
    """
    own = ChatTokenizer.load(student).encode(_PROBE)
    if teacher.served:
        # A server returns ids with log-probabilities, and the first token has no log-probability.
        own, others = own[1:], asyncio.run(_served_ids(teacher, student))
    else:
        others = ChatTokenizer.load(teacher.model).encode(_PROBE)
    if others == own:
        return Finding(Level.OK, "teacher", f"{teacher.model} has the student's tokenizer")
    pairs = enumerate(zip_longest(own, others))
    at, (ours, theirs) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    text = (
        f"{teacher.model} has a different tokenizer than the student {student}: token {at} of a test text is {theirs} "
        f"instead of {ours}; choose a teacher of the student's family (teacher.model)"
    )
    return Finding(Level.ERROR, "teacher", text)


async def _served_ids(teacher: TeacherChoice, student: str) -> list[int]:
    model = open_teacher(teacher, student)
    try:
        assert isinstance(model, OpenAIModel), "a teacher with an address is an OpenAIModel"
        return await model.served_ids(_PROBE)
    finally:
        await model.close()


def open_teacher(teacher: TeacherChoice, student: str) -> TokenModel:
    """Open the teacher as a model that scores tokens.

    Args:
        student: Folder with the tokenizer that both share.

    Raises:
        ConfigError: The model does not exist.
        EngineError: The server does not answer.
    """
    return load_model(teacher.model, name=teacher.name, tokenizer=student if teacher.served else None)


@cache
def shared_teacher(model: str, name: str | None, student: str) -> TokenModel:
    """Return the teacher of this process, opened once."""
    return open_teacher(TeacherChoice(model=model, name=name), student)


async def score_response(teacher: TokenModel, prompt_ids: list[int], response_ids: list[int]) -> list[float]:
    """Return the teacher's log-probability of each response token.

    Raises:
        EngineError: The teacher failed, or a log-probability is NaN.
    """
    scores = (await teacher.score([*prompt_ids, *response_ids]))[len(prompt_ids) - 1 :]
    if any(math.isnan(score) for score in scores):
        raise EngineError(
            f"teacher {teacher.name}: a log-probability is not a number; its weights are probably broken"
        )
    return list(scores)


def reverse_kl_advantages(
    teacher_logprobs: Tensor, student_logprobs: Tensor, mask: Tensor, clip: float
) -> Tensor:
    """Return the advantage of each token, 0 where ``mask`` is 0. All tensors have the same shape."""
    return (teacher_logprobs - student_logprobs).clamp(-clip, clip) * mask


def write_reverse_kl(queue: Any, batch: Any, clip: float) -> tuple[Any, dict[str, float]]:
    """Compute the advantages of a batch and write them to verl's transfer queue.

    Args:
        queue: verl's ``transfer_queue``.
        batch: Keys and partition of the samples.
        clip: See :class:`TeacherChoice`.

    Returns:
        The updated batch, and two metrics: the mean reverse KL divergence per trained token in nats, before clipping, and
        the share of trained tokens that were clipped.
    """
    import torch
    from tensordict import TensorDict

    fields = [SCORES, "old_log_probs", "response_mask"]
    data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    offsets = data["response_mask"].offsets()
    mask, student = (data[key].values().float() for key in ("response_mask", "old_log_probs"))
    # verl gives the rows with which it fills a batch scores of the whole text, all of them without a trained token.
    rows = zip(data[SCORES].unbind(), data["response_mask"].unbind(), strict=True)
    teacher = torch.cat([scores[: len(row_mask)] for scores, row_mask in rows]).float()
    flat = reverse_kl_advantages(teacher, student, mask, clip)
    advantages = torch.nested.nested_tensor_from_jagged(flat, offsets=offsets)
    output = TensorDict({"advantages": advantages, "returns": advantages}, batch_size=len(batch))
    written = queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=output)
    tokens = mask.sum().clamp(min=1)
    differences = student - teacher
    return written, {
        TEACHER_KL: ((differences * mask).sum() / tokens).item(),
        TEACHER_CLIPPED: (((differences.abs() > clip) * mask).sum() / tokens).item(),
    }


def placeholder_estimator(
    token_level_rewards: Tensor, response_mask: Tensor, **unused: Any
) -> tuple[Tensor, Tensor]:
    """Return zero advantages, which :func:`write_reverse_kl` replaces later."""
    zeros = token_level_rewards * 0
    return zeros, zeros
