import json
import os
import shutil
from urllib.parse import urlencode

import httpx
import pytest

from afm.evaluation.viewer import EpisodeIndex

api = pytest.importorskip("playwright.sync_api")
expect = api.expect
CHROMIUM = shutil.which("chromium")
HOSTILE = (
    '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>&lt;b&gt;\u202e'
)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


@pytest.fixture
def run(tmp_path, viewer):
    """Three files: 150 episodes, another run of two of their questions, a hostile one with tokens."""
    tokens = {"response_ids": (5, 6, 7), "response_mask": (1, 0, 1), "logprobs": (-4.0, 0.0, -0.1)}
    folder = tmp_path / "run"
    viewer.write(folder / "a.jsonl", [viewer.episode(n, passed=n % 3 > 0) for n in range(1, 151)])
    others = [viewer.episode(n, id=f"other{n}", model="rival") for n in (1, 2)]
    viewer.write(folder / "b.jsonl", others)
    hostile = viewer.episode(999, question=HOSTILE, source=HOSTILE, **tokens)
    viewer.write(folder / "c.jsonl", [hostile])
    (folder / "c.advantages.json").write_text(json.dumps({hostile.id: [1.25, 9.0, -0.5]}))
    for name in "abc":
        os.utime(folder / f"{name}.jsonl", (1e9, 1e9))
    return folder


@pytest.fixture
def address(run, viewer, tmp_path):
    with viewer.showing(EpisodeIndex(run, tmp_path / "index.sqlite")) as address:
        yield address


@pytest.fixture
def page(browser, address):
    """A page on which any complaint of the browser fails the test; it is closed before its server."""
    found = browser.new_page(viewport={"width": 1280, "height": 800})
    complaints = []
    found.on("console", lambda message: complaints.append(message.text))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    yield found
    found.close()
    assert complaints == []


@pytest.mark.slow
def test_a_person_filters_searches_reads_and_compares(page, address):
    page.goto(address)
    expect(page.locator("table.files tbody tr")).to_have_count(3)
    page.keyboard.press("e")
    expect(page.locator("#list a")).to_have_count(100)
    assert page.inner_text("#count") == "153 episodes"

    page.select_option("select[name=verdict]", "failed")
    expect(page.locator("#count")).to_have_text("50 episodes")
    page.keyboard.press("/")
    page.keyboard.type("river 42")
    expect(page.locator("#count")).to_have_text("1 episode")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.wait_for_selector(".block >> text=river 42")
    assert page.inner_text(".badge").strip().endswith("failed, score 0")
    assert " ·" not in page.inner_text(".side")  # a dot holds on to the fact before it
    linked = page.url

    page.goto(f"{address}#text=river+1")
    expect(page.locator("#count")).to_have_text("2 episodes")
    page.keyboard.press("j")
    page.wait_for_selector(".block")
    page.keyboard.press("c")
    page.click(".others button")
    expect(page.locator(".side")).to_have_count(2)
    boxes = [side.bounding_box() for side in page.query_selector_all(".side")]
    assert boxes[0]["y"] == boxes[1]["y"]  # side by side, not below each other

    page.goto("about:blank")
    page.goto(linked)  # a deep link brings filter, search and episode back
    page.wait_for_selector(".block >> text=river 42")
    expect(page.locator("#count")).to_have_text("1 episode")


def test_hostile_text_stays_text(page, address):
    page.goto(f"{address}#order=newest")
    page.wait_for_selector("#list a")
    page.keyboard.press("j")
    page.wait_for_selector(".question")
    # what would turn the direction of writing around is shown, not obeyed
    assert page.inner_text(".question") == HOSTILE.replace("\u202e", r"\u202e")
    assert page.query_selector_all("main img, main script, #list img") == []
    page.keyboard.press("t")
    page.wait_for_selector(".tokens .masked")
    assert (
        page.get_attribute(".tokens .p3.up", "title")
        == "trained, log-probability -4.000, advantage +1.250, id 5"
    )
    assert page.get_attribute(".tokens .masked", "title") == "masked, id 6"
    assert (
        page.get_attribute(".tokens .down", "title")
        == "trained, log-probability -0.100, advantage −0.500, id 7"
    )
    legend = page.inner_text(".tokens-legend")
    for meaning in (
        "3 tokens.",
        "no loss",
        "below 5 %",
        "advantage up to +1.250",
        "advantage down to −0.500",
    ):
        assert meaning in legend
    assert "owned" not in page.title()


@pytest.mark.slow
def test_new_episodes_of_a_running_job_appear(page, address, run, viewer):
    page.goto(f"{address}#order=newest")
    page.wait_for_selector("#list a >> nth=0")
    viewer.write(run / "late.jsonl", [viewer.episode(7000)])
    page.wait_for_selector("#list a >> text=river 7000")
    assert page.inner_text("#status") == "154 rows in 4 files"


def test_a_click_is_not_lost_when_the_list_is_loaded_again_meanwhile(page, address, run, viewer):
    page.goto(f"{address}#view=episodes")
    page.hover("#list a >> nth=0")
    page.mouse.down()
    viewer.write(run / "late.jsonl", [viewer.episode(7000)])
    expect(page.locator("#status")).to_have_text("154 rows in 4 files")
    expect(page.locator("#count")).to_have_text("154 episodes")
    page.mouse.up()
    page.wait_for_selector(".block")


def test_short_names_and_dates_have_one_line_in_the_table_of_files(browser, tmp_path, viewer):
    names = {"short": ("weekday_agent", "runs/rl_seqmean_0"), "long": ("a" * 60, "b" * 60)}
    for folder, (agent, model) in names.items():
        named = viewer.episode(1, agent=agent, model=model)
        viewer.write(tmp_path / f"run/eval_{folder}_0/episodes.jsonl", [named])
    with viewer.showing(EpisodeIndex(tmp_path / "run", tmp_path / "index.sqlite"), files=2) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(address)
        row = page.locator("table.files tbody tr", has_text="weekday_agent")
        row.wait_for()  # reading all cells at once does not wait for them
        lines = "cells => cells.map((cell) => { const range = document.createRange(); range.selectNodeContents(cell); return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size; })"
        assert row.locator("th, td").evaluate_all(lines) == [1] * 10
        assert page.evaluate("document.querySelector('#page').scrollWidth") == 1280
        page.close()


def test_a_narrow_screen_shows_one_pane_at_a_time(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page.goto(address)
    page.wait_for_selector("table.files tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.click("nav >> text=Episodes")
    page.click("#list a >> nth=0")
    page.wait_for_selector(".block")
    assert not page.is_visible("#list")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.click("#back")
    page.wait_for_selector("#list a")
    assert not page.is_visible(".block")
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_report_loads_nothing_fits_and_leads_to_its_trajectories(
    browser, address, run, tmp_path, width, scheme
):
    from urllib.parse import urlsplit

    from afm.evaluation.curves import score_curves
    from afm.evaluation.failures import scan
    from afm.evaluation.health import Aspect
    from afm.evaluation.metrics import summarise
    from afm.evaluation.report import write_report
    from afm.evaluation.report_input import ReportInput, StageResult, ViewLinks
    from afm.trajectory.io import load_records

    records = load_records(run / "a.jsonl") + load_records(run / "c.jsonl")
    records += [records[-1].model_copy(update={"id": HOSTILE, "verdict": None, "error": HOSTILE})]
    stages = (StageResult(HOSTILE, summarise(records), run / "a.jsonl", HOSTILE, scan(records, None)),)
    links = ViewLinks(run, urlsplit(address).port)
    meaning = "tokens trained on that nobody sampled, which is always 0 in a run that is well"
    health = (Aspect("Token drift", meaning, 0.0, 0.0, 0.0, 0.0, alarms=(HOSTILE,)),)
    page = ReportInput(HOSTILE, stages=stages, health=health, curves=tuple(score_curves(stages)), links=links)
    file = write_report(page, tmp_path / "report.html")

    found = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked, complaints = [], []
    found.on("request", lambda request: asked.append(request.url))
    found.on("console", lambda message: complaints.append(message.text))
    found.goto(file.as_uri())
    assert found.evaluate("document.documentElement.scrollWidth") == width
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert found.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")
    for one in found.locator("details").all():
        one.evaluate("(node) => { node.open = true; }")
    assert found.evaluate("document.documentElement.scrollWidth") == width
    assert found.title() != "owned"
    found.click("text=whole trajectory >> nth=0")
    found.wait_for_selector(".block >> text=river 3")
    assert found.url.startswith(f"{address}/#e=")
    assert complaints == []
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_name_of_an_agent_is_not_cut(page, address, run, viewer, width):
    named = [viewer.episode(1, agent="own_team.WeekdayTeamOfThree")]
    viewer.write(run / "d.jsonl", named)
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(address)
    cell = page.locator("td[data-label=Agent]", has_text="WeekdayTeam")
    expect(cell).to_have_count(1)
    assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth")


@pytest.mark.slow
def test_a_shared_bundle_opens_from_a_disk(browser, run, afm, tmp_path):
    """Without a server, under a policy that allows no request."""
    (run / "train.log").write_text("step 1\nstep 2\n")
    afm("view", run, "--bundle", tmp_path / "out", "--bundle-episodes", 60)
    page = browser.new_page(viewport={"width": 390, "height": 800})
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "out/index.html").as_uri())
    expect(page.locator("table.files tbody tr")).to_have_count(3)
    expect(page.locator(".notice li").first).to_contain_text("93 of 150 episodes of a.jsonl")
    expect(page.locator("#status")).to_have_text("60 of 153 rows in 3 files")
    page.keyboard.press("l")
    expect(page.locator("#log-text")).to_have_text("step 1\nstep 2\n")
    page.keyboard.press("e")
    expect(page.locator("#count")).to_have_text("60 episodes")
    page.select_option("select[name=verdict]", "failed")
    expect(page.locator("#count")).to_have_text("19 episodes")
    page.keyboard.press("j")
    page.wait_for_selector(".block >> text=river 3")
    page.keyboard.press("i")
    expect(page.locator(".mono-name")).to_have_text("a.jsonl")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert complaints == []
    page.close()


def test_a_bundle_is_searched_as_the_server_is(browser, address, run, afm, tmp_path, viewer):
    chats = [{"name": "0", "messages": [{"role": "user", "content": "Ask the ferryman."}]}] * 2
    question = "Où est la Rivière-Noire, 北京 or Straße?"
    viewer.write(run / "d.jsonl", [viewer.episode(7, question=question, provenance={"trajectories": chats})])
    afm("view", run, "--bundle", tmp_path / "out")
    page = browser.new_page()
    page.goto((tmp_path / "out/index.html").as_uri())
    counts = {
        "river 42": 1,
        '"river 42"': 1,
        '"42 river"': 0,
        "long wiki_search": 154,
        "iver": 0,
        "riviere noire": 1,
        "RIVIÈRE ferryman": 1,
        "北京": 1,
        "conversation": 0,
        "by hand": 0,
        "? !": 0,
        "": 154,
    }
    for text, count in counts.items():
        query = f"api/episodes?{urlencode({'text': text})}"
        assert httpx.get(f"{address}/{query}").json()["total"] == count, text
        assert page.evaluate(f"AFM_BUNDLE.answer({query!r})")["total"] == count, text
    page.close()


def test_an_empty_folder_says_what_to_do(browser, afm, viewer, tmp_path):
    (tmp_path / "empty").mkdir()
    index = EpisodeIndex(tmp_path / "empty", tmp_path / "index.sqlite")
    with viewer.showing(index, files=0) as address:
        page = browser.new_page()
        page.goto(address)
        expect(page.locator("#page")).to_contain_text(f"No episodes in {tmp_path}/empty yet.")
        expect(page.locator("#page")).to_contain_text("start it with the output_dir of the run")
        page.close()


@pytest.mark.slow
def test_two_episodes_are_compared_step_by_step(page, address, run, viewer):
    from afm.trajectory.tags import Author, Segment

    text = "<plan>Search it twice.</plan><think>Found.</think><answer>1</answer>"
    other = viewer.episode(1, id="short", segments=(Segment(Author.AGENT, text),), calls=())
    viewer.write(run / "d.jsonl", [other])
    page.goto(f"{address}#find=e1&in=a.jsonl")
    page.wait_for_selector(".block")
    page.keyboard.press("c")
    page.click(".others button >> text=short")
    expect(page.locator(".side")).to_have_count(2)
    page.keyboard.press("d")
    expect(page.locator(".pairs")).to_be_visible()
    assert page.locator(".pair.same").count() == 2  # the last thought and the answer
    plans = page.locator(".pair", has_text="Search it twice")
    assert plans.locator("mark").all_inner_texts() == [" it twice"]
    assert page.locator(".gap").count() == 4  # one query, its observation, and the thoughts around them
    page.keyboard.press("Escape")
    expect(page.locator(".pairs")).to_have_count(0)


def test_code_is_coloured_and_stays_the_text_that_it_was(page, address, run, viewer):
    from afm.trajectory.tags import Author, Segment

    program = "# add\nfor n in range(3):\n    print('<b>', \"it's\", 0x1F, n) # end"
    text = f"<plan>Run.</plan><code>\n```py\n{program}\n```\n</code>"
    coder = viewer.episode(5, id="coder", agent="math", segments=(Segment(Author.AGENT, text),), calls=())
    viewer.write(run / "e.jsonl", [coder])
    page.goto(f"{address}#find=coder&in=e.jsonl")
    code = page.locator(".block-text.code")
    expect(code).to_contain_text(program)
    words = {
        kind: code.locator(f".code-{kind}").all_inner_texts()
        for kind in ("word", "text", "number", "comment")
    }
    assert words == {
        "word": ["for", "in"],
        "text": ["'<b>'", '"it\'s"'],
        "number": ["3", "0x1F"],
        "comment": ["# add", "# end"],
    }


def test_a_growing_log_is_followed(page, address, run):
    (run / "train.log").write_text("step 1\n")
    page.goto(f"{address}#view=log")
    expect(page.locator("#log-text")).to_have_text("step 1\n")
    with (run / "train.log").open("a") as log:
        log.write("step 2\n")
    expect(page.locator("#log-text")).to_have_text("step 1\nstep 2\n")


def test_the_files_of_many_steps_are_one_line_until_it_is_opened(page, address, run, viewer):
    for step in range(6):
        viewer.write(run / f"rl/step_{step:06}.jsonl", [viewer.episode(step + 200)])
    page.goto(address)
    expect(page.locator("#status")).to_have_text("159 rows in 9 files")
    expect(page.locator("tbody tr:visible")).to_have_count(4)
    page.click("text=rl/step_*.jsonl, 6 files")
    expect(page.locator("tbody tr:visible")).to_have_count(10)


def test_a_search_without_a_match_leads_back_to_all(page, address):
    page.goto(f"{address}#verdict=failed&text=zebra")
    expect(page.locator("#empty")).to_contain_text("No episode matches")
    page.click("text=Show all episodes")
    expect(page.locator("#list a")).to_have_count(100)
    expect(page.locator("#empty")).to_be_hidden()


def test_long_names_and_figures_overlap_nothing(page, address, run, viewer):
    from afm.trajectory.record import Cost

    figures = Cost(agent_tokens=10**15, wall_seconds=1e12)
    name = "w" * 300
    long = viewer.episode(1, id=name, question=name, model=name, source=name, cost=figures)
    viewer.write(run / "deep/er/and/deeper/episodes.jsonl", [long])
    page.goto(address)
    expect(page.locator("tbody tr")).to_have_count(4)
    assert page.evaluate("document.getElementById('page').scrollWidth") <= 1280
    page.goto(f"{address}#text={name}")
    expect(page.locator("#list a")).to_have_count(1)
    assert page.locator("#list .figure").all_inner_texts() == ["1", "1000T", "11.6M d"]
    page.click("#list a")
    page.wait_for_selector(".block")
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 920


def test_the_keys_lead_everywhere(page, address):
    page.goto(address)
    page.wait_for_selector("table.files tbody tr")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    for key in page.locator("#help kbd").all_inner_texts():
        assert key in {"f", "e", "l", "j", "k", "/", "c", "d", "t", "i", "Esc", "?"}
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    focused = "document.activeElement.textContent"
    assert page.evaluate(focused) == "a.jsonl"  # as old as the others: in their order
    page.evaluate(
        "screenState.key = null; showPage('files', hash())"
    )  # the table is drawn again while a run writes
    page.wait_for_function("screenState.key !== null")
    assert page.evaluate(focused) == "a.jsonl"
    page.keyboard.press("Enter")
    expect(page.locator("#count")).to_have_text("150 episodes")
    page.keyboard.press("Escape")
    expect(page.locator("table.files")).to_be_visible()
