"""Hostile programs that every sandbox backend must withstand."""

from afm.sandbox.conformance.attack import AttackResult, SandboxAttack, check_sandbox
from afm.sandbox.conformance.cross_run import SHARED, TAMPER
from afm.sandbox.conformance.host import KERNEL, REACH
from afm.sandbox.conformance.limits import COMPUTING, ENDING, RESOURCES

__all__ = ["ATTACKS", "AttackResult", "SandboxAttack", "check_sandbox"]

ATTACKS = (*REACH, *KERNEL, *RESOURCES, *COMPUTING, *ENDING, *SHARED, *TAMPER)
