"""The table of environment variables: names, defaults, meaning. Importing this module reads nothing.

``environment.sh`` is this table as a shell file: ``python -m afm.settings > environment.sh``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from afm.errors import ConfigError, expectation, fault_words

_PLACEHOLDERS = ("api key", "api url")
"""Placeholders for keys and addresses in the published ``environment.sh``."""


class Environment(BaseSettings):
    """Values from the environment. Each field is the variable with its name in capitals.

    Empty variables and placeholders of the published ``environment.sh`` count as unset. Secrets never appear in ``repr``,
    logs or error messages.
    """

    model_config = SettingsConfigDict(env_ignore_empty=True, extra="ignore", frozen=True)

    server_host: str = Field(
        default="127.0.0.1", description="Address on which the tool servers listen and are called."
    )
    crawl_page_port: int = Field(default=9000, ge=1, le=65535, description="Port of the page reader.")
    websearch_port: int = Field(default=9001, ge=1, le=65535, description="Port of the web search server.")
    code_server_port: int = Field(default=9002, ge=1, le=65535, description="Port of the code server.")
    code_server_token: SecretStr | None = Field(
        default=None, description="Shared by code servers and the code tool; needed beyond this machine."
    )
    visual_inspector_port: int = Field(default=9003, ge=1, le=65535, description="Port of the image server.")
    mcp_server_port: int = Field(
        default=9004, ge=1, le=65535, description="Port on which tools are offered to MCP clients."
    )
    mcp_server_token: SecretStr | None = Field(
        default=None, description="Shared by the MCP server and its clients; needed beyond this machine."
    )
    gateway_port: int = Field(default=9005, ge=1, le=65535, description="Port of the recording gateway.")
    gateway_token: SecretStr | None = Field(
        default=None,
        description="First part of the API key that the gateway's clients send; needed beyond this machine.",
    )
    gateway_upstream_url: str | None = Field(
        default=None, description="OpenAI-compatible endpoint behind the gateway, with its /v1."
    )
    gateway_upstream_api_key: SecretStr | None = Field(
        default=None,
        description="Key of the endpoint behind the gateway; clients of the gateway never need it.",
    )
    wiki_rag_server_url: str = Field(
        default="http://127.0.0.1:8000/retrieve", description="Address to which wiki queries are posted."
    )
    wiki_server_token: SecretStr | None = Field(
        default=None,
        description="Shared by wiki servers and the wiki search tool; needed beyond this machine.",
    )
    web_server_token: SecretStr | None = Field(
        default=None,
        description="Shared by the search, page and image servers and their tools; needed beyond this machine.",
    )
    web_cache: SecretStr | None = Field(
        default=None,
        description="Cache of searches, pages and looks at images: a file, or redis://HOST:6379/0; unset: ~/.cache/afm/web.sqlite.",
    )
    web_search_method_type: Literal["local", "serper", "searxng"] = Field(
        default="local",
        description="Source of web search results: local needs no key, serper (also: serapi) does.",
    )
    web_page_store: Path | None = Field(
        default=None, description="JSONL of pages {url, title, text} that the local web search searches."
    )
    searxng_base_url: str | None = Field(
        default=None, description="Address of a SearxNG server whose JSON format is switched on."
    )
    web_search_serp_num: int = Field(default=10, ge=1, le=100, description="Results of one web search.")
    web_search_serper_api_key: SecretStr | None = Field(
        default=None, description="Key of the Serper-compatible search service."
    )
    jina_base_url: str = Field(default="https://r.jina.ai", description="Address of the page reader service.")
    jina_api_key: SecretStr | None = Field(default=None, description="Key of the page reader service.")
    summary_openai_api_base_url: str | None = Field(
        default=None, description="OpenAI-compatible endpoint that summarises pages; unset: extracts instead."
    )
    summary_openai_api_key: SecretStr | None = Field(default=None, description="Key of the summary endpoint.")
    summary_model: str | None = Field(default=None, description="Model that summarises pages.")
    vision_openai_api_base_url: str | None = Field(
        default=None,
        description="OpenAI-compatible endpoint that looks at images; the image server needs it.",
    )
    vision_openai_api_key: SecretStr | None = Field(default=None, description="Key of the vision endpoint.")
    vision_model: str | None = Field(default=None, description="Model that looks at images.")
    vision_image_folder: Path | None = Field(
        default=None,
        description="Images below this folder may be named by their path; unset: by address only.",
    )
    grm_base_url: str | None = Field(
        default=None, description="OpenAI-compatible endpoint of the judge; unset: exact match instead."
    )
    grm_api_key: SecretStr | None = Field(default=None, description="Key of the judge's endpoint.")
    grm_model_name: str = Field(default="gpt-4.1-mini", description="Model that judges answers.")
    livecodebench_data_path: Path | None = Field(
        default=None, description="Folder with the LiveCodeBench test cases."
    )
    teacher_base_url: str | None = Field(
        default=None, description="OpenAI-compatible endpoint of the team that afm data distill --team runs."
    )
    teacher_api_key: SecretStr | None = Field(default=None, description="Key of the team's endpoint.")
    teacher_model_name: str | None = Field(
        default=None, description="Model of the team's members whose file names none."
    )
    afm_model_api_key: SecretStr | None = Field(
        default=None, description="Key of the OpenAI-compatible endpoint that serves the agent's model."
    )
    afm_trust: bool = Field(
        default=False,
        description="Run code that was downloaded or belongs to another user: Python files and programs of a YAML; --trust sets it.",
    )
    afm_traceback: bool = Field(
        default=False, description="Show the whole traceback of an error on the command line."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_placeholders(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value not in _PLACEHOLDERS}

    @field_validator("web_search_method_type", mode="before")
    @classmethod
    def _published_name(cls, value: Any) -> Any:
        return "serper" if value == "serapi" else value

    def server_address(self, port: int) -> str:
        """Return the address of the tool server on ``port`` for clients on this machine."""
        host = f"[{self.server_host}]" if ":" in self.server_host else self.server_host
        return f"http://{host}:{port}"


def load_settings() -> Environment:
    """Read the environment.

    Raises:
        ConfigError: A variable has a value that is not allowed; the value of a secret is not shown.
    """
    try:
        return Environment()
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from None


def environment_script() -> str:
    """Return the table as a shell file to source. It sets the default of each variable that is not set."""
    lines = [
        "# shellcheck shell=sh",
        "# Environment variables of this project with their defaults. Values that are already set are kept.",
        "# Usage: source environment.sh",
        "# Generated from the table in afm/settings.py: python -m afm.settings > environment.sh",
    ]
    for name, field in Environment.model_fields.items():
        variable = name.upper()
        default = _shell_value(field.default)
        lines += ["", f"# {field.description}", f'export {variable}="${{{variable}:-{default}}}"']
    return "\n".join(lines) + "\n"


def _shell_value(value: object) -> str:
    if value is None or value is False:
        return ""
    return "1" if value is True else str(value)


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for details in error.errors(include_url=False):
        name = str(details["loc"][0]) if details["loc"] else "environment"
        field = Environment.model_fields.get(name)
        secret = field is not None and "Secret" in str(field.annotation)
        fault = f"got a value, expected {expectation(details['msg'])}" if secret else fault_words(details)
        meaning = field.description if field is not None else ""
        lines.append(f"environment variable {name.upper()}: {fault}. {meaning}".rstrip())
    return lines


if __name__ == "__main__":
    print(environment_script(), end="")
