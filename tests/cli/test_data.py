import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from afm.cli.data import app
from afm.cli.recipes import wiki_server
from afm.errors import UsageError
from afm.trajectory import load_records

ROOT = Path(__file__).parents[2]


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
@pytest.mark.sandbox
def test_from_a_world_to_training_files(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "with blanks"

    said = run("world", "--output-dir", folder / "world", "--train", 12, "--rl", 8, "--heldout", 4)
    assert f"{folder}/world/heldout.jsonl: 4 problems" in said

    said = run("distill", folder / "world/train.jsonl", "--output-dir", folder / "distill", "--seed", 1)
    assert " of 12 trajectories kept" in said
    kept = load_records(folder / "distill/trajectories.jsonl")

    said = run("filter", folder / "distill/trajectories.jsonl", "-o", folder / "good")
    assert f"{folder}/good: {len(kept)} of {len(kept)} kept" in said
    assert load_records(folder / "good/kept.jsonl") == kept

    run("prepare", "sft", folder / "good/kept.jsonl", "--output-dir", folder / "sft")
    rows = json.loads((folder / "sft/math_sft.json").read_text())
    assert [row["output"] for row in rows] == [record.text for record in kept]

    run("prepare", "rl", folder / "world/rl.jsonl", "-o", folder / "rl.parquet", "--split", "rl")
    assert pq.read_table(folder / "rl.parquet").num_rows == 8


@pytest.mark.slow
def test_the_first_distillation_of_the_docs_reads_every_question_of_a_default_world(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    world, tools = tmp_path / "world", ROOT / "configs/tools/wiki_rag.yaml"
    run("world", "--kind", "wiki", "--output-dir", world, "--train", 40, "--rl", 8, "--heldout", 4)
    build = [sys.executable, "-m", "tool_servers.wiki_search.build", world / "corpus.jsonl"]
    subprocess.run([*build, "--output-dir", tmp_path / "index"], check=True, capture_output=True)

    with wiki_server(tmp_path / "index", tmp_path / "server.log"):
        for agent in ("mhqa", "wiki"):
            words = ("--output-dir", tmp_path / agent, "--agent", agent, "--tools", tools)
            assert " 40 of 40 trajectories kept" in run("distill", world / "train.jsonl", *words)


def test_a_world_has_the_shapes_that_are_asked_for(tmp_path):
    words = ("world", "--kind", "wiki", "--output-dir", tmp_path, "--shapes")
    run(*words, "comparison,chain", "--hops", 2, "--train", 8, "--rl", 4, "--heldout", 4)
    shapes = {json.loads(line)["extra_info"]["shape"] for line in (tmp_path / "train.jsonl").open()}
    assert shapes == {"chain", "comparison"}
    with pytest.raises(UsageError, match="--shapes 'chains': expected chain, comparison or intersection"):
        run(*words, "chains")


def test_questions_that_occur_twice_do_not_hide_that_fewer_are_held_out(afm, tmp_path):
    rows = [{"id": str(n), "question": f"{n // 2}+1?", "answer": "2"} for n in range(14)]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = (
        "data",
        "prepare",
        "rl",
        tmp_path / "tasks.jsonl",
        "-o",
        tmp_path / "o.parquet",
        "--validation",
        2,
    )
    done = afm(*words, "--data-source", "gsm8k")
    assert done.stdout.splitlines()[1].endswith("val.parquet: 2 rows")
    assert "--validation 2: 1 question held out, at most a tenth of the rows" in done.stderr
    assert set(pq.read_table(tmp_path / "o.parquet")["data_source"].to_pylist()) == {"gsm8k"}


def test_a_row_that_no_reward_could_score_is_refused_with_its_line(afm, tmp_path):
    rows = [{"question": "1+1?", "answer": "2", "data_source": "gsm8k"}, {"question": "2+1?", "answer": "3"}]
    own = rows[1] | {"question": "3+1?", "extra_info": {"reward": "exact_match"}}
    file, out = tmp_path / "tasks.jsonl", tmp_path / "o.parquet"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in (rows[0], own, rows[1])))
    done = afm("data", "prepare", "rl", file, "-o", out, status=1)
    assert f"error: {file}:3: the row has no data_source, which chooses the reward; expected" in done.stderr
    assert "add --data-source NAME" in done.stderr
    assert not out.exists()
    afm("data", "prepare", "rl", file, "-o", out, "--data-source", "svamp")
    assert pq.read_table(out)["data_source"].to_pylist() == ["gsm8k", "svamp", "svamp"]
