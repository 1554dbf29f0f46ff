"""``servers.sh`` with real servers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from loopback import OWN_HOST, free_port

from afm.models.tiny import create_tiny_model, train_tokenizer
from tool_servers import __main__ as command_line
from tool_servers.shared.command import LOG_VARIABLE

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tool_servers/servers.sh"
TOKEN = "a-long-random-token"
KEY = "sk-a-secret-key"
OURS = (
    *("WEB_", "VISION_", "SUMMARY_", "SEARXNG_", "CODE_SERVER_", "WIKI_", "MCP_", "GATEWAY_", "AFM_SERVER"),
    *("SERVER_", "AFM_MODEL_API_KEY"),
)


class Servers:
    """Runs the commands of the script in this process, with a separate state folder, settings and environment."""

    def __init__(self, folder, monkeypatch, capsys):
        self.state = folder / "state"
        self.configs = folder / "configs"
        self.configs.mkdir()
        self._monkeypatch, self._capsys = monkeypatch, capsys
        names = ("CODE_SERVER", "CRAWL_PAGE", "WEBSEARCH", "VISUAL_INSPECTOR")
        self.ports = {name: free_port() for name in names}
        for name in list(os.environ):
            if name.startswith(OURS):
                monkeypatch.delenv(name)
        monkeypatch.setenv("SERVER_HOST", OWN_HOST)
        for name, port in self.ports.items():
            monkeypatch.setenv(f"{name}_PORT", str(port))
        monkeypatch.setenv("WEB_CACHE", str(folder / "cache.sqlite"))
        monkeypatch.setenv("WEB_SERVER_TOKEN", TOKEN)
        monkeypatch.setenv("WIKI_RAG_SERVER_URL", f"http://{OWN_HOST}:{free_port()}/retrieve")

    def __call__(self, *words, status=0, cwd="/", **variables):
        verb, *rest = map(str, words)
        options = ["--state", str(self.state), "--configs", str(self.configs), "--wait", "300"]
        with self._monkeypatch.context() as patch:
            patch.chdir(cwd)
            for name, value in variables.items():
                patch.setenv(name, str(value))
            try:
                code = command_line.main([verb, *options, *rest])
            except SystemExit as end:
                code = end.code
        output = "".join(self._capsys.readouterr())
        assert code == status, output
        assert TOKEN not in output
        assert KEY not in output
        return output

    def pid(self, name):
        return json.loads((self.state / f"{name}.pid").read_text())["pid"]

    def wait_for_port(self, name):
        """Wait until the port of a killed server is free; the kernel closes sockets after the process ends."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                return socket.create_server((OWN_HOST, self.ports[name])).close()
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the port is still taken")

    def crawl(self, url, seconds=60):
        place = f"http://{OWN_HOST}:{self.ports['CRAWL_PAGE']}/crawl_page"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        body = {"urls": url, "seconds": seconds}
        return httpx.post(place, json=body, headers=headers, timeout=120, trust_env=False)


@pytest.fixture
def servers(tmp_path, monkeypatch, capsys):
    servers = Servers(tmp_path, monkeypatch, capsys)
    yield servers
    command_line.main(["stop", "--state", str(servers.state), "--wait", "5"])
    for log in servers.state.glob("*.log*"):
        assert TOKEN not in log.read_text()


@pytest.fixture
def slow_site(site):
    """Answers when ``site.released`` is set; sets ``site.waiting`` when a request waits."""
    site.waiting, site.released = threading.Event(), threading.Event()

    def mill(_):
        site.waiting.set()
        site.released.wait(60)
        return 200, "text/html", b"<p>The mill was built in 1702.</p>"

    site.pages["/mill"] = mill
    yield site
    site.released.set()


@pytest.fixture
def request_under_way(servers, slow_site):
    """Start a page server and a request that waits for the site; yield the future answer."""
    settings = f"trusted: ['{slow_site.host}']\nworkers: 1\nfetch_s: 60\nfinish_s: 60\n"
    (servers.configs / "crawl_page.yaml").write_text(settings)
    servers("start", "crawl_page")
    with ThreadPoolExecutor() as pool:
        request = pool.submit(servers.crawl, f"{slow_site.url}/mill")
        assert slow_site.waiting.wait(60)
        yield request


MILL = {"url": "http://e.org/", "title": "Mill", "text": "The mill at the river."}


@pytest.mark.sandbox
@pytest.mark.slow
def test_all_that_are_set_up_start_work_and_stop(servers, mill_index, tmp_path):
    pages = tmp_path / "pages.jsonl"
    pages.write_text(json.dumps(MILL))
    (servers.configs / "wiki.yaml").write_text(f"index: {mill_index}\n")
    printed = servers("start", WEB_PAGE_STORE=pages)
    assert printed.count(" started, pid ") == 4, printed
    assert "visual_inspector not set up: VISION_OPENAI_API_BASE_URL" in printed
    assert servers("start", WEB_PAGE_STORE=pages).count("already running") == 4
    assert servers("status").count(" healthy, pid ") == 4
    tested = servers("test")
    for line in ("a program printed 42", "a private address is blocked", "1 results", "1 passages"):
        assert line in tested
    assert servers("stop").count(" stopped after ") == 4
    assert servers("status", status=1).count("stopped") == 8
    assert "no server is running" in servers("test", status=1)


@pytest.mark.slow
def test_relative_paths_are_those_of_the_callers_folder(servers, mill_index, tmp_path):
    caller = tmp_path / "the caller"
    caller.mkdir()
    shutil.copytree(mill_index, caller / "index")
    (caller / "pages.jsonl").write_text(json.dumps(MILL))
    (servers.configs / "wiki.yaml").write_text("index: index\n")

    def called(verb, *names, **variables):
        return servers(verb, *names, "--state", "state here", cwd=caller, **variables)

    both = ("wiki_search", "web_search")
    called_with = called("start", *both, WEB_PAGE_STORE="pages.jsonl")
    assert called_with.count(" started, pid ") == 2, called_with
    assert "1 passages" in called("test", *both)
    called("stop")
    in_front = script(SCRIPT, "wiki_search", "--index", "absent", cwd=caller)
    assert "absent: no finished index here" in in_front.stderr


def script(*command, cwd, **variables):
    environment = os.environ | {"PYTHON": sys.executable} | variables
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("called", ["./a link", "tool_servers/servers.sh"])
def test_the_script_finds_its_repository(called, tmp_path):
    (tmp_path / "a link").symlink_to(SCRIPT)
    folder = tmp_path if called == "./a link" else ROOT
    words = (called, "code", "--port", "9002", "--dry-run")
    done = script(*words, cwd=folder, CDPATH=".")  # with CDPATH, cd prints the folder
    assert (done.stdout, done.stderr) == (f"{sys.executable} -P -m tool_servers code --port 9002\n", "")


@pytest.mark.slow
def test_a_model_is_started_and_tested(servers, tmp_path):
    folder = tmp_path / "tiny model"
    train_tokenizer(["Tom has 12 apples by the long river."] * 50, folder, vocab_size=300)
    create_tiny_model(folder, folder, seed=1)
    further = ("--", "--model", folder, "--port", free_port(), "--name", "tiny")
    assert "model            started, pid " in servers("start", "model", *further, AFM_MODEL_API_KEY=KEY)
    assert "tiny continued a text by 1 token" in servers("test", "model", AFM_MODEL_API_KEY=KEY)
    assert "FAILED: status 401" in servers("test", "model", status=1)


@pytest.mark.slow
def test_a_gateway_is_tested_with_endpoints_that_list_no_models(servers, site, tmp_path):
    variables = {"GATEWAY_UPSTREAM_URL": f"{site.url}/v1", "GATEWAY_PORT": free_port()}
    servers("start", "gateway", "--", "--log", tmp_path / "events.jsonl", **variables)

    def tested(status, body, passes):
        site.pages["/v1/models"] = (status, "text/plain", body)
        return servers("test", "gateway", status=0 if passes else 1)

    assert "models behind it: 1" in tested(200, b'{"data": [{"id": "m"}]}', True)
    for body in (b"<h1>Not Found</h1>", b'{"detail": "Not Found"}', b'{"error": "no such path"}'):
        assert "the endpoint answers but lists no models (status 404)" in tested(404, body, True)
    assert "FAILED: status 401" in tested(401, b'{"error": {"message": "wrong key"}}', False)
    assert "FAILED: status 502" in tested(200, b"<h1>Welcome</h1>", False)
    site.close()
    assert "FAILED: status 502" in servers("test", "gateway", status=1)


@pytest.mark.slow
def test_a_stop_lets_requests_finish(servers, request_under_way, slow_site):
    threading.Timer(1, slow_site.released.set).start()  # while the stop command waits
    assert "crawl_page       stopped after" in servers("stop", "crawl_page")
    [page] = request_under_way.result().json()["pages"]
    assert "1702" in page["text"]
    assert not (servers.state / "crawl_page.pid").exists()


def test_a_stop_that_takes_too_long_becomes_a_kill_and_says_so(servers, request_under_way):
    pid = servers.pid("crawl_page")
    assert "killed after" in servers("stop", "crawl_page", "--wait", "0.3", status=1)
    with pytest.raises(httpx.HTTPError):
        request_under_way.result()
    assert not Path(f"/proc/{pid}/exe").exists()


def test_all_problems_are_told_before_anything_starts(servers, mill_index, tmp_path):
    torn, pages = tmp_path / "torn", tmp_path / "pages.jsonl"
    port, taken = servers.ports["CODE_SERVER"], servers.ports["WEBSEARCH"]
    pages.write_text(json.dumps(MILL))
    shutil.copytree(mill_index, torn)
    os.truncate(torn / "passages.jsonl", 10)
    (servers.configs / "wiki.yaml").write_text(f"index: {torn}\n")
    names = ("code", "crawl_page", "web_search", "visual_inspector", "wiki_search")
    variables = {"WEB_PAGE_STORE": pages, "VISION_MODEL": "eyes", "VISION_OPENAI_API_KEY": KEY}
    with socket.create_server((OWN_HOST, taken)):
        printed = servers("start", *names, status=1, CRAWL_PAGE_PORT=port, **variables)
    for line in (
        f"crawl_page       cannot start: port {port} is also the port of code",
        f"web_search       cannot start: cannot listen on {OWN_HOST}, port {taken}",
        "VISION_OPENAI_API_BASE_URL not set",
        f"wiki_search      cannot start: {torn}/passages.jsonl: it has 10 bytes, expected",
        "error: nothing was started",
    ):
        assert line in printed
    assert servers("status", status=1).count("stopped") == 8


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (("mcp", "--", "--tools", "absent.yaml"), {}, "absent.yaml: no such file"),
        (("model",), {}, "--model is missing; tool_servers/servers.sh start model -- --model FOLDER"),
        (("model", "--", "--model", "absent"), {}, "absent: not the folder of a model"),
        (
            ("wiki_search", "--", "--index=absent"),
            {},
            "absent: no index here; build one with `afm serve wiki",
        ),
        (("wiki_search",), {}, "wiki_search      not set up: no index; name its folder with --index"),
        (("crawl_page",), {"SUMMARY_OPENAI_API_BASE_URL": "http://x/v1"}, "SUMMARY_MODEL is not"),
    ],
)
def test_what_is_missing_is_named(servers, words, variables, message):
    assert message in servers("start", *words, status=1, **variables)


@pytest.mark.parametrize(
    "words",
    [("start", "cod"), ("begin",), ("start", "--", "--port", "1"), ("start", "code", "--", "--port", "x")],
)
def test_wrong_usage_has_status_2(servers, words):
    servers(*words, status=2)


@pytest.mark.slow
def test_a_server_that_ends_at_once_fails_with_its_last_words(servers, tmp_path):
    printed = servers("start", "crawl_page", status=1, WEB_CACHE=tmp_path)
    assert "crawl_page       failed: ended with status 1" in printed
    assert f"cache {tmp_path}: cannot be opened" in printed
    assert not (servers.state / "crawl_page.pid").exists()
    assert servers.state.joinpath("crawl_page.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_killed_server_is_noticed_and_can_be_started_again(servers):
    servers("start", "crawl_page")
    os.kill(servers.pid("crawl_page"), signal.SIGKILL)
    servers.wait_for_port("CRAWL_PAGE")
    assert "crawl_page       exited by itself; see " in servers("status", status=1)
    assert "FAILED: not running" in servers("test", status=1)
    assert "started" in servers("start", "crawl_page")
    assert "healthy" in servers("status", "crawl_page")
    assert "stopped" in servers("status", "crawl_page", "code", status=1)


@pytest.mark.slow
def test_a_server_that_hangs_is_not_healthy(servers, monkeypatch):
    servers("start", "crawl_page")
    monkeypatch.setattr(command_line, "_HEALTH_S", 0.5)
    os.kill(servers.pid("crawl_page"), signal.SIGSTOP)
    try:
        assert "not healthy" in servers("status", "crawl_page", status=1)
    finally:
        os.kill(servers.pid("crawl_page"), signal.SIGCONT)


def test_another_process_with_the_number_of_a_dead_server_is_left_alone(servers):
    bystander = subprocess.Popen(["sleep", "60"])
    servers.state.mkdir()
    about = {"name": "code", "pid": bystander.pid, "born": 1, "url": "http://127.0.0.1:1", "since": 0}
    (servers.state / "code.pid").write_text(json.dumps(about))
    assert "exited by itself" in servers("status", "code", status=1)
    servers("stop", "code")
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_pid_file_of_another_form_is_no_server(servers):
    servers.state.mkdir()
    (servers.state / "code.pid").write_text("12345\n")
    assert "code             stopped" in servers("status", "code", status=1)


def test_without_words_it_says_what_it_can_do(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main([])
    assert end.value.code == 0
    assert "{start,stop,status,test}" in capsys.readouterr().out


def test_a_dry_run_starts_nothing(servers):
    printed = servers("start", "crawl_page", "--dry-run")
    assert "-m tool_servers crawl_page" in printed
    assert not (servers.state / "crawl_page.pid").exists()


@pytest.mark.slow
def test_logs_are_begun_anew_without_losing_a_line(tmp_path):
    log = tmp_path / "server.log"
    program = """
import sys, time
from tool_servers.shared.serve import follow_log
follow_log()
for number in range(300):
    print(f"line {number} " + "x" * 80, file=sys.stderr if number % 2 else sys.stdout, flush=True)
    time.sleep(0.01)
"""
    environment = os.environ | {LOG_VARIABLE: f"8000:{log}"}
    with log.open("ab") as sink:
        command = [sys.executable, "-c", program]
        subprocess.run(command, stdout=sink, stderr=sink, env=environment, cwd=ROOT, check=True)
    files = sorted(tmp_path.glob("server.log*"), reverse=True)
    assert 3 <= len(files) <= 4
    numbers = [int(line.split()[1]) for file in files for line in file.read_text().splitlines()]
    assert numbers == list(range(300))
