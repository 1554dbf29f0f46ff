"""The encyclopaedia as a small web site: one HTML page an entity, links between them, served over real HTTP."""

from __future__ import annotations

from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

from afm.datasets.encyclopaedia.world import Encyclopaedia, Page

_LISTED = 100
_SHELL = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n<body>{body}</body></html>\n'


def address(title: str) -> str:
    """Path of a page: ``/wiki/Belo_Karford``."""
    return "/wiki/" + quote(title.replace(" ", "_"))


class Site:
    """Looks up and renders pages; any size of world, nothing is kept."""

    def __init__(self, world: Encyclopaedia) -> None:
        self._world = world

    def html(self, path: str) -> str | None:
        """The document at a path: ``/`` (contents, ``?from=N``), ``/wiki/NAME``; ``None`` when there is none."""
        parts = urlsplit(path)
        if parts.path == "/":
            first = parts.query.removeprefix("from=")
            return self._contents(int(first) if first.isdecimal() and len(first) < 10 else 0)
        name = unquote(parts.path).removeprefix("/wiki/").replace("_", " ")
        number = self._world.names.number(name) if parts.path.startswith("/wiki/") else None
        return None if number is None else self._page(self._world.page(number))

    def _page(self, page: Page) -> str:
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
    """A server of the site, bound and ready for ``serve_forever``; port 0 takes a free one.

    Raises:
        OSError: The address cannot be listened on.
    """
    site = Site(world)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            found = site.html(self.path)
            text = found if found is not None else _SHELL.format(title="Not found", body="<h1>Not found</h1>")
            body = text.encode()
            self.send_response(200 if found is not None else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Nothing: requests are no news."""

    return ThreadingHTTPServer((host, port), Handler)
