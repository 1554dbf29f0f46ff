"""Readers of published data sets: one function per layout, chosen by name.

A reader turns one published row into a :class:`afm.datasets.Task`, a conversation or an alpaca row. It refuses a row
that it cannot read with a reason. :func:`afm.datasets.published.read_published` adds file and line.
"""

from __future__ import annotations

from afm.datasets.readers import conversations, programs, questions, word_problems
from afm.datasets.readers.row import RowReader
from afm.datasets.schema import task_of_row
from afm.errors import suggestion

READERS: dict[str, RowReader] = {
    "nq": RowReader(questions.read_nq, "nq"),
    "triviaqa": RowReader(questions.read_triviaqa, "triviaqa"),
    "hotpotqa": RowReader(questions.read_hotpotqa, "hotpotqa"),
    "2wikimultihopqa": RowReader(questions.read_two_wiki, "2wikimultihopqa"),
    "musique": RowReader(questions.read_musique, "musique"),
    "bamboogle": RowReader(questions.read_bamboogle, "bamboogle"),
    "popqa": RowReader(questions.read_popqa, "popqa"),
    "flashrag": RowReader(questions.read_flashrag),
    "livecodebench": RowReader(programs.read_livecodebench, "livecodebench"),
    "codecontests": RowReader(programs.read_codecontests, "codecontests"),
    "codeforces": RowReader(programs.read_codeforces, "codeforces"),
    "skywork_or1": RowReader(programs.read_skywork),
    "dapo_math": RowReader(questions.read_dapo_math, "math_dapo"),
    "math_problem": RowReader(questions.read_math_problem),
    "gsm8k": RowReader(word_problems.read_gsm8k, "gsm8k"),
    "svamp": RowReader(word_problems.read_svamp, "svamp"),
    "gaia": RowReader(questions.read_gaia, "gaia"),
    "webwalker": RowReader(questions.read_webwalker, "webwalker"),
    "hle": RowReader(questions.read_hle, "hle"),
    "browsecomp": RowReader(questions.read_browsecomp, "browsecomp"),
    "t_eval": RowReader(conversations.read_t_eval, unpack=conversations.unpack_t_eval),
    "glaive": RowReader(conversations.read_glaive, unpack=conversations.unpack_glaive),
    "retool": RowReader(conversations.read_retool, "retool", makes_conversations=True),
    "retool_questions": RowReader(conversations.read_retool_question, "retool"),
    "agent_flan": RowReader(conversations.read_agent_flan, "agent_flan", makes_conversations=True),
    "sharegpt": RowReader(conversations.read_sharegpt, "sharegpt", makes_conversations=True),
    "afm_sft": RowReader(conversations.read_afm_sft),
    # AFM's RL sets and benchmark files, and raw rows of questions: all layouts of afm.datasets.schema.
    "afm_rl": RowReader(lambda row, default: task_of_row(row, default_id=default)),
    "plain": RowReader(questions.plain_rows()),
}


def checked_reader(name: str) -> str:
    """Return ``name`` if there is a reader of that name, else raise a :class:`ValueError` for pydantic."""
    if name not in READERS:
        raise ValueError(f"the name of a reader; {suggestion(name, READERS)}")
    return name
