import json
import os
import shutil

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
    assert page.inner_text(".badge").strip().endswith("failed 0")
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
    assert page.inner_text("#count") == "1 episode"


def test_hostile_text_stays_text(page, address):
    page.goto(f"{address}#order=newest")
    page.wait_for_selector("#list a")
    page.keyboard.press("j")
    page.wait_for_selector(".question")
    assert page.inner_text(".question") == HOSTILE
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
    assert page.locator("text=green above 0 and red dashed below: −0.500 to +1.250").count() == 1
    assert "owned" not in page.title()


@pytest.mark.slow
def test_new_episodes_of_a_running_job_appear(page, address, run, viewer):
    page.goto(f"{address}#order=newest")
    page.wait_for_selector("#list a >> nth=0")
    viewer.write(run / "late.jsonl", [viewer.episode(7000)])
    page.wait_for_selector("#list a >> text=river 7000")
    assert page.inner_text("#status") == "154 episodes in 4 files"


def test_a_click_is_not_lost_when_the_list_is_loaded_again_meanwhile(page, address, run, viewer):
    page.goto(f"{address}#view=episodes")
    page.hover("#list a >> nth=0")
    page.mouse.down()
    viewer.write(run / "late.jsonl", [viewer.episode(7000)])
    expect(page.locator("#status")).to_have_text("154 episodes in 4 files")
    expect(page.locator("#count")).to_have_text("154 episodes")
    page.mouse.up()
    page.wait_for_selector(".block")


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
