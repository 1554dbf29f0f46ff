import pytest

pytest.importorskip("llamafactory")


@pytest.fixture(scope="module")
def parse():
    """LLaMA-Factory's own parser on a configuration."""
    from llamafactory_patch import install

    install()
    from llamafactory.hparams.parser import _parse_train_args

    def data_arguments(**options):
        return _parse_train_args({"model_name_or_path": "m", "output_dir": "o", "use_cpu": True, **options})[
            1
        ]

    return data_arguments


def test_the_mask_is_off_unless_asked_for(parse):
    data = parse()
    assert (data.ignore_observation, data.observation_tags, data.observation_boundary) == (
        False,
        ("observation",),
        "split",
    )


def test_several_tags_are_separated_by_commas(parse):
    assert parse(ignore_observation_token="seen, heard").observation_tags == ("seen", "heard")


@pytest.mark.parametrize("token", ["<observation>", "a,,b", "two words", ""])
def test_what_is_no_tag_name_is_refused(parse, token):
    with pytest.raises(ValueError, match="is no tag name"):
        parse(ignore_observation_token=token)


def test_an_unknown_boundary_and_an_unknown_key_are_refused(parse):
    with pytest.raises(ValueError, match="observation_boundary"):
        parse(observation_boundary="cut")
    with pytest.raises(ValueError, match="ignore_observations"):
        parse(ignore_observations=True)


def test_training_on_the_prompt_contradicts_the_mask(parse):
    with pytest.raises(ValueError, match="switch train_on_prompt off"):
        parse(ignore_observation=True, train_on_prompt=True)
