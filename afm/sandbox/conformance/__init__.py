"""Hostile programs that every kind of sandbox must withstand."""

from afm.sandbox.conformance.attack import Attack, AttackResult, check_sandbox
from afm.sandbox.conformance.ending import ENDING
from afm.sandbox.conformance.host import KERNEL, REACH
from afm.sandbox.conformance.limits import COMPUTING, RESOURCES
from afm.sandbox.conformance.other_runs import SHARED, TAMPER

__all__ = ["ATTACKS", "Attack", "AttackResult", "check_sandbox"]

ATTACKS = (*REACH, *KERNEL, *RESOURCES, *COMPUTING, *ENDING, *SHARED, *TAMPER)
