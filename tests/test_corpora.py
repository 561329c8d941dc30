"""Calibration texts from recipes, files and data sets, as tokens; and recipes that are wrong."""

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from msgspec.structs import replace
from tiny import make_tokenizer

from emp_llm.calibration import data as tokens
from emp_llm.calibration.data import token_ids
from emp_llm.calibration.texts import calibration_corpora, find_corpus
from emp_llm.common.errors import UserError
from emp_llm.records.base import Corpus

ROWS = [f"Row {i} says {'so ' * (i % 5)}it." for i in range(60)]


def by_hand(texts: list[str]) -> list[int]:
    tokenizer = make_tokenizer()
    return [token for text in texts for token in tokenizer(text)["input_ids"]]


def test_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(ROWS), encoding="utf-8")
    ids = token_ids(
        replace(find_corpus(str(tmp_path / "a.txt")), samples=4, seqlen=50), make_tokenizer()
    )
    assert ids.dtype == torch.int64
    assert ids.reshape(-1).tolist() == by_hand(["\n".join(ROWS)])[:200]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_files_are_documents_in_order(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    data = datasets.Dataset.from_dict({"body": ROWS})
    data.to_json(path) if kind == "jsonl" else data.to_parquet(path)
    corpus = replace(find_corpus(f"{path},column=body"), samples=5, seqlen=60)
    assert token_ids(corpus, make_tokenizer()).reshape(-1).tolist() == by_hand(ROWS)[:300]
    with pytest.raises(UserError, match=r"no column 'text'; it has body"):
        token_ids(replace(corpus, column="text"), make_tokenizer())


def hub_like_folder(root: Path) -> str:
    folder = root / "someone" / "prose"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return "someone/prose"


@pytest.mark.parametrize("stream", [True, False])
def test_shuffled_rows_follow_the_seed_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = Corpus(
        dataset=hub_like_folder(tmp_path), shuffle=True, stream=stream, samples=3, seqlen=40
    )
    first, again, other = (token_ids(corpus, make_tokenizer(), seed).tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert token_ids(find_corpus("someone/prose"), make_tokenizer()).tolist() == by_hand(ROWS)
    joined = token_ids(find_corpus("someone/prose,join=--"), make_tokenizer())
    assert joined.tolist() == by_hand(["--".join(ROWS)])
    with pytest.raises(
        UserError,
        match=r"too short for 1000 samples x 40 tokens. Lower --samples or --seqlen",
    ):
        token_ids(replace(corpus, samples=1000), make_tokenizer())


def test_a_recipe_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text("Once more, with feeling. " * 20)
    (tmp_path / "mine.toml").write_text(
        'about = "Mine."\nfile = "prose.txt"\nsamples = 2\nseqlen = 30\n'
    )
    corpus = find_corpus(f"{tmp_path / 'mine.toml'},samples=3")
    assert token_ids(corpus, make_tokenizer()).shape == (3, 30)
    told = corpus.record().as_dict()
    said = {name: value for name, value in told.items() if value not in (None, False)}
    assert told["stream"] is False
    assert said == {
        "file": "prose.txt",
        "split": "train",
        "column": "text",
        "bos": "auto",
        "samples": 3,
        "seqlen": 30,
    }


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("smaples = 2", "unknown field.*smaples"),
        ('samples = "2"', "samples: expected int, got str"),
        ("samples = true", "samples: expected int, got bool"),
        ("seqlen = -5", "seqlen must be at least 1, got -5"),
        ('join = ["a"]', "join: expected str, got array"),
        ('split = "test"', "split has no effect on prose.txt"),
        ("samples =", "cannot be read as TOML"),
    ],
)
def test_wrong_fields_of_a_recipe(tmp_path: Path, line: str, told: str) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'file = "prose.txt"\n{line}\n')
    with pytest.raises(UserError, match=rf"mine\.toml: .*{told}"):
        find_corpus(str(recipe))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("samples=²", "samples=²: samples: expected int, got str"),
        (f"samples={'9' * 5000}", "samples: integer value out of range"),
        ("samples=-1", "samples must be at least 1, got -1"),
        ("stream=yes", "stream: expected bool, got str"),
        ("smaples=1", "field of dataset, "),
        ("samples", "expected field=value"),
        ("file=a.txt,split=test", "split has no effect on a.txt"),
        ("file=a.txt,column=body", "column has no effect on a.txt"),
        ("file=a.jsonl,column=body,config=b", "config has no effect on a.jsonl"),
    ],
)
def test_wrong_changes(changes: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        find_corpus(f"wikitext2,{changes}")


def test_a_recipe_is_shortened_to_the_context_and_a_request_is_refused() -> None:
    def corpus(**options: Any) -> Corpus:
        (found,) = calibration_corpora("c4", 256, **options)
        return found

    assert corpus().seqlen == 256
    assert corpus(samples=7, seqlen=100).samples == 7
    with pytest.raises(UserError, match="seqlen 300 is longer than the model's context of 256"):
        corpus(seqlen=300)


@pytest.mark.parametrize("join", [None, "\n\n"])
def test_the_tokens_of_a_part_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join: str | None
) -> None:
    """A long text is tokenised in part; if the part has too few tokens, in a larger one."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": f"{row} " * 40}) + "\n" for row in ROWS))
    corpus = Corpus(file=str(path), join=join)
    whole = token_ids(corpus, make_tokenizer())
    for characters in (8, 1):
        monkeypatch.setattr(tokens, "_CHARACTERS", characters)
        monkeypatch.setattr(tokens, "_MARGIN", 4)
        assert (
            token_ids(replace(corpus, samples=5, seqlen=60), make_tokenizer()).flatten().tolist()
            == whole[:300].tolist()
        )


def test_a_data_set_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer that fails is enough: the library would ask for half a minute."""
    asked = []

    def refuse(self: Any, method: str, *_: Any, **__: Any) -> Any:
        asked.append(method)
        raise ConnectionError("no network")

    session = huggingface_hub.get_session()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(type(session), "request", refuse)
    with pytest.raises(UserError, match=r"Hub cannot be reached\. Give a file .*a network"):
        token_ids(find_corpus("someone/absent"), make_tokenizer())
    assert len(asked) == 1
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
