"""Which role of an agent a member of a scripted team plays, found by what may follow what."""

from __future__ import annotations

from dataclasses import dataclass

from afm.agents import AgentSpec, RoleKind
from afm.agents.spec import START
from afm.distill.filters.rules import checking_role
from afm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Casting:
    """The roles of an agent that has one tool and, for each part to play, one role.

    Every property raises ``ConfigError`` when the agent leaves no choice or more than one.

    Attributes:
        team: What the team is called in errors.
        example: A shipped agent that the team can play.
    """

    spec: AgentSpec
    team: str
    example: str

    @property
    def thought(self) -> str:
        """The role of free reasoning."""
        return self._only("a thought role", self.spec.thought_roles)

    @property
    def first(self) -> str:
        """The text role that may begin."""
        return self._only("a first role", self._texts_after(START))

    @property
    def judge(self) -> str:
        """The text role that may follow the tool."""
        tag = self._only("a tool role", tuple(self.spec.tool_roles))
        return self._only("a role behind the tool", self._texts_after(tag))

    @property
    def tool(self) -> str:
        """The name of the tool."""
        return self._only("a tool", tuple(self.spec.tool_roles.values()))

    @property
    def check(self) -> str:
        """The text role whose good grade lets the agent answer."""
        found = checking_role(self.spec)
        return self._only("a check of the answer", (found,) if found is not None else ())

    @property
    def proposal(self) -> str:
        """The text role that the check, and nothing else, follows."""
        check = self.check
        return self._only("a proposed answer", self._before((check,)))

    @property
    def reflection(self) -> str:
        """The text role that may follow the tool and is no proposed answer."""
        behind = self._texts_after(self._only("a tool role", tuple(self.spec.tool_roles)))
        return self._only("a reflection", tuple(tag for tag in behind if tag != self.proposal))

    def _before(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(tag for tag, found in self.spec.transitions.items() if found == targets)

    def _texts_after(self, source: str) -> tuple[str, ...]:
        targets = self.spec.transitions[source]
        return tuple(tag for tag in targets if self.spec.roles[tag].kind is RoleKind.TEXT)

    def _only(self, what: str, found: tuple[str, ...]) -> str:
        if len(found) != 1:
            raise ConfigError(
                f"agent {self.spec.name!r}: the {self.team} needs exactly one choice for {what}, "
                f"got {list(found)}; use an agent like `{self.example}`"
            )
        return found[0]
