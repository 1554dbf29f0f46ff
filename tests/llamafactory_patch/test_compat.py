import subprocess
import sys

import pytest

pytest.importorskip("torch")

LOAD = """
import torch
from llamafactory_patch.compat import restore_numbered_cpu
torch.save({"a": torch.arange(3)}, "t.pt")
try:
    torch.load("t.pt", map_location=torch.device("cpu:0"), weights_only=True)
except RuntimeError as error:
    print(error)
restore_numbered_cpu()
restore_numbered_cpu()
print(torch.load("t.pt", map_location=torch.device("cpu:0"), weights_only=True)["a"].tolist())
"""


def test_checkpoints_load_onto_a_numbered_cpu(tmp_path):
    """The first lines show that the patch is still needed."""
    command = [sys.executable, "-c", LOAD]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "don't know how to restore data location" in result.stdout
    assert result.stdout.endswith("[0, 1, 2]\n")
