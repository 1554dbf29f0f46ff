import ast
from pathlib import Path

from cpu_budget import excesses

ROOT = Path(__file__).parents[1]


def proofs() -> set[str]:
    """`path::function` of each test that has the marker `proof`, on itself or on a parameter; `path` where a whole file has it."""
    names = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text("utf-8")
        if "mark.proof" not in text or path == Path(__file__):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0]):
                if "mark.proof" in ast.unparse(node.value):
                    names.add(str(path.relative_to(ROOT)))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                "mark.proof" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                names.add(f"{path.relative_to(ROOT)}::{node.name}")
    return names


def test_each_proof_has_a_line_in_the_record() -> None:
    rows = (ROOT / "benchmarks/PROOF.md").read_text("utf-8").splitlines()
    recorded = {row.split("`")[1] for row in rows if row.startswith("| `tests/")}
    assert recorded == proofs()


def test_a_test_or_a_run_above_its_limit_is_named() -> None:
    costs = {"a.py::quick": 21.0, "a.py::fine": 20.0, "b.py::slow": 90.0, "b.py::too_slow": 101.0}
    slow = {"b.py::slow", "b.py::too_slow"}
    assert excesses(costs, slow, (20.0, 100.0), 231.0) == [
        "a.py::quick: 21 CPU seconds, at most 20 are allowed",
        "b.py::too_slow: 101 CPU seconds, at most 100 are allowed",
        "all tests: 232 CPU seconds, at most 231 are allowed",
    ]
    assert excesses({"a.py::fine": 20.0}, set(), (20.0, 100.0), 20.0) == []
