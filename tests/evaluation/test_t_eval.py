import json

import pytest

from afm.errors import DataError
from afm.evaluation.job import read_benchmark
from afm.evaluation.tallies import t_eval_scores

CALL = {"thought": "Search.", "name": "Home.search", "args": {"place": "Berlin"}}
PLAN = [
    {"id": 0, "prev": [], "name": "Home.search", "args": {"place": "Berlin"}},
    {"id": 1, "prev": [0], "name": "FinishAction", "args": {}},
]


def chat(text):
    return [
        {"role": "system", "content": "You have access to the following API:\n[['Home.search', {...}]]"},
        {"role": "user", "content": "Find homes."},
        {"role": "assistant", "content": '{"name": "Home.search"}'},
        {"role": "function", "content": "{'response': []}"},
        {"role": "user", "content": text},
    ]


def item(text, gold, form=None, **more):
    metadata = {} if form is None else {"meta_data": {"response_format": form}}
    return {"origin_prompt": chat(text), "ground_truth": gold, **metadata, **more}


def plan(text, form):
    return item(text, PLAN, meta={"prompt_type": form, "API_list": ["Home.search"]})


INSTRUCTED = {"action": "Home.search", "args": {"place": "Berlin"}}
KEYS = {"thought": "goal", "action": "name", "args": "args"}
MARKS = {f"{key}_start": f"{word}: " for key, word in KEYS.items()}
MARKS |= {"thought_end": "\n", "action_end": "\n", "args_end": ""}
FILES = {
    "instruct_v2": {
        "query_0": item("json please", INSTRUCTED, "json", template=KEYS),
        "query_1": item("text please", INSTRUCTED, "string", template=MARKS),
    },
    "plan_json_v2": {"query_0": plan("plan json", "json")},
    "plan_str_v2": {"query_0": plan("plan text", "str")},
    "retrieve_str_v2": {"query_0": item("which tool", CALL, "str")},
    "understand_str_v2": {"query_0": item("which arguments", CALL, "str")},
    "reason_retrieve_understand_json_v2": {"query_0": item("the call", CALL, "json")},
    "reason_str_v2": {"query_0": item("why", CALL)},
    "review_str_v2": {"query_0": item("well done?", {"answer": "B"})},
}
RIGHT = {
    "json please": '{"goal": "g", "name": "Home.search", "args": {"place": "Berlin"}}',
    "text please": "goal: g\nname: Home.search\nargs: {'place': 'Berlin'}",
    "plan json": """[{"id": 0, "name": "Home.search", "args": "{'place': 'Berlin'}"}]""",
    "plan text": "Use Home.search to find a place in Berlin",
    "which tool": "Home.search",
    "which arguments": "{'place': 'Berlin'}",
    "the call": json.dumps(CALL),
    "why": "Search.",
    "well done?": "Answer: B",
}


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in FILES.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return folder


def test_a_file_becomes_tasks_with_chats_of_their_own(data) -> None:
    def tasks(name):
        return list(read_benchmark(data / f"{name}_v2.json", reader="t_eval"))

    json_item, text_item = tasks("instruct")
    assert (json_item.id, json_item.data_source) == ("instruct_v2/query_0", "t_eval_instruct_json")
    assert text_item.data_source == "t_eval_instruct_str"
    messages = json_item.prompt
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    # A function's answer is given as the user's.
    assert messages[-1]["content"] == "{'response': []}\n\njson please"
    three = tasks("reason_retrieve_understand_json")
    abilities = ("reason", "retrieve", "understand")
    assert [task.data_source for task in three] == [f"t_eval_{ability}_json" for ability in abilities]
    assert len({task.id for task in three}) == 3
    assert [tasks(f"{name}_str")[0].data_source for name in ("reason", "review")] == [
        "t_eval_reason_str",
        "t_eval_review_str",
    ]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("my_file", None, "the file name begins with no kind of T-Eval"),
        ("plan_json_v2", {"origin_prompt": []}, "`ground_truth`: expected an object, a list or a text"),
        ("plan_json_v2", {"origin_prompt": [], "ground_truth": PLAN}, "`origin_prompt`: expected a list"),
        ("plan_json_v2", item("x", PLAN) | {"origin_prompt": [{"role": "god"}]}, "expected role"),
        ("plan_json_v2", plan("x", "ReWOO"), "form json or str, got 'ReWOO'"),
        ("review_str_v2", item("x", {"letter": "A"}), "expected an object with answer"),
        ("instruct_v2", item("x", {"action": "a"}), "expected an object with action and args"),
        ("plan_json_v2", "text", "expected an object of origin_prompt and ground_truth"),
    ],
)
def test_what_is_no_item_is_refused_with_its_file(tmp_path, name, row, message) -> None:
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps({} if row is None else {"q": row}))
    with pytest.raises(DataError) as caught:
        list(read_benchmark(file, reader="t_eval"))
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def test_abilities_are_means_of_their_forms() -> None:
    scores = {"t_eval_plan_json": 0.5, "t_eval_plan_str": 1.0, "t_eval_retrieve_str": 0.25, "nq": 1.0}
    assert t_eval_scores(scores) == {"plan": 0.75, "retrieve": 0.25, "mean": 0.5}
    assert t_eval_scores({"nq": 1.0}) == {}
    # As the published summary: the mean of six abilities, each the mean of its forms.
    names = ("instruct", "plan", "reason", "retrieve", "understand")
    both = {f"t_eval_{name}_{form}": score for name in names for form, score in (("json", 1.0), ("str", 0.5))}
    assert t_eval_scores({**both, "t_eval_review_str": 0.0})["overall"] == pytest.approx(5 * 0.75 / 6)


def test_the_command_asks_each_item_in_its_own_chat(data, asked_chats) -> None:
    tasks = [task for file in sorted(data.iterdir()) for task in read_benchmark(file, reader="t_eval")]
    metrics, printed, page = asked_chats(
        "t_eval",
        data,
        tasks,
        lambda task: RIGHT[task.question.rpartition("\n")[2]],
        "rewards.t_eval.embeddings=words",
    )
    abilities = ("instruct", "plan", "reason", "retrieve", "understand", "review", "overall")
    assert metrics["t_eval"] == pytest.approx(dict.fromkeys(abilities, 1.0))
    assert (metrics["scored"], metrics["format_valid"]) == (11, 1.0)
    line = "T-Eval: " + ", ".join(f"{ability} 100.0 %" for ability in abilities)
    assert line in " ".join(printed.split())
    assert line in page
