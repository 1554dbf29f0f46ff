"""The walls of the house: who may import whom, and that tag names live in the agents' YAML only."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from afm.errors import MissingExtraError

ROOT = Path(__file__).resolve().parent.parent

LAYERS = [
    {
        "errors",
        "settings",
        "processes",
        "choices",
        "configuration",
        "file_kinds",
        "plugins",
        "seeds",
        "sqlite",
        "terminal",
        "palette",
    },
    {"runs"},
    {"agents", "findings", "presets"},
    {"memory_arithmetic"},
    {"trajectory"},
    {"masking"},
    {"endpoints"},
    {"models", "tools", "sandbox"},
    {"rewards"},
    {"rollout"},
    {"datasets"},
    {"harness"},
    {"play"},
    {"distill", "evaluation"},
    {"api"},
    {"cli", "starter"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SIDEWAYS = {
    ("tools", "sandbox"),
    ("configuration", "errors"),
    ("configuration", "file_kinds"),
    ("configuration", "plugins"),
    ("plugins", "errors"),
    ("plugins", "settings"),
    ("file_kinds", "errors"),
    ("processes", "errors"),
    ("sqlite", "errors"),
    ("settings", "errors"),
    ("errors", "settings"),
}


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full module name"
            yield node.module or ""
            if node.module == "afm":
                yield from (f"afm.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "afm").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", python_files("afm"), ids=lambda p: str(p.relative_to(ROOT)))
def test_each_part_imports_only_parts_below_it(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in LEVEL, f"{part} has no place in the layers"
    for module in imported_modules(path):
        pieces = module.split(".")
        plugin = pieces[0] in {"llamafactory_patch", "verl_ext", "tool_servers"}
        assert not plugin or part == "cli", f"{path} imports {module}"
        if pieces[0] != "afm" or len(pieces) < 2 or pieces[1] == part or pieces[1] not in LEVEL:
            continue
        below = LEVEL[pieces[1]] < LEVEL[part]
        assert below or (part, pieces[1]) in SIDEWAYS, f"{path} imports {module}"


@pytest.mark.parametrize("package", ["llamafactory_patch", "verl_ext"])
def test_engine_plugins_do_not_know_each_other(package: str) -> None:
    other = {"llamafactory_patch": "verl_ext", "verl_ext": "llamafactory_patch"}[package]
    for path in python_files(package):
        assert not any(module.split(".")[0] == other for module in imported_modules(path)), path


def docstrings(tree: ast.AST) -> set[int]:
    found = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    found.add(id(statement.value))
    return found


@pytest.mark.slow
def test_no_tag_is_written_outside_the_agents_declarations() -> None:
    tags = (
        r"think|plan|reflection|observation|suggested_answer|double_check|web_search|crawl_page|wiki_search"
    )
    written = re.compile(rf"</?(?:{tags}|code|answer)>|\\?<(?:{tags})\b")
    for package in ("afm", "verl_ext"):
        for path in python_files(package):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            skip = docstrings(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
                    assert not written.search(node.value), f"{path}:{node.lineno}: {node.value!r}"


@pytest.mark.parametrize(
    "path",
    [p for name in ("afm", "llamafactory_patch", "verl_ext") for p in python_files(name)],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_modules_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_nobody_is_told_to_install_the_package_of_that_name_from_the_index() -> None:
    """``afm`` there is a placeholder of somebody else's; ours is installed from a checkout."""
    wrong = re.compile(r"pip install ['\"]?afm\b")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "requirements").iterdir()]
    packages = ("afm", "llamafactory_patch", "verl_ext", "tool_servers")
    for path in [*pages, *(file for package in packages for file in python_files(package))]:
        assert not wrong.search(path.read_text(encoding="utf-8")), path


def test_an_absent_extra_is_installed_from_the_checkout() -> None:
    error = MissingExtraError("verl", "rl")
    assert str(error) == "verl is not installed; in the checkout of this project run: pip install -e '.[rl]'"
