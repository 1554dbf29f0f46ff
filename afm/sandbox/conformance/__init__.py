"""Hostile programs that every kind of sandbox must withstand."""

from afm.sandbox.conformance.attack import AttackResult, SandboxAttack, check_sandbox
from afm.sandbox.conformance.host import KERNEL, REACH
from afm.sandbox.conformance.limits import COMPUTING, ENDING, RESOURCES
from afm.sandbox.conformance.other_runs import SHARED, TAMPER

__all__ = ["ATTACKS", "AttackResult", "SandboxAttack", "check_sandbox"]

ATTACKS = (*REACH, *KERNEL, *RESOURCES, *COMPUTING, *ENDING, *SHARED, *TAMPER)
