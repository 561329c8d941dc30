"""Calibration on the model's own text: the same text whatever happens to the run, and a file
that repeats it.
"""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Run
from multimodal import make_multimodal
from stops import stopped_when
from test_conversations import TEMPLATE, write

from emp_llm import calibrate, measure, prune, sweep
from emp_llm.calibration import data
from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.files import lock
from emp_llm.common.errors import UserError
from emp_llm.common.paths import cache_folder
from emp_llm.pruning.dry_run import DryRun
from emp_llm.records.run_report import RunReport

DEMO = Path(__file__).parents[1] / "scripts" / "demo" / "model"
SIZE: dict[str, Any] = {"samples": 6, "seqlen": 48, "device_map": "cpu", "dtype": "float32"}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMP_LLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write(
        tmp_path / "prompts.jsonl", "text", ["The quiet lamp", "", "On the loud street", "It is"]
    )


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of the documents of each batch that the model writes."""
    found = []
    continued = data._continue

    def note(
        model: Any, tokenizer: Any, begun: dict[int, list[int]], *more: Any
    ) -> list[list[int]]:
        found.append(list(begun))
        return continued(model, tokenizer, begun, *more)

    monkeypatch.setattr(data, "_continue", note)
    return found


def rows(path: Path) -> list[list[int]]:
    return [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]


def written(tmp_path: Path, model: Path, text: str = "self", **more: Any) -> str:
    """Calibrate; returns the text."""
    calibrate(
        model,
        calibration=text,
        output=tmp_path / "norms.safetensors",
        overwrite=True,
        **(SIZE | more),
    )
    return (tmp_path / "norms.self.jsonl").read_text()


def test_the_text_depends_on_the_seed_alone(
    models: Callable[[str], Path],
    tmp_path: Path,
    prompts: str,
    batches: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # with learned positions
    model = models("gpt2")
    text = f"self:{prompts}"
    one = written(tmp_path, model, text, batch_size=2)
    assert batches[0] == [0, 1]
    done = len(batches)
    assert written(tmp_path, model, text, batch_size=2) == one
    assert len(batches) == done  # from the cache
    for size in (1, 3, 20):
        monkeypatch.setenv("EMP_LLM_CACHE", str(tmp_path / f"cache of {size}"))
        assert written(tmp_path, model, text, batch_size=size) == one
    assert written(tmp_path, model, text, seed=1) != one
    ids = [token for row in rows(tmp_path / "norms.self.jsonl") for token in row]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert len(ids) == 6 * 48
    assert tokenizer.decode(ids).startswith("The quiet lamp")


def test_a_killed_run_continues_its_text(
    tiny_llama: Path,
    tmp_path: Path,
    batches: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama
    whole = written(tmp_path, model, batch_size=2)
    monkeypatch.setenv("EMP_LLM_CACHE", str(tmp_path / "other"))
    batches.clear()
    with stopped_when(data, "_continue", lambda *_: len(batches) == 2):
        written(tmp_path, model, batch_size=2)
    assert written(tmp_path, model, batch_size=2) == whole
    assert [number for batch in batches for number in batch] == list(range(2 * len(batches)))


def test_a_second_run_waits_for_the_text_of_the_first(
    tiny_llama: Path, tmp_path: Path, batches: list[list[int]]
) -> None:
    """It takes what the first has written until then, whole or in part, and damage begins anew."""
    model = tiny_llama
    whole = written(tmp_path, model)
    (path,) = (cache_folder() / "self").glob("*.json")
    content = path.read_bytes()
    for left, writes in ((content, False), (b"[[1, -5]]", True)):
        path.unlink()
        batches.clear()
        with ThreadPoolExecutor(1) as threads:
            with lock(path):
                second = threads.submit(written, tmp_path, model)
                time.sleep(0.5)
                assert not second.done()
                path.write_bytes(left)
            assert second.result() == whole
        assert bool(batches) == writes


def test_every_command_writes_the_file_that_repeats_it(tiny_llama: Path, tmp_path: Path) -> None:
    model = tiny_llama
    given = SIZE | {"samples": 4}
    report = prune(model, calibration="self", output=tmp_path / "a", **given)
    (text,) = report.calibration.all_texts
    assert (text.name, text.samples, text.seqlen, report.calibration.seed) == ("self", 4, 48, 0)
    assert report.unchecked is not None
    assert "the model writes no text beyond the calibration" in report.unchecked
    file = tmp_path / "a" / "emp_llm" / "self.jsonl"
    again = prune(model, calibration=str(file), output=tmp_path / "b", **given)
    assert isinstance(again, RunReport)
    digests = [
        Activations.load(tmp_path / run / "emp_llm" / "activations.safetensors").digest
        for run in "ab"
    ]
    assert digests[0] == digests[1]
    for name in (
        "model.safetensors.index.json",
        *(path.name for path in (tmp_path / "a").glob("*.safetensors")),
    ):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()

    calibrate(model, calibration="self", output=tmp_path / "c.safetensors", **given)
    measure(model, calibration="self", output=tmp_path / "d.json", **given)
    sweep(
        model,
        calibration="self",
        betas="1",
        methods="emp-wanda",
        suite=_suite(tmp_path),
        output=tmp_path / "e",
        **given,
    )
    neurons = {"structure": "neurons", "method": "emp-wanda", "beta": 1, "width_multiple": 8}
    prune(model, calibration="self", output=tmp_path / "f", **neurons, **given)
    for other in (
        "c.self.jsonl",
        "d.self.jsonl",
        "e/self.jsonl",
        "f/emp_llm/self.jsonl",
    ):
        assert (tmp_path / other).read_bytes() == file.read_bytes()


def _suite(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("The lamp is lit. " * 20)
    (tmp_path / "suite.toml").write_text('[perplexity]\nfile = "text.txt"\nseqlen = 32\n')
    return str(tmp_path / "suite.toml")


def test_tokens_are_samples_of_the_model(tmp_path: Path) -> None:
    """The mean surprise of first tokens is their entropy."""
    written(tmp_path, DEMO, samples=1000, seqlen=2, batch_size=1000)
    pairs = torch.tensor(rows(tmp_path / "norms.self.jsonl"))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.no_grad():
        log = model(pairs[:1, :1]).logits[0, 0].log_softmax(-1)
    assert len(json.loads(written(tmp_path, DEMO, samples=1, seqlen=1))["input_ids"]) == 1
    surprise = -log[pairs[:, 1]]
    entropy = -(log.exp() * log).sum()
    assert len(pairs[:, 0].unique()) == 1
    assert abs(surprise.mean() - entropy) < 4 * surprise.std() / len(pairs) ** 0.5


def test_conversations_and_mixes(tiny_llama: Path, tmp_path: Path) -> None:
    """The model answers conversations itself, to the end of the turn; a part of a mix is what it
    is alone.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}<assistant>{% endif %}"
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_llama.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tokenizer.save_pretrained(model)
    chats = write(
        tmp_path / "c.jsonl",
        "messages",
        [[{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]],
    )
    alone = written(tmp_path, model, f"self:{chats}")
    begin = tokenizer.encode("<user> A?\n<assistant>")
    assert rows(tmp_path / "norms.self.jsonl")[0][: len(begin)] == begin
    (tmp_path / "text.txt").write_text("The lamp is lit. " * 20)
    assert written(tmp_path, model, f"{tmp_path}/text.txt:2,self:{chats}:6", samples=None) == alone
    about = Activations.load(tmp_path / "norms.safetensors").about
    assert [text.name for text in about.all_texts] == ["text.txt", "self:c.jsonl"]


def test_documents_end_at_an_end_token(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = transformers.LlamaForCausalLM.generate

    def ended(self: Any, *given: Any, **named: Any) -> Any:
        made = generate(self, *given, **named)
        made[:, 5:] = 2
        return made

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", ended)
    written(tmp_path, tiny_llama)
    ids = [token for row in rows(tmp_path / "norms.self.jsonl") for token in row]
    begin = transformers.AutoTokenizer.from_pretrained(tiny_llama).bos_token_id
    assert begin is None  # so documents begin with a random token, or with the end token
    assert [place for place, token in enumerate(ids) if token == 2][:3] == [5, 11, 17]


def test_what_cannot_write_its_text(models: Callable[[str], Path], tmp_path: Path) -> None:
    t5 = make_multimodal(tmp_path / "t5", "t5")
    with pytest.raises(
        UserError, match="--calibration self is for decoders, and this model has an encoder too"
    ):
        prune(t5, calibration="self", output=tmp_path / "out", **SIZE)


@pytest.mark.parametrize("more", [{}, {"structure": "neurons", "method": "emp-wanda"}])
def test_a_dry_run_announces_the_text(
    tiny_llama: Path, tmp_path: Path, batches: list[list[int]], more: dict[str, Any]
) -> None:
    plan = prune(tiny_llama, calibration="self:c4", output=tmp_path / "out", dry_run=True, **more)
    assert isinstance(plan, DryRun)
    assert "--calibration self:c4: the dense model first writes the text" in plan.notes
    assert not batches


def test_logits_that_are_not_finite(tiny_llama: Path, tmp_path: Path, command: Run) -> None:
    """No token is chosen by them, and no text of them is kept in the cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        for layer in (model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj):
            layer.weight.mul_(1e30)
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    model.save_pretrained(folder)
    kept = [*(cache_folder() / "self").glob("*")]
    line = ["--calibration", "self", "--samples", 2, "--seqlen", 16, "--output", "norms"]
    told = "logits are not finite"
    assert told in command(f"calibrate --model {folder}", *line, code=2).stderr
    assert kept == [*(cache_folder() / "self").glob("*")]
    line = [f"generate --max-new-tokens 3 {folder} --prompt", "The lamp"]
    for how in ("0", "0.8"):
        assert told in command(*line, "--temperature", how, code=2).stderr


@pytest.mark.parametrize("held", [b"", b"{", b"{}", b'[["a"]]', b"[1]", b"[[NaN]]", b"[[1e999]]"])
def test_a_damaged_file_of_the_cache_is_written_again(tmp_path: Path, held: bytes) -> None:
    path = tmp_path / "text.json"
    path.write_bytes(b"[[1, 2], [3]]")
    assert data._documents_in(path) == [[1, 2], [3]]
    path.write_bytes(held)
    assert data._documents_in(path) == data._documents_in(tmp_path / "none") == []
