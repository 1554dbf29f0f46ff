"""A curriculum: each step asks questions that are sometimes solved, instead of all questions equally often.

A group of samples teaches by the spread of its rewards, p (1 - p) for a question that is solved with probability p
(the variance of a Bernoulli variable). DAPO (arXiv 2503.14476, section 3.2) discards the other groups after generating
them. :class:`Difficulty` keeps each question's solve rate across steps and draws by that spread.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from afm.configuration import Settings
from afm.errors import ConfigError

QUESTION = "question_index"
"""Key of a sample's facts: the ``extra_info.index`` of its question."""
SOLVED = "acc"
"""Key of a sample's facts: whether the sample solved its question."""

_UNSEEN = 0.5
_MEMORY = 0.5


class Curriculum(Settings):
    """How questions are drawn. Without this section each question is drawn once per epoch."""

    floor: float = Field(default=0.05, gt=0, le=1)
    """Added to p (1 - p), so that questions that no sample or every sample solved are asked again."""
    retire_after: int = Field(default=2, ge=0)
    """Retires a question after this many consecutive groups in which every sample solved it. 0 retires none.
    When all questions are retired, all come back."""


class Difficulty:
    """An endless sampler that draws positions of a data set by the solve rates of their questions.

    It is a stateful sampler of torchdata. Each checkpoint holds its state with the data loader's, so a resumed run makes
    the same draws. After a draw, a question rests until half as many other questions as are active have been drawn.

    Args:
        indices: ``extra_info.index`` of each question.
        rules: See :class:`Curriculum`.
        seed: Seed of the draws.
        agents: Agent of each question in a run of several agents. The solve rate of a question holds for its agent only.

    Raises:
        ConfigError: Two questions have the same index.
    """

    def __init__(
        self, indices: Sequence[Any], rules: Curriculum, seed: int, agents: Sequence[str] = ()
    ) -> None:
        self._agents = list(agents)
        self._position = {str(index): position for position, index in enumerate(indices)}
        if len(self._position) != len(indices):
            raise ConfigError(
                f"curriculum: {len(indices) - len(self._position):,} of {len(indices):,} questions share their "
                "extra_info.index with another one; write the data with `afm data prepare rl`, which numbers them"
            )
        self._questions = hashlib.sha256("\n".join(self._position).encode()).hexdigest()
        self._rules = rules
        self._rate: Any = np.full(len(indices), _UNSEEN)
        self._groups: Any = np.zeros(len(indices), dtype=np.int64)
        self._in_a_row: Any = np.zeros(len(indices), dtype=np.int64)
        self._resting: deque[int] = deque()
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._rate)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self._draw()

    def record(self, index: Any, solved: float) -> None:
        """Record the share of a finished group's samples that solved the question ``index``."""
        position = self._position.get(str(index))
        if position is None:
            return
        before = self._rate[position] if self._groups[position] else solved
        self._rate[position] = _MEMORY * before + (1 - _MEMORY) * solved
        self._groups[position] += 1
        self._in_a_row[position] = self._in_a_row[position] + 1 if solved >= 1 else 0

    def metrics(self) -> dict[str, float]:
        """Return the number of questions asked and retired, and the mean solve rate of those asked."""
        asked = self._groups > 0
        return {
            "curriculum/asked": float(asked.sum()),
            "curriculum/retired": float(self._retired().sum()),
            "curriculum/solve_rate": float(self._rate[asked].mean()) if asked.any() else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later draws depend on."""
        return {
            "questions": self._questions,
            "rate": self._rate.tolist(),
            "groups": self._groups.tolist(),
            "in_a_row": self._in_a_row.tolist(),
            "resting": list(self._resting),
            "rng": self._rng.bit_generator.state,
        } | ({"agents": self._agents} if self._agents else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`. Questions that now belong to another agent count as never asked.

        Raises:
            ConfigError: The state belongs to another data set.
        """
        if len(state["rate"]) != len(self):
            raise ConfigError(
                f"curriculum: the checkpoint has {len(state['rate']):,} questions, but the data has {len(self):,}; "
                "continue with the same train_files"
            )
        if state.get("questions", self._questions) != self._questions:
            raise ConfigError(
                "curriculum: the questions of the checkpoint differ from the data, or are in another order; continue with the "
                "same train_files"
            )
        self._rate = np.array(state["rate"])
        self._groups = np.array(state["groups"])
        self._in_a_row = np.array(state["in_a_row"])
        self._resting = deque(state["resting"])
        self._rng.bit_generator.state = state["rng"]
        before = state.get("agents", self._agents) or [""] * len(self)
        for position, agent in enumerate(self._agents or [""] * len(self)):
            if agent != before[position]:
                self._rate[position] = _UNSEEN
                self._groups[position] = self._in_a_row[position] = 0

    def _retired(self) -> Any:
        enough = self._rules.retire_after
        return self._in_a_row >= enough if enough else np.zeros(len(self), dtype=bool)

    def _draw(self) -> int:
        retired = self._retired()
        if retired.all():
            retired[:] = False
        weights = self._rate * (1 - self._rate) + self._rules.floor
        weights[retired] = 0
        while len(self._resting) > (len(self) - int(retired.sum())) // 2:
            self._resting.popleft()
        weights[list(self._resting)] = 0
        drawn = int(self._rng.choice(len(self), p=weights / weights.sum()))
        self._resting.append(drawn)
        return drawn


_running: list[Difficulty] = []


def running() -> Difficulty | None:
    """Return the curriculum of the trainer in this process, if it has one."""
    return _running[-1] if _running else None


def start_curriculum(data_config: Any, dataset: Any, agents: Sequence[str] = ()) -> Difficulty:
    """Start the curriculum of ``data.curriculum`` over verl's data set. :func:`running` returns it from then on.

    Args:
        agents: See :class:`Difficulty`.
    """
    rules = dict(data_config["curriculum"])
    rules.pop("settings", None)
    difficulty = Difficulty(
        _indices(dataset),
        Curriculum.model_validate(rules),
        data_config.get("seed") or 0,
        agents,
    )
    _running[:] = [difficulty]
    return difficulty


def _indices(dataset: Any) -> list[Any]:
    infos = dataset.dataframe["extra_info"]
    missing = next((row for row, info in enumerate(infos) if (info or {}).get("index") is None), None)
    if missing is not None:
        raise ConfigError(
            f"curriculum: row {missing} of data.train_files has no extra_info.index; write the data with "
            "`afm data prepare rl`, which numbers the questions"
        )
    return [info["index"] for info in infos]
