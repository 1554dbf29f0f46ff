import json

import pytest

from afm.agents import load_agent
from afm.errors import DataError
from afm.trajectory.convert.base import Context
from afm.trajectory.convert.files import FORMATS

ENDLESS = "[" * 100_000
CONTEXT = Context(agent=load_agent("mhqa"))


def test_a_call_that_opens_brackets_for_ever_is_a_bad_row():
    turns = [{"from": "human", "value": "q?"}, {"from": "function_call", "value": ENDLESS}]

    with pytest.raises(DataError, match="no JSON"):
        FORMATS["sharegpt"].read({"conversations": turns}, CONTEXT)


def test_an_action_that_opens_brackets_for_ever_is_a_text():
    text = f"Thought: I look.\nAction: wiki_search\nAction Input: {ENDLESS}\nObservation: x\nFinal Answer: 7"

    found = FORMATS["react"].read({"question": "q?", "text": text}, CONTEXT).record

    assert ENDLESS in json.dumps(found.model_dump(mode="json"))
