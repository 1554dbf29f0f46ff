"""Readers of published data sets: one small file for each layout, found by name.

A reader turns one row, as its owner publishes it, into a :class:`afm.datasets.Task`, a conversation or an alpaca row.
What it cannot read it refuses with a reason; :func:`afm.datasets.published.read_published` adds file and line.
"""

from __future__ import annotations

from afm.datasets.readers.afm_rl import AFM_RL
from afm.datasets.readers.afm_sft import AFM_SFT
from afm.datasets.readers.agent_flan import AGENT_FLAN
from afm.datasets.readers.bamboogle import BAMBOOGLE
from afm.datasets.readers.browsecomp import BROWSECOMP
from afm.datasets.readers.codecontests import CODECONTESTS
from afm.datasets.readers.codeforces import CODEFORCES
from afm.datasets.readers.dapo_math import DAPO_MATH
from afm.datasets.readers.flashrag import FLASHRAG
from afm.datasets.readers.gaia import GAIA
from afm.datasets.readers.glaive import GLAIVE
from afm.datasets.readers.gsm8k import GSM8K
from afm.datasets.readers.hle import HLE
from afm.datasets.readers.hotpotqa import HOTPOTQA
from afm.datasets.readers.livecodebench import LIVECODEBENCH
from afm.datasets.readers.math_problem import MATH_PROBLEM
from afm.datasets.readers.musique import MUSIQUE
from afm.datasets.readers.nq import NQ
from afm.datasets.readers.plain import PLAIN
from afm.datasets.readers.popqa import POPQA
from afm.datasets.readers.retool import RETOOL, RETOOL_QUESTIONS
from afm.datasets.readers.row import AlpacaRow, Conversation, Message, Reader
from afm.datasets.readers.sharegpt import SHAREGPT
from afm.datasets.readers.skywork import SKYWORK
from afm.datasets.readers.t_eval import T_EVAL
from afm.datasets.readers.triviaqa import TRIVIAQA
from afm.datasets.readers.two_wiki import TWO_WIKI
from afm.datasets.readers.webwalker import WEBWALKER
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
