from afm.models.scripted import ScriptedModel
from afm.rollout import episode_record, run_episode
from afm.trajectory.record import Record, StopReason, Verdict


async def test_a_record_holds_the_whole_episode_and_survives_json(spec, calculator):
    model = ScriptedModel(["<calc>2 + 3</calc>", "<answer>5</answer>"])
    episode = await run_episode(spec, model, {"calculator": calculator}, "Q")
    record = episode_record(
        episode,
        spec,
        id="task-1#0",
        question="Q",
        ground_truth="5",
        data_source="sums",
        model=model.name,
        seed=3,
        verdict=Verdict(score=1.0),
        provenance={"round": 0},
    )
    again = Record.model_validate_json(record.model_dump_json())
    assert again == record
    assert again.text == episode.text
    assert (again.agent, again.agent_digest, again.stop) == ("adder", spec.digest, StopReason.ANSWER)
    assert again.response_ids == episode.response_ids
    assert again.response_mask == episode.response_mask
    assert again.logprobs == (0.0,) * len(episode.response_ids)
    assert again.calls[0].observation == "5"
    assert (again.ground_truth, again.seed, again.provenance) == ("5", 3, {"round": 0})


async def test_tokens_can_be_left_out(spec, calculator):
    model = ScriptedModel("<answer>5</answer>")
    episode = await run_episode(spec, model, {"calculator": calculator}, "Q")
    record = episode_record(episode, spec, id="1", question="Q", with_tokens=False)
    assert (record.prompt_ids, record.response_ids, record.logprobs) == (None, None, None)
    assert record.text == "<answer>5</answer>"
