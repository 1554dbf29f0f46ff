"""A real image server, a vision endpoint that decodes its pictures, and a web site with pictures."""

from __future__ import annotations

import base64
import io
import json
import time

import pytest
from PIL import Image
from site_server import Site
from tool_server import ToolServer, running

TOKEN = "a-long-random-token"
KEY = "sk-a-secret-key"


class Eyes(Site):
    """Chat completions with image content; answers with size, format and colour of the picture and the question."""

    def __init__(self):
        super().__init__()
        self.requests = []
        self.status, self.delay_s, self.reply = 200, 0.0, None
        self.pages["/v1/chat/completions"] = self.answer

    def answer(self, handler):
        asked = json.loads(handler.body)
        self.requests.append(asked)
        time.sleep(self.delay_s)
        if self.status != 200:
            return self.status, "text/plain", KEY.encode()
        text, picture = asked["messages"][-1]["content"]
        head, _, data = picture["image_url"]["url"].partition(";base64,")
        with Image.open(io.BytesIO(base64.b64decode(data))) as seen:
            colour = seen.convert("RGB").getpixel((0, 0))
            said = f"{head} {seen.size} {colour} {text['text']}"
        reply = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        return 200, "application/json", json.dumps(self.reply or reply).encode()


@pytest.fixture
def eyes():
    eyes = Eyes()
    yield eyes
    eyes.close()


@pytest.fixture
def usual(tmp_path, eyes):
    """Variables of every server."""
    model = {
        "VISION_OPENAI_API_BASE_URL": f"{eyes.url}/v1",
        "VISION_OPENAI_API_KEY": KEY,
        "VISION_MODEL": "eyes",
    }
    return model | {"WEB_SERVER_TOKEN": TOKEN, "WEB_CACHE": tmp_path / "cache.sqlite"}


@pytest.fixture
def start(tmp_path, usual):
    """Start image servers with these settings and variables."""
    with running(ToolServer, tmp_path, KEY, TOKEN) as start:
        yield lambda settings=None, **own: start("visual_inspector", settings=settings, **usual | own)
