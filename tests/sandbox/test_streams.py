"""What a program printed before it was stopped is kept, in every sandbox."""

import pytest

from afm.sandbox import ExitReason, SandboxLimits, open_sandbox

pytestmark = pytest.mark.sandbox


async def test_whole_lines_survive_a_limit(backend):
    box = open_sandbox(backend)
    code = "print('step 1')\nprint('step 2')\nprint('half', end='')\nwhile True: pass"
    try:
        result = await box.run(code, "", SandboxLimits(wall_s=1.0))
    finally:
        await box.close()
    assert result.reason in (ExitReason.TIMEOUT, ExitReason.CPU)
    assert result.stdout == "step 1\nstep 2\n"
