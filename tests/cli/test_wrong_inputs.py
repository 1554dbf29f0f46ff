"""Wrong inputs to every command: one message with the value, the expectation and the next step, and the documented status."""

import gzip
import json
import os
import re
import shlex
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from afm.configuration import parse_yaml, read_file
from afm.errors import ConfigError, RepeatedErrors, UsageError
from afm.file_kinds import FILE_KINDS, kind_of
from afm.terminal import afm_command

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., Any]

SFT, RL, EVAL = "configs/tiny/sft/math.yaml", "configs/tiny/rl/math.yaml", "configs/eval/aime24.yaml"
AGENT, TOOLS, REWARD = (
    "configs/tiny/agents/math.yaml",
    "configs/tools/search.yaml",
    "configs/rewards/math.yaml",
)
CONVERT = "afm convert {T}/chat.jsonl --to coa --agent NAME -o RECORDS.jsonl"
WORLD = "doctor configs/tiny/eval/math_world.yaml model=http://127.0.0.1:1"
DISTILL = "afm data distill {T}/tasks.jsonl --output-dir DIR"

# Command; exit status; parts of the message. {T} is a folder with the files of `folder` below.
TABLE: list[tuple[str, int, tuple[str, ...]]] = [
    # The command line itself is wrong: status 2.
    ("sfft x", 2, ("afm: no such command 'sfft'", "did you mean 'sft'?", "see afm --help")),
    ("--foo", 2, ("no such option: --foo", "see afm --help")),
    ("list recipe", 2, ("no such command 'recipe'", "did you mean 'recipes'?")),
    ("serve cod", 2, ("no such command 'cod'", "did you mean 'code'?", "afm serve --help")),
    ("sft", 2, ("afm sft: missing argument 'CONFIG'", "expected: YAML of the run", "afm sft --help")),
    ("rl code_dapo_7b", 2, ("no such file (did you mean configs/rl/code_dapo_7b.yaml?)",)),
    ("eval nope", 2, ("CONFIG nope: no such file", "(`afm list benchmarks` prints the paths)")),
    ("eval aime", 2, ("did you mean configs/tiny/eval/aime24.yaml or configs/tiny/eval/aime25.yaml?",)),
    (
        "doctor gsm8k",
        2,
        (
            "(did you mean configs/tiny/sft/gsm8k.yaml or configs/tiny/rl/gsm8k.yaml or configs/tiny/eval/gsm8k.yaml?)",
            "see afm doctor --help",
        ),
    ),
    ("sft web_agent_qwen2.5_7b", 2, ("(did you mean configs/sft/web_agent_qwen2.5_7b.yaml?)",)),
    (
        "rl nope.yaml",
        2,
        ("afm rl: CONFIG nope.yaml: no such file", "expected: YAML of the run", "afm list recipes"),
    ),
    (
        "eval nope.yaml",
        2,
        ("CONFIG nope.yaml: no such file", "expected: YAML of the evaluation", "afm eval run --help"),
    ),
    (
        "quickstart --base nowhere.gguf",
        2,
        ("nowhere.gguf: no such file; expected a model's folder, a GGUF file",),
    ),
    ("quickstart --world wiki --base smollm2", 2, ("no recipe for the world 'wiki'; use --world math",)),
    ("import nowhere.gguf -o o", 2, ("nowhere.gguf: no such file; expected a model's folder, a GGUF file",)),
    ("convert", 2, ("missing argument 'FILE'", "expected: JSONL", "afm convert --help")),
    (
        "convert {T}/good.jsonl --to cao -o o.jsonl",
        2,
        ("--to cao: did you mean 'coa'?", "afm convert --help"),
    ),
    (
        "convert {T}/tasks.jsonl --to coa -o o.jsonl",
        1,
        ("tasks.jsonl:1: got the keys", "these are questions", DISTILL),
    ),
    ("data filter {T}/tasks.jsonl -o {T}/f3 --no-picture", 1, ("these are questions", DISTILL)),
    (
        "validate {T}/tasks.jsonl --agent math",
        1,
        ("error: {T}/tasks.jsonl:1: ", "these are questions", DISTILL),
    ),
    ("view {T}/tasks.jsonl", 1, ("these are questions", DISTILL)),
    ("reward {T}/source.jsonl", 1, ("no reward for data_source 'zzz'", "give it: --rewards YAML")),
    (f"{WORLD} data={{T}}/source.jsonl", 1, ("no reward for data_source 'zzz'", "give it: rewards=YAML")),
    (f"{WORLD} data={{T}}/tasks.jsonl", 1, ("afm data prepare tasks {T}/tasks.jsonl --data-source NAME",)),
    (
        f"{WORLD} data={{T}}/keys.jsonl",
        1,
        ("afm data prepare tasks {T}/keys.jsonl --question-key problem --answer-key solution --out",),
    ),
    ("convert {T}/good.jsonl --to coa -o {T}/good.jsonl", 2, ("the same file", "choose another --out")),
    ("convert {T}/good.jsonl --to coa -o o.jsonl --tool x", 2, ("--tool 'x'", "expected THEIRS=OURS")),
    (
        "convert {T}/good.jsonl --to coa -o o.jsonl --agent nobody",
        2,
        ("--agent nobody", "expected one of: code"),
    ),
    ("validate {T}/model", 2, ("FILE {T}/model: is a folder", "expected: JSONL", "afm validate --help")),
    ("mask {T}/good.jsonl", 2, ("--tokenizer is missing", "tokenizer.json", "--tokenizer DIR")),
    (
        "mask {T}/good.jsonl --tokenizer {T}/model",
        2,
        ("--tokenizer {T}/model", "expected a folder", "tokenizer.json"),
    ),
    (
        "mask {T}/good.jsonl --tokenizer {T}/modle",
        2,
        (
            "--tokenizer {T}/modle: no such folder (did you mean {T}/model?); expected a folder",
            "own_logs.md makes a small one",
        ),
    ),
    ("mask {T}/good.jsonl a=1", 2, ("'a=1'", "only the YAML of a training run takes overrides")),
    ("reward", 2, ("FILE is missing", "afm reward FILE", "afm reward --attack")),
    ("reward --attack --scorer nothing", 2, ("--scorer nothing", "expected one of: choice")),
    ("ask", 2, ("missing option '--model'", "expected: folder of a model", "afm ask --help")),
    ("ask hi --model {T}/none", 2, ("--model {T}/none: no such folder", "http://HOST:PORT/v1")),
    ("ask hi --model Qwen2.5-7B-Instruct", 2, ("afm import Qwen/Qwen2.5-7B-Instruct -o models/Qwen2.5",)),
    ("ask hi --model {T}/model", 2, ("--model {T}/model: holds no model", "expected a model's folder")),
    ("ask '' --model {T}/model", 2, ("QUESTION is empty", "leave it out to open a chat")),
    (
        "ask hi --model http://127.0.0.1:1/v1 --agent {T}/good.jsonl",
        2,
        ("holds rows of data", "afm list --help"),
    ),
    (f"sft {SFT} --learning_rate 3", 2, ("--learning_rate", "learning_rate=VALUE")),
    (f"sft {SFT} lerning_rate=3", 2, ("override 'lerning_rate=3'", "did you mean 'learning_rate'?")),
    (f"doctor {SFT} --gpu-gib inf", 2, ("--gpu-gib inf: should be a finite number",)),
    ("ask hi --model {T}/model --temperature 1e999", 2, ("--temperature 1e999: should be a finite number",)),
    (f"sft {SFT} learning_rate=abc", 2, ("override 'learning_rate=abc'", "got 'abc'", "expected")),
    (f"eval {EVAL}", 2, ("model: missing", "model=DIR_OR_URL")),
    (f"eval {EVAL} model=x limt=3", 2, ("override 'limt=3'", "did you mean 'limit'?")),
    (f"eval {EVAL} model=x rounds=x", 2, ("override 'rounds=x'", "got 'x'", "expected a whole number")),
    (f"eval {EVAL} --limit 3", 2, ("--limit: not an option", "limit=VALUE")),
    (f"eval {EVAL} limit", 2, ("override 'limit'", "expected key=value")),
    (f"sft {SFT} +learning_rate=1", 2, ("no sign is needed", "write learning_rate=1")),
    (
        f"sft {SFT} --dry-run template=qwen25",
        2,
        ("template: got 'qwen25'", "expected a template of LLaMA-Factory", "did you mean 'qwen'?"),
    ),
    (f"sft {SFT} cutoff_len=0", 2, ("got 0", "expected a whole number above 0")),
    (f"sft {SFT} num_train_epochs=nan", 2, ("got 'nan'", "expected a number above 0")),
    (f"sft {SFT} stage=sftt", 2, ("got 'sftt'", "expected one of pt, sft")),
    (f"sft {SFT} learning_rate=[1", 2, ("override 'learning_rate=[1'", "the value is not YAML")),
    (f"sft {SFT} =3", 2, ("override '=3'", "expected key=value")),
    ("sft configs/tiny/sft", 2, ("CONFIG configs/tiny/sft: is a folder", "expected: YAML of the run")),
    (f"eval {EVAL} model=x rounds=0", 2, ("got 0", "expected at least 1")),
    (f"eval {EVAL} model=x sampling.temperatur=1", 2, ("unknown key; did you mean 'temperature'?",)),
    (f"eval {EVAL} model=x benchmark=aime26", 2, ("got 'aime26'", "did you mean 'aime25'?")),
    (f"eval {EVAL} model=x agent=nobody", 1, ("agent 'nobody' is not shipped", "expected one of: code")),
    ("ask hi --model ftp://x", 2, ("--model ftp://x", "http://HOST:PORT/v1")),
    ("init {T}", 2, ("{T} is a folder with files in it", "for example {T}_2")),
    ("export {T}/none", 2, ("RUN {T}/none: no such folder", "expected: output_dir of an `afm rl`")),
    (f"doctor {SFT} --nodes 0", 2, ("--nodes 0: should be at least 1",)),
    (f"mask {SFT} --examples 0", 2, ("--examples 0: should be at least 1",)),
    ("reproduce web_agent lerning_rate=3", 2, ("lerning_rate=3", "expected sft.KEY=VALUE")),
    ("reward {T}/good.jsonl --scorer x", 2, ("--scorer goes with --attack",)),
    ("data download web_agnt --output-dir {T}/raw", 2, ("web_agnt", "did you mean 'web_agent'?")),
    ("data world --output-dir {T}/w --pages 3", 2, ("--pages 3: should be at least 40",)),
    ("eval compare {T}/model", 2, ("got 1 folder", "afm eval compare BEFORE AFTER")),
    ("report {T}/none", 2, ("{T}/none: no such folder", "expected the output_dir")),
    ("view {T}/good.jsonl --host 0.0.0.0", 2, ("--host 0.0.0.0", "127.0.0.1", "ssh -L")),
    (
        "view {T}/good.jsonl --port 99999",
        2,
        ("--port 99999: should be at most 65535", "afm view --help"),
    ),
    (
        "serve model {T}/model --replicas 0",
        2,
        ("--replicas 0: should be at least 1", "expected: number of servers"),
    ),
    ("sandbox run", 2, ("no program on standard input", "echo 'print(1+1)' | afm sandbox run")),
    ("sandbox check --only nothing", 2, ("--only 'nothing'", "afm sandbox check")),
    (
        "quickstart --world physics",
        2,
        ("--world physics: expected one of: math, wiki", "afm quickstart --help"),
    ),
    ("reproduce nobody", 2, ("AGENT nobody", "expected one of: code_agent")),
    ("reproduce web_agent --from nowhere", 2, ("nowhere: no such stage", "expected one of: download")),
    ("reproduce web_agent --size 99b", 2, ("99b", "expected 7b or 32b")),
    (
        "data world --output-dir {T}/w --hops 9",
        2,
        ("--hops '9'", "expected numbers from 1 to 4", "for example 1,2"),
    ),
    (
        "data prepare tasks {T}/tasks.jsonl -o {T}/x.jsonl --reader nope",
        2,
        ("--reader nope", "expected one of"),
    ),
    (
        "data prepare published web_agnt --data {T} --output-dir {T}",
        2,
        ("web_agnt", "did you mean 'web_agent'?"),
    ),
    (
        "data download web_agent --output-dir {T} --only nope",
        2,
        ("--only nope", "expected one of: benchmarks"),
    ),
    ("data distill {T}/tasks.jsonl --output-dir {T}/d budget.usd=3", 2, ("'budget.usd=3'", "--team FILE")),
    ("data filter {T}/good.jsonl -o {T}/good.jsonl", 2, ("--output-dir {T}/good.jsonl", "expected a folder")),
    # Values and files that an earlier version let through, or rejected in Python's words.
    ("data prepare rl {T}/tasks.jsonl --out {T}/o.csv", 2, ("o.csv", "a file that ends in .parquet")),
    ("data filter {T}/good.jsonl -o {T}/nan --min-score nan", 2, ("--min-score nan", "a finite number")),
    ("sandbox install ''", 2, ("PACKAGES: got an empty name", "numpy")),
    ("view {T}/none_yet --bundle {T}/b", 1, ("none_yet: no episodes and no logs to share",)),
    (
        "convert {T}/good.jsonl --to coa -o {T}/model",
        1,
        ("{T}/model: is a folder; expected the name of a file",),
    ),
    ("convert {T}/good.jsonl --to coa -o /", 1, ("/: is a folder; expected the name of a file",)),
    (
        "convert {T}/good.jsonl --to coa -o /proc/o.jsonl",
        1,
        ("/proc/o.jsonl: no such file, and none can be written there", "choose another place"),
    ),
    ("validate {T}/deep.jsonl", 1, ("deep.jsonl:1: invalid JSON from here on: nested too deeply",)),
    ("reward {T}/deep_row.jsonl", 1, ("deep_row.jsonl:1: invalid JSON: nested too deeply",)),
    (
        "reward {T}/rows.json",
        1,
        ("rows.json:1: got a JSON list, expected one JSON object per line; convert", "{T}/rows.json"),
    ),
    (
        "data filter {T}/rows.json -o {T}/f --no-picture",
        1,
        ("rows.json:1: got a JSON list, expected one JSON",),
    ),
    ("data prepare sft {T}/rows.json --output-dir {T}/s", 1, ("rows.json:1: got a JSON list, expected one",)),
    (
        "data filter {T}/own_key.jsonl -o {T}/f2 --no-picture",
        1,
        ("own_key.jsonl:1: note: unknown key; keys of",),
    ),
    (
        "convert {T}/wide_list.jsonl --to coa --agent react -o {T}/o",
        1,
        ("got UTF-16, expected UTF-8; convert it: iconv",),
    ),
    (
        "convert {T}/repr.txt --to coa --agent react -o {T}/o",
        1,
        ("got the text of a Python object, expected",),
    ),
    (
        "convert {T}/sender.json --to coa --agent react -o {T}/o",
        1,
        ("no key 'role' among ['sender', 'text']; write",),
    ),
    ("validate {T}/digits.jsonl", 1, ("digits.jsonl:1: invalid JSON: a number with more than 4,300 digits",)),
    (f"eval {EVAL} model=m sampling.temperature=hot", 2, ("got 'hot' (text), expected a number",)),
    (f"eval {EVAL} model=m rounds=0", 2, ("rounds: got 0 (number), expected at least 1",)),
    (f"sft {SFT} cutoff_len=-5", 2, ("cutoff_len: got -5, expected a whole number above 0",)),
    ("quickstart --seed x", 2, ("--seed x: should be a whole number;", "afm quickstart --help")),
    (
        "quickstart --output-dir {T}/good.jsonl",
        1,
        ("{T}/good.jsonl: is a file; expected a folder", "choose another --output-dir"),
    ),
    ("eval {T}/tab.yaml", 1, ("{T}/tab.yaml: cannot be read as YAML", "line 2")),
    ("eval {T}/twice.yaml", 1, ("{T}/twice.yaml: line 2: key 'model' is set twice",)),
    (
        "doctor {T}/circle.yaml",
        1,
        ("circle.yaml: cannot be read as YAML: line 1, column 8: alias *a is inside",),
    ),
    (
        "validate {T}/good.jsonl --agent {T}/circle.yaml",
        2,
        ("line 1, column 8: alias *a is inside the value",),
    ),
    ("eval {T}/list.yaml", 1, ("{T}/list.yaml: got list, expected a mapping of evaluation settings",)),
    (
        "eval {T}/numbers.yaml",
        1,
        ("{T}/numbers.yaml: got the key 1, expected words as the keys of evaluation settings",),
    ),
    ("eval {T}/bomb.yaml", 1, ("{T}/bomb.yaml", "its aliases stand for more than 100,000 values")),
    (
        "eval {T}/endless.yaml model=http://x data=y agent=math",
        1,
        ("{T}/endless.yaml", "sampling.temperature: got inf (number), expected a finite number"),
    ),
    (
        "data prepare tasks {T}/latin.csv --out {T}/o.jsonl",
        1,
        ("latin.csv:2: not UTF-8", "iconv -f WINDOWS-1252"),
    ),
    ("import 'a b/c' -o {T}/im", 2, ("a b/c: no such file; expected a model's folder",)),
    ("reproduce svamp --size 7b", 2, ("svamp is published in other sizes; expected 135m or 1.5b",)),
    # A YAML of another kind: status 1, with the command for it.
    (
        f"eval {SFT}",
        1,
        (f"{SFT}: this is an `afm sft` file, expected an `afm eval` file", f"run afm sft {SFT}"),
    ),
    (f"sft {RL}", 1, ("this is an `afm rl` file, expected an `afm sft` file", f"run afm rl {RL}")),
    (f"sft {AGENT}", 1, ("this is an agent", f"agent={AGENT}", f"afm ask --agent {AGENT} --model DIR")),
    (f"doctor {AGENT} x=1", 1, ("x=1: an agent takes no overrides", f"edit {AGENT}")),
    # A key that is wrong many times over: three lines and a count, the known keys once.
    (
        "eval {T}/keys.yaml model=x",
        1,
        (
            "keys.yaml: key0: unknown key; expected one of: agent, ",
            "keys.yaml: key1: unknown key\n",
            "keys.yaml: key2: unknown key\n... and 6 more like it: {T}/keys.yaml: key0: unknown key\n",
        ),
    ),
    *(
        (
            f"{command} {{T}}/weights/config.json",
            1,
            ("this is a model's config, expected an `afm", "afm eval EVAL.yaml model={T}/weights\n"),
        )
        for command in ("eval", "sft")
    ),
    (
        "eval {T}/child.yaml model=x",
        1,
        (
            "{T}/child.yaml: extends: {T}/gone.yaml: no such file; expected a path from the folder of child.yaml",
        ),
    ),
    ("view {T}/chat.jsonl", 1, ("the first line is not an episode; expected trajectory JSONL;", CONVERT)),
    # The advice can be typed as it is, and each kind is recognised everywhere.
    (
        f"data distill {{T}}/tasks.jsonl --output-dir {{T}}/d --team {AGENT}",
        1,
        (f"{AGENT}: this is an agent, expected a team; name it in a run: afm eval EVAL.yaml agent={AGENT}",),
    ),
    (
        f"reward {{T}}/good.jsonl --rewards {AGENT}",
        1,
        ("expected a reward", "name it in a run: afm eval", "(with tools of your own: --tools TOOLS.yaml)"),
    ),
    (f"view {AGENT}", 1, ("expected rows (JSONL); this is an agent; name it in a run",)),
    (f"report {AGENT}", 2, (f"{AGENT}: this is an agent; name it in a run", "expected the output_dir")),
    (
        f"reward {{T}}/good.jsonl --rewards {TOOLS}",
        1,
        ("this is a list of tools, expected a reward", f"tools={TOOLS}"),
    ),
    (
        f"reward {REWARD}",
        1,
        ("expected rows", "this is a reward", f"afm reward ROWS.jsonl --rewards {REWARD}"),
    ),
    (f"validate {TOOLS}", 1, ("expected rows", "this is a list of tools", f"afm doctor {TOOLS}")),
    (
        f"data filter {{T}}/good.jsonl -o {{T}}/f --config {EVAL}",
        1,
        ("this is an `afm eval` file", f"afm eval {EVAL}"),
    ),
    (
        "data queries configs/expand/world.yaml",
        1,
        ("this is an `afm data expand` file", "run afm data expand"),
    ),
    (
        "data expand configs/queries/qa.yaml",
        1,
        ("this is an `afm data queries` file", "run afm data queries"),
    ),
    (
        "data distill {T}/tasks.jsonl --output-dir {T}/d --team configs/teams/smolagents.yaml",
        1,
        ("this is a map of a team's log, expected a team", "afm data merge LOG.jsonl --map"),
    ),
    (
        f"data distill {{T}}/tasks.jsonl --output-dir {{T}}/d --tools {REWARD}",
        1,
        ("this is a reward", "rewards="),
    ),
    (
        "data merge {T}/good.jsonl --map configs/distill/math.yaml --tasks {T}/tasks.jsonl --output-dir {T}/m",
        1,
        ("this is a team, expected a map", "afm data distill TASKS.jsonl --team"),
    ),
    # Data that is not shipped: status 1, with the commands that fetch it.
    (
        "eval configs/eval/hallucination.yaml model=x",
        1,
        (
            "raw/glaive: no such file",
            "afm data download benchmarks --output-dir data/web_agent/raw --only glaive",
        ),
    ),
    (
        "eval configs/eval/t_eval.yaml model=x",
        1,
        (
            "raw/t_eval: no such file",
            "afm data download benchmarks --output-dir data/web_agent/raw --only t_eval",
        ),
    ),
    (
        "eval configs/eval/unseen_tools_web.yaml model=x",
        1,
        (
            "eval/gaia.jsonl: no such file",
            "afm data download web_agent",
            "afm data prepare published web_agent",
        ),
    ),
    (
        "data prepare published web_agent --data {T}/none --output-dir {T}/p",
        1,
        ("no file that matches", "`afm data download` fetches set 'web_agent_sft'"),
    ),
    # Files that hold no JSON lines: status 1, with the command that makes them.
    (
        "validate {T}/packed.jsonl",
        1,
        ("packed.jsonl:1: got a file packed with gzip", "gunzip -c {T}/packed.jsonl"),
    ),
    (
        "reward {T}/wide.jsonl",
        1,
        ("wide.jsonl:1: got UTF-16, expected UTF-8", "iconv -f UTF-16 -t UTF-8 {T}/wide"),
    ),
    ("reward {T}/unmarked.jsonl", 1, ("got UTF-16, expected UTF-8", "iconv -f UTF-16LE -t UTF-8 {T}/unm")),
    ("convert {T}/wide.jsonl --to coa -o {T}/o.jsonl", 1, ("got UTF-16", "iconv -f UTF-16")),
    (
        "validate {T}/indented.jsonl",
        1,
        ("indented.jsonl:1: got a JSON object over several lines", "jq -c . {T}"),
    ),
    (
        "data stats {T}/indented.jsonl",
        1,
        ("got a JSON object over several lines", "jq -c . {T}/indented.jsonl"),
    ),
    (
        "data filter {T}/table.jsonl -o {T}/f2",
        1,
        ("table.jsonl:1: got a table (CSV)", "afm data prepare tasks"),
    ),
    ("data distill {T}/table.jsonl --output-dir {T}/d", 1, ("got a table (CSV)", "afm data prepare tasks")),
    ("data distill {T}/tasks.jsonl --output-dir {T}/d", 1, ("afm data prepare tasks {T}/tasks.jsonl",)),
    ("reward {T}/tasks.jsonl", 1, ("these are questions", "afm data distill {T}/tasks.jsonl")),
    (
        "data prepare sft {T}/zip.jsonl --output-dir {T}/s",
        1,
        (
            "save a spreadsheet as CSV: libreoffice --convert-to csv {T}/zip.jsonl, and unpack",
            "unzip {T}/zip.jsonl",
        ),
    ),
    (
        "view {T}/packed.jsonl --index {T}/i.sqlite",
        1,
        ("got a file packed with gzip", "gunzip -c {T}/packed.jsonl"),
    ),
    (f"eval {EVAL} model=x data={{T}}/packed.jsonl", 1, ("got a file packed with gzip", "gunzip -c")),
    (
        "cassette {T}/good.jsonl",
        1,
        ("file is not a database", "set `cassette` in the tools YAML to a recorded file"),
    ),
    ("import {T}/good.jsonl -o {T}/im", 2, ("no model; expected a model's folder, a GGUF file",)),
    ("serve model {T}/absent", 2, ("{T}/absent: no such folder; expected a model's folder",)),
    # Files that are empty, broken, or hold other rows: status 1.
    ("eval {T}/empty.yaml", 1, ("{T}/empty.yaml: got nothing", "expected a mapping of evaluation settings")),
    (
        "eval {T}/broken.yaml",
        1,
        ("{T}/broken.yaml: cannot be read as YAML", "line 1", "expected evaluation settings"),
    ),
    (
        "eval {T}/good.jsonl",
        1,
        ("holds rows of data, expected a YAML of evaluation settings", "afm list --help"),
    ),
    ("doctor {T}/none.yaml", 2, ("CONFIG {T}/none.yaml: no such file", "expected: YAML of a training run")),
    (
        "validate {T}/empty.jsonl",
        1,
        ("{T}/empty.jsonl: holds no rows", "rerun the command that wrote it"),
    ),
    (
        "validate {T}/prose.jsonl",
        1,
        ("prose.jsonl:1: invalid JSON", "expected one JSON value per line", "... and 9 more"),
    ),
    *(
        (
            f"{command} {{T}}/two.jsonl",
            1,
            ("two.jsonl:1: two JSON values on one line", "second at character 21; put each on its own line"),
        )
        for command in ("validate", "data stats", "convert --to coa --agent math -o {T}/o.jsonl")
    ),
    (
        "validate {T}/chat.jsonl",
        1,
        ("names no agent; give --agent NAME, or --agent FILE for your own", CONVERT, "... and 6 more"),
    ),
    (
        "convert {T}/chat.jsonl --to coa -o {T}/o.jsonl",
        1,
        ("9 rows cannot be converted, so nothing was written; correct the faults above", "6 more"),
    ),
    (
        "reward {T}/chat.jsonl",
        1,
        ("got an object with messages, expected one with data_source", "... and 6 more"),
    ),
    ("data filter {T}/chat.jsonl -o {T}/f1 --no-picture", 1, ("no row is a trajectory record", CONVERT)),
    ("data stats {T}/chat.jsonl", 1, ("got an object with messages, expected a trajectory record", CONVERT)),
    (
        "data negative {T}/chat.jsonl --output-dir {T}/n",
        1,
        ("expected a trajectory record", CONVERT, "... and 6 more"),
    ),
    (
        "data prepare sft {T}/chat.jsonl --output-dir {T}/s",
        1,
        ("chat.jsonl:1: got an object with messages", CONVERT),
    ),
    ("data distill {T}/chat.jsonl --output-dir {T}/d", 1, ("expected `question`", "afm data prepare tasks")),
    (
        "data prepare tasks {T}/chat.jsonl -o {T}/x.jsonl",
        1,
        (
            "no row of {T}/chat.jsonl",
            "`afm data prepare tasks {T}/chat.jsonl --question-key KEY",
        ),
    ),
    (
        "data prepare tasks {T}/tasks.jsonl -o {T}/x.jsonl",
        1,
        ("data_source; give one: --data-source NAME", "x.bad_rows.jsonl lists the rows\n"),
    ),
    ("data filter {T}/team --output-dir {T}/d", 2, ("is a folder (did you mean {T}/team/kept.jsonl?)",)),
    ("report {T}/modle", 2, ("{T}/modle: no such folder (did you mean {T}/model?); expected",)),
    ("export {T}/modle", 2, ("RUN {T}/modle: no such folder (did you mean {T}/model?)",)),
    ("data queries configs/queries/qa.yaml", 1, ("tasks: missing, but required", "give tasks=VALUE")),
    ("report {T}/model", 1, ("{T}/model holds nothing to report", "expected episodes.jsonl")),
    ("view {T}/none", 2, ("{T}/none: no such file or folder", "expected episodes as JSONL")),
    (
        "data world --output-dir {T}/good.jsonl",
        1,
        ("{T}/good.jsonl: is a file; expected a folder", "choose another --output-dir"),
    ),
    # Nothing where a value is needed: an empty path would be this folder.
    ("quickstart --output-dir ''", 2, ("--output-dir: got an empty value", "expected: folder of the run")),
    ("quickstart --base ''", 2, ("--base: got an empty value", "expected: pre-trained model")),
    ("init ''", 2, ("FOLDER: got an empty value", "for example my_task")),
    ("convert {T}/good.jsonl --to coa -o ''", 2, ("--out: got an empty value", "expected: file to write")),
    ("data world --output-dir {T}/w --hops ''", 2, ("--hops: got an empty value", "numbers of pages")),
    ("ask hi --model ''", 2, ("--model: got an empty value", "folder of a model")),
    ("report ''", 2, ("RUN_DIR: got an empty value", "output_dir of `afm quickstart`")),
    # Arguments that are missing, too many, or no option of the command.
    ("init", 2, ("afm init: missing argument 'FOLDER'", "expected: new or empty folder", "afm init --help")),
    ("init agent.yaml extra", 2, ("afm init: unexpected argument: extra",)),
    ("init agent.yaml", 2, ("agent.yaml is the name of a file", "for example agent; see afm init --help\n")),
    ("init {T}/good.jsonl", 2, ("{T}/good.jsonl is a file", "for example {T}/good; see afm init --help\n")),
    (
        "serve model --model m",
        2,
        (
            "no such option: --model; give MODEL without it: `afm serve model MODEL`",
            "see afm serve model --help",
        ),
    ),
    ("list agents --jsn", 2, ("no such option: --jsn; did you mean --json?", "afm list agents --help")),
    ("data prepare rl x --output y", 2, ("no such option: --output; did you mean --out? see afm data",)),
    ("quickstart --out y", 2, ("no such option: --out; did you mean --output-dir? see afm quickstart",)),
    ("view --bogus", 2, ("afm view: no such option: --bogus; see afm view --help",)),
    ("eval {T}/absent.yaml", 2, ("absent.yaml: no such file", "(`afm list benchmarks` prints the paths)")),
    ("doctor {T}/flat.yaml", 1, ("think: unknown key; `roles:` above it is empty: indent this line if it",)),
    ("eval {T}/sampled.yaml model", 2, ("override 'model': expected key=value, for example seed=1",)),
    ("list agents extra", 2, ("afm list agents: unexpected argument: extra",)),
    ("validate {T}/good.jsonl {T}/good.jsonl", 2, ("afm validate: unexpected argument: {T}/good.jsonl",)),
    ("convert {T}/good.jsonl", 2, ("missing option '--to'; expected: format to write: coa, alpaca",)),
    ("convert {T}/good.jsonl --to coa", 2, ("missing option '--out'; expected: file to write",)),
    ("data nope", 2, ("afm data: no such command 'nope'", "afm data --help")),
    ("data world", 2, ("missing option '--output-dir'", "expected: folder for the three JSONL files")),
    ("data distill", 2, ("missing argument 'TASKS'", "expected: tasks as JSONL, CSV or parquet")),
    ("data filter", 2, ("missing argument 'FILES'", "expected: trajectory JSONL")),
    ("data download web_agent", 2, ("missing option '--output-dir'", "expected: folder to download into")),
    ("data merge {T}/good.jsonl", 2, ("missing option '--map'", "like those in configs/teams")),
    ("data prepare mix web_agent", 2, ("missing argument 'NAME'", "expected: name of a mix")),
    ("data prepare rl {T}/tasks.jsonl", 2, ("missing option '--out'", "its name ends in .parquet")),
    ("eval compare", 2, ("missing argument 'FOLDERS'", "expected: output_dir of two or more evaluations")),
    ("eval chose {T}/model", 2, ("afm eval: no such command 'chose'", "did you mean 'choose'?")),
    ("eval --dry-run", 2, ("missing argument 'CONFIG'", "expected: YAML of the evaluation")),
    ("reproduce web_agent --from", 2, ("option '--from' requires an argument", "see afm reproduce --help")),
    ("serve wiki build", 2, ("missing argument 'CORPUS'", "afm serve wiki build --help")),
    ("serve mcp", 2, ("missing option '--tools'", "configs/tools/code_executor.yaml")),
    ("sandbox run extra", 2, ("afm sandbox run: unexpected argument: extra",)),
    ("cassette", 2, ("missing argument 'FILE'", "`cassette` of a tools YAML")),
    # Files and folders that are missing, or of the wrong sort.
    ("validate {T}/none.jsonl", 2, ("FILE {T}/none.jsonl: no such file", "expected: JSONL")),
    ("mask {T}/none_yet", 2, ("FILE {T}/none_yet: is a folder", "expected: rows in any format")),
    ("sft learning_rate=3", 2, ("CONFIG learning_rate=3: no such file; an override comes after the file",)),
    ("doctor {T}/model", 2, ("CONFIG {T}/model: is a folder", "expected: YAML of a training run")),
    ("export {T}/good.jsonl", 2, ("RUN {T}/good.jsonl: is a file", "expected: output_dir of an `afm rl`")),
    ("eval choose {T}/none", 2, ("FOLDER {T}/none: no such folder", "output_dir of a finished evaluation")),
    ("data livecodebench {T}/none", 2, ("FILES {T}/none: no such file",)),
    ("data filter {T}/good.jsonl -o {T}/f --against {T}/none", 2, ("--against {T}/none: no such file",)),
    ("data queries {T}/none.yaml", 2, ("CONFIG {T}/none.yaml: no such file", "configs/queries/qa.yaml")),
    ("serve code --config {T}/none.yaml", 2, ("--config {T}/none.yaml: no such file", "configs/servers")),
    ("serve gateway --log {T}", 2, ("--log {T}: is a folder", "expected: event log to write")),
    ("serve wiki --index {T}/none", 2, ("--index {T}/none: no such folder", "`afm serve wiki build` made")),
    ("sandbox run --stdin {T}/none", 2, ("--stdin {T}/none: no such file",)),
    ("cassette {T}/empty.jsonl", 1, ("empty.jsonl: is empty; expected the file that `cassette`",)),
    ("cassette {T}/none", 2, ("FILE {T}/none: no such file",)),
    ("view {T}/good.jsonl --index /proc/x/i.sqlite", 1, ("/proc/x: no such file, and none can be written",)),
    ("view {T}/good.jsonl --index /proc/zz --bundle {T}/b", 1, ("/proc/zz: no index can be written there",)),
    ("view {T}/good.jsonl --index {T}/model --bundle {T}/b", 2, ("{T}/model: is a folder; choose another",)),
    (
        "view {T}/good.jsonl --index {T}/chat.jsonl --bundle {T}/b",
        2,
        ("{T}/chat.jsonl: is not an index of episodes, and was not changed", "choose another --index"),
    ),
    ("view {T}/deep.jsonl --index {T}/i.sqlite", 1, ("deep.jsonl:1: the first line is not an episode",)),
    ("view {T}/good.jsonl --bundle {T}/good.jsonl", 2, ("--bundle {T}/good.jsonl: is a file",)),
    ("data world --output-dir /proc/x", 1, ("/proc/x: no such file, and none can be written there",)),
    ("init /proc/x", 1, ("/proc/x: no such file, and none can be written there", "choose another place")),
    (
        "reward --attack {T}/good.jsonl",
        1,
        ("good.jsonl:1: got a trajectory without data_source and ground_truth",),
    ),
    ("report {T}/good.jsonl", 2, ("{T}/good.jsonl: is a file; afm view {T}/good.jsonl shows its episodes",)),
    # Models that cannot be used yet.
    (
        "ask hi --model {T}/ck",
        2,
        ("holds checkpoints of a training run, export one first: afm export {T}/ck",),
    ),
    (
        f"eval {EVAL} model={{T}}/ck data={{T}}/tasks.jsonl output_dir={{T}}/e",
        2,
        ("{T}/ck: holds checkpoints of a training run, export one first: afm export {T}/ck",),
    ),
    (
        f"eval {EVAL} model=x benchmark=null reader=null data={{T}}/none.csv",
        2,
        ("data: {T}/none.csv: no such file or folder", "data=FILE"),
    ),
    ("serve model {T}/ck", 2, ("holds checkpoints of a training run, export one first: afm export {T}/ck",)),
    ("serve model {T}/model", 2, ("{T}/model: holds no model (config.json); expected a model's folder",)),
    ("ask hi --model {T}/m.gguf", 2, ("a GGUF file; `afm import` makes a folder of it",)),
    (
        "ask hi --model http://127.0.0.1:1/v1 --agent math --tokenizer {T}/model",
        1,
        ("no tokenizer can be loaded from it (no tokenizer.json)", "expected a folder with tokenizer.json"),
    ),
    (
        "data queries configs/queries/qa.yaml tasks={T}/tasks.jsonl model={T}/absent output_dir={T}/q",
        2,
        ("model: {T}/absent: no such folder; expected a model's folder",),
    ),
    # Values out of range, and words that are none of a few.
    ("validate {T}/good.jsonl --from cao", 2, ("afm validate: --from cao: did you mean 'coa'?",)),
    ("mask {T}/good.jsonl --boundary x", 2, ("--boundary x: expected one of: keep, mask, split",)),
    ("data world --output-dir {T}/w --shapes ring", 2, ("--shapes 'ring'", "expected chain, comparison")),
    ("data negative {T}/good.jsonl --output-dir {T}/n --ratio absent_needed=nan", 2, ("a number from 0",)),
    ("data negative {T}/good.jsonl --output-dir {T}/n --ratio absent_needed=-1", 2, ("a number from 0",)),
    ("data stats {T}/good.jsonl --samples 999", 2, ("--samples 999: should be at most 200",)),
    (
        "data stats {T}/good.jsonl --out {T}/own.jsonl",
        2,
        ("--out {T}/own.jsonl: expected the name of a page",),
    ),
    ("report {T}/model --out {T}/own.jsonl", 2, ("{T}/own.jsonl: expected the name", "for example own.html")),
    ("data world --output-dir {T}/w --train 100000000000", 2, ("should be at most 10000000",)),
    ("data prepare rl {T}/tasks.jsonl -o {T}/o.parquet --validation 0", 2, ("--validation 0: should be",)),
    (
        "data prepare mix web_agent x --data {T} --output-dir {T}",
        2,
        ("no such mix; the file has no `mixes`",),
    ),
    (
        "ask hi --model {T}/ck --temperature -1",
        2,
        ("--temperature -1: should be at least 0",),
    ),
    ("serve model {T}/model --engine x", 2, ("--engine x: expected one of: own, sglang, vllm",)),
    ("serve wiki --engine x", 2, ("--engine x: expected one of: bm25, dense, hybrid",)),
    ("sandbox check --backend nope", 2, ("--backend nope: expected one of: auto, bubblewrap",)),
    ("cassette {T}/good.jsonl --max-age-days -1", 2, ("--max-age-days -1: should be at least",)),
    ("reward {T}/good.jsonl --agent nobody", 2, ("--agent nobody: agent 'nobody' is not shipped",)),
    # Rows: another agent, another format, a table with a column twice.
    (
        "validate {T}/own.jsonl",
        1,
        ("agent 'weekday_agent' is not shipped", "the path of a YAML: --agent FILE"),
    ),
    ("convert {T}/own.jsonl --to alpaca -o {T}/o", 1, ("the path of a YAML: --agent FILE", "1 row cannot")),
    ("data prepare rl {T}/two.csv -o {T}/o.parquet", 1, ("two.csv:1: two columns are called 'question'",)),
    (
        "data prepare rl {T}/chat.jsonl -o {T}/o.parquet",
        1,
        ("`afm data prepare tasks {T}/chat.jsonl --question",),
    ),
    ("data stats {T}/good.jsonl --funnel {T}/good.jsonl --out {T}/r.html", 1, ("holds no funnel; expected",)),
    # Options that were ignored, and rows that a page cannot show.
    ("doctor --gpus 2", 2, ("--gpus 2: no YAML to check", "afm doctor CONFIG --gpus 2")),
    (
        f"doctor {TOOLS} --gpus 2 --nodes 3",
        2,
        ("--nodes 3 --gpus 2:", "is a list of tools, which needs no GPUs"),
    ),
    ("data stats {T}/good.jsonl --funnel {T}/huge.json", 1, ("huge.json: holds no funnel; expected",)),
    (
        "doctor {T}/parameters.yaml",
        1,
        ("tools[0].tool_schema.function.parameters", "(object), expected `properties` to be a mapping"),
    ),
    (
        "convert {T}/good.jsonl --to coa -o {T}/loop",
        1,
        ("Symlink loop from '{T}/loop'; correct the link, or choose another path",),
    ),
    ("data stats {T}/good.jsonl --funnel {T}/good.jsonl", 1, ("good.jsonl: holds no funnel; expected",)),
    ("view {T}/bare.jsonl --index {T}/b.sqlite --bundle {T}/bb", 1, ("bare.jsonl:2: agent_digest: missing",)),
    ("view {T}/bare.jsonl --index {T}/b.sqlite --bundle {T}/bb", 1, ("bare.jsonl:2: agent_digest: missing",)),
    ("data prepare sft {T}/good.jsonl --output-dir {T}/s --agent mhqa", 1, ("belongs to agent 'math'",)),
    (
        "doctor {T}/wide.yaml",
        1,
        ("byte 1 (line 1) is not UTF-8", "iconv -f UTF-16 -t UTF-8 {T}/wide.yaml > {T}/wide_utf8.yaml"),
    ),
    ("doctor {T}/unordered.yaml", 1, ("unordered.yaml: transitions: missing, but required",)),
    (
        "doctor {T}/latin.yaml",
        1,
        ("byte 5 (line 1) is not UTF-8", "save it as UTF-8: iconv -f WINDOWS-1252 -t UTF-8 {T}/latin.yaml >"),
    ),
    (
        "import {T}/m.gguf -o {T}/im",
        1,
        ("its contents do not fit its 4 bytes", "download or convert it again"),
    ),
    ("sandbox install numpy --folder {T}/good.jsonl", 2, ("--folder {T}/good.jsonl: is a file",)),
    (
        "sandbox install numpy --python {T}/good.jsonl",
        1,
        ("good.jsonl' is not a program", "name another: --python"),
    ),
    ("init {T}/dangling", 2, ("{T}/dangling is a file; expected a new or an empty folder",)),
    ("eval {T}/none_yet", 2, ("CONFIG {T}/none_yet: is a folder",)),
    (f"quickstart --seed {10**30}", 2, (f"--seed {10**30}: should be at most 4294967295",)),
    ("quickstart --seed -1", 2, ("--seed -1: should be at least 0",)),
    ("data world --output-dir {T}/w --seed -1", 2, ("--seed -1: should be at least 0",)),
    ("reproduce svamp --root {T}/good.jsonl --dry-run", 2, ("--root (ROOT) {T}/good.jsonl: is a file",)),
]

# The same for the processes that `afm serve` becomes, named as in `python -m tool_servers`.
SERVERS: list[tuple[str, int, tuple[str, ...]]] = [
    (
        "gateway --upstream http://127.0.0.1:1/v1 --log /proc/x/y.jsonl",
        1,
        ("/proc/x: no such file, and none can be written there", "choose another place"),
    ),
    ("gateway --upstream nonsense", 1, ("got 'nonsense' (text), expected http://HOST or https://HOST",)),
    ("code --host http://localhost", 1, ("expected a name or an address alone, for example 127.0.0.1",)),
    ("code --host 127.0.0.1:9", 1, ("host '127.0.0.1:9': expected a name or an address alone",)),
    ("code --host nowhere.invalid", 1, ("needs a token; set CODE_SERVER_TOKEN", "openssl rand -hex 16")),
    (
        f"code --config {TOOLS}",
        1,
        ("this is a list of tools, expected an `afm serve code` file", "afm doctor"),
    ),
    (
        "code --config {T}/wide.yaml",
        1,
        ("byte 1 (line 1) is not UTF-8; expected code server settings", "iconv"),
    ),
    ("code --config {T}/list.yaml", 1, ("got list, expected a mapping of code server settings",)),
    (
        "code --config {T}/endless.yaml",
        1,
        ("this is an `afm eval` file, expected an `afm serve code` file; run",),
    ),
    ("code --config {T}/odd.yaml", 1, ("temperature: unknown key; expected one of: finish_s",)),
    ("wiki_search", 1, ("no index; name its folder with --index",)),
    ("wiki_search --index {T}", 1, ("build it with: afm serve wiki build CORPUS.jsonl --output-dir {T}",)),
    ("mcp --tools {T}/good.jsonl", 1, ("holds rows of data, expected a YAML of tools settings",)),
    (f"mcp --tools {REWARD}", 1, ("this is a reward, expected a list of tools",)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good, faulty, empty and foreign files."""
    folder = tmp_path_factory.mktemp("inputs")
    text = "<plan>p</plan><think>t</think><answer>\\boxed{1}</answer>"
    record = {"id": "a", "agent": "math", "agent_digest": "d", "question": "?"}
    record["segments"] = [{"author": "agent", "text": text}]  # type: ignore[assignment]
    bare = {key: value for key, value in record.items() if key != "agent_digest"}
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    files = {
        "good.jsonl": json.dumps(record) + "\n",
        "bare.jsonl": f"{json.dumps(record)}\n{json.dumps(bare)}\n",
        "own.jsonl": json.dumps(record | {"agent": "weekday_agent"}) + "\n",
        "chat.jsonl": (json.dumps(chat) + "\n") * 9,
        "tasks.jsonl": '{"id": "1", "question": "1+1?", "answer": "2"}\n',
        "two.jsonl": '{"question": "one"} {"question": "two"}\n',
        "source.jsonl": '{"data_source": "zzz", "question": "1+1?", "response": "2", "ground_truth": "2"}\n',
        "keys.jsonl": '{"problem": "1+1?", "solution": "2"}\n',
        "prose.jsonl": "hello\nworld\n" * 6,
        "empty.jsonl": "",
        "empty.yaml": "",
        "tab.yaml": "data:\n\t- a\n",
        "twice.yaml": "model: a\nmodel: b\n",
        "list.yaml": "- 1\n",
        "numbers.yaml": "1: 2\n",
        "bomb.yaml": "a: &a [1]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi")),
        "flat.yaml": "transitions: {}\nroles:\nthink: {kind: thought}\n",
        "sampled.yaml": "sampling: {temperature: 1}\n",
        "odd.yaml": "temperature: 1\n",
        "endless.yaml": "sampling: {temperature: .inf}\n",
        "circle.yaml": "a: &a [*a]\n",
        "deep.jsonl": "[" * 100_000 + "\n",
        "rows.json": f"[{json.dumps(record)}]",
        "own_key.jsonl": json.dumps(record | {"note": "x"}) + "\n",
        "deep_row.jsonl": '{"a": ' + "[" * 100_000 + "\n",
        "repr.txt": "[{'role': 'user', 'content': 'q'}]\n",
        "sender.json": '{"messages": [{"sender": "user", "text": "q"}]}\n',
        "digits.jsonl": f'{{"id": {"9" * 5000}}}\n',
        "huge.json": '{"seen": 1e999, "stages": []}',
        "parameters.yaml": "tools: [{class_name: x.Y, tool_schema: {function: {name: x, parameters: {properties: null}}}}]\n",
        "broken.yaml": "a: [1\n",
        "child.yaml": "extends: gone.yaml\n",
        "keys.yaml": "".join(f"key{number}: 1\n" for number in range(9)),
    }
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "packed.jsonl").write_bytes(gzip.compress(files["good.jsonl"].encode()))
    (folder / "wide.jsonl").write_text(files["good.jsonl"], encoding="utf-16")
    (folder / "wide_list.jsonl").write_text('[{"role": "user", "content": "q"}]\n', encoding="utf-16")
    (folder / "unmarked.jsonl").write_text(files["good.jsonl"], encoding="utf-16-le")
    (folder / "indented.jsonl").write_text(f"{json.dumps(record, indent=2)}\n" * 2, encoding="utf-8")
    (folder / "table.jsonl").write_text("question,answer\n1+1?,2\n", encoding="utf-8")
    (folder / "zip.jsonl").write_bytes(b"PK\x03\x04")
    (folder / "two.csv").write_text("question,answer,question\n1+1?,2,1+2?\n", encoding="utf-8")
    (folder / "latin.csv").write_text("question,answer\nWie heißt du?,Tom\n", encoding="latin-1")
    (folder / "model").mkdir()
    (folder / "team").mkdir()
    (folder / "team/kept.jsonl").write_text(files["good.jsonl"], encoding="utf-8")
    (folder / "weights").mkdir()
    (folder / "weights/config.json").write_text(
        '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}'
    )
    (folder / "none_yet").mkdir()
    (folder / "ck/checkpoints/global_step_2").mkdir(parents=True)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "m.gguf").write_bytes(b"GGUF")
    (folder / "wide.yaml").write_text("model: m\n", encoding="utf-16")
    agent = "name: a\nprompt: p\nroles: {answer: {kind: answer}}\nlimits: {max_turns: 1}\n"
    (folder / "unordered.yaml").write_text(agent, encoding="utf-8")
    (folder / "latin.yaml").write_bytes(b'a: "\xfc"\n')
    (folder / "dangling").symlink_to(folder / "nowhere")
    return folder


@pytest.mark.parametrize(("words", "status", "parts"), TABLE, ids=[row[0][:60] for row in TABLE])
def test_a_wrong_input_gets_one_message_that_helps(
    afm: Command,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    status: int,
    parts: tuple[str, ...],
) -> None:
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        done = afm(*shlex.split(words.replace("{T}", str(folder))), status=None)
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    assert "Traceback" not in output
    assert "╭" not in output, "usage errors are lines like all others, no boxes"
    for part in parts:
        assert part.replace("{T}", str(folder)) in output, output
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert status != 2 or (errors and errors[0].startswith(("error: afm ", "error: afm:"))), output
    reported = all(line.startswith("checking: ") for line in done.stderr.splitlines())  # by afm doctor
    assert len(errors) == 1 or (reported and status == 1), output


def test_a_wrong_value_of_a_variable_is_named(afm: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY", "maybe")
    errors = afm("reproduce", "svamp", status=2).stderr
    assert "--tiny (TINY) maybe: should be true or false; expected: run the same stages" in errors


@pytest.mark.parametrize(("words", "status", "parts"), SERVERS, ids=[row[0][:60] for row in SERVERS])
def test_a_server_that_cannot_start_says_what_to_do(
    folder: Path, capfd: pytest.CaptureFixture[str], words: str, status: int, parts: tuple[str, ...]
) -> None:
    from tool_servers.__main__ import main

    assert main(shlex.split(f"{words.replace('{T}', str(folder))} --port 0")) == status
    errors = capfd.readouterr().err
    assert errors.startswith("error: ")
    assert "Traceback" not in errors
    for part in parts:
        assert part.replace("{T}", str(folder)) in errors, errors


def test_a_model_without_its_organisation_is_named_as_on_the_hub() -> None:
    from llamafactory_patch.checks import check_model
    from llamafactory_patch.config import resolve
    from verl_ext.doctor import _model
    from verl_ext.settings import load_settings

    with pytest.raises(ConfigError, match=r"on the Hub it is model_name_or_path=Qwen/Qwen2\.5-7B$"):
        check_model(resolve(ROOT / SFT, ["model_name_or_path=Qwen2.5-7B"]))
    settings = load_settings(ROOT / "configs/rl/web_dapo_7b.yaml", ["model=Qwen2.5-7B-Instruct"])
    assert _model(settings, here=True).text.endswith("; on the Hub it is model=Qwen/Qwen2.5-7B-Instruct")


def test_the_advice_to_fetch_a_model_names_the_one_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from afm.findings import fetch_advice

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    advice = "; to fetch it from the Hub: afm import meta-llama/Some-1B -o models/Some-1B"
    assert fetch_advice("meta-llama/Some-1B") == advice
    for path in ("mine/Some-1B", "checkpoint/sft", "runs/rl", "models/base", "Some-1B", "./org/Some-1B"):
        assert fetch_advice(path) == "", path


def test_a_part_of_a_reinforcement_run_says_how_it_is_used() -> None:
    from verl_ext.settings import load_settings

    with pytest.raises(ConfigError, match=r"is a part of a run.*`extends: \[RECIPE.yaml, .*colocate.yaml\]`"):
        load_settings(ROOT / "configs/rl/async/colocate.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+seed=1", "no sign is needed to add a key; write seed=1"),
        ("+trainer.nnodes=2", "a key of verl; write +verl.trainer.nnodes=2"),
        ("++trainer.mine.x=2", "a key of verl; write +verl.trainer.mine.x=2"),
        ("~verl.x", "~ does not delete a key; set it to null: verl.x=null"),
        ("trainer.nnodes=2", "a key of verl; write verl.trainer.nnodes=2"),
        ("nnodes=8", "a key of verl; write verl.trainer.nnodes=8"),
        ("total_epochs=8", "a key of verl; write verl.trainer.total_epochs=8"),
        ("lerning_rate=3", "unknown key; did you mean verl.actor_rollout_ref.actor.optim.lr=3?"),
        ("max_response_length=1000", "unknown key; did you mean limits.max_response_tokens=1000?"),
        ("max_prompt_length=9", "unknown key; did you mean verl.data.max_prompt_length=9?"),
        ("max_steps=3", "unknown key; did you mean verl.trainer.total_training_steps=3?"),
        ("--nodes", "nodes: unknown key; did you mean verl.trainer.nnodes=VALUE?"),
        ("--trainer.nnodes=8", "trainer.nnodes is a key of verl; write verl.trainer.nnodes=8"),
        ("actor.lr=1e-6", "a key of verl; write verl.actor_rollout_ref.actor.optim.lr=1e-6"),
        ("rollout.n=8", "a key of verl; write verl.actor_rollout_ref.rollout.n=8"),
        ("lora_rank=16", "unknown key; did you mean verl.actor_rollout_ref.model.lora_rank=16?"),
        (
            "WANDB_API_KEY=abc",
            "'WANDB_API_KEY=...': WANDB_API_KEY is not a setting; write it before the command",
        ),
        ("configs/rl/async/colocate.yaml", "to combine YAMLs: one with `extends: [FILE, configs/rl/async/"),
        (
            "ray_address=node0",
            "got 'node0' (text), expected HOST:PORT of the cluster's head, for example 10.0",
        ),
        ("ray_address=node0:x", "got 'node0:x' (text), expected HOST:PORT of the cluster's head"),
        ("platform=tpu", "got 'tpu' (text), expected 'cpu' or 'gpu'"),
    ],
)
def test_a_wrong_override_of_a_reinforcement_run_says_what_to_write(override: str, message: str) -> None:
    """`afm rl` reads its settings in a process of its own, so these are read directly."""
    from verl_ext.settings import load_settings

    with pytest.raises(UsageError, match=re.escape(message)) as error:
        load_settings(ROOT / RL, [override])
    shown = re.sub("(?<=_KEY=).*", "...", override)  # a secret is not repeated
    assert str(error.value).startswith(f"override {shown!r}: ")


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "head:6379", "ray://head:10001", "auto", "null"])
def test_addresses_of_clusters_are_accepted(address: str) -> None:
    from verl_ext.settings import load_settings

    settings = load_settings(ROOT / RL, [f"ray_address={address}"])
    assert settings.ray_address == (None if address == "null" else address)


def test_the_table_is_long_and_covers_every_command() -> None:
    from afm.cli.commands import command

    assert len(TABLE) >= 210
    tried = {row[0].split()[0] for row in TABLE}
    assert set(command().commands) <= tried


def test_a_port_in_use_says_what_to_do(afm: Command, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = afm(
            "view", folder / "good.jsonl", "--port", port, "--index", folder / "index.sqlite", status=1
        )
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in done.stderr
    assert "choose another port with --port" in done.stderr


SERVERS = {"crawl_page": "crawl", "visual_inspector": "visual", "web_search": "search"}
"""Commands of servers whose file has another name."""


@pytest.mark.sandbox
@pytest.mark.parametrize("text", ["", "sandbox: {backend: auto}"])
def test_doctor_checks_the_file_of_a_sandbox_server(afm: Command, tmp_path: Path, text: str) -> None:
    file = tmp_path / "server.yaml" if text else ROOT / "configs/servers/code.yaml"
    if text:
        file.write_text(text)
    keys, sandbox, last = afm("doctor", file).stdout.splitlines()
    assert keys.endswith("this is a sandbox server's file, and its settings are valid")
    assert sandbox.endswith("it runs programs on this machine")
    assert last == f"no fault found; next: {afm_command()} serve code --config {file}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "backend: zygote\nlimits: {wall_s: 3}",
            "backend, limits: settings of the sandbox; write them under `sandbox:`",
        ),
        ("sandbox: {backend: none}", "got 'none'"),
        ("sandbox: {python: /nowhere/python3}", "/nowhere/python3"),
    ],
)
def test_doctor_says_what_is_wrong_with_the_file_of_a_sandbox_server(
    afm: Command, tmp_path: Path, text: str, fault: str
) -> None:
    (tmp_path / "server.yaml").write_text(text)
    done = afm("doctor", tmp_path / "server.yaml", status=1)
    assert fault in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "configs/servers").iterdir()) if path.stem != "code"],
    ids=lambda path: path.stem,
)
def test_doctor_names_the_server_that_checks_a_file(afm: Command, path: Path) -> None:
    command = f"afm serve {SERVERS.get(path.stem, path.stem)}"
    done = afm("doctor", path, status=1)
    assert done.stderr == (
        f"error: {path}: this is an `{command}` file, which afm doctor does not check; start the server, "
        f"which checks it first: {command} --config {path}\n"
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_shipped_yaml_is_of_its_own_kind_or_of_none(path: Path) -> None:
    own = {
        "agents": "an agent", "data": "a list of data sets", "distill": "a team",
        "eval": "an `afm eval` file", "expand": "an `afm data expand` file", "filters": "a list of filters",
        "queries": "an `afm data queries` file", "rewards": "a reward", "rl": "an `afm rl` file",
        "servers": f"an `afm serve {SERVERS.get(path.stem, path.stem)}` file", "sft": "an `afm sft` file", "teams": "a map of a team's log",
        "tools": "a list of tools",
    }  # fmt: skip
    parts = path.relative_to(ROOT / "configs").parts
    name = own["agents" if "agents" in parts else parts[1] if parts[0] == "tiny" else parts[0]]
    [expected] = [kind for kind in FILE_KINDS if kind.name == name]
    data = parse_yaml(path.read_text(encoding="utf-8"))
    assert kind_of(data) is None or expected.matches(data)
    assert read_file(path, expected.content[0])


def test_a_key_of_its_own_kind_decides_about_a_mixed_file(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text("data: [a.jsonl]\ntrain_files: b.parquet\nverl: {}\n")
    assert read_file(mixed, "evaluation settings")
    with pytest.raises(ConfigError, match="this is an `afm rl` file, expected an agent"):
        read_file(mixed, "agent settings")


def test_errors_of_one_kind_are_counted_after_three() -> None:
    repeats = RepeatedErrors()
    errors = [f"line {number}: got 'x{number}'" for number in range(9)] + ["another fault"]
    assert [error for error in errors if repeats.is_new(error)] == [*errors[:3], "another fault"]
    assert list(repeats.rest()) == ["... and 6 more like it: line 0: got 'x0'"]
