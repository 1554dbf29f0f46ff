"""Hostile programs that every kind of sandbox must withstand."""

from afm.sandbox.conformance.attack import Attack
from afm.sandbox.conformance.check import AttackResult, check_sandbox
from afm.sandbox.conformance.suite import ATTACKS

__all__ = ["ATTACKS", "Attack", "AttackResult", "check_sandbox"]
