"""Python files beside a YAML: imported from there, announced, and refused where others wrote them."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afm.configuration import read_extended, read_file
from afm.errors import ConfigError
from afm.plugins import import_module_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("AFM_TRUST", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("plug_"):
            del sys.modules[name]


def write(folder: Path, name: str, text: str = "class A: ...\n") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_beside_the_yaml_is_imported_once_with_those_beside_it_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "plug_helper.py", "NUMBER = 7\n")
    file = write(tmp_path, "plug_one.py", "from plug_helper import NUMBER\n")
    for _ in range(2):
        assert import_module_of("plug_one.A", tmp_path, "here").NUMBER == 7
    assert capsys.readouterr().err == f"running your code: {file}\n"


def test_a_package_beside_the_yaml_may_hold_the_class(tmp_path: Path) -> None:
    write(tmp_path, "plug_package/__init__.py", "")
    write(tmp_path, "plug_package/tools.py")
    assert import_module_of("plug_package.tools.A", tmp_path, "here").A


def test_a_downloaded_file_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "download.manifest.json", "{}")
    file = write(tmp_path, "set/plug_downloaded.py", "raise SystemExit('it ran')\n")
    with pytest.raises(
        ConfigError, match=r"was not imported: .* was downloaded \(.*manifest.json\).* with --trust"
    ):
        import_module_of("plug_downloaded.A", file.parent, "here")
    file.write_text("class A: ...\n")
    monkeypatch.setenv("AFM_TRUST", "1")
    assert import_module_of("plug_downloaded.A", file.parent, "here").A


def test_a_file_of_another_user_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "plug_foreign.py")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=rf"belongs to another user \(id {owner}, yours is {owner + 1}\)"):
        import_module_of("plug_foreign.A", tmp_path, "here")


RUNS_CODE = [
    ("harness: {command: [python, agent.py]}", "harness.command"),
    ("harness: {command: [bash, -c, 'true']}", "harness.command"),
    ("tools: [{config: {command: [uvx, server]}}]", r"tools\[0\].config.command"),
    ("tools: [{config: {sandbox: {nsjail_path: ./nsjail}}}]", r"tools\[0\].config.sandbox.nsjail_path"),
    ("sandbox: {python: ./python3}", "sandbox.python"),
    ("trust_remote_code: true", "trust_remote_code"),
    ("servers: {team: {url: 'http://a.example/v1'}}", "servers.team.url"),
    ("servers: {team: {key_variable: HF_TOKEN}}", "servers.team.key_variable"),
    ("tools: [{config: {urls: ['http://a.example']}}]", r"tools\[0\].config.urls"),
    ("verl: {actor_rollout_ref: {model: {external_lib: agent}}}", "verl"),
]
"""Content of a YAML that starts a program, loads code or names a server, and the key that does."""


def from_afm(folder: Path, name: str) -> Path:
    write(folder, "download.manifest.json", "{}")
    return write(folder, f"set/{name}")


def from_hub_cache(folder: Path, name: str) -> Path:
    """As `hf download` writes: the files are links to blobs."""
    blob = write(folder, "models--org--name/blobs/0123")
    file = folder / "models--org--name/snapshots/ab" / name
    file.parent.mkdir(parents=True)
    file.symlink_to(blob)
    return file


def from_hub_to_folder(folder: Path, name: str) -> Path:
    """As `hf download --local-dir` writes: notes, here of another file, because one file may have been added later."""
    write(folder, ".cache/huggingface/download/set/tools.yaml.metadata", "")
    return write(folder, f"set/{name}")


@pytest.mark.parametrize("download", [from_afm, from_hub_cache, from_hub_to_folder])
def test_a_download_is_recognised_and_imported_once_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, download: Callable[[Path, str], Path]
) -> None:
    name = f"plug_{download.__name__}"
    file = download(tmp_path, f"{name}.py")
    with pytest.raises(ConfigError, match="was downloaded"):
        import_module_of(f"{name}.A", file.parent, "here")
    monkeypatch.setenv("AFM_TRUST", "1")
    assert import_module_of(f"{name}.A", file.parent, "here").A


@pytest.mark.parametrize(("text", "key"), RUNS_CODE)
def test_a_downloaded_yaml_that_runs_code_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, key: str
) -> None:
    file = write(tmp_path, "set/recipe.yaml", text)
    assert read_file(file)
    write(tmp_path, "download.manifest.json", "{}")
    with pytest.raises(ConfigError, match=rf"recipe.yaml: {key} .* was downloaded .*--trust"):
        read_file(file)
    own = write(tmp_path.parent, f"{tmp_path.name}_own.yaml", f"extends: {file}\n")
    with pytest.raises(ConfigError, match=rf"recipe.yaml: {key} "):
        read_extended(own)
    monkeypatch.setenv("AFM_TRUST", "1")
    assert read_file(file)


def test_a_yaml_of_another_user_that_runs_code_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "recipe.yaml", RUNS_CODE[0][0])
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"harness\.command starts a program: .* belongs to another user"):
        read_file(file)
    assert read_file(ROOT / "configs/tiny/rl/math_harness.yaml"), (
        "whoever owns the framework runs code anyway"
    )


def test_an_own_yaml_may_not_run_a_downloaded_program(tmp_path: Path) -> None:
    write(tmp_path, "download/download.manifest.json", "{}")
    program = write(tmp_path, "download/agent.py")
    for word in ("download/agent.py", str(program)):
        file = write(tmp_path, "recipe.yaml", f"harness: {{command: [python, {word}]}}")
        with pytest.raises(ConfigError, match=r"recipe.yaml: harness.command .*agent.py was downloaded"):
            read_file(file)


def test_a_downloaded_yaml_without_code_is_read(tmp_path: Path) -> None:
    write(tmp_path, "download.manifest.json", "{}")
    text = "roles: {python: {kind: tool}}\ntrust_remote_code: false\nverl: {}\ncommand: []\n"
    assert read_file(write(tmp_path, "agent.yaml", text))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("json", "", r"here: 'json\.A': the module name 'json' is taken by .*; rename .*json\.py"),
        ("this", "", r"'this' is a module of Python; rename"),
        (
            "plug_broken",
            "\n1 / 0",
            r"'plug_broken\.A' cannot be imported: plug_broken\.py:2: ZeroDivisionError: .* run ",
        ),
        (
            "plug_lacking",
            "import plug_absent",
            r"plug_lacking\.py:1: ModuleNotFound.*'plug_absent'; install the package",
        ),
        (
            "plug_syntax",
            "\ndef f(",
            r"imported: plug_syntax\.py:2: SyntaxError: '\(' was never closed: def f\(; correct",
        ),
        (
            "plug_name",
            "from afm import Nope",
            r"imported: plug_name\.py:1: ImportError: cannot import name 'Nope'",
        ),
    ],
)
def test_what_cannot_be_imported_is_explained(tmp_path: Path, name: str, text: str, message: str) -> None:
    write(tmp_path, f"{name}.py", text)
    with pytest.raises(ConfigError, match=message):
        import_module_of(f"{name}.A", tmp_path, "here")


def test_a_module_that_is_nowhere_is_expected_beside_the_yaml(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"named 'plug_nowhere'; expected .*plug_nowhere\.py or an installed package"
    ):
        import_module_of("plug_nowhere.A", tmp_path, "here")
    write(tmp_path, "plug_somewhere.py", "class Clock: ...")
    with pytest.raises(ConfigError, match=r"\(did you mean plug_somewhere\.Clock\?\)"):
        import_module_of("plugsomewhere.Clock", tmp_path, "here")
    with pytest.raises(
        ConfigError, match=r"got 'Clock', expected MODULE.CLASS, did you mean plug_somewhere\.Clock\?"
    ):
        import_module_of("Clock", tmp_path, "here")


def test_python_code_that_is_not_utf_8_gets_a_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "plug_latin.py").write_bytes('"""Römisch."""'.encode("latin-1"))
    with pytest.raises(
        ConfigError, match=r"plug_latin\.py is not UTF-8; save it as UTF-8: iconv -f .*_utf8\.py"
    ):
        import_module_of("plug_latin.A", tmp_path, "here")


def test_two_folders_with_one_module_name_are_not_mixed_up(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder, "plug_twice.py")
    import_module_of("plug_twice.A", tmp_path / "a", "here")
    with pytest.raises(ConfigError, match=r"is taken by .*a/plug_twice\.py; rename .*b/plug_twice\.py"):
        import_module_of("plug_twice.A", tmp_path / "b", "here")
