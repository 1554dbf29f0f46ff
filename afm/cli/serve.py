"""``afm serve``: one tool server, or the servers of a model, in the foreground."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from afm.choices import PublishedIndex
from afm.cli import serve_model
from afm.cli.options import TrustOption, file_argument, file_option
from afm.processes import hold_interrupts

app = typer.Typer(help="Start a tool server or a model server.", no_args_is_help=True)
wiki = typer.Typer(invoke_without_command=True)
app.add_typer(wiki, name="wiki")

Config = Annotated[
    Path | None,
    file_option("YAML of the server's settings, like those in configs/servers [default: built-in values]."),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on [default: SERVER_HOST].")]
Port = Annotated[
    int | None,
    typer.Option(
        help="Port to listen on; 0 chooses a free port [default: the variable named above].", min=0, max=65535
    ),
]


_ACCESS = "Clients must send the token in {token}. Without a token the server listens on this machine only."
_TOOL_SERVERS = (
    (
        *("code", "code", "CODE_SERVER_PORT", "CODE_SERVER_TOKEN"),
        "Run programs in this machine's sandbox, for code tools with `urls`.",
    ),
    (
        *("search", "web_search", "WEBSEARCH_PORT", "WEB_SERVER_TOKEN"),
        "Search the web: Serper, SearxNG or local pages.\n\nIt serves web_search tools. "
        "WEB_SEARCH_METHOD_TYPE selects the provider.",
    ),
    (
        *("crawl", "crawl_page", "CRAWL_PAGE_PORT", "WEB_SERVER_TOKEN"),
        "Read public web pages and summarise them for the question.\n\nIt serves crawl_page tools.",
    ),
    (
        *("visual", "visual_inspector", "VISUAL_INSPECTOR_PORT", "WEB_SERVER_TOKEN"),
        "Answer questions about images.\n\nIt serves visual_inspector tools. "
        "VISION_OPENAI_API_BASE_URL is the address of the vision model.",
    ),
)
"""Command, server, variables of its port and its token, and help text."""


def _tool_server(server: str, port_variable: str, token: str, purpose: str) -> Callable[..., None]:
    def serve(config: Config = None, host: Host = None, port: Port = None) -> None:
        _become(f"tool_servers {server}", {"--config": config, "--host": host, "--port": port})

    gap = " " if "\n\n" in purpose else "\n\n"
    serve.__doc__ = f"{purpose}{gap}{port_variable} sets the port. {_ACCESS.format(token=token)}"
    return serve


for _name, *_server in _TOOL_SERVERS:
    app.command(name=_name)(_tool_server(*_server))


@app.command()
def gateway(
    upstream: Annotated[
        str | None, typer.Option(help="Endpoint to forward to, with /v1 [default: GATEWAY_UPSTREAM_URL].")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Event log to write [default: runs/gateway/events.jsonl].", dir_okay=False),
    ] = None,
    config: Config = None,
    host: Host = None,
    port: Port = None,
) -> None:
    """Record the model calls of any team of agents.

    It is an OpenAI-compatible proxy in front of any endpoint. GATEWAY_UPSTREAM_API_KEY holds the endpoint's key.
    GATEWAY_PORT sets the port. Clients must send the token in GATEWAY_TOKEN. Without a token the server listens on
    this machine only.
    """
    options = {"--upstream": upstream, "--log": log, "--config": config, "--host": host, "--port": port}
    _become("tool_servers gateway", options)


@app.command()
def mcp(
    tools: Annotated[Path, file_option("Tools YAML, for example configs/tools/code_executor.yaml.")],
    http: Annotated[
        bool, typer.Option("--http", help="Listen on HOST:PORT/mcp; implied by --host and --port.")
    ] = False,
    host: Host = None,
    port: Port = None,
    trust: TrustOption = False,
) -> None:
    """Offer the tools of a YAML to MCP clients.

    They connect on standard streams or by HTTP. MCP_SERVER_PORT sets the port for HTTP. Clients must send the token
    in MCP_SERVER_TOKEN. Without a token the server listens on this machine only.
    """
    options = {"--tools": tools, "--http": http or None, "--host": host, "--port": port}
    _become("tool_servers mcp", options)


app.command(name="model")(serve_model.model)


class WikiEngine(StrEnum):
    """The kinds of search."""

    BM25 = "bm25"
    DENSE = "dense"
    HYBRID = "hybrid"


@wiki.callback()
def serve_wiki(
    context: typer.Context,
    index: Annotated[
        Path | None,
        typer.Option(
            help="Folder that `afm serve wiki build` made [default: the one in --config].",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    config: Config = None,
    engine: Annotated[
        WikiEngine | None, typer.Option(help="Kind of search [default: bm25, if the index has it].")
    ] = None,
    host: Host = None,
    port: Port = None,
) -> None:
    """Search a local corpus.

    It serves wiki_search tools and clients of Search-R1's server. `afm serve wiki build` builds the index. The port
    is that of WIKI_RAG_SERVER_URL. Clients must send the token in WIKI_SERVER_TOKEN. Without a token the server
    listens on this machine only.
    """
    if context.invoked_subcommand is None:
        options = {"--index": index, "--config": config, "--engine": engine, "--host": host, "--port": port}
        _become("tool_servers wiki_search", options)


@wiki.command()
def build(
    corpus: Annotated[Path, file_argument('JSONL of {"id", "contents"}, plain or .gz.')],
    output_dir: Annotated[Path, typer.Option(help="Folder of the index.")],
    engine: Annotated[WikiEngine, typer.Option(help="Kind of index to build.")] = WikiEngine.BM25,
    model: Annotated[
        str | None,
        typer.Option(
            help="Embedding model: a folder or a name on the Hub; required for dense and hybrid [default: none]."
        ),
    ] = None,
    faiss: Annotated[
        str, typer.Option(help="Dense index: flat, ivf, hnsw, or the path of a FAISS index.")
    ] = "flat",
    query_prefix: Annotated[
        str | None, typer.Option(help="Text before each query [default: `query: ` for E5 models].")
    ] = None,
    passage_prefix: Annotated[
        str | None, typer.Option(help="Text before each passage [default: `passage: ` for E5 models].")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device of the embedding model: cpu or cuda [default: cuda, if there is a GPU]."),
    ] = None,
) -> None:
    """Build the index of a corpus.

    A dense part can be added to a BM25 index later. If interrupted, run the same command again to resume.
    """
    options = {
        "--output-dir": output_dir,
        "--engine": engine,
        "--model": model,
        "--faiss": faiss,
        "--query-prefix": query_prefix,
        "--passage-prefix": passage_prefix,
        "--device": device,
    }
    _become("tool_servers.wiki_search.build", options, str(corpus))


@wiki.command()
def download(
    output_dir: Annotated[Path, typer.Option(help="Folder for the files.")],
    index: Annotated[
        PublishedIndex,
        typer.Option(
            help="Index to download: flat is exact (60 GiB), hnsw is for CPUs, none is the corpus only."
        ),
    ] = PublishedIndex.FLAT,
    gunzip: Annotated[
        bool, typer.Option("--gunzip", help="Unpack the corpus too; `afm serve wiki build` reads it packed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be fetched; fetch nothing.")
    ] = False,
) -> None:
    """Download the Wikipedia of 2018 and an E5 index.

    They come from the Hugging Face Hub (HF_ENDPOINT, HF_TOKEN). At the end the command prints the commands that build
    and serve the index. If interrupted, run the same command again to resume.
    """
    from afm.datasets.wiki18 import check_space, commands, planned, run
    from afm.terminal import ProgressView

    view = ProgressView()
    wanted = planned(output_dir, index, gunzip=gunzip)
    view.line(f"{output_dir}: {wanted.summary()}")
    check_space(wanted)
    if not dry_run:
        run(wanted, view.update)
    view.line("then:")
    for words in commands(wanted, output_dir / "index"):
        view.line(shlex.join(words))


def _become(module: str, options: Mapping[str, object | None], *arguments: str) -> None:
    """Replace this process with another program, which receives signals and sets the exit status.

    Args:
        module: Name of its module, and the words before the options.
        options: Values by name. ``None`` omits an option, ``True`` passes its name without a value.
    """
    given = [
        name if value is True else f"{name}={value}" for name, value in options.items() if value is not None
    ]
    rest = ["--", *arguments] if arguments else []
    hold_interrupts()
    os.execv(sys.executable, [sys.executable, "-P", "-m", *module.split(), *given, *rest])
