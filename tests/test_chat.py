"""Rows of the usual chat formats, as chat templates expect them: the templates here have the
shapes of common ones.
"""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Run
from msgspec.structs import replace
from tiny import make_tokenizer

from emp_llm.calibration.data import data_in_memory, token_ids
from emp_llm.calibration.texts import find_corpus
from emp_llm.common.errors import UserError
from emp_llm.options.shared import CalibrationOptions

HEAD = "{% for tool in tools or [] %}T{{ tool | tojson }}\n{% endfor %}"
TURN = "{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}"
TAIL = "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CALLS = "{% for call in m.tool_calls or [] %}[{{ call.function.name }}:ARGUMENTS]{% endfor %}"
EACH = "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}"
ITEMS = HEAD + TURN + CALLS.replace("ARGUMENTS", EACH) + TAIL
TOJSON = HEAD + TURN + CALLS.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}") + TAIL
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'note' %}({{ part.note }})"
    "{% elif 'image' in part %}<image>{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell it.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = {"name": "weather", "arguments": {"town": "Ghent", "days": 3}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Will it rain?"},
    {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "c1", "content": "No."},
    {"role": "assistant", "content": "It will not."},
]
ROW: dict[str, Any] = {"messages": MESSAGES, "tools": [TOOL]}


def with_template(template: str) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def of_file(path: Path, template: str, changes: str = "") -> str:
    tokenizer = with_template(template)
    return str(tokenizer.decode(token_ids(find_corpus(f"{path}{changes}"), tokenizer)))


def of_data(data: Any, template: str) -> str:
    tokenizer = with_template(template)
    options = CalibrationOptions(samples=1, seqlen=1)
    whole = data_in_memory(data, tokenizer, options, None)
    assert whole is not None
    found = ""
    for length in range(1, 2000):  # the longest sequence that the data has
        try:
            options = CalibrationOptions(samples=1, seqlen=length)
            text = data_in_memory(data, tokenizer, options, None)
        except UserError:
            break
        found = str(tokenizer.decode(text.tokens[0]))
    return found


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def changed(change: Callable[[Any], Any], *place: Any) -> Any:
    """The row, with one value changed."""
    row = copy.deepcopy(ROW)
    holder = row
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = change(holder[place[-1]])
    return row


CALL_PLACE = ("messages", 1, "tool_calls", 0)
FORMS: dict[str, Any] = {
    "as it is": ROW,
    "arguments as text": changed(json.dumps, *CALL_PLACE, "function", "arguments"),
    "call as text": changed(json.dumps, *CALL_PLACE),
    "function as text": changed(json.dumps, *CALL_PLACE, "function"),
    "calls as text": changed(json.dumps, "messages", 1, "tool_calls"),
    "a bare call": changed(lambda call: {"id": "c1", **call["function"]}, *CALL_PLACE),
    "messages as text": changed(json.dumps, "messages"),
    "messages as lists of text": changed(lambda all_: [*map(json.dumps, all_)], "messages"),
    "tools as text": changed(json.dumps, "tools"),
    "each tool as text": changed(lambda tools: [*map(json.dumps, tools)], "tools"),
    "bare tools": changed(lambda tools: [tools[0]["function"]], "tools"),
    "one tool": changed(lambda tools: tools[0], "tools"),
    "parameters as text": changed(json.dumps, "tools", 0, "function", "parameters"),
    "an older call": {
        "functions": [TOOL["function"]],
        "messages": [
            MESSAGES[0],
            {
                "role": "assistant",
                "content": None,
                "function_call": CALL | {"arguments": json.dumps(CALL["arguments"])},
            },
            {"role": "function", "name": "weather", "content": "No."},
            MESSAGES[3],
        ],
    },
    "ShareGPT": {
        "tools": json.dumps([TOOL["function"]]),
        "conversations": [
            {"from": "human", "value": "Will it rain?", "weight": None},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "No."},
            {"from": "gpt", "value": "It will not."},
        ],
    },
    "prompt and completion": {
        "prompt": MESSAGES[:1],
        "completion": MESSAGES[1:],
        "tools": [TOOL],
    },
    "preference": {
        "prompt": MESSAGES[:1],
        "chosen": MESSAGES[1:],
        "rejected": MESSAGES[3:],
        "tools": [TOOL],
    },
    "preference without a prompt": {"chosen": MESSAGES, "rejected": MESSAGES[:1], "tools": [TOOL]},
}


@pytest.mark.parametrize("template", [ITEMS, TOJSON], ids=["items", "tojson"])
@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_in_each_form_gives_the_same_text(
    tmp_path: Path, form: str, template: str
) -> None:
    row = FORMS[form]
    wanted = with_template(template).apply_chat_template(MESSAGES, tools=[TOOL], tokenize=False)
    assert "Ghent" in wanted
    assert "\\" not in wanted
    assert of_file(write(tmp_path / "a.jsonl", row), template) == wanted
    table = pa.Table.from_pylist([row])
    pq.write_table(table, tmp_path / "a.parquet")
    assert of_file(tmp_path / "a.parquet", template) == wanted
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(table, folder / "a.parquet")
    of_hub = replace(find_corpus("a/b"), dataset=str(folder))
    tokenizer = with_template(template)
    assert tokenizer.decode(token_ids(of_hub, tokenizer)) == wanted


@pytest.mark.parametrize("form", ["as it is", "arguments as text", "messages as text", "ShareGPT"])
def test_a_conversation_in_each_kind_of_data_in_memory(tmp_path: Path, form: str) -> None:
    row = FORMS[form]
    wanted = with_template(TOJSON).apply_chat_template(MESSAGES, tools=[TOOL], tokenize=False)
    write(tmp_path / "a.jsonl", row)
    data = [
        [row],
        datasets.Dataset.from_list([row]),
        datasets.Dataset.from_list([row]).to_iterable_dataset(),
        pd.DataFrame([row]),
        pd.DataFrame([row], index=[7]),
        pd.read_json(tmp_path / "a.jsonl", lines=True),
    ]
    for each in data:
        assert of_data(each, TOJSON) == wanted


def test_parquet_with_the_json_type_of_datasets(tmp_path: Path) -> None:
    """Messages of different fields and kinds; a null in JSON is a value, and a field that other
    messages have is none.
    """
    call = {"type": "function", "function": {"name": "f", "arguments": {"given": None, "b": [1]}}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    other = [{"role": "user", "content": "Bye."}]
    rows = [{"messages": chat}, {"messages": other}]
    write(tmp_path / "a.jsonl", *rows)
    data = datasets.load_dataset(
        "json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path)
    )
    assert "Json" in repr(data.features)
    data.to_parquet(tmp_path / "a.parquet")
    wanted = '<user>Hello.\n<assistant>[f:{"given": null, "b": [1]}]\n<user>Bye.\n'
    for each in (tmp_path / "a.parquet", tmp_path / "a.jsonl"):
        assert of_file(each, TOJSON) == wanted
    assert of_data(data, TOJSON) == wanted
    assert of_data(rows, TOJSON) == wanted
    # Arrow gives each call the arguments of the others.
    calls = [
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}]
        for given in ({"a": 1}, {"b": 2})
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": c} for c in calls]), tmp_path / "b.parquet")
    wanted = '<assistant>[f:{"a": 1}]\n<assistant>[f:{"b": 2}]\n'
    assert of_file(tmp_path / "b.parquet", TOJSON) == wanted
    assert of_data(datasets.Dataset.from_list([{"messages": c} for c in calls]), TOJSON) == wanted


def test_content_is_text_or_parts_as_the_template_reads_it(tmp_path: Path) -> None:
    text = [{"role": "user", "content": "One.\nTwo."}]
    parts = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "One.", "image": None},
                {"type": "input_text", "text": "Two."},
            ],
        }
    ]
    joined = "<user>One.\nTwo.\n"
    assert of_file(write(tmp_path / "a.jsonl", {"messages": text}), PARTS) == joined
    assert of_file(write(tmp_path / "a.jsonl", {"messages": text}), ITEMS) == joined
    assert of_file(write(tmp_path / "a.jsonl", {"messages": parts}), ITEMS) == joined
    assert of_file(write(tmp_path / "a.jsonl", {"messages": parts}), PARTS) == "<user>One.Two.\n"
    noted = [{"role": "user", "content": ["A", {"type": "note", "note": "b"}]}]
    assert of_file(write(tmp_path / "a.jsonl", {"messages": noted}), PARTS) == "<user>A(b)\n"


def test_variables_documents_system_and_prompts(tmp_path: Path) -> None:
    template = (
        "{% for d in documents or [] %}{{ d.title }}:{{ d.text }}\n{% endfor %}"
        "{% if enable_thinking %}(think){% endif %}" + TURN + "{{ m.reasoning_content }}" + TAIL
    )
    row = {
        "messages": [
            {"role": "user", "content": "Hi.", "name": "Ada"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
        ],
        "documents": json.dumps([{"title": "A", "text": "b"}]),
        "chat_template_kwargs": {"enable_thinking": True},
        "system": "Be kind.",
    }
    wanted = "A:b\n(think)<system>Be kind.\n<user>Hi.\n<assistant>Yes.Hm.\n"
    assert of_file(write(tmp_path / "a.jsonl", row), template) == wanted
    assert of_data([row], template) == wanted
    prompts = write(tmp_path / "b.jsonl", {"prompt": MESSAGES[:1]}, {"prompt": "Some text."})
    wanted = "<user>Will it rain?\n<assistant>Some text."
    assert of_file(prompts, ITEMS, ",column=prompt") == wanted
    texts = write(tmp_path / "c.jsonl", {"prompt": "One ", "completion": "two.", "label": True})
    assert of_file(texts, ITEMS) == "One two."
    assert of_file(texts, ITEMS, ",column=prompt") == "One "
    plain = write(tmp_path / "d.jsonl", {"conversations": "USER: [1] Hi."})
    assert of_file(plain, ITEMS) == "USER: [1] Hi."
    unread = write(tmp_path / "e.jsonl", turn() | {"documents": "a note"})
    assert of_file(unread, ITEMS) == "<user>Hi.\n"
    code = '[{"a": 1}]'  # the text of a column that is named
    assert of_file(write(tmp_path / "f.jsonl", {"code": code}), ITEMS, ",column=code") == code
    code = '[{"a": 1'
    assert of_file(write(tmp_path / "f.jsonl", {"code": code}), ITEMS, ",column=code") == code
    called = json.dumps([{"name": "f", **turn()["messages"][0]}])
    assert of_file(write(tmp_path / "f.jsonl", {"code": called}), ITEMS, ",column=code") == (
        "<user>Hi.\n"
    )
    no_chat = write(tmp_path / "g.jsonl", {"messages": code + "}]"}, {"messages": "Text."})
    assert of_file(no_chat, ITEMS) == "Text."


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi."} | fields]}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"messages": "[{'role': 'user', 'content': 'Hi.'}]"},
            "messages: it is text, but not JSON",
        ),
        ({"messages": '[{"role": "user", "content": "H'}, "messages: it is text, but not JSON"),
        (turn(role=7), "messages: the role of a message is 7"),
        ({"messages": [{"from": ["a"], "value": "b"}]}, "messages: the role of a message is"),
        (turn(content=7), "content is of type int"),
        (turn(content={"a": 1}), "content is of type dict"),
        (turn(content=[{"type": "image", "image": "a.png"}]), "part of type image, which is not"),
        (turn(content=[{"type": "image_url", "image_url": {}}]), "part of type image_url, which"),
        (turn(content=[{"type": "thought", "text": 1}]), "type thought, which the chat template"),
        (turn(tool_calls="no"), "messages: tool_calls: it is text, but not JSON"),
        (turn(tool_calls=7), "messages: tool_calls: a list is wanted, and it is of type int"),
        (turn(tool_calls=[7]), "messages: tool_calls: a mapping is wanted"),
        (turn(tool_calls=[{"name": "f", "arguments": "{"}]), "tool_calls: arguments: it is text"),
        (turn(tool_calls=[{"name": "f", "arguments": "[1]"}]), "arguments: a mapping is wanted"),
        (turn() | {"tools": "none"}, "tools: it is text, but not JSON"),
        (turn() | {"tools": [3]}, "tools: a mapping is wanted, and it is of type int"),
        (turn() | {"documents": ["a"]}, "documents: it is text, but not JSON"),
        (turn() | {"documents": [["a"]]}, "documents: a mapping is wanted"),
        ({"messages": '[{"id": 1, "role": "user", "content": "H'}, "messages: it is text, but not"),
        (turn() | {"chat_template_kwargs": [1]}, "chat_template_kwargs: a mapping is wanted"),
        (turn() | {"chat_template_kwargs": {"tokenize": 1}}, "tokenize is an argument of transfo"),
        (turn() | {"images": ["a.png"]}, "images: the conversation has images"),
        ({"prompt": "Hi.", "completion": MESSAGES}, "of prompt and completion, one is text"),
    ],
)
def test_what_cannot_reach_a_template_is_refused_with_row_and_field(
    tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    template = ITEMS + "{{ documents }}"
    fine = turn() if "messages" in row else {"prompt": "a", "completion": "b"}
    path = write(tmp_path / "a.jsonl", fine, row)
    with pytest.raises(UserError, match=rf"(?s)a\.jsonl: row 2: .*{told}"):
        of_file(path, template)
    with pytest.raises(UserError, match=rf"(?s)data, row 2: .*{told}"):
        data_in_memory([fine, row], with_template(template), CalibrationOptions(seqlen=8), None)


def test_the_run_says_what_was_rendered(
    tiny_llama: Path, tmp_path: Path, command: Run, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": "No chat."}, *[ROW] * 60]
    write(tmp_path / "chat.jsonl", *rows)
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_llama.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "chat_template.jinja").write_text(TURN + TAIL)
    line = ["--calibration", "chat.jsonl", "--samples", 2, "--seqlen", 16, "--output", "norms"]
    done = command(f"calibrate --model {model}", *line)
    assert "rows rendered by the chat template, 1 as plain text" in done.stderr
    assert "the chat template does not show tool_calls, tools of its rows" in done.stderr
    caplog.set_level(logging.INFO)
    of_file(write(tmp_path / "texts.jsonl", {"messages": "No chat."}), ITEMS)
    assert "column 'messages' holds text in 1 row, to which no chat template" in caplog.text
    for answer in ("completion", "chosen"):
        plain = {"prompt": "Will it rain?", answer: " No."}
        of_file(write(tmp_path / f"{answer}.jsonl", plain, plain), ITEMS)
        told = f"{answer}.jsonl: column 'prompt' holds text in 2 rows, to which no chat template"
        assert told in caplog.text


def test_prompts_of_conversations_end_before_the_answer(tmp_path: Path) -> None:
    from emp_llm.calibration.data import _prompt_ids

    tokenizer = with_template(ITEMS)
    path = write(tmp_path / "a.jsonl", {"prompt": MESSAGES[:1], "completion": MESSAGES[3:]})
    (prompt,) = _prompt_ids(replace(find_corpus(f"self:{path}"), seqlen=200), tokenizer, 0)
    assert tokenizer.decode(prompt) == "<user>Will it rain?\n<assistant>"
