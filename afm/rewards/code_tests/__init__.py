"""Score programs by test cases: the program runs in the sandbox, and its output is compared outside."""

from afm.rewards.code_tests.scorer import CodeTests

__all__ = ["CodeTests"]
