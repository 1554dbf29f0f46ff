import json
from pathlib import Path

import pytest
import scripted_solver

from afm.evaluation import summarise
from afm.trajectory.io import RecordWriter
from afm.trajectory.record import Cost, Record, Verdict
from afm.trajectory.tags import Author, Segment

ROOT = Path(__file__).parents[2]


def make_record(task, score, *, number=0, text="", calls=0, source="mini_math", **fields):
    """An episode of ``task``; ``score=None`` means that the reward abstained."""
    verdict = Verdict(score=score, parts={} if score is None else {"correct": score, "format": 1.0})
    return Record(
        **{
            "id": f"{task}#{number}",
            "agent": "math",
            "agent_digest": "0" * 16,
            "question": f"question of {task}",
            "segments": (Segment(Author.AGENT, text),) if text else (),
            "ground_truth": "1",
            "data_source": source,
            "verdict": verdict,
            "cost": Cost(tool_calls=calls, agent_tokens=10, observation_tokens=4 * calls, wall_seconds=0.5),
            "provenance": {"task": task, "round": number},
            **fields,
        }
    )


@pytest.fixture(scope="session")
def record():
    return make_record


@pytest.fixture(scope="session")
def write_run():
    """Leaves a folder as ``evaluate`` does: ``write_run(folder, rows, manifest)``; figures are of ``rows`` as they were."""

    def write(folder, rows, manifest=None, *, written=None):
        with RecordWriter(folder / "episodes.jsonl") as writer:
            for row in written or rows:
                writer.write(row)
        spec = manifest and manifest.spec
        (folder / "metrics.json").write_text(summarise(rows, spec=spec).model_dump_json())
        if manifest is not None:
            (folder / "manifest.json").write_text(manifest.model_dump_json())
        return folder

    return write


@pytest.fixture(scope="session")
def solver():
    return scripted_solver


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, solver):
    """A random model: it writes nonsense, but the same nonsense for the same seeds."""
    from afm.models.tiny import create_tiny_model, train_tokenizer

    folder = tmp_path_factory.mktemp("tiny model")
    train_tokenizer([task.question for task in solver.tasks(50)], folder, vocab_size=300)
    create_tiny_model(folder, folder, seed=0, hidden_size=32, layers=1, heads=2, mlp=64)
    return folder


@pytest.fixture
def oracle_server(tmp_path):
    """Starts a model that knows replies by prompt, with a tokenizer of ``texts``; its ``words`` name it to `afm eval`."""
    import oracle

    from afm.models.tiny import train_tokenizer

    started = []

    def start(texts, vocab_size=400):
        folder = tmp_path / "tokenizer"
        train_tokenizer(texts, folder, vocab_size=vocab_size)
        server = oracle.OracleServer(folder).start()
        server.words = [f"model={server.url}", "model.name=oracle", f"model.tokenizer={folder}"]
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def asked_chats(tmp_path, oracle_server, afm):
    """Runs ``afm eval CONFIG`` and ``afm report`` of rows that are chats: the metrics, what was told, and the page."""

    def run(config, data, tasks, reply, *more):
        server = oracle_server([str([task.prompt for task in tasks])])
        for task in tasks:
            server.replies[tuple(server.tokenizer.encode_prompt(task.prompt))] = reply(task)
        out = tmp_path / "out"
        file = ROOT / f"configs/eval/{config}.yaml"
        printed = afm("eval", file, *server.words, f"data={data}", f"output_dir={out}", *more).stdout
        assert server.unknown == 0
        afm("report", out)
        return json.loads((out / "metrics.json").read_text()), printed, (out / "report.html").read_text()

    return run
