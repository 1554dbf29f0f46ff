import re
import threading

import httpx
import pytest

from afm.datasets.encyclopaedia import Encyclopaedia, Site, site_server

WORLD = Encyclopaedia(400, seed=3)


@pytest.fixture(scope="module")
def client():
    server = site_server(WORLD)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", trust_env=False) as client:
        yield client
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_page_is_reached_from_the_contents_by_links(client):
    found, here = set(), "/"
    while here:
        text = client.get(here).text
        found |= set(re.findall(r'href="(/wiki/[^"]+)"', text))
        more = re.search(r'href="(/\?from=\d+)">More', text)
        here = more and more[1]
    assert len(found) == 400


def test_a_page_shows_its_text_and_links_to_pages_that_exist(client):
    page = WORLD.page(399)
    response = client.get("/wiki/" + page.title.replace(" ", "_"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert re.sub("<[^>]+>", "", response.text.split("<p>")[1].split("</p>")[0]) == page.text
    links = re.findall(r'href="(/wiki/[^"]+)"', response.text)
    assert len(links) == len(page.links)
    assert all(client.head(link).status_code == 200 for link in links)


@pytest.mark.parametrize("path", ["/wiki/Nobody_Here", "/nothing", "/wiki/", "/wiki/%00"])
def test_unknown_paths_are_not_found(client, path):
    assert client.get(path).status_code == 404


def test_the_contents_take_any_number():
    assert Site(WORLD).html("/?from=99999999") is not None
    assert Site(WORLD).html("/?from=x") == Site(WORLD).html("/")
