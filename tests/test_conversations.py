"""Calibration on chat data: the tokenizer's chat template, no special token twice, and data that
cannot be used.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from msgspec.structs import replace
from tiny import make_tokenizer

from emp_llm.calibration.data import token_ids
from emp_llm.calibration.texts import find_corpus, text_rows
from emp_llm.common.errors import UserError

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
CHATS = [
    [{"role": "user", "content": f"Row {i}?"}, {"role": "assistant", "content": "It is so."}]
    for i in range(40)
]
SHAREGPT = [
    [{"from": "human", "value": f"Row {i}?"}, {"from": "gpt", "value": "It is so."}]
    for i in range(40)
]


def write(path: Path, column: str, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    return str(path)


def with_template() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_bos_token = True
    return tokenizer


@pytest.mark.parametrize(
    ("column", "rows", "join"),
    [("messages", CHATS, "\n\n"), ("conversations", SHAREGPT, None), ("turns", CHATS, None)],
)
def test_conversations_are_rendered_by_the_template(
    tmp_path: Path, column: str, rows: list[Any], join: str | None
) -> None:
    name = write(tmp_path / "chat.jsonl", column, rows) + (
        ",column=turns" if column == "turns" else ""
    )
    tokenizer = with_template()
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    texts = texts if join is None else [join.join(texts)]
    wanted = [
        token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    for _ in range(2):  # again, from the cache
        assert token_ids(replace(find_corpus(name), join=join), tokenizer).tolist() == wanted


def test_text_comes_before_conversations(tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text(json.dumps({"text": "It is so.", "messages": CHATS[0]}) + "\n")
    assert list(text_rows(find_corpus(str(path)))) == ["It is so."]


def test_token_ids_are_not_joined(tmp_path: Path) -> None:
    name = write(tmp_path / "ids.jsonl", "input_ids", [[1, 2], [3]])
    with pytest.raises(UserError, match=r"ids\.jsonl: join= joins texts, and these are token ids"):
        token_ids(replace(find_corpus(name), join=" "), make_tokenizer())


def test_data_that_cannot_be_used(tmp_path: Path) -> None:
    name = write(tmp_path / "chat.jsonl", "messages", CHATS)
    with pytest.raises(
        UserError,
        match=r"chat\.jsonl: row 1: it is a conversation, .* has no chat "
        r"template\. .*,column=NAME",
    ):
        token_ids(find_corpus(name), make_tokenizer())
    strict = with_template()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"refuses a conversation \(roles must alternate\)"):
        token_ids(find_corpus(name), strict)
    for wrong in ([1, 2], [{"who": "me"}], []):
        name = write(tmp_path / f"wrong{len(wrong)}.jsonl", "messages", [wrong])
        with pytest.raises(
            UserError,
            match=r"column 'messages' holds neither text nor conversations",
        ):
            token_ids(find_corpus(name), with_template())


def test_a_model_is_calibrated_on_a_chat(
    evaluable_llama: Path, tmp_path: Path, command: Run
) -> None:
    """Through the command; the tokenizer of the model has no template, and is told so before the
    model is loaded.
    """
    write(tmp_path / "chat.jsonl", "messages", CHATS)
    line = "calibrate --calibration chat.jsonl --samples 2 --seqlen 16 --output norms"
    done = command(line, "--model", evaluable_llama, code=2)
    assert "no chat template" in done.stderr
    model = Path(shutil.copytree(evaluable_llama, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    command(line, "--model", model)
    assert (tmp_path / "norms").is_file()
