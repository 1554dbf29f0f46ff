"""Agent foundation models: one language model trained to work like a team of agents.

A notebook needs only the names below. Each is imported at its first use, so ``import afm`` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from afm.agents import AgentSpec as AgentSpec
    from afm.agents import load_agent as load_agent
    from afm.agents import shipped_agents as shipped_agents
    from afm.api import ask as ask
    from afm.api import evaluate as evaluate
    from afm.api import mask as mask
    from afm.api import run as run
    from afm.api import score as score
    from afm.datasets import Task as Task
    from afm.datasets import read_tasks as read_tasks
    from afm.errors import AfmError as AfmError
    from afm.evaluation import Metrics as Metrics
    from afm.masking import MaskedIds as MaskedIds
    from afm.models import ScriptedModel as ScriptedModel
    from afm.models import TokenModel as TokenModel
    from afm.models import load_model as load_model
    from afm.rewards import Verdict as Verdict
    from afm.rewards import load_reward as load_reward
    from afm.tools import Tool as Tool
    from afm.tools import load_tools as load_tools
    from afm.trajectory import Record as Record
    from afm.trajectory import Trajectory as Trajectory
    from afm.trajectory import load_records as load_records
    from afm.trajectory import parse as parse

_MODULES = {
    "agents": ("AgentSpec", "load_agent", "shipped_agents"),
    "api": ("ask", "evaluate", "mask", "run", "score"),
    "datasets": ("Task", "read_tasks"),
    "errors": ("AfmError",),
    "evaluation": ("Metrics",),
    "masking": ("MaskedIds",),
    "models": ("ScriptedModel", "TokenModel", "load_model"),
    "rewards": ("Verdict", "load_reward"),
    "tools": ("Tool", "load_tools"),
    "trajectory": ("Record", "Trajectory", "load_records", "parse"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would accept any name of this module

    def __getattr__(name):
        """Import a public name at its first use."""
        if name not in _HOMES:
            raise AttributeError(f"module 'afm' has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = getattr(import_module(f"afm.{_HOMES[name]}"), name)
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *_HOMES})
