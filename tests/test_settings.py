import os
import shlex
import subprocess
from pathlib import Path

import pytest

from afm.errors import ConfigError
from afm.settings import Environment, environment_script, load_settings

SCRIPT = Path(__file__).parents[1] / "environment.sh"
PUBLISHED = {
    "SERVER_HOST", "CRAWL_PAGE_PORT", "WEBSEARCH_PORT", "WIKI_RAG_SERVER_URL", "GRM_BASE_URL", "GRM_API_KEY",
    "GRM_MODEL_NAME", "JINA_BASE_URL", "JINA_API_KEY", "WEB_SEARCH_METHOD_TYPE", "WEB_SEARCH_SERP_NUM",
    "WEB_SEARCH_SERPER_API_KEY", "SUMMARY_OPENAI_API_BASE_URL", "SUMMARY_OPENAI_API_KEY", "SUMMARY_MODEL",
    "LIVECODEBENCH_DATA_PATH",
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Environment.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def sourced(**variables: str) -> dict[str, str]:
    names = " ".join(name.upper() for name in Environment.model_fields)
    command = (
        f'set -eu; . {shlex.quote(str(SCRIPT))}; for name in {names}; do eval "echo $name=\\$$name"; done'
    )
    env = {"PATH": os.environ["PATH"], **variables}
    shown = subprocess.check_output(["sh", "-c", command], env=env, text=True)
    return dict(line.split("=", 1) for line in shown.splitlines())


def test_published_variables_are_all_known() -> None:
    assert {name.upper() for name in Environment.model_fields} >= PUBLISHED


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAWL_PAGE_PORT", "")
    monkeypatch.setenv("GRM_API_KEY", "")
    assert load_settings().crawl_page_port == 9000
    assert load_settings().grm_api_key is None


def test_the_published_environment_can_be_sourced_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its placeholders count as unset, its name of the search service is ours, and what is not ours is passed over."""
    published = {
        "WEB_SEARCH_METHOD_TYPE": "serapi",
        "WEB_SEARCH_SERPER_API_KEY": "api key",
        "GRM_API_KEY": "api key",
        "SUMMARY_OPENAI_API_BASE_URL": "api url",
        "UNI_API_URLS": "https://api.example.org/v1",
        "UNI_API_KEY": "api key",
        "LIVECODEBENCH_DATA_PATH": "/not/made/yet",
    }
    for name, value in published.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.web_search_method_type == "serper"
    assert settings.summary_openai_api_base_url is None
    assert settings.web_search_serper_api_key is settings.grm_api_key is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("WEB_SEARCH_SERP_NUM", "many", "a whole number"),
        ("WEB_SEARCH_METHOD_TYPE", "bing", "'local', .* 'searxng'"),
    ],
)
def test_bad_value_names_variable_value_and_expectation(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=rf"environment variable {name}: got '{value}' .text., expected {expected}"
    ):
        load_settings()


def test_secrets_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRM_API_KEY", "s3cret")
    assert "s3cret" not in repr(load_settings())
    assert "s3cret" not in load_settings().model_dump_json()
    assert "s3cret" not in environment_script()


def test_shell_file_is_the_table() -> None:
    assert SCRIPT.read_text(encoding="utf-8") == environment_script()


def test_sourcing_the_shell_file_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_settings()
    for name, value in sourced().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == before


def test_sourcing_the_shell_file_keeps_what_is_set_blanks_included() -> None:
    variables = sourced(LIVECODEBENCH_DATA_PATH="/data/my tests", SERVER_HOST="::1")
    assert variables["LIVECODEBENCH_DATA_PATH"] == "/data/my tests"
    assert variables["SERVER_HOST"] == "::1"
    assert variables["CRAWL_PAGE_PORT"] == "9000"
