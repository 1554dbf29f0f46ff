"""Measure the code base: files, lines, length of functions, duplicates and import cycles.

Usage: python benchmarks/house.py [--names]     (--names lists the items behind each figure)
``tests/test_house.py`` has the limits.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("afm", "llamafactory_patch", "verl_ext", "tool_servers")
SMALL_LINES = 60
LONG_FUNCTION_LINES = 60
# Vague names: a participle or a pronoun in place of a noun.
VAGUE_NAMES = ("found", "given", "told", "one")
# Functions with fewer statements may be equal by chance.
SHORTEST_HELPER_LINES = 4


@dataclass(frozen=True)
class House:
    """Figures of the product's packages. Lists are sorted and name the items behind a figure."""

    files: int
    lines: int
    function_p50: int
    function_p90: int
    long_functions: list[str]
    circles: list[str]
    small_modules: list[str]
    repeated_classes: list[str]
    repeated_helpers: list[str]
    vague_names_per_10k_lines: float


@dataclass(frozen=True)
class _Module:
    name: str
    path: Path
    lines: int
    tree: ast.Module


def measure(root: Path = ROOT) -> House:
    """Measure the packages below ``root``.

    Raises:
        SyntaxError: A file is not Python.
    """
    modules = {module.name: module for module in _modules(root)}
    lines = sum(module.lines for module in modules.values())
    functions = [(m, f) for m in modules.values() for f in _functions(m.tree)]
    lengths = sorted(_length(f) for _, f in functions)
    imports = {name: set(_imports(module, modules)) for name, module in modules.items()}
    return House(
        files=len(modules),
        lines=lines,
        function_p50=lengths[len(lengths) // 2],
        function_p90=lengths[int(0.9 * len(lengths))],
        long_functions=sorted(f"{m.name}.{f.name}" for m, f in functions if _length(f) > LONG_FUNCTION_LINES),
        circles=sorted(" <-> ".join(circle) for circle in _circles(imports)),
        small_modules=_small_modules(modules, imports),
        repeated_classes=_repeated_classes(modules),
        repeated_helpers=_repeated_helpers(modules),
        vague_names_per_10k_lines=_vague_names(modules) / lines * 10_000,
    )


def _modules(root: Path) -> Iterator[_Module]:
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            yield _Module(name, path, text.count("\n"), ast.parse(text))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _imports(module: _Module, modules: dict[str, _Module]) -> Iterator[str]:
    """Yield the modules of the product that ``module`` imports, also in functions, but not only for type checkers."""
    for node in _walk_without_type_checking(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            submodules = [name for a in node.names if (name := f"{node.module}.{a.name}") in modules]
            yield from (
                name for name in submodules or [node.module] if name in modules and name != module.name
            )
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in modules and a.name != module.name)


def _walk_without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes.extend(node.orelse)
        else:
            nodes.extend(ast.iter_child_nodes(node))


def _circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that import each other: strongly connected components (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in imports[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            start = stack.index(name)
            group = sorted(stack[start:])
            del stack[start:]
            if len(group) > 1:
                circles.append(group)

    for name in imports:
        if name not in index:
            visit(name)
    return circles


def _small_modules(modules: dict[str, _Module], imports: dict[str, set[str]]) -> list[str]:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, targets in imports.items():
        for target in targets:
            importers[target].add(name)
    return sorted(
        name
        for name, module in modules.items()
        if len(importers[name]) == 1 and module.lines < SMALL_LINES and not module.path.name.startswith("__")
    )


def _repeated_classes(modules: dict[str, _Module]) -> list[str]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    return sorted(f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1)


def _repeated_helpers(modules: dict[str, _Module]) -> list[str]:
    """Return functions with the same body in several modules, regardless of names and docstrings."""
    bodies: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for node in module.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 >= SHORTEST_HELPER_LINES:
                bodies["\n".join(ast.dump(statement) for statement in body)].append(
                    f"{module.name}.{node.name}"
                )
    return sorted(" = ".join(names) for names in bodies.values() if len(names) > 1)


def _vague_names(modules: dict[str, _Module]) -> int:
    names: Counter[str] = Counter()
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.arg):
                names[node.arg] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] += 1
    return sum(names[word] for word in VAGUE_NAMES)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list the items behind each figure")
    with_names = parser.parse_args().names
    for name, value in vars(measure()).items():
        figure = (
            f"{value:.1f}"
            if isinstance(value, float)
            else str(len(value) if isinstance(value, list) else value)
        )
        print(f"{name.replace('_', ' '):28}{figure:>10}")
        if with_names and isinstance(value, list):
            print("\n".join(f"    {item}" for item in value))


if __name__ == "__main__":
    main()
