import httpx
import pytest
from extras import needs

from afm.evaluation.viewer import EpisodeIndex

needs("fastapi")


@pytest.fixture
def address(tmp_path, viewer):
    tokens = {"response_ids": (5, 6), "response_mask": (1, 0), "logprobs": (-0.5, 0.0)}
    viewer.write(
        tmp_path / "run/episodes.jsonl", [viewer.episode(1), viewer.episode(2, passed=False, **tokens)]
    )
    with viewer.showing(EpisodeIndex(tmp_path / "run", tmp_path / "index.sqlite")) as found:
        yield found


def get(address, path):
    return httpx.get(address + path)


def test_an_episode_is_shown_by_role_with_the_time_of_its_calls(address, viewer):
    shown = get(address, "/api/episodes/1").json()
    roles = ["think", "plan", "think", "wiki_search", "observation", "think", "answer"]
    assert [block["role"] for block in shown["blocks"]] == roles
    assert [block["author"] == "environment" for block in shown["blocks"]] == [
        role == "observation" for role in roles
    ]
    assert shown["blocks"][3]["seconds"] == 0.25
    assert shown["row"]["verdict"] == "passed"
    assert shown["has_tokens"] is False


def test_tokens_come_with_mask_and_log_probability(address, viewer):
    shown = get(address, "/api/episodes/2/tokens").json()
    assert shown["tokens"] == [
        {"id": 5, "text": "5 ", "trained": True, "logprob": -0.5, "advantage": None},
        {"id": 6, "text": "6 ", "trained": False, "logprob": None, "advantage": None},
    ]
    assert shown["note"].startswith("No settings file here names a model. The page shows token ids.")


def test_lists_are_filtered_and_paged(address, viewer):
    page = get(address, "/api/episodes?verdict=failed").json()
    assert [row["name"] for row in page["rows"]] == ["e2"]
    page = get(address, "/api/episodes?limit=1&offset=1").json()
    assert ([row["name"] for row in page["rows"]], page["total"]) == (["e2"], 2)


def test_what_is_not_there_is_an_error_in_words(address, viewer):
    answer = get(address, "/api/episodes/77")
    assert (answer.status_code, answer.json()) == (404, {"error": "there is no episode 77"})
    assert get(address, "/../server.py").status_code == 404
    assert get(address, "/viewer.html").status_code == 404


def test_an_episode_whose_file_changed_is_not_shown_as_another(tmp_path, address, viewer):
    file = tmp_path / "run/episodes.jsonl"
    file.write_bytes(b"x" * file.stat().st_size)
    answer = get(address, "/api/episodes/2")
    assert answer.status_code == 409
    assert "the file may have changed since it was indexed" in answer.json()["error"]


def test_a_page_of_another_name_cannot_read_it(address, viewer):
    """DNS rebinding: the browser of this machine asks with the name of a foreign page."""
    assert httpx.get(f"{address}/api/status", headers={"Host": "evil.example"}).status_code == 400
    answer = get(address, "/")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "access-control-allow-origin" not in answer.headers


def test_a_running_job_is_followed(tmp_path, address, viewer):
    viewer.write(tmp_path / "run/later.jsonl", [viewer.episode(3)])
    viewer.until(lambda: get(address, "/api/status").json()["episodes"] == 3)
    assert get(address, "/api/episodes?text=river+3").json()["total"] == 1


def test_an_episode_is_found_by_its_name_and_the_end_of_its_file(tmp_path, address, viewer):
    def found(query):
        return get(address, f"/api/find?{query}").json()["number"]

    for end in ("", "&file=episodes.jsonl", "&file=run/episodes.jsonl"):
        assert found(f"name=e2{end}") == 2
    assert found("name=e2&file=sodes.jsonl") is None
    assert found("name=e9&file=episodes.jsonl") is None


def test_numbers_that_sqlite_does_not_have_are_refused(address):
    for query in ("?step={}", "?question={}", "?offset={}", "?step=-{}", "/{}", "/{}/tokens"):
        assert get(address, "/api/episodes" + query.format(2**63 + 1)).status_code == 422, query
    assert get(address, "/api/episodes").status_code == 200
    assert get(address, "/api/episodes?text=a%00b").status_code == 200, "a NUL is no letter"


def test_advantages_are_one_for_all_tokens_or_one_each(viewer):
    from afm.evaluation.viewer.episodes import token_view

    def shown(advantages):
        tokens = {"response_ids": (5, 6, 7), "response_mask": (1, 0, 1)}
        record = viewer.episode(1, **tokens)
        return [token["advantage"] for token in token_view(record, None, advantages)]

    assert shown(0.5) == [0.5, None, 0.5]
    assert shown([1, 2, -3]) == [1.0, None, -3.0]
    assert shown([1]) == [1.0, None, None]
    for broken in ("x", None, [None, "y", float("nan")], {"a": 1}, True, 10**400):
        assert shown(broken) == [None, None, None]


def test_figures_that_json_lacks_become_null(tmp_path, address, viewer):
    (tmp_path / "run/later.jsonl").write_text(viewer.line_without_numbers(3))
    viewer.until(lambda: get(address, "/api/status").json()["episodes"] == 3)
    listed = get(address, "/api/episodes?order=newest").json()["rows"][0]
    assert (listed["seconds"], listed["score"]) == (None, None)
    shown = get(address, "/api/episodes/3").json()
    assert (shown["cost"]["wall_seconds"], shown["verdict"]["score"]) == (None, None)
    assert get(address, "/api/files").status_code == 200


@pytest.mark.slow
def test_the_command_listens_on_ipv6_and_to_this_machine_only(afm, tmp_path, viewer):
    import re
    import socket
    import subprocess
    import sys

    viewer.write(tmp_path / "a.jsonl", [viewer.episode(1)])
    command = [sys.executable, "-m", "afm.cli.main", "view", str(tmp_path), "--host"]
    refused = afm("view", tmp_path, "--host", "0.0.0.0", status=2)
    assert "expected a loopback address (127.0.0.1, ::1, localhost)" in refused.stderr
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with subprocess.Popen([*command, "::1"], stdout=subprocess.PIPE, text=True) as process:
        try:
            found = re.match(r"(http://\[::1\]:\d+)/", process.stdout.readline())
            address = found[1]
            viewer.until(lambda: viewer.answered(address))
            assert httpx.get(f"{address}/api/status").json()["episodes"] == 1
            for name in ("evil.example", "[::2]", "[::1", "::1]evil"):
                assert httpx.get(f"{address}/", headers={"Host": name}).status_code == 400
        finally:
            process.terminate()


def test_a_folder_without_episodes_is_served_with_a_warning(tmp_path):
    import subprocess
    import sys

    command = [sys.executable, "-m", "afm.cli.main", "view", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline().startswith(f"{tmp_path}: no episodes below this folder yet;")
        finally:
            process.terminate()
