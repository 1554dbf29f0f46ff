import asyncio
import json

import pytest

from afm.errors import ConfigError, UsageError
from afm.evaluation import Sources, read_manifest, summarise
from afm.evaluation.config import load_config
from afm.evaluation.job import prices_of
from afm.evaluation.prices import Prices, read_prices
from afm.evaluation.report import write_comparison
from afm.evaluation.statistics import bootstrap_quotient
from afm.evaluation.wording import money_words
from afm.trajectory.io import load_records
from afm.trajectory.record import CallRecord, Cost, Verdict

# Two generations: the first reads the prompt (100), the second prompt, 10 written and 20 observed tokens (130).
COST = Cost(prompt_tokens=100, read_tokens=230, agent_tokens=30, observation_tokens=20, generations=2)


def call(tool, *, duplicate=False):
    return CallRecord(role=tool, tool=tool, argument="", observation="", ok=True, duplicate=duplicate)


def test_every_generation_reads_again_what_stands_before_it() -> None:
    assert Prices(prompt=2, completion=8).model_usd(COST) == pytest.approx((230 * 2 + 30 * 8) / 1e6)
    # 120 tokens are new (prompt, observation); 110 were read or written before.
    cached = Prices(prompt=2, completion=8, cached=0.5).model_usd(COST)
    assert cached == pytest.approx((120 * 2 + 110 * 0.5 + 30 * 8) / 1e6)
    older = COST.model_copy(update={"read_tokens": 0})
    assert Prices(prompt=2, completion=8).model_usd(older) == pytest.approx((120 * 2 + 30 * 8) / 1e6)


def test_calls_cost_what_their_tool_does_and_repeated_ones_nothing() -> None:
    prices = Prices(prompt=0, completion=0, tools={"search": 0.01})
    assert prices.tools_usd([call("search"), call("search", duplicate=True), call("code")]) == 0.01
    with pytest.raises(ConfigError, match=r"prices.tools.search: .* did you mean 'web_search'\?"):
        prices.checked(["web_search", "code"])


def test_a_solved_task_pays_for_the_failed_ones(record) -> None:
    rows = [record(f"t{i}", float(i < 2), cost=COST) for i in range(8)] + [record("x", None, cost=COST)]
    one = (230 * 2 + 30 * 8) / 1e6
    usd = summarise(rows, prices=Prices(prompt=2, completion=8)).usd
    assert usd.per_episode.value == usd.per_episode.low == usd.per_episode.high == pytest.approx(one)
    assert usd.per_solved.value == pytest.approx(9 * one / 2)
    # No pass in a resample of nine questions: (7/9)^9 = 10.4 % of them, so there is no upper end.
    assert usd.per_solved.high is None
    assert usd.per_solved.low == pytest.approx(9 * one / 5, rel=0.3)
    assert usd.parts == {"model": pytest.approx(one), "tools": 0, "judge": 0}
    nothing = summarise([record("a", 0.0, cost=COST)], prices=Prices(prompt=2, completion=8)).usd
    assert nothing.per_solved is None
    assert summarise(rows).usd is None
    assert summarise(rows[::-1], prices=Prices(prompt=2, completion=8)).usd == usd


def test_the_interval_of_a_ratio_is_the_binomials() -> None:
    # Of 100 questions half pass, each costs 1: passes of a resample are Binomial(100, 1/2), 2.5 % points 40 and 60.
    value, low, high = bootstrap_quotient([[1.0] * 100], [[0, 1] * 50])
    assert value == 2
    assert (low, high) == (pytest.approx(100 / 60, rel=0.02), pytest.approx(100 / 40, rel=0.03))


def test_judges_cost_where_their_price_is_known(record) -> None:
    row = record("a", 1.0, cost=COST, verdict=Verdict(score=1.0, judge_tokens=500))
    known = summarise([row], prices=Prices(prompt=0, completion=0, judge=2)).usd
    assert known.parts["judge"] == pytest.approx(0.001)
    unknown = summarise([row], prices=Prices(prompt=2, completion=8))
    assert unknown.usd.judge_unpriced
    assert money_words(unknown.usd).endswith("; without the judge, which has no price")


def test_the_judges_price_comes_from_the_rewards(tmp_path) -> None:
    file = tmp_path / "eval.yaml"
    prices = "{prompt: 1, completion: 2}"
    file.write_text(f"name: x\ndata: tasks.jsonl\nagent: math\nmodel: m\noutput_dir: out\nprices: {prices}\n")
    priced = load_config(file, ["rewards={judge: {price_per_million_tokens: 3}}", "prices.tools.code=0.5"])
    assert prices_of(priced) == Prices(prompt=1, completion=2, judge=3, tools={"code": 0.5})
    assert prices_of(load_config(file, ["prices="])) is None
    assert read_prices(str(file)) == read_prices(prices)
    with pytest.raises(ConfigError, match=r"prices.tools.cod: .* did you mean 'code'\?"):
        prices_of(load_config(file, ["prices.tools.cod=1"]))
    with pytest.raises(UsageError, match=r"prices.promt: unknown key; did you mean 'prompt'\?"):
        load_config(file, ["prices.promt=1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{prompt: 1}", "--prices: completion: missing, but required"),
        ("{prompt: 1", r"--prices: '\{prompt: 1' is not YAML"),
        *((f"{{prompt: {price}, completion: 1}}", "--prices: ") for price in (".inf", "1e300", ".nan", "-1")),
        ("{prompt: 1, completion: 1, tools: {code: 1e300}}", "--prices: "),
    ],
)
def test_a_price_is_an_amount_of_money(text, message) -> None:
    with pytest.raises(UsageError, match=message):
        read_prices(text)


@pytest.mark.slow
@pytest.mark.sandbox
def test_a_real_run_counts_what_was_read_and_may_be_priced_anew(afm, tmp_path, solver) -> None:
    prices = Prices(prompt=1, completion=10, tools={"code": 0.001})
    out = tmp_path / "run"
    metrics = asyncio.run(solver.run(out, 50, 6, rounds=2, sources=Sources(prices=prices)))
    with_call = 0
    for one in load_records(out / "episodes.jsonl"):
        cost = one.cost
        first = len(one.segments[0].text)  # a token of the scripted model is a character
        twice = cost.prompt_tokens + first + cost.observation_tokens if one.calls else 0
        assert cost.read_tokens == cost.prompt_tokens + twice
        with_call += len(one.calls)
    usd = metrics.usd
    assert with_call > 0
    assert usd.parts["tools"] == pytest.approx(with_call * 0.001 / 12)
    assert usd.per_solved.value == pytest.approx(usd.per_episode.value * 12 / with_call)
    assert usd.per_episode.low < usd.per_episode.value < usd.per_episode.high
    before = (out / "episodes.jsonl").read_bytes()
    dearer = prices.model_copy(update={"tools": {"code": 0.003}})
    again = asyncio.run(solver.run(out, 50, 6, rounds=2, sources=Sources(prices=dearer)))
    assert again.usd.parts["tools"] == pytest.approx(3 * usd.parts["tools"])
    assert again.usd.parts["model"] == usd.parts["model"]
    assert (out / "episodes.jsonl").read_bytes() == before
    assert read_manifest(out / "manifest.json").prices == dearer

    other = tmp_path / "other"
    asyncio.run(solver.run(other, 100, 6, rounds=2, sources=Sources(prices=prices)))
    printed = afm("eval", "compare", out, other).stdout
    assert "costs use different prices: prompt 1, completion 10, code 0.003 -> prompt 1" in printed
    assert printed.count("per solved task") == 2
    page = write_comparison([out, other], tmp_path / "page.html").read_text()
    assert "Cost per solved task" in page
    assert "\u00a0USD per solved task" in page, "no line begins with USD"
    assert " USD per solved task" not in page
    assert "Costs use different prices" in page
    data = json.loads((tmp_path / "page.json").read_text())
    curve = next(one for one in data["curves"] if one["title"] == "Cost against score")
    assert curve["x_label"] == "USD per question"
    mean = again.usd.per_episode.value
    assert curve["series"][0]["x"] == [pytest.approx(mean), pytest.approx(2 * mean)]
    assert "per solved task" in (tmp_path / "page.md").read_text()
