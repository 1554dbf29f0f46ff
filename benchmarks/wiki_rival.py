"""The rival of bench_wiki.py: a plain server that answers one request at a time over the same index.

For BM25, it uses bm25s, memory-mapped; for the other engines, ours. Usage: ``wiki_rival.py INDEX ENGINE``.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tool_servers.wiki_search.corpus import terms_of
from tool_servers.wiki_search.search import open_index

Search = Callable[[str, int], list[tuple[int, float]]]


def bm25s_search(index: Path) -> Search:
    """Return the search function of bm25s."""
    import bm25s

    retriever = bm25s.BM25.load(index / "bm25", mmap=True)

    def search(query: str, k: int) -> list[tuple[int, float]]:
        words = [word for word in terms_of(query) if word in retriever.vocab_dict]
        if not words:
            return []
        passages, scores = retriever.retrieve([words], k=k, show_progress=False)
        return [(int(p), float(s)) for p, s in zip(passages[0], scores[0], strict=True) if s > 0]

    return search


def main() -> None:
    folder, engine = Path(sys.argv[1]), sys.argv[2]
    index = open_index(folder, engine)
    search: Search = (
        bm25s_search(folder) if engine == "bm25" else lambda query, k: index.engine.search([query], k)[0]
    )
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_at_a_time:
                found = [search(query, asked["topk"]) for query in asked["queries"]]
            result = [[self._document(passage, score) for passage, score in hits] for hits in found]
            body = json.dumps({"result": result}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _document(self, passage: int, score: float) -> dict[str, Any]:
            found = index.store[passage]
            return {"document": {"id": found.id, "contents": found.contents}, "score": score}

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 512
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignore clients that leave."""

    with Server(("127.0.0.1", 0), Handler) as server:
        print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
