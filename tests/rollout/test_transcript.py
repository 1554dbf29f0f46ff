"""Events while an episode runs, and its record on disk."""

from afm.agents import Limits
from afm.models.base import ScriptedModel
from afm.rollout import CallFinished, CallStarted, Stopped, TextWritten, episode_record, run_episode
from afm.trajectory.record import Record, StopReason, Verdict

SCRIPT = ["<think>a < b</think>\n<calc>2 + 3</calc>", "<answer>5 é</answer>"]


class TokenByToken(ScriptedModel):
    async def stream(self, prompt_ids, params, on_token):
        generation = await self.generate(prompt_ids, params)
        for token in generation.token_ids:
            on_token(token)
        return generation


async def events_of(model, spec, calculator, **options):
    events = []
    await run_episode(spec, model, {"calculator": calculator}, "Q", on_event=events.append, **options)
    return events


def written(events):
    """Neighbouring pieces of one role and author joined."""
    joined = []
    for event in events:
        if not isinstance(event, TextWritten):
            continue
        key = (event.role, event.by_agent)
        if joined and joined[-1][0] == key:
            joined[-1][1] += event.text
        else:
            joined.append([key, event.text])
    return [(*key, text) for key, text in joined]


EXPECTED = [
    ("think", True, "<think>a < b</think>"),
    (None, True, "\n"),
    ("calc", True, "<calc>2 + 3</calc>"),
    ("observation", False, "\n<observation>\n5\n</observation>\n"),
    ("answer", True, "<answer>5 é</answer>"),
]


async def test_a_streaming_model_is_shown_token_by_token(spec, calculator):
    events = await events_of(TokenByToken(SCRIPT), spec, calculator)
    assert written(events) == EXPECTED
    pieces = [event.text for event in events if isinstance(event, TextWritten)]
    assert pieces[:4] == ["<think>", "a", " ", "< b"]


async def test_text_comes_with_its_role_and_calls_and_the_end_in_order(spec, calculator):
    events = await events_of(ScriptedModel(SCRIPT), spec, calculator)
    assert written(events) == EXPECTED
    kinds = [type(event) for event in events if not isinstance(event, TextWritten)]
    assert kinds == [CallStarted, CallFinished, Stopped]
    started, finished, stopped = [event for event in events if not isinstance(event, TextWritten)]
    assert (started.role, started.tool, started.argument) == ("calc", "calculator", "2 + 3")
    assert finished.call.observation == "5"
    assert stopped.reason is StopReason.ANSWER


async def test_a_tag_that_never_ends_is_shown_at_the_end(spec, calculator):
    events = await events_of(
        TokenByToken("<think>a</thi"), spec, calculator, limits=Limits(max_response_tokens=12)
    )
    assert "".join(event.text for event in events if isinstance(event, TextWritten)) == "<think>a</th"


async def test_a_record_holds_the_whole_episode_and_survives_json(spec, calculator):
    model = ScriptedModel(["<calc>2 + 3</calc>", "<answer>5</answer>"])
    episode = await run_episode(spec, model, {"calculator": calculator}, "Q")
    origin = {"ground_truth": "5", "data_source": "sums", "model": model.name, "seed": 3}
    record = episode_record(
        episode, spec, id="1#0", question="Q", verdict=Verdict(score=1.0), provenance={"round": 0}, **origin
    )
    again = Record.model_validate_json(record.model_dump_json())
    assert again == record
    assert again.text == episode.text
    assert (again.agent, again.agent_digest, again.stop) == ("adder", spec.digest, StopReason.ANSWER)
    assert (again.response_ids, again.response_mask) == (episode.response_ids, episode.response_mask)
    assert again.logprobs == (0.0,) * len(episode.response_ids)
    assert again.calls[0].observation == "5"
    assert (again.ground_truth, again.seed, again.provenance) == ("5", 3, {"round": 0})
    bare = episode_record(episode, spec, id="1", question="Q", with_tokens=False)
    assert (bare.prompt_ids, bare.response_ids, bare.logprobs) == (None, None, None)
    assert bare.text == episode.text
