"""Calibration on a mix of texts: each part is what it would be alone, and the record names the
parts with their numbers.
"""

import errno
import shutil
from mmap import mmap
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import Run
from test_conversations import CHATS, TEMPLATE, with_template, write

from emp_llm.calibration import data
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.data import CalibrationText, read_text
from emp_llm.common.errors import UserError
from emp_llm.options.shared import CalibrationOptions

LENGTH = 24


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with texts of several kinds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Once more, with feeling. " * 80)
    (tmp_path / "b:c.txt").write_text("The lamp is lit. " * 80)
    write(
        tmp_path / "rows.jsonl",
        "body",
        [f"Row {i} says it is so, and so it is." for i in range(60)],
    )
    write(tmp_path / "chat.jsonl", "messages", CHATS)
    (tmp_path / "long.toml").write_text('file = "a.txt"\nseqlen = 30\nsamples = 5\n')
    (tmp_path / "shuffled.toml").write_text(
        'file = "rows.jsonl"\ncolumn = "body"\nshuffle = true\n'
    )
    return tmp_path


def tokens(calibration: str, seed: int = 0, **options: Any) -> torch.Tensor:
    chosen = CalibrationOptions(calibration=calibration, seed=seed, **{"seqlen": LENGTH} | options)
    return read_text(chosen, with_template(), {"max_position_embeddings": 128}).tokens


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    ("mix", "samples", "parts"),
    [
        ("a.txt:4", None, [("a.txt", 4)]),
        ("a.txt:2,rows.jsonl:3,column=body", None, [("a.txt", 2), ("rows.jsonl,column=body", 3)]),
        ("rows.jsonl,column=body,a.txt", 4, [("rows.jsonl,column=body", 2), ("a.txt", 2)]),
        (" a.txt , chat.jsonl,b:c.txt,", 8, [("a.txt", 4), ("chat.jsonl", 2), ("b:c.txt", 2)]),
        ("shuffled.toml:3,a.txt:1", None, [("shuffled.toml", 3), ("a.txt", 1)]),
    ],
)
def test_each_part_is_what_it_would_be_alone(
    mix: str, samples: int | None, parts: list[tuple[str, int]]
) -> None:
    for seed in (0, 1):
        alone = [tokens(name, seed, samples=count) for name, count in parts]
        assert torch.equal(tokens(mix, seed, samples=samples), torch.cat(alone))
    assert torch.equal(tokens(mix, 0, samples=samples), tokens(mix, 1, samples=samples)) == (
        "shuffled" not in mix
    )


@pytest.mark.usefixtures("texts")
def test_the_length_and_the_number_that_parts_name() -> None:
    assert tokens("long.toml,chat.jsonl", samples=6, seqlen=None).shape == (6, 30)
    assert tokens("long.toml:1,rows.jsonl:1,column=body,seqlen=30", seqlen=None).shape == (2, 30)
    with pytest.raises(
        UserError,
        match=r"differ in tokens per sequence \(long.toml has 30, chat.jsonl has 9\)",
    ):
        tokens("long.toml:1,chat.jsonl:1,seqlen=9", seqlen=None)
    with pytest.raises(
        UserError,
        match=r"a\.txt: 2,000 tokens, too short for 63 samples x 64 tokens",
    ):
        tokens("chat.jsonl:1,a.txt:63", seqlen=64)


@pytest.mark.parametrize(
    ("mix", "options", "told"),
    [
        (
            "a.txt:2,chat.jsonl:2",
            ["--samples", 4],
            "--samples 4: --calibration sets the numbers of its texts already",
        ),
        ("a.txt,chat.jsonl", ["--samples", 1], "--samples 1: --calibration names 2 texts"),
        (
            "a.txt:2,chat.jsonl",
            [],
            "'chat.jsonl' has no number of sequences, but another text has one",
        ),
        ("rows.jsonl,column=body,chat.jsonl:2", [], "such as rows.jsonl:64, or give none"),
        ("a.txt:0", [], "samples must be at least 1, got 0"),
        ("a.txt:many", [], "'a.txt:many' is not a recipe"),
        (f"a.txt:{'9' * 30}", [], "too short for 999999"),
        ("a.txt,samples=3,a.txt:2", [], "--calibration names a text twice"),
        ("rows.jsonl,column=body:3", [], "no column 'body:3'; it has body"),
        ("a.txt:2,absent.txt:2", [], "absent.txt: no such file"),
        ("C:\\texts\\a.txt:64", [], "C:\\texts\\a.txt: no such file"),
        ("a.txt,samples", [], "expected field=value"),
        ("A text, in place of a name.\n", [], "a text of 28 characters, where the name of one"),
        ("a, " * 5000, [], "In Python, give data=[text]; in a command, the path of a file"),
    ],
)
def test_wrong_mixes(
    tiny_llama: Path, texts: Path, command: Run, mix: str, options: list[Any], told: str
) -> None:
    before = sorted(texts.iterdir())
    done = command(
        f"calibrate --output norms --model {tiny_llama} --calibration",
        mix,
        *options,
        code=2,
    )
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(texts.iterdir()) == before


def test_the_norms_are_those_of_both_texts_and_the_record_says_so(
    evaluable_llama: Path, texts: Path, command: Run
) -> None:
    model = Path(shutil.copytree(evaluable_llama, texts / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)

    def norms(calibration: str, *options: Any) -> Activations:
        line = f"calibrate --model {model} --seqlen {LENGTH} --dtype float32 --output norms"
        done = command(f"{line} --overwrite --calibration", calibration, *options)
        names = [f"{text.file}" for text in Activations.load(texts / "norms").about.all_texts]
        assert f"tokens of {' and '.join(names)}" in done.stderr
        return Activations.load(texts / "norms")

    mix = norms(f"{texts / 'a.txt'}:3,chat.jsonl:2")
    parts = [norms("a.txt", "--samples", 3), norms("chat.jsonl:2")]
    for name, norm in mix.statistics["norm"].items():
        together = sum(part.statistics["norm"][name].double().square() for part in parts)
        torch.testing.assert_close(norm.double().square(), together, rtol=1e-5, atol=0)
    assert mix.about.text is None
    assert [(text.file, text.samples, text.seqlen) for text in mix.about.texts] == [
        ("a.txt", 3, LENGTH),
        ("chat.jsonl", 2, LENGTH),
    ]
    assert mix.about.tokens == 5 * LENGTH
    line = f"prune --calibration a.txt,chat.jsonl --samples 5 --model {model} --seqlen {LENGTH}"
    dry_run = command(line, "--execution", "blocks", "--dry-run")
    assert "disk while calibrating" in dry_run.stdout
    command(line, "--output", "out", "--device-map", "cpu")
    command("report out --output page --no-plots")
    assert ("a.txt, 3 x 24 tokens; chat.jsonl, 2 x 24 tokens") in (
        texts / "page" / "report.md"
    ).read_text()


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("mix", ["a.txt", "a.txt,rows.jsonl,column=body", "rows.toml", "each.toml"])
def test_a_long_text_lies_in_a_file(
    mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same tokens; a full disk is told."""
    (tmp_path / "rows.toml").write_text('file = "rows.jsonl"\ncolumn = "body"\n')
    (tmp_path / "each.toml").write_text('file = "rows.jsonl"\ncolumn = "body"\nbos = "each"\n')
    options = CalibrationOptions(calibration=mix, samples=6, seqlen=LENGTH)
    tokenizer = with_template()
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(1)

    def read() -> CalibrationText:
        return read_text(options, tokenizer, None, training=30)

    in_memory = read()
    mapped = []

    def noted(file: int, size: int) -> mmap:
        mapped.append(size)
        return mmap(file, size)

    with monkeypatch.context() as patch:
        patch.setattr(data, "_IN_MEMORY_BYTES", 100)
        patch.setattr(data, "mmap", noted)
        in_file = read()
        for one, other in ((in_memory, in_file), (in_memory.for_training, in_file.for_training)):
            assert one.signature == other.signature
            assert one.corpora == other.corpora
            assert torch.equal(one.in_turns, other.in_turns)
        assert in_memory.held_out is not None
        assert in_file.held_out is not None
        assert torch.equal(in_memory.held_out, in_file.held_out)
        assert len(in_file.for_training.tokens) == 30
        assert mapped
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            full = Mock(side_effect=OSError(code, "full"))
            patch.setattr(data.os, "posix_fallocate", full, raising=False)
            with pytest.raises(UserError, match=r"no space left for .* tokens .* Set TMPDIR"):
                read()
