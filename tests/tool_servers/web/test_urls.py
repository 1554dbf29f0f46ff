from __future__ import annotations

import pytest

from afm.tools.crawl_page import urls_in


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("https://a.org/x", ["https://a.org/x"]),
        ("https://a.org/x | https://b.org/y", ["https://a.org/x", "https://b.org/y"]),
        ("https://a.org/x|https://b.org/y|", ["https://a.org/x", "https://b.org/y"]),
        ("https://a.org/?q=1|2|http://b.org", ["https://a.org/?q=1|2", "http://b.org"]),
        ('[A | B](https://a.org/x) | [C](https://b.org/ "title")', ["https://a.org/x", "https://b.org/"]),
        ("[F](https://en.wikipedia.org/wiki/Foo_(bar))", ["https://en.wikipedia.org/wiki/Foo_(bar)"]),
        ("- https://a.org\n- https://b.org\n", ["https://a.org", "https://b.org"]),
        ("1. [x](http://a.org)\n2. <http://b.org>", ["http://a.org", "http://b.org"]),
        ("http://a.org | http://a.org", ["http://a.org"]),
        ("en.wikipedia.org/wiki/X | a.org", ["https://en.wikipedia.org/wiki/X", "https://a.org"]),
        ("file:///etc/passwd", ["file:///etc/passwd"]),
        ("[broken](http://a.org", ["[broken](http://a.org"]),
        (" \n | ", []),
    ],
)
def test_addresses_as_agents_write_them(text, urls):
    assert urls_in(text) == urls
