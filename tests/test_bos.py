"""The begin token: Gemma's sequences and blocks begin with it, other models' numbers stay as
they were, and records say so.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_conversations import write
from tiny import make_tokenizer
from tokenizers.processors import TemplateProcessing

from emp_llm import calibrate, prune
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.data import data_in_memory, read_text, sequences
from emp_llm.commands.evaluate import Evaluated, evaluate
from emp_llm.common.errors import UserError
from emp_llm.evaluation.evaluate import perplexity
from emp_llm.models.loading import load_model
from emp_llm.options.shared import CalibrationOptions

BOS = 1
LENGTH = 24
TEXT = "The lamp is lit, and so it stays."
GEMMA, LLAMA = (
    {"model_type": kind, "max_position_embeddings": 128} for kind in ("gemma2", "llama")
)


def tokenizer(begins: bool = False) -> Any:
    """One token per byte, and a begin token, which the tokenizer may put before every text."""
    made = make_tokenizer()
    made.bos_token = begin = made.convert_ids_to_tokens(BOS)
    if begins:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            [begin, "$A"], None, [(begin, BOS)]
        )
    return made


@pytest.fixture(autouse=True)
def _texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and a suite in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMP_LLM_CACHE", str(tmp_path / "cache"))
    Path("a.txt").write_text(TEXT * 40)
    write(tmp_path / "rows.jsonl", "text", [TEXT] * 40)
    Path("suite.toml").write_text('[perplexity]\nfile = "a.txt"\nseqlen = 64\n')


def read(calibration: str, config: Any = GEMMA, begins: bool = False, **options: Any) -> Any:
    how = CalibrationOptions(
        calibration=calibration, **({"samples": 4, "seqlen": LENGTH} | options)
    )
    return read_text(how, tokenizer(begins), config)


def test_each_sequence_of_gemma_begins_and_no_token_of_the_text_is_lost() -> None:
    plain = tokenizer()(TEXT * 40)["input_ids"]
    for begins in (False, True):
        found = read("a.txt", begins=begins).tokens
        assert found[:, 0].tolist() == [BOS] * 4
        assert found[:, 1:].flatten().tolist() == plain[: 4 * (LENGTH - 1)]
    wrapped = {"model_type": "paligemma", "text_config": {"model_type": "gemma"}}
    assert torch.equal(read("a.txt", wrapped).tokens, found)
    assert read("a.txt").corpora[0].record().bos == "each"
    as_before = read("a.txt", LLAMA, begins=True)
    assert as_before.tokens.flatten().tolist() == [BOS, *plain[: 4 * LENGTH - 1]]
    assert as_before.corpora[0].record().as_dict()["bos"] == "auto"


def test_a_field_of_the_text_chooses() -> None:
    assert torch.equal(read("a.txt,bos=each", LLAMA).tokens, read("a.txt").tokens)
    assert BOS not in read("a.txt,bos=none", begins=True).tokens
    mix = read("a.txt:1,rows.jsonl:1,bos=none", samples=None)
    assert mix.tokens[:, 0].tolist() == [BOS, mix.tokens[0, 1]]
    assert [part.bos for part in mix.corpora] == ["each", "none"]


def test_texts_in_memory_and_token_ids() -> None:
    how = CalibrationOptions(samples=4, seqlen=LENGTH)
    found = data_in_memory([TEXT] * 40, tokenizer(), how, GEMMA)
    assert torch.equal(found.tokens, read("rows.jsonl").tokens)
    assert found.corpora[0].bos == "each"
    short = CalibrationOptions(seqlen=len(TEXT) + 1)
    one = data_in_memory([TEXT], tokenizer(), short, GEMMA)
    assert one.tokens.shape == (1, len(TEXT) + 1)
    ids = torch.arange(2, 50).reshape(2, 24)
    given = data_in_memory(ids, None, CalibrationOptions(), GEMMA)
    assert torch.equal(given.tokens, ids), "token ids stay as they are given"
    assert given.corpora[0].bos == "auto"


@pytest.mark.parametrize("begin", [None, 9])
def test_sequences_hold_every_token_once(begin: int | None) -> None:
    for ids in ([3] * 10, [9, *[3] * 10], [3, 3, 3, 9, 3, 3, 3, 9, 3], [9], [3], []):
        found = list(sequences(torch.tensor(ids, dtype=torch.int64), 4, begin))
        assert all(row.numel() == 4 for row in found[:-1])
        assert begin is None or all(row[0] == begin for row in found)
        text = [token for row in found for token in row.tolist()]
        assert sum(token == 3 for token in text) == ids.count(3)
        again = sequences(torch.tensor(text, dtype=torch.int64), 4, begin)
        assert [row.tolist() for row in again] == [row.tolist() for row in found], (
            "a text that begins so gets no second token"
        )
    with pytest.raises(UserError, match="a sequence of 1 token holds the begin token alone"):
        next(sequences(torch.tensor([3]), 1, 9))


@pytest.mark.parametrize("length", [63 * 5, 63 * 5 + 1, 63 * 5 + 20, 1])
def test_the_begin_token_is_given_and_every_token_of_the_text_predicted_once(
    evaluable: Any, length: int
) -> None:
    model = load_model(evaluable("gemma2"), "cpu", "float32")
    ids = torch.randint(2, 256, (length,), generator=torch.Generator().manual_seed(0))
    found = perplexity(model, ids, 64, batch_size=2, begin=BOS)
    total = 0.0
    weight = 0
    for block in ids.split(63):
        row = torch.cat([torch.tensor([BOS]), block])[None]
        with torch.no_grad():
            logs = model(row).logits.double().log_softmax(-1)
        losses = -logs[0, :-1].gather(1, row[0, 1:, None])
        assert losses.numel() == block.numel()
        total += float(losses.mean()) * row.numel()
        weight += row.numel()
    assert found.perplexity == pytest.approx(math.exp(total / weight), rel=2e-6)
    blocks = -(-length // 63)
    assert (found.tokens, found.blocks, found.partial) == (length + blocks, blocks, False)
    if blocks > 2:
        part = perplexity(model, ids, 64, limit=2, begin=BOS)
        assert (part.tokens, part.blocks, part.partial) == (128, 2, True)
        assert part.block_losses == pytest.approx(found.block_losses[:2], rel=1e-5)


def test_evaluations_name_it_and_differ_by_it(evaluable: Any) -> None:
    def results(family: str, suite: str, **more: Any) -> Any:
        found = evaluate(str(evaluable(family)), suite=suite, device_map="cpu", **more)
        assert isinstance(found, Evaluated)
        return found

    first = results("gemma2", "suite.toml", output=Path("g.json"))
    assert first.results.made_by.text.bos == "each"
    assert "tokens (bos=each)" in first.table
    stored = json.loads(Path("g.json").read_text())
    assert stored["perplexity"]["tokens"] == 1320 + 21
    again = results("gemma2", "suite.toml,bos=each", output=Path("g.json"))
    assert again.results.perplexity == first.results.perplexity, "not measured again"
    with pytest.raises(UserError, match="it holds other results"):
        results("gemma2", "suite.toml,bos=none", output=Path("g.json"))
    llama = results("llama", "suite.toml", output=Path("l.json"))
    older = json.loads(Path("l.json").read_text())
    assert older["made_by"]["text"].pop("bos") == "auto"
    Path("l.json").write_text(json.dumps(older))
    again = results("llama", "suite.toml", output=Path("l.json"))
    assert again.results.perplexity == llama.results.perplexity, "older results are resumed"
    assert "bos=" not in llama.table
    del stored["made_by"]["text"]["bos"]  # of an older emp-llm
    Path("older.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"its results are of another suite or limit \(text"):
        results("gemma2", "suite.toml", output=Path("g.json"), baseline="older.json")


def test_runs_name_it(evaluable: Any) -> None:
    given = {"samples": 4, "seqlen": LENGTH, "device_map": "cpu"}
    report = prune(
        evaluable("gemma2"), calibration="a.txt", evaluate="suite.toml", output=Path("out"), **given
    )
    assert [text and text.bos for text in (report.calibration.text, report.evaluation.text)] == [
        "each",
        "each",
    ]
    calibrate(evaluable("gemma2"), calibration="a.txt,bos=none", output=Path("none"), **given)
    norms = Activations.load(Path("none"))
    assert norms.about.all_texts[0].bos == "none"
    assert norms.digest != Activations.load(Path("out/emp_llm/activations.safetensors")).digest


def test_the_models_own_text_begins_and_is_read_again(evaluable: Any) -> None:
    write(Path("prompts.jsonl"), "text", ["The lamp", "", "It is"])
    given = {"samples": 4, "seqlen": LENGTH, "device_map": "cpu", "overwrite": True}

    def norms(calibration: str) -> Activations:
        calibrate(evaluable("gemma2"), calibration=calibration, output=Path("norms"), **given)
        return Activations.load(Path("norms"))

    for name in ("self", "self:prompts.jsonl"):
        first = norms(name)
        rows = [
            json.loads(line)["input_ids"]
            for line in Path("norms.self.jsonl").read_text().splitlines()
        ]
        assert [(row[0], len(row)) for row in rows] == [(BOS, LENGTH)] * 4
        if name != "self":
            assert rows[0][1:9] == tokenizer()("The lamp")["input_ids"]
        Path("again.jsonl").write_text(Path("norms.self.jsonl").read_text())
        again = norms("again.jsonl")
        assert all(
            torch.equal(first.statistics["norm"][key], again.statistics["norm"][key])
            for key in first.statistics["norm"]
        )
