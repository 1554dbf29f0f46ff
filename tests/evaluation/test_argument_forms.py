"""Arguments of tools that an agent never saw."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from afm.errors import ConfigError
from afm.evaluation.config import load_config
from afm.evaluation.tallies import UnseenTool
from afm.evaluation.wording import unseen_words
from afm.models.base import ScriptedModel

ROOT = Path(__file__).resolve().parents[2]
JSON = {"form": "json", "required": ["file_path"], "optional": ["question"]}
GOOD = '```json\n{"file_path": "a.png", "question": "which?"}\n```'


@pytest.mark.parametrize(
    ("tool", "argument", "good"),
    [
        (JSON, f"\n{GOOD}\n", True),
        (JSON, '```json\n{"file_path": "a.png"}\n```', True),
        (JSON, '{"file_path": "a.png"}', False),
        (JSON, "```json\n{'file_path': 'a.png'}\n```", False),
        (JSON, '```json\n{"question": "which?"}\n```', False),
        (JSON, '```json\n{"file_path": 3}\n```', False),
        (JSON, '```json\n{"file_path": "a.png", "zoom": 2}\n```', False),
        (JSON, '```json\n["a.png"]\n```', False),
        ({"form": "urls"}, " https://a.org | http://b.org/y?z=1 ", True),
        ({"form": "urls"}, "https://a.org | b.org", False),
        ({"form": "urls"}, "https://a.org and https://b.org", False),
        ({"form": "urls"}, "", False),
        ({"form": "text"}, "tower of Almar", True),
        ({"form": "text"}, '{"query": "tower"}', False),
        ({"form": "text"}, "one\ntwo", False),
        ({"form": "text"}, "  ", False),
        ({"form": "program"}, "```py\nprint(1)\n```", True),
        ({"form": "program"}, "print(1)", False),
    ],
)
def test_what_keeps_and_what_breaks_a_form(tool, argument, good) -> None:
    assert UnseenTool.model_validate(tool).accepts(argument) is good


def test_keys_belong_to_json() -> None:
    with pytest.raises(ValidationError, match="keys only for form: json"):
        UnseenTool.model_validate({"form": "text", "required": ["a"]})


def test_a_tool_that_the_agent_does_not_have_is_no_unseen_one() -> None:
    words = ["model=m", "data=x", "unseen_tools.code_run.form=program"]
    config = load_config(ROOT / "configs/eval/unseen_tools_web.yaml", words)
    with pytest.raises(ConfigError, match=r"unseen_tools.code_run: agent 'full' has no such tool"):
        config.unseen_roles()


async def test_broken_calls_are_counted_by_tool(tmp_path, solver) -> None:
    """Two episodes of the same three calls: one of two pictures is asked for in a broken form, the search is fine."""
    tasks = [task.model_copy(update={"data_source": "mini_wiki"}) for task in solver.tasks(2)]
    config = load_config(ROOT / "configs/eval/unseen_tools_code.yaml", ["model=m", "data=x"])
    spec = config.routes().first.declared
    says = [
        "<plan>Look.</plan><think>t</think><web_search>tower of Almar</web_search>",
        f"<reflection>r</reflection><think>t</think><visual_inspector>{GOOD}</visual_inspector>",
        "<reflection>r</reflection><think>t</think><visual_inspector>a.png</visual_inspector>",
        "<reflection>r</reflection><think>t</think><answer>```py\n1\n```</answer>",
    ]

    def script(text):
        return says[text.rpartition("\nassistant: ")[2].count("</observation>")]

    tools = {name: solver.Says(name) for name in ("code", "web_search", "crawl_page", "visual_inspector")}
    unseen = config.unseen_roles()
    metrics = await solver.play(tasks, spec, ScriptedModel(script), tools, tmp_path, unseen=unseen)
    assert metrics.format_valid == 1.0
    errors = {"all": 1 / 3, "visual_inspector": 0.5, "web_search": 0.0}
    assert metrics.unseen_argument_errors == pytest.approx(errors)
    assert unseen_words(metrics) == (
        "33.3 % of the calls of unseen tools have an invalid argument (visual_inspector 50.0 %, web_search 0.0 %)"
    )
