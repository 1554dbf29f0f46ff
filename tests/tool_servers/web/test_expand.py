"""Model-written questions from real web tools: a search and a page server with a generated encyclopaedia."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from afm.datasets import read_tasks
from afm.datasets.encyclopaedia import Encyclopaedia
from afm.datasets.encyclopaedia.relations import ATTRIBUTE_OF, EntityKind, find_fact, read_chain
from afm.distill.event_log import EventKind, read_events
from afm.distill.expand import expand, read_expansion
from afm.errors import ConfigError

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/expand/web.yaml"
WORLD = Encyclopaedia(200, seed=5)
LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")
GUILDS = [WORLD.names.name(number) for number in list(WORLD.ranges[EntityKind.GUILD])[:4]]
YEAR = ATTRIBUTE_OF[EntityKind.GUILD].name


def plain(text):
    return LINK.sub(r"\1", text)


def passages(user):
    return re.findall(r"^Passage(?: \d+)?: ([^\n]*)\n<<<\n(.*?)\n>>>", user, re.MULTILINE | re.DOTALL)


def scout(user):
    """Read the result with the subject's name, then continue with the founder of a guild or the next guild."""
    topic = re.search(r"^Topic: (.*)$", user, re.MULTILINE)[1]
    if "Search results:" in user:
        subject = re.search(r"^Subject: (.*)$", user, re.MULTILINE)[1]
        return {"address": re.search(rf"^\[\d+\] {subject}\n(\S+)", user, re.MULTILINE)[1]}
    founder = re.search(rf"The founder of {topic} is \[([^]]+)\]", user)
    return {"subject": founder[1], "query": f"who is {founder[1]}"}


def proposer(user):
    (first, one), (second, two) = passages(user)
    year = find_fact(plain(two), "birth year", second)
    return {
        "question": f"What is the birth year of the founder of {first}?",
        "answer": year.gives,
        "evidence": [
            {"passage": 1, "quote": re.search(rf"The founder of {first} is \[{second}\]", one)[0]},
            {"passage": 2, "quote": year.sentence},
        ],
    }


def solver(user):
    chain = read_chain(re.search(r"^Question: (.*)$", user, re.MULTILINE)[1])
    text, name = plain(" ".join(text for _, text in passages(user))), chain.start
    for asks in chain.asks:
        fact = find_fact(text, asks, name)
        if fact is None:
            return {"answer": ""}
        name = fact.gives
    return {"answer": name}


def side_by_side(user):
    """Choose another guild, independent of the pages read."""
    if "Search results:" in user:
        return scout(user)
    read = set(re.findall(r"^Page \d+, \S+, about (.*):$", user, re.MULTILINE))
    return {"subject": next(name for name in GUILDS if name not in read)}


def compares(user):
    """Ask a question whose answer is the name of a guild in the evidence."""
    years = {name: find_fact(plain(text), YEAR, name) for name, text in passages(user)}
    first = min(years, key=lambda name: int(years[name].gives))
    evidence = [{"passage": number, "quote": fact.sentence} for number, fact in enumerate(years.values(), 1)]
    return {"question": "Which of the two guilds opened earlier?", "answer": first, "evidence": evidence}


def compared(user):
    years = {name: int(find_fact(plain(text), YEAR, name).gives) for name, text in passages(user)}
    return {"answer": min(years, key=years.get) if len(years) == 2 else ""}


DEPTH = {"You gather web": scout, "You write one": proposer, "You answer a": solver}
WIDTH = {"You gather web": side_by_side, "You write one": compares, "You answer a": compared}


@pytest.fixture
def model(site, monkeypatch):
    """An OpenAI-compatible endpoint whose replies come from its ``brains``."""

    class Model:
        brains = DEPTH
        asked = 0

    def completion(handler):
        Model.asked += 1
        system, user = (message["content"] for message in json.loads(handler.body)["messages"])
        brain = next(brain for words, brain in Model.brains.items() if system.startswith(words))
        content = json.dumps(brain(user))
        choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return 200, "application/json", json.dumps({"choices": [choice], "usage": usage}).encode()

    site.pages["/v1/chat/completions"] = completion
    monkeypatch.setenv("TEACHER_BASE_URL", f"{site.url}/v1")
    monkeypatch.setenv("TEACHER_API_KEY", "sk-teacher-secret")
    return Model


async def expanded(tmp_path, tools, topics, **settings):
    (tmp_path / "topics.txt").write_text("\n".join(topics) + "\n")
    settings |= {"tools": tools, "topics": tmp_path / "topics.txt", "output_dir": tmp_path / "out"}
    return await expand(read_expansion(CONFIG, [f"{key}={value}" for key, value in settings.items()]))


@pytest.mark.slow
async def test_by_depth_one_page_leads_to_the_next_and_all_is_on_record(tmp_path, tools, model):
    summary = await expanded(tmp_path, tmp_path / "tools.yaml", [*GUILDS, "xylophone", "", GUILDS[0]])

    tasks = list(read_tasks(summary.path))
    assert (summary.groups, summary.kept, summary.rejected) == (5, 4, {"pages": 1})
    for guild, task in zip(GUILDS, tasks, strict=True):
        founder = find_fact(WORLD.page(WORLD.names.number(guild)).text, "founder", guild).gives
        born = find_fact(WORLD.page(WORLD.names.number(founder)).text, "birth year", founder).gives
        assert task.question == f"What is the birth year of the founder of {guild}?"
        assert task.ground_truth == born
        assert task.extra_info["hops"] == 2
        ends = [hop["passage"].rpartition("/")[2].replace("_", " ") for hop in task.extra_info["path"]]
        assert ends == [guild, founder]
    (rejected,) = map(json.loads, (tmp_path / "out/rejected.jsonl").read_text().splitlines())
    assert rejected["rejected"] == "web_search returned nothing for 'xylophone'"
    events = list(read_events(tmp_path / "out/events.jsonl"))
    calls = [event.tool for event in events if event.kind is EventKind.TOOL_CALL]
    assert calls.count("crawl_page") == 8
    assert calls.count("web_search") == 9
    page = next(
        event for event in events if event.kind is EventKind.TOOL_RESULT and event.tool == "crawl_page"
    )
    assert page.content == (await tools["crawl_page"].call(page.content.splitlines()[1])).text

    asked = model.asked
    words = [sys.executable, "-m", "afm.cli.main", "data", "expand", str(CONFIG)]
    words += [f"topics={tmp_path / 'topics.txt'}", f"tools={tmp_path / 'tools.yaml'}"]
    words += [f"output_dir={tmp_path / 'out'}"]
    again = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True)
    assert "4 questions of 5 groups" in again.stdout, again.stderr
    assert model.asked == asked


@pytest.mark.slow
async def test_by_width_pages_are_compared_and_what_the_scout_makes_up_is_not_read(tmp_path, tools, model):
    async def rejected(name, brain):
        model.brains = DEPTH | {"You gather web": brain}
        (tmp_path / name).mkdir()
        await expanded(tmp_path / name, tmp_path / "tools.yaml", GUILDS[:1])
        (row,) = map(json.loads, (tmp_path / name / "out/rejected.jsonl").read_text().splitlines())
        return row["rejected"]

    def inventing(user):
        return {"address": "http://127.0.0.1:1/invented"} if "Search results:" in user else scout(user)

    def straying(user):
        return scout(user) if "Search results:" in user else {"subject": GUILDS[3]}

    model.brains = WIDTH
    summary = await expanded(tmp_path, tmp_path / "tools.yaml", GUILDS[:1], growth="width")
    (task,) = read_tasks(summary.path)
    years = {name: find_fact(WORLD.page(WORLD.names.number(name)).text, YEAR, name) for name in GUILDS[:2]}
    assert task.ground_truth == min(years, key=lambda name: int(years[name].gives))
    assert [hop["quote"] for hop in task.extra_info["path"]] == [fact.sentence for fact in years.values()]

    assert "'http://127.0.0.1:1/invented' is not among the results" in await rejected("1", inventing)
    assert "does not occur word for word in page 1" in await rejected("2", straying)


async def test_a_server_that_is_away_is_no_rejection_and_a_wrong_file_is_told(tmp_path, model):
    away = yaml.safe_load((ROOT / "configs/tiny/tools/search.yaml").read_text())
    for entry in away["tools"]:
        entry["config"] |= {"urls": ["http://127.0.0.1:9"], "tries": 1}
    gone, alone = tmp_path / "gone.yaml", tmp_path / "alone.yaml"
    gone.write_text(yaml.safe_dump(away))
    alone.write_text(yaml.safe_dump({"tools": away["tools"][:1]}))
    found = await expanded(tmp_path, gone, GUILDS[:1])

    assert (found.kept, found.failed, found.rejected) == (0, 1, {})
    with pytest.raises(ConfigError, match=r"members\.scout: missing"):
        await expanded(tmp_path, gone, GUILDS[:1], **{"members.scout": ""})
    with pytest.raises(ConfigError, match="page_tool: 'crawl_page' is not among the tools"):
        await expanded(tmp_path, alone, GUILDS[:1])
