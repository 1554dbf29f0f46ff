from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image
from tool_server import ToolServer

from afm.errors import ConfigError
from afm.tools.registry import load_tools
from tool_servers.visual_inspector.picture import NoPictureError, prepare
from tool_servers.visual_inspector.server import InspectorSettings

ROOT = Path(__file__).parents[3]
TOKEN = "a-long-random-token"
KEY = "sk-a-secret-key"
RED = (255, 0, 0)


def encoded(kind="PNG", size=(40, 30), colour=RED, mode="RGB", **options):
    sink = io.BytesIO()
    Image.new(mode, size, colour).save(sink, kind, **options)
    return sink.getvalue()


INLINE = "data:image/png;base64," + base64.b64encode(encoded()).decode()


def ask(server, image, question="", **more):
    return server.post(image=image, question=question, **more)


def png_that_claims(width, height):
    """A tiny file whose header announces a large picture."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    data = b"IDAT" + zlib.compress(bytes(1000))
    return head + struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "inner").mkdir(parents=True)
    (folder / "red.png").write_bytes(encoded())
    (folder / "inner/a map: part 1.jpg").write_bytes(encoded("JPEG"))
    (tmp_path / "secret.png").write_bytes(encoded(colour=(0, 0, 255)))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "inside.png").symlink_to(folder / "red.png")
    (folder / "out").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.png")
    return folder


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_formats_are_known_by_their_content_and_sent_as_png_or_jpeg(kind):
    picture = prepare(encoded(kind), 10_000, 100)
    assert (picture.width, picture.height, picture.kind) == (40, 30, kind)
    assert picture.media_type == ("image/jpeg" if kind == "JPEG" else "image/png")
    with Image.open(io.BytesIO(picture.body)) as again:
        assert all(abs(a - b) < 4 for a, b in zip(again.convert("RGB").getpixel((5, 5)), RED, strict=True))


def test_a_large_picture_is_scaled_and_turned_upright_and_loses_its_metadata():
    exif = Image.Exif()
    exif[0x0112] = 6  # stored rotated by 90 degrees
    exif[0x010F] = "camera of a private person"
    picture = prepare(encoded("JPEG", size=(400, 200), exif=exif), 100_000, 100)
    assert (picture.width, picture.height) == (200, 400)
    with Image.open(io.BytesIO(picture.body)) as again:
        assert again.size == (50, 100)
    assert b"private" not in picture.body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is not a picture, or not one of: PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is not a picture"),
        (b"", "it is not a picture"),
        (encoded()[:60], "it is damaged or incomplete"),
        (encoded(size=(101, 100)), "it has more than 10000 pixels"),
        (png_that_claims(60_000, 60_000), "it has more than 10000 pixels"),
    ],
)
def test_what_is_no_usable_picture_is_refused(body, message):
    with pytest.raises(NoPictureError, match=message):
        prepare(body, 10_000, 100)


def test_an_address_is_fetched_and_the_model_is_shown_the_picture(start, eyes, site):
    site.pages["/red.png"] = (200, "application/octet-stream", encoded("JPEG"))
    server = start({"trusted": [site.host]})
    answer = ask(server, f"{site.url}/red.png", "Which colour?").json()
    assert answer["text"].startswith("data:image/jpeg (40, 30) (25")
    assert answer["text"].endswith("Which colour?")
    assert (answer["kind"], answer["cached"]) == (None, False)
    assert (answer["width"], answer["height"], answer["format"]) == (40, 30, "JPEG")
    [asked] = eyes.requests
    assert (asked["model"], asked["messages"][0]["role"]) == ("eyes", "system")
    assert eyes.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert [headers["Accept"] for headers in site.headers] == ["image/*"]


@pytest.mark.slow
def test_equal_questions_about_equal_pictures_are_asked_once_also_after_a_restart(start, eyes, folder):
    first = start(VISION_IMAGE_FOLDER=folder)
    questions = [("red.png", "Which colour?"), ("inside.png", " Which colour? "), ("red.png", "Which shape?")]
    assert [ask(first, *question).json()["cached"] for question in questions] == [False, True, False]
    first.stop()
    assert ask(start(VISION_IMAGE_FOLDER=folder), *questions[0]).json()["cached"] is True
    assert len(eyes.requests) == 2


@pytest.mark.slow
def test_paths_below_the_folder_are_read_and_nothing_outside_is_reached(start, eyes, folder):
    server = start(VISION_IMAGE_FOLDER=folder)
    for place in (
        "link.png", "out/secret.png", "../secret.png", "inner/../../secret.png", "/etc/passwd", "pipe.png", "inner",
        ".", "absent.png", "red.png/x", "\0", "x" * 5000, "C:\\red.png", "~/red.png", "out/pictures/../secret.png",
        "/dev/zero", "/proc/self/environ", str(folder.parent / "secret.png"), str(folder) + "x/red.png",
    ):  # fmt: skip
        text = "there is no such file in the folder of pictures"
        assert ask(server, place).json() == {"text": text, "kind": "name"}, place
    assert ask(server, "").status_code == 400
    assert eyes.requests == []
    below = ("red.png", "inner/a map: part 1.jpg", "inside.png", "inner/../red.png", str(folder / "red.png"))
    assert [ask(server, place).json()["kind"] for place in below] == [None] * 5


def moved(handler):
    handler.send_response(302)
    handler.send_header("Location", "http://10.0.0.1/a.png")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


@pytest.mark.slow
def test_pictures_that_cannot_be_had_say_why_and_cost_no_call_of_the_model(start, eyes, site):
    site.pages |= {
        "/page": (200, "text/html", b"<p>"),
        "/large.png": (200, "image/png", bytes(200_000)),
        "/text.png": (200, "image/png", b"I am no picture, I am a text."),
        "/bomb.png": (200, "image/png", png_that_claims(50_000, 50_000)),
        "/private.png": moved,
    }
    server = start({"trusted": [site.host], "max_bytes": 100_000})
    for place, kind in (
        ("http://127.0.0.1:1/a.png", "blocked"),
        ("file:///etc/passwd", "blocked"),
        ("red.png", "blocked"),  # no folder is set
        ("data:image/png;base64,!!!", "broken"),
        (f"{site.url}/page", "type"),
        (f"{site.url}/absent.png", "status"),
        (f"{site.url}/large.png", "too_large"),
        (f"{site.url}/text.png", "parse"),
        (f"{site.url}/bomb.png", "parse"),
        (f"{site.url}/private.png", "blocked"),
    ):
        answer = ask(server, place).json()
        assert (answer["kind"], len(answer["text"]) > 10) == (kind, True), place
    assert eyes.requests == []
    assert server.metric('afm_vision_pictures_total{end="blocked"}') == 4


def test_an_inline_picture_is_taken(start):
    text = ask(start(), INLINE, "?").json()["text"]
    assert text == "data:image/png (40, 30) (255, 0, 0) ?"


@pytest.mark.slow
def test_a_model_that_fails_is_named_and_its_words_are_not_passed_on(start, eyes):
    server = start({"model_s": 600})
    for status, kind in ((500, "status"), (401, "key"), (400, "status"), (429, "busy")):
        eyes.status = status
        response = ask(server, INLINE)
        assert (response.status_code, response.json()["kind"]) == (502, kind)
        assert KEY not in response.text
    eyes.status, eyes.reply = 200, {"choices": []}
    empty = {"error": "the answer of the vision model holds no text", "kind": "broken"}
    assert ask(server, INLINE).json() == empty
    eyes.reply, eyes.delay_s = None, 100.0
    assert ask(server, INLINE, "slow", seconds=10).json()["kind"] == "timeout"


MODEL = {"VISION_OPENAI_API_BASE_URL": "http://x/v1", "VISION_MODEL": "m"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "VISION_OPENAI_API_BASE_URL and VISION_MODEL not set"),
        (MODEL | {"VISION_IMAGE_FOLDER": "/nowhere"}, "folder of pictures /nowhere: no such folder"),
    ],
)
def test_without_a_model_or_its_folder_it_does_not_start_and_says_what_to_set(tmp_path, variables, message):
    with pytest.raises(ConfigError, match=message):
        ToolServer("visual_inspector", tmp_path, **variables)


@pytest.mark.slow
async def test_the_tool_reads_the_agents_json(start, folder, monkeypatch):
    server = start(VISION_IMAGE_FOLDER=folder)
    monkeypatch.setenv("WEB_SERVER_TOKEN", TOKEN)
    monkeypatch.setenv("VISUAL_INSPECTOR_PORT", server.url.rpartition(":")[2])
    tool = load_tools(ROOT / "configs/tools/visual_inspector.yaml")["visual_inspector"]
    plain = '{"file_path": "red.png", "question": "Which colour?"}'
    fenced = f"```json\n{plain}\n```"
    for argument in (fenced, plain, f"\n {fenced}\n"):
        seen = await tool.call(argument)
        assert (seen.ok, seen.text) == (True, "data:image/png (40, 30) (255, 0, 0) Which colour?")
    assert "Describe the picture" in (await tool.call('{"file_path": "red.png"}')).text
    missing = await tool.call('{"file_path": "blue.png"}')
    message = "This image could not be looked at: there is no such file in the folder of pictures."
    assert (missing.ok, missing.text) == (True, message)
    for argument in ("red.png", "", "```json\n{}\n```", '{"file_path": 3}', "[" * 100_000):
        observation = await tool.call(argument)
        assert (observation.ok, observation.meta["reason"]) == (True, "bad_argument")
        assert "```json" in observation.text
    await tool.close()


def test_the_shipped_settings_are_the_defaults():
    assert InspectorSettings.read(ROOT / "configs/servers/visual_inspector.yaml") == InspectorSettings()


@pytest.mark.parametrize("folder_name", ["configs/tools", "configs/tiny/tools"])
def test_the_shipped_file_of_all_tools_serves_the_full_agent(folder_name):
    tools = load_tools(ROOT / folder_name / "all.yaml")
    assert list(tools) == ["code", "web_search", "crawl_page", "visual_inspector", "wiki_search"]
