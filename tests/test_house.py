"""The walls of the house: how large it may be, and that nothing is in it twice.

Lower a wall when a change leaves room. Only the first two rise, and only for features that an issue names: say which, below.
"""

from pathlib import Path

import house
import pytest


@pytest.fixture(scope="module")
def figures() -> object:
    return house.measure()


# The redesign was to end at 65,000 lines of the 72,400 that it was measured on. Features of 10,200 lines came in beside
# it; 74,200 is the same share of both. Raised since: 16 files and 2,400 lines for what a person meets (starter, Python at the
# top of the package, kinds of YAML, `afm list`, own plugins, the viewer's bundle, files, log and diff); 1 file and 350 lines for
# on-policy distillation; 4 files and 550 lines for GGUF files and `afm import`; 1 file and 450 lines
# for vLLM as a rollout engine on CPUs;
# 2 files and 450 lines for SVAMP and GSM8K; 3 files and 850 lines for the proof that weights arrive and LoRA in reinforcement;
# 1 file and 400 lines for the quickstart from a pre-trained model; 10 files and 2,000 lines for the sessions of harnesses;
# 11 files and 2,100 lines for programs as agents in reinforcement, evaluation, distillation and the sandbox;
# 150 lines for requests that are sent again, the environment of programs and JSON of a schema;
# 440 lines for teams as agents, with credit by member;
# 100 lines for threads that the server holds, and replies that are continued;
# 100 lines for reports that say what fell, and for wrong inputs in the user's words;
# 250 lines for the trust of downloaded programs and YAMLs, for calls that hang, and for spans of the Responses API;
# 50 lines for sizes that fit any number of sequences of a harness;
# 450 lines for help that fits 80 columns and names every default, and for values that are refused before any work;
# 70 lines for requests, verdicts and processes of programs that are refused or found;
# 80 lines for messages of teams in the viewer, and for rewards that stay flat;
# 40 lines for files that are refused where a page or an index would replace them;
# 40 lines for sizes, teams and options that are refused with what to write instead;
# 40 lines for the agent that rows name, and for runs that failed;
# 110 lines for the `await` that a team lacks, own tools in `afm doctor`, and options that were ignored;
# 60 lines for alias bombs, infinite numbers, the tool calls of programs, and commands of reports that can be pasted;
# 80 lines for what a fork repeats in the viewer, and for lines and folders without episodes;
# 60 lines for a quiet training that shows its steps and the next command;
# 160 lines for values of another kind in Python, and for paths, tools and options that are refused with the next step;
# 190 lines for servers, imports and the sandbox that meet wrong files, addresses and full disks;
# 300 lines for what training runs, logs of other frameworks, verl's keys and YAMLs of a wrong kind say to try next;
# 330 lines for attacks on a scorer of one's own, `afm list rewards`, an alarm on the format, and files that changed or are typed wrong;
# 120 lines for what `afm doctor` says of schedules, files of servers and its own progress;
# 50 lines for dropped rows with their reasons, rewards of logs, data of an agent that changed, and plain names in tests;
# 130 lines for what the eight-node path says: the next command, servers on the loopback, missing data, waiting for nodes;
# 60 lines for messages of LangChain, and for lists, keys and paths of logs that are refused with the next step;
# 220 lines for advice that names the real file, key or command instead of a placeholder or the nearest spelling;
# 100 lines for files of sandbox servers in `afm doctor`, judges on the loopback, and runs that stopped or have nothing left to do;
# 80 lines for Ctrl-C that is answered, and for mistakes of a first day that are refused with the next step;
# 90 lines for logs: commands that an error advises, agents next to the rows, thoughts in the prompt, settings that differ;
# 230 lines for the stumbles that three walks left: dry runs of reinforcement, own tools and rewards, logs, kinds of YAML;
# 130 lines for dry runs that find what the doctor finds, LoRA targets, one token of Ray, and runs that learned little;
# 150 lines for updates of LangGraph, keys that occur twice, words of JSON, and findings on tools beside an agent;
# 100 lines for lists that fit a terminal, the doctor's checks of rewards and teams, and model cards with facts;
# 140 lines for the newest evaluation first in the viewer, MiB and unset servers in `afm doctor`, and tests of silent libraries;
# 100 lines for rewards, teams and filters in `afm doctor`, and shipped files that a typed name meant.
# 60 lines for the engine's attention on a CPU, and SVAMP's slips and other things;
# 50 lines for weights that reach the CPU engine without pickling, and evaluations that differ in stored limits only;
# 70 lines for memory that training on a CPU keeps, rows grouped by length (also after a resume), and steps without a signal;
# 250 lines for what three outside readers proved: LoRA over several workers, padding and fillers, adapters with rsLoRA,
# units and variables of gold answers, and malformed requests, calls and histories in the gateway.
WALLS = {
    "files": 357,
    "lines": 88_950,
    "function_p90": 24,
    "long_functions": 0,
    "circles": 0,
    "small_modules": 2,
    "repeated_classes": 0,
    "repeated_helpers": 0,
    "vague_names_per_10k_lines": 3,
}


@pytest.mark.parametrize("figure", WALLS)
def test_the_house_stays_within_its_walls(figures: object, figure: str) -> None:
    value = getattr(figures, figure)
    count = len(value) if isinstance(value, list) else value
    assert count <= WALLS[figure], f"{figure}: {count}, wall {WALLS[figure]}: {value}"


def small_house(root: Path, files: dict[str, str]) -> object:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return house.measure(root)


def test_a_circle_is_found_inside_functions_and_not_behind_type_checking(tmp_path: Path) -> None:
    figures = small_house(
        tmp_path,
        {
            "afm/a.py": "def f():\n    from afm.b import g\n    return g\n",
            "afm/b.py": "from afm import a\ndef g():\n    return a\n",
            "afm/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from afm.d import D\n",
            "afm/d.py": "import afm.c\nclass D: ...\n",
        },
    )
    assert figures.circles == ["afm.a <-> afm.b"]  # type: ignore[attr-defined]


def test_a_class_name_and_a_body_that_occur_twice_are_named_with_their_modules(tmp_path: Path) -> None:
    body = '    """{}"""\n    x = 1\n    y = 2\n    z = x + y\n    return z\n'
    figures = small_house(
        tmp_path,
        {
            "afm/a.py": "class Plan: ...\ndef f():\n" + body.format("One."),
            "verl_ext/b.py": "class Plan: ...\ndef g():\n" + body.format("Two."),
        },
    )
    assert figures.repeated_classes == ["Plan: afm.a, verl_ext.b"]  # type: ignore[attr-defined]
    assert figures.repeated_helpers == ["afm.a.f = verl_ext.b.g"]  # type: ignore[attr-defined]


def test_a_small_module_counts_only_with_a_single_importer(tmp_path: Path) -> None:
    files = {
        "afm/small.py": "def s(): ...\n",
        "afm/shared.py": "def t(): ...\n",
        "afm/a.py": "from afm.small import s\nfrom afm.shared import t\ndef f(): ...\n" + "# line\n" * 70,
        "afm/b.py": "from afm.shared import t\ndef f(): ...\n" + "# line\n" * 70,
    }
    assert small_house(tmp_path, files).small_modules == ["afm.small"]  # type: ignore[attr-defined]
