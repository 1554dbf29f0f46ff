"""Third-party teams over the gateway, converted to trajectories: real smolagents, and plain OpenAI tool calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extras import LazyPackage

from afm.agents import load_agent
from afm.datasets import Task, write_tasks
from afm.distill.conversation import TeamConversation
from afm.distill.model_calls import BadLines, read_calls
from afm.distill.reconstruct import merge_gateway_log
from afm.distill.team_map import TeamMap
from afm.errors import DataError
from afm.trajectory import Segment, load_records, validate

openai = LazyPackage("openai")
ROOT = Path(__file__).parents[3]
MILL = 'Doc 1 (Title: "Old Mill")\nThe Old Mill was built by Anna Berg <in 1702>.\n\n  It stands at the river Ilm.'
BERG = "Anna Berg was born in Weimar; \u201cthe miller\u201d, they said."
PAGES = {"Old Mill builder": MILL, "Anna Berg birthplace": BERG}
TASK = Task(
    id="q/1",
    question="Where was the builder of the Old Mill born?",
    ground_truth="Weimar",
    data_source="wiki",
)


def tool_call(name, identity="call_0", **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": identity, "type": "function", "function": function}


def assistant(content, *calls):
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def scripted(*messages):
    left = list(messages)
    return lambda body: left.pop(0)


@pytest.fixture
def searching():
    """A smolagents tool over two pages."""
    smolagents = pytest.importorskip("smolagents")

    class WikiSearch(smolagents.Tool):
        name = "wiki_search"
        description = "Searches an encyclopaedia."
        inputs = {"query": {"type": "string", "description": "What to look for."}}  # noqa: RUF012
        output_type = "string"

        def forward(self, query: str) -> str:
            return PAGES[query]

    return WikiSearch()


def model_of(gateway, agent="solo", task="q%2F1", **options):
    import smolagents

    return smolagents.OpenAIServerModel(
        "tiny", api_base=gateway.base, api_key=f"k:task={task},agent={agent}", **options
    )


def shipped(name, spec=None):
    """Return the shipped map of a team."""
    return TeamMap.read(ROOT / f"configs/teams/{name}.yaml", spec or load_agent("mhqa"))


def merged(gateway, tmp_path, team, agent="mhqa", tasks=(TASK,)):
    """Return the kept and dropped records of a log."""
    spec = load_agent(agent)
    team = shipped(team, spec) if isinstance(team, str) else team.checked(spec)
    merge_gateway_log(gateway.log, tasks, spec, team, tmp_path / "out", name="team")
    files = (tmp_path / "out/trajectories.jsonl", tmp_path / "out/dropped.jsonl")
    records = [record for file in files for record in load_records(file)]
    for record in records:
        if record.kept:
            assert not validate([Segment(part.author, part.text) for part in record.segments], spec)
    return records


TEAMS = {"ToolCallingAgent": "smolagents", "CodeAgent": "smolagents_code"}


@pytest.fixture
def run(gateway, teacher, searching, tmp_path):
    """Return the record of a smolagents agent whose model replies with these messages."""
    import smolagents

    def played(kind, *messages, model=None, answer="Weimar", **options):
        teacher.script = scripted(*messages)
        agent = getattr(smolagents, kind)(
            [searching], model or model_of(gateway), verbosity_level=0, **options
        )
        assert agent.run(TASK.question) == answer
        [record] = merged(gateway, tmp_path, TEAMS[kind])
        return record

    return played


@pytest.fixture
def plain(gateway, teacher, tmp_path):
    """Return the record of a plain team whose members reply with these messages."""

    def played(*messages, **work):
        teacher.script = scripted(*messages)
        PlainTeam(gateway).work(**work)
        [record] = merged(gateway, tmp_path, "openai_tools")
        return record

    return played


def steps(record):
    """Return each step as its role and, after a colon, its member."""
    return " ".join(f"{step['role']}:{step['agent']}".rstrip(":") for step in record.provenance["steps"])


def found(record):
    """Return the calls of a record, which must be kept."""
    assert record.kept, record.reason
    return [(call.argument, call.observation) for call in record.calls]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_calling_agent_of_smolagents_becomes_a_trajectory(run, stream):
    record = run(
        "ToolCallingAgent",
        assistant("First the builder.", tool_call("wiki_search", query="Old Mill builder")),
        assistant(None, tool_call("wiki_search", "call_1", query="Anna Berg birthplace")),
        assistant("Both pages agree.", tool_call("final_answer", "call_2", answer="Weimar")),
        stream_outputs=stream,
    )

    assert found(record) == list(PAGES.items())
    assert steps(record) == (
        "think:solo wiki_search:solo observation think wiki_search:solo observation think:solo answer:solo"
    )
    events = [step["event"].removeprefix("q/1#1.") for step in record.provenance["steps"]]
    assert "".join(events) == "11222333"
    assert record.text.endswith("<think>Both pages agree.</think><answer>Weimar</answer>")
    assert (record.id, record.question, record.ground_truth) == ("q/1", TASK.question, "Weimar")
    assert (record.cost.prompt_tokens, record.cost.agent_tokens, record.cost.generations) == (300, 30, 3)


def test_planning_and_a_managed_agent_keep_their_members(gateway, teacher, searching, tmp_path):
    from smolagents import ToolCallingAgent

    searcher = ToolCallingAgent(
        [searching],
        model_of(gateway, "searcher"),
        name="searcher",
        description="Searches.",
        verbosity_level=0,
    )
    model = model_of(gateway, "manager")
    manager = ToolCallingAgent([], model, managed_agents=[searcher], planning_interval=5, verbosity_level=0)
    teacher.script = scripted(
        assistant("1. Find the builder.\n2. Find the birthplace."),
        assistant("I ask the searcher.", tool_call("searcher", task="Find where the builder was born.")),
        assistant("The builder first.", tool_call("wiki_search", "c1", query="Old Mill builder")),
        assistant("Now Anna Berg.", tool_call("wiki_search", "c2", query="Anna Berg birthplace")),
        assistant("", tool_call("final_answer", "c3", answer="Anna Berg was born in Weimar.")),
        assistant("That settles it.", tool_call("final_answer", "c4", answer="Weimar")),
    )
    assert manager.run(TASK.question) == "Weimar"

    [record] = merged(
        gateway, tmp_path, shipped("smolagents").model_copy(update={"delegates": ("searcher",)})
    )

    assert record.kept, record.reason
    assert steps(record) == (
        "think plan:manager think:manager wiki_search:searcher observation think:searcher "
        "wiki_search:searcher observation think:searcher answer:manager"
    )
    assert "I ask the searcher.\n\nThe builder first." in record.text
    assert "Anna Berg was born in Weimar.\n\nThat settles it." in record.text


def program(thought, code):
    return assistant(f"Thought: {thought}\n<code>\n{code}\n</code>")


def test_a_code_agent_of_smolagents_becomes_a_trajectory(run):
    record = run(
        "CodeAgent",
        program("the builder.", 'print(wiki_search("Old Mill builder"))'),
        program("her birthplace.", 'found = wiki_search(query="Anna Berg birthplace")\nprint(found)'),
        program("done.", 'final_answer("Weimar")'),
    )

    assert [observation for _, observation in found(record)] == [MILL, BERG]
    assert record.text.startswith("<think>the builder.</think><wiki_search>Old Mill builder</wiki_search>\n")
    assert record.text.endswith("<think>done.</think><answer>Weimar</answer>")


def test_the_stand_in_for_a_thought_before_the_answer_asks_for_no_further_search(gateway, run, tmp_path):
    record = run(
        "ToolCallingAgent",
        assistant(None, tool_call("wiki_search", query="Old Mill builder")),
        assistant(None, tool_call("final_answer", "call_2", answer="Weimar")),
    )

    assert record.kept, record.reason
    assert record.text.startswith("<think>Next: look up what is missing.</think><wiki_search>")
    assert record.text.endswith("<think>Nothing is missing any more.</think><answer>Weimar</answer>")
    team = shipped("smolagents").model_copy(update={"missing_last_thought": ""})
    [bare] = merged(gateway, tmp_path, team)
    assert bare.reason.startswith("format: <answer> at character ")
    assert "Next" not in bare.text.rpartition("</observation>")[2]


@pytest.mark.parametrize(
    "said",
    [
        "Thought: look.\nCode:\n```py\nprint(wiki_search('Old Mill builder'))\n```<end_code>",
        "**Thought:** look.\n<code>\nprint(wiki_search('Old Mill builder'))\n</code>",
        "look.\n\nCode:\n<code>\nprint(wiki_search('Old Mill builder'))\n</code>",
    ],
)
def test_labels_of_a_code_agent_are_no_part_of_its_thoughts(run, said):
    record = run("CodeAgent", assistant(said), program("done.", 'final_answer("Weimar")'))

    assert record.kept, record.reason
    assert record.text.startswith("<think>look.</think><wiki_search>Old Mill builder</wiki_search>")


def test_a_code_agents_programs_become_those_of_the_math_agent(gateway, teacher, tmp_path):
    from smolagents import ActionStep, CodeAgent

    task = Task(id="m", question="What is 6 times 7?", ground_truth="42", data_source="math")
    teacher.script = scripted(
        assistant("1. Multiply."),
        program("multiply.", "print(6 * 7)"),
        assistant("The program printed a number, and it is plausible."),
        program("done.", 'final_answer("42")'),
    )
    team, judged = PlainTeam(gateway, "m"), []

    def reflect(step):
        if not judged:
            judged.append(team.ask("critic", USER))

    agent = CodeAgent([], model_of(gateway, task="m"), verbosity_level=0)
    agent.step_callbacks.register(ActionStep, reflect)
    team.ask("planner", USER)
    assert str(agent.run(task.question)) == "42"
    team_map = TeamMap.model_validate(
        {
            "messages": [{"agent": "planner", "role": "plan"}, {"agent": "critic", "role": "reflection"}],
            "finals": {"final_answer": "answer"},
            "programs": {"tool": {"tool": "code"}},
        }
    )

    [record] = merged(gateway, tmp_path, team_map, "math", [task])

    logs = "Execution logs:\n42\nLast output from code snippet:\nNone"
    assert found(record) == [("\n```py\nprint(6 * 7)\n```\n", logs)]
    roles = " ".join(step["role"] for step in record.provenance["steps"])
    assert roles == "plan think code observation reflection think answer"


USER = [{"role": "user", "content": TASK.question}]


class PlainTeam:
    """Planner, searcher, critic and writer with one client, as in a user's script."""

    def __init__(self, gateway, task=TASK.id):
        self.client = openai.OpenAI(api_key="k", base_url=gateway.base, default_headers={"X-AFM-Task": task})

    def ask(self, agent, messages):
        headers = {"X-AFM-Agent": agent}
        answer = self.client.chat.completions.create(model="tiny", messages=messages, extra_headers=headers)
        return answer.choices[0].message

    def work(self, *, lost=False):
        plan = self.ask("planner", USER).content
        history = [*USER, {"role": "user", "content": plan}]
        while (said := self.ask("searcher", history)).tool_calls:
            history.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                page = PAGES[json.loads(call.function.arguments)["query"]]
                history.append(result(call.id, page))
            if lost:
                history = [*history[:2], {"role": "user", "content": "Go on."}]
        self.conclude()

    def conclude(self):
        self.ask("critic", [{"role": "user", "content": "Judge."}])
        self.ask("writer", [{"role": "user", "content": "Write."}])


def result(identity, text, role="tool", **more):
    return {"role": role, "content": text} | ({"tool_call_id": identity} if identity else {}) | more


PLAIN = (
    assistant("1. The builder.\n2. The birthplace."),
    assistant(
        "Both at once.",
        tool_call("wiki_search", query="Old Mill builder"),
        tool_call("wiki_search", query="Anna Berg birthplace"),
    ),
    assistant("I have both."),
    assistant("The pages agree."),
    assistant("They support it. Final answer: Weimar"),
)


def test_a_plain_script_with_parallel_calls_becomes_a_trajectory(plain):
    record = plain(*PLAIN)  # the server gives every call the same id

    assert record.kept, record.reason
    assert steps(record) == (
        "think plan:planner think:searcher wiki_search:searcher observation think wiki_search:searcher "
        "observation think:searcher reflection:critic think:writer answer:writer"
    )
    assert record.text.endswith("<think>They support it.</think><answer>Weimar</answer>")


TWO = [tool_call("wiki_search", f"c{number}", query=query) for number, query in enumerate(PAGES)]
BARE = [{key: value for key, value in call.items() if key != "id"} for call in TWO]
OTHER = tool_call("wiki_search", "c1", query="Anna Berg birthplace Germany")
SAME_ID = [TWO[0], {**TWO[1], "id": "c0"}]
OLDER = {"role": "assistant", "content": "Look.", "function_call": TWO[0]["function"]}
RESULTS = [result("c0", MILL), result("c1", BERG)]


@pytest.fixture
def searched(gateway, teacher, tmp_path):
    """Return the record of a team whose searcher replies with ``said`` and sends ``kept`` with the results."""

    def played(said, kept, results):
        teacher.script = scripted(PLAIN[0], said, *PLAIN[2:])
        team = PlainTeam(gateway)
        history = [*USER, {"role": "user", "content": team.ask("planner", USER).content}]
        team.ask("searcher", history)
        team.ask("searcher", [*history, kept, *results])
        team.conclude()
        [record] = merged(gateway, tmp_path, "openai_tools")
        return record

    return played


def both(calls):
    """Return a message with these calls, or a message unchanged."""
    return assistant("Both.", *calls) if isinstance(calls, list) else calls


LOST = "no later call shows what wiki_search returned"
UNKNOWN = "the next request shows a result that fits none of the tool calls"


@pytest.mark.parametrize(
    ("said", "kept", "results", "reason"),
    [
        (TWO, TWO, RESULTS[1:], LOST),
        (BARE, BARE, [result("", BERG)], "1 results without ids do not fit 2 tool calls"),
        (BARE, TWO, RESULTS[1:], LOST),
        (TWO, TWO, [*RESULTS, result("c2", "?")], UNKNOWN),
        (SAME_ID, SAME_ID, RESULTS[:1], "tool calls share an id, and not each of them has a result"),
        (
            TWO,
            [TWO[0], OTHER],
            RESULTS,
            "the next request shows another call of wiki_search than the model made",
        ),
        (TWO, TWO[1:], RESULTS[1:], "the model made 2 tool calls and the next request shows 1"),
        (
            OLDER,
            OLDER,
            [result("", MILL, "function", name="browse")],
            "1 results without ids do not fit 1 tool",
        ),
        (assistant("I know it."), assistant("I know it."), [result("c7", MILL)], UNKNOWN),
    ],
)
def test_a_call_never_gets_the_result_of_another(searched, said, kept, results, reason):
    record = searched(both(said), both(kept), results)

    assert not record.kept
    assert record.reason.startswith(f"event q/1#1.2: {reason}")


@pytest.mark.parametrize(
    ("said", "kept", "results"),
    [
        (TWO, TWO, RESULTS[::-1]),
        (TWO, TWO[::-1], RESULTS[::-1]),
        (BARE, BARE, [result("", MILL), result("", BERG)]),
        (BARE, TWO, RESULTS[::-1]),  # the framework gave the ids
        (SAME_ID, SAME_ID, [result("c0", MILL), result("c0", BERG)]),
        (TWO, TWO, [*RESULTS[::-1], assistant("Hm."), result("c0", "later")]),
        (OLDER, OLDER, [result("", MILL, "function", name="wiki_search")]),
    ],
)
def test_results_belong_to_the_call_of_their_id_and_without_ids_to_that_of_their_place(
    searched, said, kept, results
):
    pages = list(PAGES.items())
    assert found(searched(both(said), both(kept), results)) == (pages[:1] if said is OLDER else pages)


SHORT = assistant("It is a mill.")
SECOND = assistant("Second.", TWO[0])


@pytest.mark.parametrize(
    ("choices", "kept", "results"),
    [
        ([assistant("First.", tool_call("wiki_search", "c9", query="mills")), SECOND], SECOND, RESULTS[:1]),
        ([assistant("First. It is a mill."), SHORT], SHORT, []),
    ],
)
def test_of_several_choices_the_one_counts_that_the_next_request_continues(searched, choices, kept, results):
    record = searched(choices, kept, results)

    assert [call.observation for call in record.calls] == [MILL] * len(results)
    assert f"<think>{kept['content']}" in record.text
    assert "First." not in record.text


def test_choices_that_are_both_continued_drop_the_task(gateway, teacher, tmp_path):
    """In a tree search, the continuation of one branch would follow the other branch."""
    teacher.script = scripted([assistant("First."), assistant("Second.")], PLAIN[2], PLAIN[2])
    team = PlainTeam(gateway)
    team.ask("searcher", USER)
    for branch in ("First.", "Second."):
        team.ask("searcher", [*USER, assistant(branch), {"role": "user", "content": "Go on."}])

    [record] = merged(gateway, tmp_path, "openai_tools")

    assert record.reason == "event q/1#1.1: answered with 2 choices, and later calls continue several"


def test_of_several_choices_of_a_completion_the_one_counts_that_the_next_prompt_continues(
    gateway, teacher, tmp_path
):
    teacher.script = scripted([assistant(" Seven"), assistant(" Look: mill")], assistant(" So: Weimar"))
    client = openai.OpenAI(api_key="k:task=q%2F1,agent=solo", base_url=gateway.base)
    client.completions.create(model="tiny", prompt="Where?", n=2)
    client.completions.create(model="tiny", prompt="Where? Look: mill\nObservation: Weimar\nSo?")
    [calls] = read_calls(gateway.log)

    assert TeamConversation(calls, r"Observation: (\w+)").reply(0)["content"] == " Look: mill"
    assert TeamConversation(calls, r"Observation: (\w+)").observation(0)[0] == "Weimar"


TWICE = [assistant("Final answer: Weimar")] * 2


@pytest.mark.parametrize(
    ("planned", "written", "reason"),
    [
        ("A", [TWICE[0], assistant("Final answer: Jena")], "1.5: answered with 2 choices"),
        ("C", TWICE, "1.1: answered with 2 choices"),
        ("A. Or Plan B", TWICE, "1.1: answered with 2 choices"),
        ("B", TWICE, ""),
    ],
)
def test_a_choice_that_no_later_request_shows_drops_the_task(
    gateway, teacher, tmp_path, planned, written, reason
):
    teacher.script = scripted([assistant("Plan A."), assistant("Plan B.")], *PLAIN[1:4], written)
    team = PlainTeam(gateway)
    team.ask("planner", USER)
    history = [*USER, {"role": "user", "content": f"Plan {planned}."}]
    said = team.ask("searcher", history)
    results = [result(call.id, page) for call, page in zip(said.tool_calls, PAGES.values(), strict=True)]
    team.ask("searcher", [*history, said.model_dump(exclude_none=True), *results])
    team.conclude()

    [record] = merged(gateway, tmp_path, "openai_tools")

    assert reason in record.reason
    assert record.kept == (not reason) == ("<plan>Plan B.</plan>" in record.text)


def test_a_program_that_the_framework_put_together_drops_the_task(gateway, run):
    """smolagents runs all blocks of a message as one program."""
    search = "print(wiki_search('Old Mill builder'))"
    two = f"Thought: both.\n<code>\nx = 1\n</code>\nand\n<code>\n{search}\n</code>"
    run("CodeAgent", assistant(two), program("done.", 'final_answer("Weimar")'))

    [calls] = read_calls(gateway.log)
    thread = TeamConversation(calls, shipped("smolagents_code").observation)

    message = r"q/1#1\.1: the next request shows another program than the model wrote"
    with pytest.raises(DataError, match=message):
        thread.program(0, "x = 1")
    thread.program(0, f"x = 1\n\n{search}")


def test_results_that_no_model_was_shown_drop_the_task(plain):
    assert plain(*PLAIN, lost=True).reason == f"event q/1#1.2: {LOST}"


def test_a_task_whose_order_the_agent_forbids_is_dropped_with_the_fault(plain):
    record = plain(*PLAIN[:3], assistant("Bad. <plan>new</plan>"), PLAIN[4])

    assert record.reason.startswith("format: <plan> at character ")


def test_calls_that_failed_or_were_tried_again_count_once(gateway, teacher, tmp_path):
    teacher.script = scripted(assistant("0. A plan that nobody got."), *PLAIN)
    team = PlainTeam(gateway)
    with pytest.raises(openai.RateLimitError):
        team.client.with_options(max_retries=0).chat.completions.create(model="busy", messages=USER)
    team.ask("planner", USER)  # its answer is lost, so the request is repeated
    team.work()

    [record] = merged(gateway, tmp_path, "openai_tools")

    assert record.kept, record.reason
    assert "<plan>1. The builder.\n2. The birthplace.</plan>" in record.text
    assert record.cost.generations == 6  # both were paid


def test_the_last_attempt_at_a_task_counts_and_unknown_tasks_are_told(gateway, teacher, tmp_path):
    for attempt in (1, 2):
        team = PlainTeam(gateway)
        team.client = team.client.with_options(api_key=f"k:attempt={attempt}")
        teacher.script = scripted(*PLAIN[:4], assistant(f"Final answer: {attempt}"))
        team.work()
    teacher.script = scripted(assistant("x"))
    PlainTeam(gateway, "other").ask("planner", USER)

    first, second = merged(gateway, tmp_path, "openai_tools")

    assert (first.kept, first.provenance["attempt"]) == (True, 2)
    assert first.text.endswith("<answer>2</answer>")
    assert (second.id, second.reason) == ("other", "no task of this name among the tasks")


def test_calls_without_a_label_find_their_task_by_its_question(gateway, run):
    import smolagents

    record = run(
        "ToolCallingAgent",
        assistant("First the builder.", tool_call("wiki_search", query="Old Mill builder")),
        assistant("Enough.", tool_call("final_answer", "call_2", answer="Weimar")),
        model=smolagents.OpenAIServerModel("tiny", api_base=gateway.base, api_key="none"),
    )

    assert (record.kept, record.id) == (True, "q/1")


SEVERAL = "expected one tool whose result is all that it prints"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ('q = "Old " + "Mill builder"\nprint(wiki_search(q))', "an argument of wiki_search is computed"),
        ('print("Found:", wiki_search("Old Mill builder"))', SEVERAL),
        ('print(wiki_search("Old Mill builder"))\nprint("x")', SEVERAL),
        ("print(1)", "a program calls no tool"),
    ],
)
def test_programs_that_hide_what_a_tool_did_drop_the_task(run, code, reason):
    record = run("CodeAgent", program("look.", code), program("done.", 'final_answer("Weimar")'))

    assert not record.kept
    assert reason in record.reason


def spoiled(log, name):
    """Copy a log and add a blank line, an incomplete line and a line of another kind; return their numbers."""
    lines = log.read_bytes().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if b'"q/2#1.3"' in line)
    torn, other = lines[at][:60] + b"\n", b'{"level": "info"}\n'
    lines[at] = torn
    lines[3:3] = [b"\n"]
    lines[6:6] = [other]
    name.write_bytes(b"".join(lines))
    return sorted([lines.index(torn) + 1, lines.index(other) + 1])


@pytest.mark.slow
def test_bad_lines_of_a_log_stop_the_merge_or_cost_only_the_attempts_that_miss_them(
    gateway, teacher, tmp_path, afm
):
    tasks = [TASK.model_copy(update={"id": f"q/{number}"}) for number in (1, 2, 3)]
    for task in tasks:
        teacher.script = scripted(*PLAIN)
        PlainTeam(gateway, task.id).work()
    write_tasks([*tasks, TASK.model_copy(update={"id": "never"})], tmp_path / "tasks.jsonl")
    log, out = tmp_path / "spoiled.jsonl", tmp_path / "out"
    numbers = spoiled(gateway.log, log)
    words = f"data merge {log} --agent mhqa --tasks {tmp_path}/tasks.jsonl --output-dir {out}".split()
    words += ["--map", str(ROOT / "configs/teams/openai_tools.yaml")]

    refused = afm(*words, status=1).stderr
    assert f"{log}:{numbers[0]}: not an event: " in refused
    assert "--on-bad-rows drop" in refused
    assert not (out / "trajectories.jsonl").exists()

    printed = afm(*words, "--on-bad-rows", "drop").stdout
    for line in (
        "2 of 3 attempts kept",
        "tasks without a call in the log: 1",
        f"lines that cannot be read: 2, listed in {out}/unreadable.jsonl",
    ):
        assert line in printed
    listed = [json.loads(line) for line in (out / "unreadable.jsonl").read_text().splitlines()]
    assert sorted(line["line"] for line in listed) == numbers
    assert {line["text"] for line in listed} >= {'{"level": "info"}'}
    [dropped] = load_records(out / "dropped.jsonl")
    assert (dropped.id, dropped.reason) == ("q/2", "lines of its last attempt cannot be read")
    assert [record.id for record in load_records(out / "trajectories.jsonl")] == ["q/1", "q/3"]
    counts = {"kept": 2, "dropped": 1, "tasks_without_calls": 1, "unreadable_lines": 2}
    assert json.loads((out / "manifest.json").read_text())["counts"] == counts


@pytest.fixture
def log_lines(gateway, teacher):
    """Return the lines of one complete attempt."""
    teacher.script = scripted(*PLAIN)
    PlainTeam(gateway).work()
    return gateway.log.read_bytes().splitlines(keepends=True)


def test_a_line_lost_without_a_trace_drops_its_attempt_too(log_lines, tmp_path):
    """The line does not name the attempt, but the event numbers of the attempt have a gap."""
    log, bad = tmp_path / "log", BadLines(tmp_path / "log")
    log.write_bytes(b"".join([*log_lines[:2], b"\0" * 40 + b"\n", *log_lines[3:]]))

    [calls] = read_calls(log, bad=bad)

    assert ([row["line"] for row in bad.lines], bad.damaged, len(calls)) == ([3], {("q/1", 1)}, 4)


def test_a_call_that_is_not_whole_is_told_with_its_line(log_lines, tmp_path):
    rows = [json.loads(line) for line in log_lines]
    rows[4]["meta"]["stream"] = "perhaps"
    log, bad = tmp_path / "log", BadLines(tmp_path / "log")
    log.write_text("\n".join(map(json.dumps, rows)) + "\n")

    with pytest.raises(DataError, match=r"log:5: event 'q/1#1.4' is not a complete model call: stream: "):
        list(read_calls(log))
    assert len(list(read_calls(log, bad=bad))) == 1
    assert ([row["line"] for row in bad.lines], bad.damaged) == ([5], {("q/1", 1)})
