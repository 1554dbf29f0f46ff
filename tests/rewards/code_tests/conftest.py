"""A scorer of programs in a real sandbox, shared by the tests of a module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from patient_scorer import PatientScorer

from afm.rewards.code_tests import CodeTests
from afm.rewards.code_tests.runner import TestPolicy
from afm.sandbox import open_sandbox


@pytest.fixture(scope="module")
def training() -> Iterator[CodeTests]:
    """Stops at the first failing case."""
    yield from _scorer(early_stop=True)


@pytest.fixture(scope="module")
def evaluation() -> Iterator[CodeTests]:
    """Runs every case."""
    yield from _scorer(early_stop=False)


def _scorer(*, early_stop: bool) -> Iterator[CodeTests]:
    scorer = PatientScorer(open_sandbox(), TestPolicy(case_s=1.0, early_stop=early_stop))
    yield scorer
    asyncio.run(scorer.close())


@pytest.fixture(params=["training", "evaluation"])
def scorer(request: pytest.FixtureRequest, training: CodeTests, evaluation: CodeTests) -> CodeTests:
    """Both, one after the other."""
    policies: dict[str, CodeTests] = {"training": training, "evaluation": evaluation}
    return policies[request.param]
