"""``afm serve``: one tool server, in the foreground."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Serve a tool to other machines.", no_args_is_help=True)
wiki = typer.Typer(invoke_without_command=True)
app.add_typer(wiki, name="wiki")


@app.command()
def code(
    config: Annotated[
        Path | None, typer.Option(help="YAML, e.g. configs/servers/code.yaml.", exists=True, dir_okay=False)
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (SERVER_HOST).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, 0 for a free one (CODE_SERVER_PORT).", min=0, max=65535)
    ] = None,
) -> None:
    """Run programs that come by HTTP in this machine's sandbox, for code tools with `urls`.

    CODE_SERVER_TOKEN is asked of every request; without one the server listens on this machine only.
    """
    _become("tool_servers.code", {"--config": config, "--host": host, "--port": port})


@app.command()
def search(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML, e.g. configs/servers/web_search.yaml.", exists=True, dir_okay=False),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (SERVER_HOST).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, 0 for a free one (WEBSEARCH_PORT).", min=0, max=65535)
    ] = None,
) -> None:
    """Search the web for web_search tools: by Serper or SearxNG, or in local pages (WEB_SEARCH_METHOD_TYPE).

    WEB_SERVER_TOKEN is asked of every request; without one the server listens on this machine only.
    """
    _become("tool_servers.web_search", {"--config": config, "--host": host, "--port": port})


@app.command()
def crawl(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML, e.g. configs/servers/crawl_page.yaml.", exists=True, dir_okay=False),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (SERVER_HOST).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, 0 for a free one (CRAWL_PAGE_PORT).", min=0, max=65535)
    ] = None,
) -> None:
    """Read public web pages for crawl_page tools, summed up toward the question.

    WEB_SERVER_TOKEN is asked of every request; without one the server listens on this machine only.
    """
    _become("tool_servers.crawl_page", {"--config": config, "--host": host, "--port": port})


@app.command()
def vision(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML, e.g. configs/servers/visual_inspector.yaml.", exists=True, dir_okay=False),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (SERVER_HOST).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, 0 for a free one (VISUAL_INSPECTOR_PORT).", min=0, max=65535)
    ] = None,
) -> None:
    """Look at images for visual_inspector tools, with the model at VISION_OPENAI_API_BASE_URL.

    WEB_SERVER_TOKEN is asked of every request; without one the server listens on this machine only.
    """
    _become("tool_servers.visual_inspector", {"--config": config, "--host": host, "--port": port})


class WikiEngine(StrEnum):
    """How passages are found."""

    BM25 = "bm25"
    DENSE = "dense"
    HYBRID = "hybrid"


@wiki.callback()
def serve_wiki(
    context: typer.Context,
    index: Annotated[
        Path | None,
        typer.Option(help="Folder that `afm serve wiki build` made.", exists=True, file_okay=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML, e.g. configs/servers/wiki.yaml.", exists=True, dir_okay=False)
    ] = None,
    engine: Annotated[WikiEngine | None, typer.Option(help="By default BM25, if the index has it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (SERVER_HOST).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, 0 for a free one (of WIKI_RAG_SERVER_URL).", min=0, max=65535)
    ] = None,
) -> None:
    """Search a local corpus for wiki_search tools and clients of Search-R1's server; `build` makes the index.

    WIKI_SERVER_TOKEN is asked of every request; without one the server listens on this machine only.
    """
    if context.invoked_subcommand is None:
        options = {"--index": index, "--config": config, "--engine": engine, "--host": host, "--port": port}
        _become("tool_servers.wiki_search", options)


@wiki.command()
def build(
    corpus: Annotated[
        Path, typer.Argument(help='JSON lines {"id", "contents"}, also .gz.', exists=True, dir_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder of the index.")],
    engine: Annotated[WikiEngine, typer.Option(help="What to build.")] = WikiEngine.BM25,
    model: Annotated[str | None, typer.Option(help="Embedding model: a folder or a name.")] = None,
    faiss: Annotated[str, typer.Option(help="flat, ivf, hnsw, or a ready FAISS index.")] = "flat",
    query_prefix: Annotated[str | None, typer.Option(help="By default `query: ` for E5 models.")] = None,
    passage_prefix: Annotated[str | None, typer.Option(help="By default `passage: ` for E5 models.")] = None,
    device: Annotated[str | None, typer.Option(help="Of the embedding model: cpu, cuda.")] = None,
) -> None:
    """Make an index. Killed, the same command goes on; a dense part can be added to a BM25 index later."""
    options = {
        "--out": out,
        "--engine": engine,
        "--model": model,
        "--faiss": faiss,
        "--query-prefix": query_prefix,
        "--passage-prefix": passage_prefix,
        "--device": device,
    }
    _become("tool_servers.wiki_search.build", options, str(corpus))


def _become(module: str, options: Mapping[str, object | None], *arguments: str) -> None:
    """Go on as another program, so that signals and the exit status are its own."""
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    os.execv(
        sys.executable, [sys.executable, "-m", module, *given, *(["--", *arguments] if arguments else [])]
    )
