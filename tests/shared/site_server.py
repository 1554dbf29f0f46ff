"""A real web site on this machine."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Site:
    """A web site in a thread.

    ``pages`` maps paths to (status, media type, body), or to a function of the handler that returns these or answers itself.
    ``asked``, ``headers`` and ``bodies`` are those of the requests.
    """

    def __init__(self):
        self.pages = {}
        self.asked = []
        self.headers = []
        self.bodies = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                site.asked.append(self.path)
                site.headers.append(dict(self.headers))
                length = int(self.headers.get("Content-Length") or 0)
                self.body = self.rfile.read(length)
                site.bodies.append(self.body)
                page = site.page(self.path)
                if callable(page):
                    page = page(self)
                if page is None:
                    return
                status, media_type, body = page
                self.send_response(status)
                self.send_header("Content-Type", media_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815 - the name that the server looks for

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket.listen(256)  # the default of 5 delays a burst of connections by a second
        self.port = self._server.server_address[1]
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def page(self, path):
        """Return the page at a path."""
        return self.pages.get(path.partition("?")[0], (404, "text/plain", b"no"))

    def close(self):
        self._server.shutdown()
        self._server.server_close()
