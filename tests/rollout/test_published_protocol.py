"""The published way to run an episode: steps, repeats, suggested answers, and what the model reads of its own past."""

import pytest
from known_tool import KnownTool

from afm.agents import Limits, load_agent
from afm.errors import ConfigError
from afm.models.base import SamplingParams, ScriptedModel
from afm.rollout import PublishedProtocol, run_published
from afm.rollout.published_protocol import SAME_CONTENT, SAME_FUNCTION, suggestion_role, trimmed
from afm.trajectory import answers
from afm.trajectory.record import StopReason
from afm.trajectory.tags import Author

WEB = load_agent("web")
ASKED = [{"role": "user", "content": "Who?"}]


class Watched(ScriptedModel):
    """Remembers what it read."""

    def __init__(self, script):
        super().__init__(script)
        self.read = []

    async def generate(self, prompt_ids, params):
        self.read.append(bytes(prompt_ids).decode())
        return await super().generate(prompt_ids, params)


async def play(script, *, spec=WEB, **numbers):
    tools = {name: KnownTool(name, "found {}".format) for name in ("web_search", "crawl_page")}
    model = Watched(script)
    protocol = PublishedProtocol(**{"attempts": 1} | numbers)
    bounds = {"limits": Limits(), "sampling": SamplingParams(max_new_tokens=1)}
    episode = await run_published(spec, model, tools, "Who?", ASKED, protocol=protocol, **bounds)
    return episode, model, tools["web_search"]


def search(query):
    return f"<think>look</think><web_search>{query}</web_search>"


def suggest(answer):
    return f"<think>so {answer}</think><suggested_answer>{answer}</suggested_answer>"


def counted(episode):
    return answers(episode.segments, WEB)


async def test_a_step_is_read_again_as_a_closed_turn_with_an_opened_thought() -> None:
    episode, model, tool = await play([search("a"), "<think>b</think><answer>c</answer>"])
    assert model.read == [
        "user: Who?\nassistant: <think>\nassistant: ",
        "user: Who?\nassistant: <think>\n<think>look</think><web_search>a</web_search>\n<observation>\nfound a\n</observation>"
        "<think>\nassistant: ",
    ]
    assert (tool.arguments, counted(episode), episode.stop) == (["a"], ("c",), StopReason.ANSWER)
    assert bytes(episode.response_ids).decode() == episode.text
    none = dict.fromkeys(("errors", "forgotten_tokens", "quoted_steps", "trimmed_reads"), 0)
    assert episode.protocol == none | {
        "name": "published",
        "answer_from": "answer",
        "steps": 2,
        "attempts": 1,
    }


async def test_the_last_suggested_answer_counts_at_the_limit() -> None:
    episode, _, _ = await play([suggest("x"), suggest("y"), search("a"), search("b")], max_steps=4)
    assert (counted(episode), episode.stop) == (("y",), StopReason.TURNS)
    assert episode.protocol["answer_from"] == "last suggested answer"
    adopted = len("\n<answer>y</answer>")
    assert episode.response_mask[-adopted:] == (0,) * adopted
    assert bytes(episode.response_ids).decode() == episode.text
    silent, _, _ = await play([search("a"), search("b")], max_steps=2)
    assert (counted(silent), silent.protocol["answer_from"]) == ((), None)


async def test_the_third_suggested_answer_is_the_answer() -> None:
    episode, _, _ = await play([suggest("x"), suggest("y"), suggest("z"), "never said"])
    assert (counted(episode), episode.stop, episode.cost.generations) == (("z",), StopReason.ANSWER, 3)
    assert episode.protocol["answer_from"] == "suggested answer 3"


async def test_after_five_steps_of_one_kind_no_step_is_carried_out_until_the_kind_changes() -> None:
    """An answer is passed over as well: the script looks at the steps before it alone."""
    script = [search(query) for query in "abcde"]
    script += ["<think>1</think><answer>early</answer>", "<think>2</think><answer>late</answer>"]
    episode, model, tool = await play(script)
    assert tool.arguments == list("abcde")
    assert counted(episode) == ("late",)
    assert SAME_FUNCTION in model.read[6]
    quoted = [part.author for part in episode.segments if "early" in part.text]
    assert quoted == [Author.ENVIRONMENT]
    assert (episode.protocol["quoted_steps"], episode.protocol["steps"]) == (1, 7)


async def test_a_step_that_was_written_before_is_not_carried_out_again() -> None:
    script = [
        search("a"),
        "<think>again</think><web_search>a</web_search>",
        "<think>c</think><answer>d</answer>",
    ]
    episode, model, tool = await play(script)
    assert tool.arguments == ["a"]
    assert SAME_CONTENT in model.read[2]
    assert counted(episode) == ("d",)


async def test_a_generation_without_a_step_is_forgotten_but_paid_for() -> None:
    script = ["I give up", "<think>a</think><answer>b</answer>"]
    episode, model, _ = await play(script)
    assert counted(episode) == ("b",)
    assert "I give up" not in model.read[1]
    assert model.read[1].count("<think>") == 2
    assert episode.protocol["errors"] == 1
    assert episode.protocol["forgotten_tokens"] == len("I give up") + 1  # the end of the text is a token
    assert episode.cost.agent_tokens == sum(episode.response_mask) + episode.protocol["forgotten_tokens"]
    lost, _, _ = await play([suggest("x"), *["no step"] * 3], max_errors=3)
    assert (counted(lost), lost.stop) == (("x",), StopReason.END_OF_TEXT)


async def test_a_generation_that_is_too_long_is_forgotten() -> None:
    episode, _, _ = await play(["<think>" + "w" * 500, suggest("x")], turn_tokens=100, max_errors=6)
    assert episode.protocol["errors"] >= 1
    assert "www" not in episode.text


async def test_a_full_context_keeps_plans_and_the_newest_steps() -> None:
    plan = "<think>p</think><plan>first a, then b</plan>"
    script = [plan + search("a" * 60), search("b" * 60), "<think>c</think><answer>d</answer>"]
    # The history before the third step has 467 tokens (bytes): 943 - 200 - 4 (prompt) - 467 - 10 = 262 of them may be shown.
    episode, model, _ = await play(script, total_tokens=943, turn_tokens=200, reserve=10)
    last = model.read[2].removeprefix("user: Who?\nassistant: ")
    assert last.startswith("<plan>first a, then b</plan>")
    assert last.endswith("<think>\nassistant: ")
    assert "b" * 60 in last
    assert "a" * 60 not in last
    assert episode.protocol["trimmed_reads"] == 1
    assert bytes(episode.response_ids).decode() == episode.text  # the record itself is whole


def lengths(text):
    return list(text.encode())


def decoded(ids):
    return bytes(ids).decode()


@pytest.mark.parametrize(
    ("max_tokens", "left"),
    [
        # plans come first even where nothing is cut
        (200, "<plan>go</plan><think>one</think><think>two</think>"),
        (44, "<plan>go</plan>one</think><think>two</think>"),
        # of the first text that does not fit, its beginning
        (43, "<plan>go</plan>on</think><think>two</think>"),
        (10, "go</plan>"),  # the newest pieces of a plan that is too long
        (0, "<think>"),
    ],
)
def test_what_is_left_of_a_text(max_tokens, left) -> None:
    """Bytes are tokens here."""
    text = "<think>one</think><plan>go</plan><think>two</think>"
    assert trimmed(text, max_tokens, ("plan", "reflection"), lengths, decoded) == left


async def test_only_agents_that_suggest_answers_are_played_so() -> None:
    roles = {
        name: suggestion_role(load_agent(name)) for name in ("web", "wiki", "full", "mhqa", "math", "code")
    }
    assert {name for name, role in roles.items() if role == "suggested_answer"} == {"web", "wiki", "full"}
    with pytest.raises(ConfigError, match="agent 'math' suggests no answers"):
        await play([], spec=load_agent("math"))
