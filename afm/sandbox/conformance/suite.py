"""All attacks."""

from __future__ import annotations

from afm.sandbox.conformance.computing import ATTACKS as COMPUTING
from afm.sandbox.conformance.ending import ATTACKS as ENDING
from afm.sandbox.conformance.kernel import ATTACKS as KERNEL
from afm.sandbox.conformance.reach import ATTACKS as REACH
from afm.sandbox.conformance.resources import ATTACKS as RESOURCES
from afm.sandbox.conformance.shared import ATTACKS as SHARED
from afm.sandbox.conformance.tamper import ATTACKS as TAMPER

ATTACKS = (*REACH, *KERNEL, *RESOURCES, *COMPUTING, *ENDING, *SHARED, *TAMPER)
