import pytest

from afm.agents import AgentSpec, load_agent, shipped_agents
from afm.agents.spec import roles_text, rules_text

SMALL = AgentSpec.model_validate(
    {
        "name": "small",
        "roles": {
            "muse": {"kind": "thought", "purpose": "Reason."},
            "look": {"kind": "tool", "tool": "lookup", "format": "one word\nper line", "needs_thought": True},
            "seen": {"kind": "observation"},
            "rate": {
                "max_count": 2,
                "no_thought": True,
                "grade": {
                    "pattern": "([0-9])",
                    "reject": ["1", "2"],
                    "when_rejected": ["look"],
                    "when_accepted": ["done"],
                },
            },
            "done": {"kind": "answer"},
        },
        "transitions": {"start": ["look", "rate", "done"], "look": ["rate"], "rate": ["look", "done"]},
        "answer_separator": "|",
        "rules": ["Be brief."],
    }
)


def test_roles_are_numbered_with_purpose_format_and_author() -> None:
    assert roles_text(SMALL) == "\n".join(
        [
            "1. <muse>...</muse>",
            "   Purpose: Reason.",
            "2. <look>...</look>",
            "   Format:",
            "   one word",
            "   per line",
            "   The environment runs it and answers in <seen>.",
            "3. <seen>...</seen>",
            "   Written by the environment only. Never write it yourself.",
            "4. <rate>...</rate>",
            "5. <done>...</done>",
        ]
    )


def test_rules_say_what_the_declaration_says() -> None:
    assert rules_text(SMALL) == "\n".join(
        [
            "- Begin with <look>, <rate> or <done>.",
            "- After <look> and its <seen>: <rate>.",
            "- After <rate>: <look> or <done>.",
            "- If <rate> gives any grade of 1 or 2: <look>.",
            "- If <rate> gives only better grades: <done>.",
            "- Write one <muse> directly before every <look>; it does not count in the order above.",
            "- Write no <muse> before <rate>.",
            "- You may write one <muse> directly before <done>; it does not count in the order above.",
            "- Write <rate> at most 2 times.",
            "- Write nothing outside the tags, close every tag you open, and never write a tag inside another.",
            "- After <look> stop and wait for <seen>.",
            "- End with exactly one <done>; nothing follows it.",
            "- If the question has several answers, separate them with '|'.",
            "- Be brief.",
        ]
    )


@pytest.mark.parametrize("name", shipped_agents())
def test_shipped_prompt_names_every_role_and_fills_every_placeholder(name: str) -> None:
    spec = load_agent(name)
    prompt = spec.system_prompt()
    assert all(f"<{tag}>...</{tag}>" in prompt for tag in spec.roles)
    assert "{roles}" not in prompt
    assert "{rules}" not in prompt


@pytest.mark.parametrize(
    ("name", "shape"), [("math", "\\boxed{"), ("code", "```py"), ("full", "```json"), ("web", "|")]
)
def test_shipped_prompt_shows_the_formats_its_tools_and_answer_need(name: str, shape: str) -> None:
    assert shape in load_agent(name).system_prompt()
