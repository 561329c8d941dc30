"""Texts as people have them: rows that hold none, damaged and packed files, any path."""

import gzip
import json
import logging
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import Run
from msgspec.structs import replace
from tiny import make_tokenizer

from emp_llm.calibration import texts
from emp_llm.calibration.data import data_in_memory, token_ids
from emp_llm.calibration.texts import calibration_corpora, find_corpus, text_rows
from emp_llm.common.errors import UserError
from emp_llm.evaluation.results import find_suite
from emp_llm.options.shared import CalibrationOptions
from emp_llm.records.base import Corpus

ROWS: list[Any] = [{"text": "one"}, {"text": None}, {"other": 1}, None, {"text": 7}, {"text": ""}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zst(raw: bytes) -> bytes:
    """Two frames."""
    half = len(raw) // 2
    return b"".join(zstandard.compress(part) for part in (raw[:half], raw[half:]))


def xz(raw: bytes) -> bytes:
    """Two streams."""
    return b"".join(lzma.compress(part) for part in (raw[:9], raw[9:]))


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": xz,
    ".zst": zst,
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("content", ["lines", "list"])
def test_rows_without_text_are_skipped_and_counted(
    tmp_path: Path, packed: str, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"rows.jsonl{packed}"
    raw = LINES if content == "lines" else json.dumps(ROWS, indent=1).encode()
    path.write_bytes(PACKED[packed](b"\xef\xbb\xbf" + raw))
    assert list(text_rows(find_corpus(str(path)))) == ["one", ""]
    assert "4 of the 6 that were read" in caplog.text
    assert "the first is row 2" in caplog.text


def test_parquet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "[rows]*.parquet"
    datasets.Dataset.from_dict({"text": ["one", None, "two"]}).to_parquet(path)
    assert list(text_rows(find_corpus(str(path)))) == ["one", "two"]
    assert "1 of the 3" in caplog.text
    shuffled = [*text_rows(replace(find_corpus(str(path)), shuffle=True), 1)]
    assert sorted(shuffled) == ["one", "two"]


@pytest.mark.parametrize("packed", PACKED)
def test_text_and_its_line_ends(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(PACKED[packed]("\ufeffä\r\nb\n".encode()))
    assert list(text_rows(find_corpus(str(path)))) == ["ä\nb\n"]


def test_a_prompt_is_a_line_whatever_it_holds(tmp_path: Path) -> None:
    lines = ["one\x0ctwo", "three\u2028four", "five\x85six", "seven\x1eeight\x0b", "nine"]
    path = tmp_path / "prompts.txt"
    path.write_bytes("\r\n".join(lines).encode())
    assert list(text_rows(find_corpus(f"self:{path}"))) == lines


def test_half_a_surrogate_pair_is_the_replacement_character(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    wanted = tokenizer("a \ufffd b")["input_ids"]
    for row in (
        '{"text": "a \\ud83d b"}',
        '{"messages": [{"role": "user", "content": "a \\udc00 b"}]}',
    ):
        path = tmp_path / "rows.jsonl"
        path.write_text(row)
        assert token_ids(find_corpus(str(path)), tokenizer).tolist() == wanted
        for rows in ([json.loads(row)], ["a \ud83d b"]):
            options = CalibrationOptions(seqlen=len(wanted))
            found = data_in_memory(rows, tokenizer, options, None)
            assert found.tokens.tolist() == [wanted]
    path.write_text('{"text": "a \\ud83d\\ude00 b"}')
    assert token_ids(find_corpus(str(path)), tokenizer).tolist() == tokenizer("a 😀 b")["input_ids"]


def test_shuffled_rows_are_in_the_order_of_the_library(tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(50)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    theirs = datasets.Dataset.from_dict({"text": rows}).shuffle(seed=3)["text"]
    assert list(text_rows(Corpus(file=str(path), shuffle=True), 3)) == list(theirs)


@pytest.mark.parametrize(
    ("name", "raw", "told"),
    [
        ("a.txt", b"", "it is empty"),
        ("a.txt", b" \n", "it is empty"),
        ("a.txt", b"good\nna\xefve\n", "line 2 is not UTF-8.*iconv"),
        ("a.txt", "naïve".encode("utf-16"), "line 1 is not UTF-8.*UTF-16"),
        ("a.jsonl", b"\n \n", "it is empty"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xef"}\n', "line 2 is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, "line 1 is nested too deeply"),
        ("a.jsonl", b"[]", "no column 'text'; its rows have no fields"),
        (
            "a.jsonl",
            b'{"text": 5}\n',
            "column 'text' holds neither text nor conversations in any of 1 row.*=NAME",
        ),
        ("a.json", b'{"text":\n5\n', "line 1 is not JSON"),
        ("a.jsonl", b"[{}]\n[{}]\n", "a list ends before line 2, where more follows.*messages"),
        ("a.jsonl", b"[{}]\n[{}\n", "a list ends before line 2, where more follows"),
        ("a.jsonl", b"[{}]\n\n\nx", "a list ends before line 4, where more follows"),
        ("a.jsonl", b"[\n{}\nx]", "line 3 is not JSON"),
        ("a.jsonl", b"[{}] [{}]", "line 1 is not JSON"),
        (
            "a.jsonl",
            b'{"messages": []}\n{"messages": []}\n',
            r"column 'messages' holds neither .* in any of 2 rows \(\[\] in row 1\)",
        ),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "damaged or incomplete"),
        ("a.jsonl.gz", b"no gzip", "damaged or incomplete"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:12] + b"xx" * 40, "damaged or incomplete"),
        ("a.jsonl.xz", lzma.compress(LINES)[:-9], "damaged or incomplete"),
        ("a.jsonl.xz", b"no xz", "damaged or incomplete"),
        ("a.jsonl.zst", zstandard.compress(LINES)[:-5], "damaged or incomplete"),
        ("a.jsonl.zst", b"no zstd", "damaged or incomplete"),
        ("a.parquet", b"PAR1 no", "damaged or incomplete"),
        ("a.parquet", b"", "damaged or incomplete"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, raw: bytes, told: str) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(UserError, match=rf"(?s){name}: .*{told}"):
        list(text_rows(find_corpus(str(path))))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([b"na\xefve"]).view(pa.string()),
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": '])),
    ],
)
def test_values_of_parquet_that_are_not_what_they_say(tmp_path: Path, values: pa.Array) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": values}), path)
    with pytest.raises(UserError, match=r"a\.parquet: it is damaged or incomplete"):
        list(text_rows(find_corpus(str(path))))


def test_an_object_of_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": "one"}, indent=1))
    assert list(text_rows(find_corpus(str(path)))) == ["one"]


def test_zstandard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"x")
    with pytest.raises(UserError, match=r"pip install zstandard"):
        list(text_rows(find_corpus(str(path))))


ODD = ["a, b.txt", "c4,d.txt", "e:64.txt", " f .txt", "g=h,samples=3.txt", "[i]*.jsonl", "ü'j$.txt"]


@pytest.mark.parametrize("name", ODD)
def test_any_path(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("one" if name.endswith("txt") else '{"text": "one"}')
    Path("other.txt").write_text("two")
    Path("suite.toml").write_text("[perplexity]\nfile = 'other.txt'\nseqlen = 8\n")
    for given in (name, str(tmp_path / name)):
        (corpus,) = calibration_corpora(f"{given}:5,seqlen=7")
        assert (corpus.file, corpus.samples, corpus.seqlen) == (given, 5, 7)
        assert list(text_rows(corpus)) == ["one"]
        mix = calibration_corpora(f"other.txt:1,{given}:2")
        assert [(each.file, each.samples) for each in mix] == [("other.txt", 1), (given, 2)]
        assert [each.file for each in calibration_corpora(f"{given},other.txt")] == [
            given,
            "other.txt",
        ]
        assert find_corpus(f"self:{given},seqlen=9").file == given
        suite = find_suite(f"suite.toml,file={given},seqlen=4")
        assert (suite.corpus.file, suite.corpus.seqlen) == (given, 4)
    Path("odd, suite.toml").write_text(Path("suite.toml").read_text())
    assert find_suite("odd, suite.toml,seqlen=4,limit=3").limit == 3


def test_a_command_says_what_it_skipped(tiny_llama: Path, tmp_path: Path, command: Run) -> None:
    rows = [{"text": f"The {number}th lamp is lit."} for number in range(60)]
    lines = "".join(json.dumps(row) + "\n" for row in [*ROWS, *rows])
    (tmp_path / "my, rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    options = ["--samples", 2, "--seqlen", 32, "--output", "norms.safetensors"]
    done = command(f"calibrate --model {tiny_llama} --calibration", "my, rows.jsonl.gz", *options)
    assert "4 of the" in done.stderr
    assert (tmp_path / "norms.safetensors").is_file()
    assert texts.ending_of("my, rows.jsonl.gz") == ".jsonl"
    assert logging.getLogger("emp_llm").level == 0
