"""Which questions each step asks: those that are sometimes solved, rather than all alike.

A group of samples teaches by the spread of its rewards, p (1 - p) for a question that is solved with probability p
(the variance of a Bernoulli variable). DAPO (arXiv 2503.14476, section 3.2) throws the others away after they were
generated. :class:`Difficulty` keeps each question's solve rate across steps and draws by that spread.
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
"""Key of a sample's facts: ``extra_info.index`` of its question."""
SOLVED = "acc"
"""The fact that says whether a sample solved its question."""

_UNSEEN = 0.5
_MEMORY = 0.5


class Curriculum(Settings):
    """How questions are drawn; without this section every question is drawn once an epoch."""

    floor: float = Field(default=0.05, gt=0, le=1)
    """Added to p (1 - p), so that a question that no sample or every sample solved is asked again."""
    retire_after: int = Field(default=2, ge=0)
    """Groups in a row that are solved by every sample, after which a question is not asked any more; 0
    retires none. When all are retired, all come back."""


class Difficulty:
    """Draws positions of a data set by the solve rates of their questions, without end.

    A stateful sampler of torchdata: its state is saved with the data loader in each checkpoint, so a resumed run draws what
    the run would have drawn. A question rests until half as many others as are active have been drawn.

    Args:
        indices: ``extra_info.index`` of each question.
        rules: See :class:`Curriculum`.
        seed: Of the draws.
        agents: Of each question, where there are several: what is known of a question holds for its agent alone.

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
        """Take note of a finished group: the share of its samples that solved the question ``index``."""
        position = self._position.get(str(index))
        if position is None:
            return
        before = self._rate[position] if self._groups[position] else solved
        self._rate[position] = _MEMORY * before + (1 - _MEMORY) * solved
        self._groups[position] += 1
        self._in_a_row[position] = self._in_a_row[position] + 1 if solved >= 1 else 0

    def metrics(self) -> dict[str, float]:
        """What is known so far: questions asked, retired, and the mean solve rate of those asked."""
        asked = self._groups > 0
        return {
            "curriculum/asked": float(asked.sum()),
            "curriculum/retired": float(self._retired().sum()),
            "curriculum/solve_rate": float(self._rate[asked].mean()) if asked.any() else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that later draws depend on."""
        return {
            "questions": self._questions,
            "rate": self._rate.tolist(),
            "groups": self._groups.tolist(),
            "in_a_row": self._in_a_row.tolist(),
            "resting": list(self._resting),
            "rng": self._rng.bit_generator.state,
        } | ({"agents": self._agents} if self._agents else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; questions that another agent works on now count as never asked.

        Raises:
            ConfigError: The state is of another data set.
        """
        if len(state["rate"]) != len(self):
            raise ConfigError(
                f"curriculum: the checkpoint knows {len(state['rate']):,} questions, the data has {len(self):,}; "
                "continue with the same train_files"
            )
        if state.get("questions", self._questions) != self._questions:
            raise ConfigError(
                "curriculum: the checkpoint knows other questions than the data, or another order of them; continue with the "
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
    """The curriculum of the trainer in this process, if it has one."""
    return _running[-1] if _running else None


def start_curriculum(data_config: Any, dataset: Any, agents: Sequence[str] = ()) -> Difficulty:
    """The curriculum of ``data.curriculum`` over verl's data set, from now on the one that is :func:`running`.

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
