"""Runs of real agents of smolagents, with scripted models, as trajectories; expected texts by hand."""

import json

import pytest

from afm.agents import AgentSpec, load_agent
from afm.errors import DataError
from afm.trajectory.convert import FORMATS, Context
from afm.trajectory.programs import FencedProgram, parse_program

smolagents = pytest.importorskip("smolagents")
from smolagents.models import ChatMessage, ChatMessageToolCall, ChatMessageToolCallFunction  # noqa: E402

QUESTION = "How much is 6*7?"
LOGS = "Execution logs:\n42\nLast output from code snippet:\n"


class Scripted(smolagents.Model):
    """Says what it was told to: texts, or (text, tool, arguments)."""

    def __init__(self, *said):
        super().__init__(model_id="scripted")
        self.left = list(said)

    def generate(self, *args, **kwargs):
        said = self.left.pop(0)
        if isinstance(said, str):
            return ChatMessage("assistant", said)
        text, *calls = said
        functions = [ChatMessageToolCallFunction(name=name, arguments=given) for name, given in calls]
        listed = [
            ChatMessageToolCall(function, str(number), "function")
            for number, function in enumerate(functions)
        ]
        return ChatMessage("assistant", text, listed)


class Search(smolagents.Tool):
    name, description, output_type = "wiki_search", "Searches.", "string"
    inputs = {"query": {"type": "string", "description": "What."}}  # noqa: RUF012

    def forward(self, query: str) -> str:
        if query == "bad":
            raise RuntimeError("boom")
        return f"Result for {query}"


def coder() -> AgentSpec:
    """The agent for mathematics without its plan and its reflections, which no ``CodeAgent`` writes."""
    spec = load_agent("math")
    roles = {tag: role for tag, role in spec.roles.items() if tag not in ("plan", "reflection")}
    transitions = {"start": ("code", "answer"), "code": ("code", "answer")}
    return AgentSpec.model_validate(
        spec.model_dump() | {"name": "coder", "roles": roles, "transitions": transitions}
    )


def programs(*said, **options):
    """The log of a ``CodeAgent`` as it stands in a file."""
    agent = smolagents.CodeAgent([], Scripted(*said), verbosity_level=0, **options)
    return json.loads(json.dumps(agent.run(QUESTION, return_full_result=True).dict()))


def calls(*said, **options):
    agent = smolagents.ToolCallingAgent([Search()], Scripted(*said), verbosity_level=0, **options)
    return json.loads(json.dumps(agent.run("When?", return_full_result=True).dict()))


def read_code(row):
    return FORMATS["smolagents"].read(row, Context(agent=coder(), tools={"python_interpreter": "code"}))


def read(row):
    return FORMATS["smolagents"].read(row, Context(agent=load_agent("mhqa"), missing_thought="On."))


def said_code(thought, code):
    return f"Thought: {thought}\n<code>\n{code}\n</code>"


def observed(text):
    return f"\n<observation>\n{text}\n</observation>\n"


CALCULATED = f"<think>compute.</think><code>\n```py\nx=6*7\nprint(x)\n```\n</code>{observed(LOGS + 'None')}"


def test_a_program_stands_once_behind_its_thought_and_the_last_one_is_the_answer():
    row = programs(said_code("compute.", "x=6*7\nprint(x)"), said_code("done.", "final_answer(x)"))
    found = read_code(row)
    assert found.record.text == f"{CALCULATED}<think>done.</think><answer>\\boxed{{42}}</answer>"
    assert found.record.kept, found.record.reason
    assert found.lost == ()
    assert (found.record.cost.tool_calls, found.record.cost.tool_failures) == (1, 0)


def test_functions_of_the_log_that_programs_call_are_counted_by_row():
    said = [
        said_code("look.", "x = wiki_search(query='mill')\nprint(x)"),
        said_code("done.", "final_answer(x)"),
    ]
    agent = smolagents.CodeAgent([Search()], Scripted(*said), verbosity_level=0)
    row = json.loads(json.dumps(agent.run(QUESTION, return_full_result=True).dict()))
    context = Context(agent=coder(), tools={"python_interpreter": "code"})
    for each in (row, row, programs(said_code("compute.", "x=6*7\nprint(x)"), said[1])):
        assert FORMATS["smolagents"].read(each, context).record.kept
    assert context.unknown == {"wiki_search": 2}


DONE = said_code("done.", "final_answer(x)")
CODE = "x=6*7\nprint(x)"


def in_json(thought, code):
    return json.dumps({"thought": thought, "code": code})


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("**Thought:** {}\n```py\n{}\n```".format, {"code_block_tags": "markdown"}),
        ("Thought: {}\nCode:\n```py\n{}\n```<end_code>".format, {}),
        ("<think>\n{}\n</think>\n<code>\n{}\n</code>".format, {}),
        ("{}\n<run>{}</run>".format, {"code_block_tags": ("<run>", "</run>")}),
        (in_json, {"use_structured_outputs_internally": True}),
    ],
)
def test_a_program_is_found_in_whatever_marks_it_stands(form, options):
    said = form("compute.", CODE), form("done.", "final_answer(x)")
    found = read_code(programs(*said, **options)).record
    assert found.text == f"{CALCULATED}<think>done.</think><answer>\\boxed{{42}}</answer>"


IF = "if x > 1:\n    final_answer(x)"


@pytest.mark.parametrize(
    ("end", "kept", "lost"),
    [
        ("final_answer(x + 0)", "x + 0", "final_answer() around the last value of a program"),
        (IF, IF, "what final_answer() in the middle of a program does; it stays there"),
    ],
)
def test_a_last_program_that_calculates_stays_and_its_answer_follows(end, kept, lost):
    found = read_code(programs(said_code("compute.", f"{CODE}\n{end}")))
    program = f"<code>\n```py\n{CODE}\n{kept}\n```\n</code>{observed(f'{LOGS}42')}"
    assert found.record.text == f"<think>compute.</think>{program}<answer>\\boxed{{42}}</answer>"
    assert found.lost == (lost,)


def test_every_program_is_one_that_the_code_tool_reads():
    row = programs(said_code("compute.", "print('```')\nx=6*7"), said_code("done.", "final_answer(x)"))
    [call] = read_code(row).record.calls
    assert parse_program(call.argument) == FencedProgram("print('```')\nx=6*7\n")


@pytest.mark.parametrize("code", ["print(1)", "\n```py\nprint(1)\n```\n"])
def test_calls_of_the_code_tool_in_other_formats_get_the_fence_too(code):
    call = {"id": "c", "function": {"name": "code", "arguments": json.dumps({"code": code})}}
    answer = "<think>Done.</think><answer>\\boxed{1}</answer>"
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "compute.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "assistant", "content": answer},
    ]
    context = Context(agent=coder())
    record = FORMATS["openai"].read({"messages": messages}, context).record
    assert "<code>\n```py\nprint(1)\n```\n</code>" in record.text
    assert FORMATS["openai"].read(FORMATS["openai"].write(record, context), context).record == record


def test_tags_in_the_words_beside_a_program_are_text():
    said = said_code("in <observation> I saw </answer> nothing.", "print(6*7)")
    found = read_code(programs(said, said_code("done.", "final_answer(42)"))).record
    assert found.text.startswith(
        "<think>in [observation] I saw [/answer] nothing.</think><code>\n```py\nprint(6*7)\n```\n</code>"
    )
    assert found.kept, found.reason


def test_a_program_that_fails_is_answered_by_its_error():
    row = programs(said_code("compute.", "print(1)\n1/0"), said_code("done.", "final_answer(42)"))
    found = read_code(row).record
    assert found.text.startswith(
        "<think>compute.</think><code>\n```py\nprint(1)\n1/0\n```\n</code>\n<observation>\nExecution logs:\n1\n\nError: Code execution failed"
    )
    assert (found.cost.tool_calls, found.cost.tool_failures, found.calls[0].ok) == (1, 1, False)


def test_words_without_a_program_are_a_thought_and_the_error_of_the_parser_is_told():
    found = read_code(programs("I refuse.", said_code("compute.", CODE), DONE))
    assert found.record.text.startswith(CALCULATED.replace("compute.", "I refuse.\n\ncompute."))
    assert found.lost == ("the error of a step without a tool call (AgentParsingError)",)
    assert found.record.kept, found.record.reason


def test_an_answer_that_a_check_refused_is_none():
    def is_right(answer, memory, agent):
        return answer == 42

    row = programs(
        said_code("guess.", "final_answer(41)"),
        said_code("again.", "final_answer(42)"),
        final_answer_checks=[is_right],
    )
    found = read_code(row)
    assert found.record.text == "<think>guess.\n\nagain.</think><answer>\\boxed{42}</answer>"
    assert found.lost == ("an answer that a check refused",)
    row = calls(
        ("guess.", ("final_answer", {"answer": 41})),
        ("again.", ("final_answer", {"answer": 42})),
        final_answer_checks=[is_right],
    )
    found = read(row)
    assert found.record.text == "<think>guess.\n\nagain.</think><answer>42</answer>"
    assert found.lost == ("an answer that was refused (AgentError)",)


@pytest.mark.parametrize("message", [True, False])
def test_calls_that_failed_are_calls_with_their_error_as_result(message):
    """smolagents lists none of them: they stand in the model's message, and in the text of the error."""
    row = calls(
        ("Look.", ("wiki_search", {"query": "mill"})),
        ("", ("wiki_search", {"query": "bad"})),
        ("", ("wiki_search", {"query": "bad"})),
        ("", ("final_answer", {"answer": "1702"})),
    )
    assert [step["tool_calls"] for step in row["steps"][2:4]] == [[], []]
    if not message:
        row["steps"] = [step | {"model_output_message": None} for step in row["steps"]]
    found = read(row)
    error = (
        "Error: Error executing tool 'wiki_search' with arguments {'query': 'bad'}: RuntimeError: boom\n"
        "Please try again or use another tool"
    )
    failed = f"<think>On.</think><wiki_search>bad</wiki_search>{observed(error)}"
    assert found.record.text == (
        f"<think>Look.</think><wiki_search>mill</wiki_search>{observed('Result for mill')}{failed * 2}"
        "<think>On.</think><answer>1702</answer>"
    )
    assert [call.ok for call in found.record.calls] == [True, False, False]
    assert (found.record.cost.tool_calls, found.record.cost.tool_failures, found.lost) == (3, 2, ())


def test_calls_beside_one_that_failed_are_refused_for_their_results_stand_nowhere():
    both = ("", ("wiki_search", {"query": "mill"}), ("wiki_search", {"query": "bad"}))
    row = calls(both, ("", ("final_answer", {"answer": "1702"})))
    with pytest.raises(DataError, match="step 1: one of 2 tool calls failed, and the log lacks the results"):
        read(row)


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_that_reached_its_last_step_ends_with_the_answer_it_was_asked_for_then(whole):
    row = calls(("Look.", ("wiki_search", {"query": "mill"})), "It was 1702", max_steps=1)
    assert row["state"] == "max_steps_error"
    found = read(row if whole else row["steps"])
    assert found.record.text.endswith("<think>On.</think><answer>It was 1702</answer>")
    assert found.lost == ("the error of a step without a tool call (AgentMaxStepsError)",)
    assert (found.record.kept, found.record.stop) == (False, "turns")
    assert "reached its limit of steps" in found.record.reason
    if whole:  # the answer beside the steps counts when none stands in them
        row["steps"][-1] |= {"action_output": None, "model_output": "Hm."}
        assert read(row).record.text.endswith("<think>Hm.</think><answer>It was 1702</answer>")


def test_a_call_that_the_model_wrote_as_json_stands_once():
    written = 'I look.\nAction:\n{"name": "wiki_search", "arguments": {"query": "mill"}}'
    row = calls(written, ("Found.", ("final_answer", {"answer": "1702"})))
    assert read(row).record.text == (
        f"<think>I look.</think><wiki_search>mill</wiki_search>{observed('Result for mill')}"
        "<think>Found.</think><answer>1702</answer>"
    )


def test_plans_tokens_and_what_else_stands_beside_the_steps():
    row = calls(
        "1. Search",
        ("Look.", ("wiki_search", {"query": "mill"})),
        ("Found.", ("final_answer", {"answer": "1702"})),
        planning_interval=5,
    )
    row |= {"id": 0, "token_usage": {"input_tokens": 30, "output_tokens": 4}, "score": 0.5}
    found = read(row)
    assert "1. Search\n```\n\nLook.</think><wiki_search>" in found.record.text
    assert found.record.kept, found.record.reason
    assert (found.record.id, found.record.cost.prompt_tokens, found.record.cost.agent_tokens) == ("0", 30, 4)
    assert found.lost == ("key 'score'",)
    written = FORMATS["smolagents"].write(found.record, Context())
    assert set(written["steps"][1]) == set(row["steps"][2])  # all that smolagents itself has, and no more
