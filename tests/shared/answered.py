"""Well-formed responses that say no more than an answer, for tests of rewards."""

from typing import Any

from afm.agents import load_agent
from afm.rewards import Sample
from afm.trajectory import author_segments

_THINKING = "<think>t</think><plan>p</plan><think>t</think><answer>{}</answer>"
_FORMS = {
    "math": "<plan>p</plan><think>t</think><answer>{}</answer>",
    "code": "<plan>p</plan><think>t</think><answer>```py\n{}\n```</answer>",
    "mhqa": _THINKING,
    "web": _THINKING,
}


def answered(agent: str, source: str, answer: str, gold: Any, question: str = "q", **more: Any) -> Sample:
    """A row of ``source`` with a response of ``agent``; ``more`` are further fields of the sample."""
    spec = load_agent(agent)
    segments = author_segments(_FORMS[agent].format(answer), spec)
    return Sample(spec, source, question, segments, gold, **more)
