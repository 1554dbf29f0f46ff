"""What no cassette may hold, in whatever form a program or a server writes it."""

from __future__ import annotations

import base64
import html
import json
import re
import sqlite3
import sys
import time
from pathlib import Path
from urllib.parse import quote, quote_plus

import mcp_program
import pytest
from tool_entries import entry

from afm.tools import ToolResult, load_tools
from afm.tools.cassette import Cassette, Recorded
from afm.tools.secrets import Secrets

QUOTED = 's3cr"et\\value-long'
PADDED = "p/word+&x=y <secret> part"
LINES = "line1-of-pem-key  \nline2-of-pem-key"
SECRETS = (QUOTED, PADDED, LINES, "plain-secret-1")


async def stored(path: Path, text: str, **options: list[str]) -> str:
    """Everything that a cassette keeps of a call that has ``text`` in all its parts."""
    meta = {text: text, "deep": [{"list": (text,)}, Path(text)]}
    cassette = Cassette(path, **options)  # type: ignore[arg-type]
    await cassette.add(Recorded("t", text, ToolResult(text, meta=meta), "v", time.time(), text))
    found = await cassette.find("t", text, text)
    assert found is not None
    cassette.close()
    with sqlite3.connect(path) as file:
        (row,) = file.execute("SELECT * FROM calls").fetchall()
    file.close()
    raw = b"".join(part.read_bytes() for part in path.parent.glob(f"{path.name}*"))
    return "\n".join([*map(str, row), str(found), raw.decode("utf-8", "replace")])


FORMS = {
    "as it is": lambda value: value,
    "in JSON": json.dumps,
    "in JSON, as UTF-8": lambda value: json.dumps(value, ensure_ascii=False),
    "in JSON within JSON": lambda value: json.dumps(json.dumps({"key": value})),
    "in JSON with slashes": lambda value: json.dumps(value).replace("/", "\\/"),
    "in an address": lambda value: quote(value, safe=""),
    "in an address, small": lambda value: re.sub(
        "%..", lambda found: found[0].lower(), quote(value, safe="")
    ),
    "in a path": quote,
    "in a form": quote_plus,
    "in HTML": html.escape,
    "in base64": lambda value: base64.b64encode(value.encode()).decode(),
    "in base64 for addresses": lambda value: base64.urlsafe_b64encode(value.encode()).decode().rstrip("="),
    "as a password in base64": lambda value: base64.b64encode(f"user:{value}".encode()).decode(),
    "amid others in base64": lambda value: base64.b64encode(f"{{'k': '{value}'}}".encode()).decode(),
    "in hex": lambda value: value.encode().hex(),
    "with line ends of others": lambda value: value.replace("\n", "\r\n"),
    "without blanks at line ends": lambda value: "\n".join(line.rstrip() for line in value.split("\n")),
}


def traces(secret: str) -> set[str]:
    """Pieces of a secret, and of its base64 at each offset, that nothing stored may hold."""
    coded = {base64.b64encode(b"x" * offset + secret.encode()).decode()[4:-4] for offset in range(3)}
    return coded | {secret[1:-1], secret[-5:], secret[:6], secret[-5:].encode().hex()}


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_hidden_in_every_form(monkeypatch: pytest.MonkeyPatch, form: str, secret: str) -> None:
    monkeypatch.setenv("SOME_API_KEY", secret)
    hidden = Secrets().hidden(f"before {FORMS[form](secret)} after")
    assert not [trace for trace in traces(secret) if trace in hidden]
    assert "[secret]" in hidden


@pytest.mark.parametrize("secret", SECRETS)
async def test_a_cassette_holds_no_form_of_it_in_any_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("SOME_API_KEY", secret)
    text = "  \n".join(f"{name}: {write(secret)}" for name, write in FORMS.items())
    kept = await stored(tmp_path / "x", text)
    assert not [trace for trace in traces(secret) if trace in kept]
    assert kept.count("[secret]") >= 4 * len(FORMS)


@pytest.mark.parametrize("around", ["{}\n", "\n {} \t", "Bearer {}", "Basic {}\n"])
async def test_what_stands_around_a_secret_in_its_variable_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: str
) -> None:
    monkeypatch.setenv("SOME_API_KEY", around.format("trailing-newline-secret"))
    assert "trailing" not in await stored(tmp_path / "x", "token trailing-newline-secret, no more")


@pytest.mark.parametrize(
    "name",
    [
        "GITHUB_TOKEN",
        "GH_PAT",
        "npm_config__authToken",
        "KEY",
        "DB_PASS",
        "DB_PWD",
        "PGPASSWORD",
        "GPG_PASSPHRASE",
        "REDISCLI_AUTH",
        "CLIENTSECRET",
        "SERVICE_CREDENTIALS",
        "API_KEYS",
    ],
)
def test_names_that_say_secret(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0123-abc-xyz")
    assert Secrets().hidden("<0123-abc-xyz>") == "<[secret]>"


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZER",
        "MONKEY",
        "PATTERN",
        "PWD",
        "AUTHOR",
        "SSH_AUTH_SOCK",
        "GOOGLE_APPLICATION_CREDENTIALS_FILE",
        "BYPASS",
    ],
)
def test_names_that_do_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "/srv/shared/tokenizers")
    assert Secrets().hidden("in /srv/shared/tokenizers/qwen") == "in /srv/shared/tokenizers/qwen"


@pytest.mark.parametrize(
    ("variable", "value", "text", "hidden"),
    [
        ("SOME_URL", "postgres://me:dbsecretpw@host/x", "pw dbsecretpw", "pw [secret]"),
        ("SOME_URL", "http://u:p%40ss-word-1@proxy", "p@ss-word-1 p%40ss-word-1", "[secret] [secret]"),
        ("SOME_URL", "https://ghp_0123456789@github.com/x", "ghp_0123456789", "[secret]"),
        ("SOME_URL", "ssh://username@host", "username", "username"),
        ("SOME_URL", "http://host/me@example.org", "example.org", "example.org"),
        ("SEARCH_API_KEYS", "first-key-1, second-key-2", "second-key-2 first-key-1", "[secret] [secret]"),
    ],
)
def test_passwords_in_addresses_and_each_of_several_keys(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str, hidden: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert Secrets().hidden(text) == hidden


async def test_what_an_mcp_server_is_told_of_the_environment_is_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp")
    monkeypatch.setenv("PRIVATE_NOTE", "nobody-may-know")
    monkeypatch.setenv("OTHER_NOTE", "everybody-may-know")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = {"command": [sys.executable, mcp_program.__file__], "argument": "text"}
    config["environment"] = ["PRIVATE_NOTE", "HOME"]
    file = {"tools": [entry("mcp.McpTool", "note", **config)]}
    cassette = str(tmp_path / "x")
    for settings, note in (({"file": cassette, "mode": "record"}, "nobody-may-know"), (cassette, "[secret]")):
        tool = load_tools(file | {"cassette": settings})["note"]
        assert (await tool.call("everybody-may-know")).text == f"{note}, {tmp_path}, everybody-may-know"
        await tool.close()


async def test_half_characters_can_be_recorded(tmp_path: Path) -> None:
    cassette = Cassette(tmp_path / "x")
    result = ToolResult("x \ud800", meta={"error": "\udfff"})
    await cassette.add(Recorded("t", "half \ud800", result, "v", 1.0))
    found = await cassette.find("t", "half \ud800")
    assert found is not None
    assert (found.result.text, found.result.meta) == ("x \ufffd", {"error": "\ufffd"})
    cassette.close()
