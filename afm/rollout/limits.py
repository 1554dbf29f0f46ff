"""The limits of one episode: tokens that it may still sample, and seconds that are left."""

from __future__ import annotations

import time
from dataclasses import dataclass

from afm.agents.spec import Limits
from afm.trajectory.record import StopReason


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens that the next generation may have, and the reason to stop once they are used up."""

    tokens: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The bounds on tokens of one episode; ``None`` means unbounded.

    Attributes:
        response: Sampled and observed tokens together, the model's context included.
        agent: Sampled tokens.
        turn: Sampled tokens since the last observation.
    """

    response: int
    agent: int | None
    turn: int | None

    @classmethod
    def of(cls, limits: Limits, *, context_left: int, turn_tokens: int | None) -> TokenBudget:
        """The bounds from an agent's limits, the room a prompt leaves, and the caller's own bound a turn."""
        response = context_left
        if limits.max_response_tokens is not None:
            response = min(response, limits.max_response_tokens)
        turn = min(
            (value for value in (limits.max_turn_tokens, turn_tokens) if value is not None), default=None
        )
        return cls(response, limits.max_agent_tokens, turn)

    def room(self, *, response: int, agent: int, turn: int) -> Room:
        """What is left after these numbers of tokens."""
        rooms = [Room(self.response - response, StopReason.RESPONSE_TOKENS)]
        if self.agent is not None:
            rooms.append(Room(self.agent - agent, StopReason.AGENT_TOKENS))
        if self.turn is not None:
            rooms.append(Room(self.turn - turn, StopReason.AGENT_TOKENS))
        return min(rooms, key=lambda room: room.tokens)


class Clock:
    """Wall time since the episode began."""

    def __init__(self, max_seconds: float | None) -> None:
        self._begun = time.perf_counter()
        self._max_seconds = max_seconds

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._begun

    @property
    def left(self) -> float | None:
        """Seconds that remain, not below 0; ``None`` when time is unbounded."""
        return None if self._max_seconds is None else max(0.0, self._max_seconds - self.elapsed)
