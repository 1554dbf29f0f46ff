"""Scorers of programs in one real sandbox per module, because tests of the sandbox look for leftover processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from patient_scorer import PatientScorer

from afm.rewards.code_tests import CodeTests
from afm.rewards.code_tests.runner import TestPolicy
from afm.sandbox import Sandbox, open_sandbox


@pytest.fixture(scope="module")
def shared_sandbox() -> Iterator[Sandbox]:
    sandbox = open_sandbox()
    yield sandbox
    asyncio.run(sandbox.close())


@pytest.fixture(scope="module")
def training(shared_sandbox: Sandbox) -> CodeTests:
    """Stops at the first failing case."""
    return PatientScorer(shared_sandbox, TestPolicy(case_s=1.0))


@pytest.fixture(scope="module")
def evaluation(shared_sandbox: Sandbox) -> CodeTests:
    """Runs every case."""
    return PatientScorer(shared_sandbox, TestPolicy(case_s=1.0, early_stop=False))


@pytest.fixture(params=["training", "evaluation"])
def scorer(request: pytest.FixtureRequest, training: CodeTests, evaluation: CodeTests) -> CodeTests:
    """Both, one after the other."""
    return {"training": training, "evaluation": evaluation}[request.param]
