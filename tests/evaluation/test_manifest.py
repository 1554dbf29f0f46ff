import pytest

from afm.agents import Limits
from afm.errors import ConfigError, DataError
from afm.evaluation import Conditions, Sources, read_manifest
from afm.evaluation.manifest import claim, differences, make_manifest, model_digest
from afm.models.base import SamplingParams


def manifest(solver, *, tasks=2, spec=None, name="m", temperature=1.0, model=None, reward=None):
    sampling = SamplingParams(max_new_tokens=9, temperature=temperature)
    conditions = Conditions(sampling, limits=Limits(), sources=Sources(model=model, reward=reward))
    return make_manifest(solver.tasks(tasks), spec or solver.spec(), name, conditions)


def test_a_run_without_an_episode_claims_no_folder_and_keeps_its_agent(tmp_path, solver) -> None:
    claim(tmp_path, manifest(solver))
    claim(tmp_path, manifest(solver, temperature=0.5))
    kept = read_manifest(tmp_path / "manifest.json")
    assert (kept.settings["sampling"]["temperature"], kept.spec) == (0.5, solver.spec())


def test_equal_runs_share_a_folder_and_others_are_told_apart(tmp_path, solver) -> None:
    claim(tmp_path, manifest(solver))
    (tmp_path / "episodes.jsonl").write_text("{}\n")
    claim(tmp_path, manifest(solver))
    other = solver.spec().model_copy(update={"rules": ("One rule.",)})
    fresh = type(other).model_validate(other.model_dump())
    with pytest.raises(
        ConfigError, match=r"settings \(agent.digest: '\w+' -> '\w+'\); choose another output_dir"
    ):
        claim(tmp_path, manifest(solver, spec=fresh))
    first, dearer, other_judge = (
        manifest(solver, reward={"judge": {"model": name, "price_per_million_tokens": price}})
        for name, price in (("a", 1), ("a", 2), ("b", 2))
    )
    assert differences(first, dearer) == []
    assert differences(first, other_judge) == ["reward.judge.model: 'a' -> 'b'"]
    changes = differences(manifest(solver), manifest(solver, temperature=0.0))
    assert changes == ["sampling.temperature: 1.0 -> 0.0"]


def test_limits_that_were_replaced_make_no_other_agent(solver) -> None:
    spec = solver.spec()
    narrow = spec.model_copy(update={"limits": Limits(max_response_tokens=64)})
    narrow = type(spec).model_validate(narrow.model_dump())
    assert narrow.digest != spec.digest
    assert differences(manifest(solver), manifest(solver, spec=narrow)) == []
    sampling = SamplingParams(max_new_tokens=9)
    own = make_manifest(solver.tasks(2), narrow, "m", Conditions(sampling))
    assert differences(manifest(solver), own) == ["limits.max_response_tokens: None -> 64"]


def test_the_model_digest_sees_weights_and_configuration(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(9 << 20))
    first = model_digest(str(tmp_path))
    (tmp_path / "trainer_log.jsonl").write_text("{}")
    assert model_digest(str(tmp_path)) == first
    changed = bytearray(9 << 20)
    changed[-1] = 1
    weights.write_bytes(changed)
    second = model_digest(str(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len({first, second, model_digest(str(tmp_path))}) == 3
    assert model_digest("http://127.0.0.1:8000") is None


def test_a_moved_model_is_the_same_model(tmp_path, solver) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    here, there = (manifest(solver, name=n, model=str(tmp_path / n)) for n in ("here", "there"))
    assert differences(here, there) == []
    (tmp_path / "there/config.json").write_text("[]")
    changes = differences(here, manifest(solver, name="there", model=str(tmp_path / "there")))
    assert [change.partition(":")[0] for change in changes] == ["model.name", "model.digest"]


def test_a_broken_manifest_is_named(tmp_path) -> None:
    file = tmp_path / "manifest.json"
    with pytest.raises(DataError, match=r"manifest.json: cannot be read"):
        read_manifest(file)
    file.write_text('{"format": 2}')
    with pytest.raises(DataError, match="invalid manifest: format"):
        read_manifest(file)
