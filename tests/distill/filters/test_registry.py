from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.distill.filters.registry import FilterPlan, build_stages, load_plan
from afm.errors import ConfigError
from afm.trajectory import author_segments
from afm.trajectory.record import Record

CONFIGS = Path(__file__).parents[3] / "configs/filters"


def written(tmp_path, text):
    path = tmp_path / "filters.yaml"
    path.write_text(text)
    return path


def test_the_judged_preset_differs_from_the_other_in_its_judge_alone():
    judged, matched = (load_plan(CONFIGS / f"{name}.yaml") for name in ("mhqa_judge", "mhqa"))
    pairs = zip(judged.stages, matched.stages, strict=True)
    assert [one.name for one, other in pairs if one != other] == ["quality"]
    assert (judged.agent, judged.seed) == (matched.agent, matched.seed)


@pytest.mark.parametrize("name", ["web", "mhqa", "math", "code"])
def test_a_shipped_preset_suits_its_agent(name):
    pytest.importorskip("numpy")
    plan = load_plan(CONFIGS / f"{name}.yaml")

    stages = build_stages(plan, load_agent(name))

    assert plan.agent == name
    assert [stage.name for stage in stages] == [stage.name for stage in plan.stages]
    assert plan.stages[0].complexity.min_calls == 5
    assert plan.stages[0].complexity.min_tools == (2 if name == "web" else 1)
    # Reference, section 2: complexity, quality, reflection enrichment, error-correction upsampling.
    published = ["complexity", "quality", "reflection", "correction"]
    expected = published if name in ("web", "mhqa") else published[:2]
    assert [stage.name for stage in plan.stages if stage.name in published] == expected


def test_the_filters_for_logs_of_your_own_judge_no_answer():
    pytest.importorskip("numpy")
    plan = load_plan(CONFIGS / "logs.yaml")

    names = [stage.name for stage in build_stages(plan, load_agent(plan.agent))]

    assert not {"quality", "correction", "reflection"} & set(names)
    assert {"format", "secrets", "personal", "near_duplicates"} <= set(names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: [{complexty: {}}]", r"stages\[0\].complexty: unknown key; did you mean 'complexity'\?"),
        ("stages: [{quality: {min_score: .nan}}]", "got nan"),
        ("stages: [{format: {}, complexity: {}}]", "exactly one filter"),
        ("stages: [{format: {}}, {format: {}}]", "listed twice"),
        ("stages: [{correction: {}}, {format: {}}]", "must be the last"),
        ("stages: []", "at least 1 item"),
        ("stages: [{secrets: {allow: ['(']}}]", "a regular expression"),
        ("stages: [{secrets: {allow: ['.+']}}]", "'.[+]' allows everything"),
        ("stages: [{secrets: {kinds: []}}]", "secrets.kinds: .*at least one kind; leave `kinds` out"),
        ("stages: [{contamination: {places: []}}]", "`ngram: null`"),
        (
            "stages: [{correction: {times: 1e9}}]",
            r"times: got 1000000000.0 \(number\), expected at most 100",
        ),
        ("stages: [{near_duplicates: {}}, {quality: {}}]", "after all others except `correction`"),
    ],
)
def test_a_wrong_file_says_what_to_do(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_plan(written(tmp_path, text))


def test_paths_are_relative_to_the_file(tmp_path):
    text = "stages: [{contamination: {tasks: [a.jsonl]}}, {quality: {reward: r.yaml}}]"
    plan = load_plan(written(tmp_path, text))

    assert plan.stages[0].contamination.tasks == (tmp_path / "a.jsonl",)
    assert plan.stages[1].quality.reward == tmp_path / "r.yaml"


def test_evaluation_sets_are_added_where_they_are_compared():
    with_stage = FilterPlan.model_validate({"stages": [{"format": {}}, {"contamination": {"ngram": 8}}]})
    without = FilterPlan.model_validate({"stages": [{"format": {}}]})

    added = with_stage.against([Path("e.jsonl")])
    assert added.stages[1].contamination.tasks == (Path("e.jsonl"),)
    assert added.stages[1].contamination.ngram == 8
    assert [stage.name for stage in without.against([Path("e.jsonl")]).stages] == ["contamination", "format"]


TOOLS = """
tools:
  - class_name: afm.tools.search.WikiSearchTool
    tool_schema: {type: function, function: {name: code}}
"""


@pytest.mark.parametrize(
    ("argument", "stage", "reason"),
    [
        ("\n```py\nprint(1)\n```\n", "format: {}", ""),
        ("print(1)", "format: {}", "format: <code> at character 34 (line 1 of the text) is a call that"),
        ("print(1)", "format: {tools: tools.yaml}", ""),
    ],
)
def test_calls_that_their_tool_refuses_are_dropped_by_the_class_of_the_tools_file(
    tmp_path, argument, stage, reason
):
    (tmp_path / "tools.yaml").write_text(TOOLS)
    math = load_agent("math")
    text = (
        f"<plan>P.</plan><think>Run.</think><code>{argument}</code>\n<observation>1</observation>\n"
        "<reflection>R.</reflection><think>T.</think><answer>\\boxed{1}</answer>"
    )
    parts = author_segments(text, math)
    record = Record(id="a", agent="math", agent_digest="d", question="?", segments=parts)

    [filtered] = build_stages(load_plan(written(tmp_path, f"stages: [{{{stage}}}]")), math)

    assert filtered.apply(record).reason.startswith(reason)
    assert filtered.apply(record).kept == (not reason)
