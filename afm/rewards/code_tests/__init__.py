"""Correctness of programs: they run on test cases in the sandbox, and what they answer is compared outside it."""

from afm.rewards.code_tests.scorer import CodeTests

__all__ = ["CodeTests"]
