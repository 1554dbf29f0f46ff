"""Readers of published data sets: one function a layout, chosen by name.

A reader turns one row, as its owner publishes it, into a :class:`afm.datasets.Task`, a conversation or an alpaca row.
What it cannot read it refuses with a reason; :func:`afm.datasets.published.read_published` adds file and line.
"""

from __future__ import annotations

from afm.datasets.readers.conversations import AFM_SFT, AGENT_FLAN, RETOOL, RETOOL_QUESTIONS, SHAREGPT
from afm.datasets.readers.glaive import GLAIVE
from afm.datasets.readers.mathematics import DAPO_MATH, GSM8K, MATH_PROBLEM
from afm.datasets.readers.own_rows import AFM_RL, PLAIN
from afm.datasets.readers.programs import CODECONTESTS, CODEFORCES, LIVECODEBENCH, SKYWORK
from afm.datasets.readers.questions import (
    BAMBOOGLE,
    FLASHRAG,
    HOTPOTQA,
    MUSIQUE,
    NQ,
    POPQA,
    TRIVIAQA,
    TWO_WIKI,
)
from afm.datasets.readers.row import AlpacaRow, Conversation, Message, Reader
from afm.datasets.readers.t_eval import T_EVAL
from afm.datasets.readers.web_benchmarks import BROWSECOMP, GAIA, HLE, WEBWALKER
from afm.errors import suggestion

__all__ = ["READERS", "AlpacaRow", "Conversation", "Message", "Reader", "checked_reader"]

READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        NQ,
        TRIVIAQA,
        HOTPOTQA,
        TWO_WIKI,
        MUSIQUE,
        BAMBOOGLE,
        POPQA,
        FLASHRAG,
        LIVECODEBENCH,
        CODECONTESTS,
        CODEFORCES,
        SKYWORK,
        DAPO_MATH,
        MATH_PROBLEM,
        GSM8K,
        GAIA,
        WEBWALKER,
        HLE,
        BROWSECOMP,
        T_EVAL,
        GLAIVE,
        RETOOL,
        RETOOL_QUESTIONS,
        AGENT_FLAN,
        SHAREGPT,
        AFM_SFT,
        AFM_RL,
        PLAIN,
    )
}


def checked_reader(name: str) -> str:
    """``name``, when there is such a reader.

    Raises:
        ValueError: There is none.
    """
    if name not in READERS:
        raise ValueError(f"the name of a reader; {suggestion(name, READERS)}")
    return name
