"""A closed, generated encyclopaedia: corpus, web site and multi-hop questions with gold answers and gold paths."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote, urlsplit

from afm.datasets.encyclopaedia.questions import DATA_SOURCE, HOPS, SHAPES, Shape, generate
from afm.datasets.encyclopaedia.world import Encyclopaedia, WikiPage
from afm.datasets.hub import Progress
from afm.datasets.mini_world import WorldSplit
from afm.datasets.schema import write_tasks
from afm.runs.atomic import replacing
from afm.runs.folder import write_manifest

__all__ = ["Encyclopaedia", "Shape", "Site", "generate", "site_server", "write_corpus", "write_encyclopaedia"]


_LISTED = 100
_SHELL = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n<body>{body}</body></html>\n'


def address(title: str) -> str:
    """Return the path of a page: ``/wiki/Belo_Karford``."""
    return "/wiki/" + quote(title.replace(" ", "_"))


class Site:
    """Looks up and renders pages of a world of any size. Nothing is cached."""

    def __init__(self, world: Encyclopaedia) -> None:
        self._world = world

    def html(self, path: str) -> str | None:
        """Return the document at a path, or ``None``: ``/`` (contents, ``?from=N``) or ``/wiki/NAME``."""
        parts = urlsplit(path)
        if parts.path == "/":
            first = parts.query.removeprefix("from=")
            return self._contents(int(first) if first.isdecimal() and len(first) < 10 else 0)
        name = unquote(parts.path).removeprefix("/wiki/").replace("_", " ")
        number = self._world.names.number(name) if parts.path.startswith("/wiki/") else None
        return None if number is None else self._page(self._world.page(number))

    def _page(self, page: WikiPage) -> str:
        pieces, here = [], 0
        for link in page.links:
            name = page.text[link.start : link.end]
            pieces += [escape(page.text[here : link.start]), f'<a href="{address(name)}">{escape(name)}</a>']
            here = link.end
        pieces.append(escape(page.text[here:]))
        body = f'<h1>{escape(page.title)}</h1>\n<p>{"".join(pieces)}</p>\n<p><a href="/">Contents</a></p>'
        return _SHELL.format(title=escape(page.title), body=body)

    def _contents(self, first: int) -> str:
        numbers = range(self._world.size)[first : first + _LISTED]
        names = [self._world.names.name(number) for number in numbers]
        rows = "".join(f'<li><a href="{address(name)}">{escape(name)}</a></li>\n' for name in names)
        more = first + _LISTED
        onward = f'<p><a href="/?from={more}">More</a></p>' if more < self._world.size else ""
        return _SHELL.format(
            title="Encyclopaedia", body=f"<h1>Encyclopaedia</h1>\n<ul>\n{rows}</ul>\n{onward}"
        )


def site_server(world: Encyclopaedia, *, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the site, bound and ready for ``serve_forever``. Port 0 chooses a free port."""
    site = Site(world)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            page = site.html(self.path)
            body = (page or _SHELL.format(title="Not found", body="<h1>Not found</h1>")).encode()
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Do not log requests."""

    return ThreadingHTTPServer((host, port), Handler)


_STEP = 10_000


def corpus_lines(world: Encyclopaedia, numbers: Iterable[int] | None = None) -> Iterator[str]:
    """Stream passages as JSON lines ``{"id", "contents"}``. By default all pages."""
    for number in range(world.size) if numbers is None else numbers:
        row = {"id": str(number), "contents": world.page(number).contents}
        yield json.dumps(row, ensure_ascii=False) + "\n"


def write_corpus(world: Encyclopaedia, path: Path, progress: Progress | None = None) -> None:
    """Write the corpus, compressed if ``path`` ends in ``.gz``. ``path`` appears when it is complete."""
    with replacing(path) as temporary, _open(temporary, path.suffix == ".gz") as file:
        for number, line in enumerate(corpus_lines(world), 1):
            file.write(line)
            if progress and (number % _STEP == 0 or number == world.size):
                progress("passages", number, world.size)


def write_encyclopaedia(
    out_dir: str | Path,
    world: Encyclopaedia,
    *,
    sizes: Mapping[WorldSplit, int],
    seed: int,
    hops: Sequence[int] = HOPS,
    shapes: Sequence[Shape] = SHAPES,
    progress: Progress | None = None,
) -> dict[WorldSplit, Path]:
    """Write ``corpus.jsonl``, a file of questions per split and a manifest, and return the question files."""
    out = Path(out_dir)
    paths = {split: out / f"{split.value}.jsonl" for split in sizes}
    for split, path in paths.items():
        write_tasks(generate(world, split, sizes[split], seed=seed, hops=hops, shapes=shapes), path)
    write_corpus(world, out / "corpus.jsonl", progress)
    counts = {"pages": world.size} | {split.value: count for split, count in sizes.items()}
    write_manifest(
        out / "manifest.json",
        counts=counts,
        seed=seed,
        world=DATA_SOURCE,
        wordings=world.wordings,
        brief=world.brief,
        hops=list(hops),
        shapes=[shape.value for shape in shapes],
    )
    return paths


def _open(path: Path, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=6)
    return path.open("w", encoding="utf-8")
