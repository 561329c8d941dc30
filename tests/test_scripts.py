"""Every script imports and answers --help, the commands that scripts start parse, and small runs
of some succeed.
"""

import json
import lzma
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import bench_helpers
import bench_peers
import bench_prune
import peers
import pytest
import torch
import torch_index
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from emp_llm import prune
from emp_llm.cli import parse

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
PATHS = [*SCRIPTS.glob("*.py"), *(SCRIPTS / "paper").glob("*.py")]
NAMES = {
    path.stem: str(path.relative_to(ROOT))
    for path in sorted(PATHS)
    if "__main__" in path.read_text(encoding="utf-8")
}
PAGES = sorted([*(SCRIPTS / "results").glob("*.md"), *(ROOT / "docs" / "paper").glob("*.md")])


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    """The exit code of a script."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    try:
        import_module(name).main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("name", NAMES)
def test_every_script_answers_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The help begins with the purpose and a usage line, which names only options that exist."""
    assert run(monkeypatch, name, "--help") == 0
    usage, _, options = capsys.readouterr().out.partition("\noptions:")
    command = f"python {NAMES[name]}"
    assert f"    {command}" in usage
    named = set(re.findall(r"--[a-z-]+", usage.split(command, 1)[1].split("\n\n")[0]))
    assert named <= set(re.findall(r"--[a-z-]+", options))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_of_results_name_a_command_that_parses(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text(encoding="utf-8").replace("\n", " ")
    commands = re.findall(r"`python (scripts/(?:paper/)?(\w+)\.py)([^`]*)`", text)
    known = ("`bash scripts/on_gpu.sh", "` of commit ")
    assert commands or any(word in text for word in known) or page.parent.name == "paper"
    for path, name, arguments in commands:
        assert (ROOT / path).is_file()
        if name in NAMES:
            assert run(monkeypatch, name, "--help") == 0
            options = capsys.readouterr().out.partition("\noptions:")[2]
            assert set(re.findall(r"(?<!\w)--[a-z-]+", arguments)) <= set(
                re.findall(r"--[a-z-]+", options)
            )


def test_commands_of_benchmarks_parse() -> None:
    line = bench_prune.prune_command(Path("model"), Path("output"), "all-linear")
    parse(prune, line[line.index("prune") + 1 :], "prune")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("import_graph", ""),
        ("check_conventional", "llama qwen2"),
        ("check_towers", "llava bart"),
        ("check_masks", "--weights 100"),
        ("bench_masks", "--rows 8 --repeats 1 --threads 1"),
        ("bench_runtime", "--rows 8 --repeats 1 --threads 1 --layer-only"),
        ("bench_refit", "--shapes 24x40 --tokens 100 --repeats 1 --threads 1"),
        ("bench_attention", "--shapes 1,2,1,300,8 --repeats 1"),
        ("fuzz_checkpoint", "--executions 20"),
    ],
)
def test_small_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, arguments: str
) -> None:
    assert run(monkeypatch, name, *arguments.split()) == 0
    assert capsys.readouterr().out


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """The folder with the two files that models are trained on and judged by."""
    articles = (ROOT / "calibration" / "demo.txt").read_text(encoding="utf-8").split("\n\n")
    for name, part in (("train", articles[:400]), ("heldout", articles[400:500])):
        with lzma.open(tmp_path / f"wikipedia_{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in part)
    return tmp_path


def test_a_mixture_learns(monkeypatch: pytest.MonkeyPatch, texts: Path) -> None:
    """It learns in a few seconds, and its file has a tensor for each matrix of an expert."""
    monkeypatch.syspath_prepend(str(SCRIPTS / "demo"))
    # Which would take a minute.
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    monkeypatch.setattr(import_module("train_moe"), "WARMUP", 1)
    folder = texts / "mixture"
    size = "--hidden 64 --layers 1 --experts 8 --top 2 --intermediate 32 --batch-tokens 512"
    line = [
        "--text",
        str(texts),
        "--tokenizer",
        str(SCRIPTS / "demo" / "model"),
        "--output",
        str(folder),
        "--minutes",
        "0.05",
    ]
    assert run(monkeypatch, "train_moe", *line, *size.split(), "--learning-rate", "0.01") == 0
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert record["held_out_loss"] < math.log(model.config.vocab_size)
    (shares,) = record["shares_of_experts"]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.0.mlp.experts.7.up_proj.weight").get_shape() == [32, 64]


def test_the_witness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], texts: Path, tmp_path: Path
) -> None:
    """Trained for a few steps and pruned; a second run uses the same checkpoint, and stops when
    the time is over.
    """
    witness = import_module("train_witness")
    rows = import_module("witness_rows")
    monkeypatch.setattr(witness, "TINY", replace(witness.TINY, steps=4, samples=4, blocks=2))
    monkeypatch.setattr(
        rows,
        "ROWS",
        [row for row in rows.ROWS if "wanda --sparsity 0.5" in row and "emp" not in row][:2],
    )
    line = ["--text", str(texts), "--output", str(tmp_path / "out"), "--device", "cpu", "--tiny"]
    assert (
        run(monkeypatch, "train_witness", *line, "--table", str(tmp_path / "docs" / "witness.md"))
        == 0
    )
    page = (tmp_path / "docs" / "witness.md").read_text(encoding="utf-8")
    cells = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in page.splitlines()
        if row.startswith("| `--method")
    ]
    assert [row[0] for row in cells] == [f"`{row}`" for row in rows.ROWS]
    assert [row[1] for row in cells] == ["50.00%", "50.00%"]
    assert all(float(row[2]) > 1 and "±" in row[3] for row in cells)
    assert cells[0][2] != cells[1][2]
    assert '"steps_done": 4' in page
    weights = next((tmp_path / "out" / "model").glob("*.safetensors"))
    before = weights.stat().st_mtime_ns
    assert run(monkeypatch, "train_witness", *line, "--seconds", "0.1") == 0
    assert weights.stat().st_mtime_ns == before
    assert ("1 of 2 rows did not fit in the time") in (tmp_path / "out" / "witness.md").read_text(
        encoding="utf-8"
    )


def test_a_synthetic_checkpoint_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that benchmarks prune, with narrow layers."""
    synthetic = import_module("synthetic")
    for name, value in {
        "HIDDEN": 64,
        "INTERMEDIATE": 96,
        "VOCABULARY": 100,
        "_PIECE": 1 << 16,
    }.items():
        monkeypatch.setattr(synthetic, name, value)
    size = synthetic.make_checkpoint(tmp_path / "model", 0.001, shards=3)
    assert size >= 1_000_000
    prune(
        model=tmp_path / "model",
        output=tmp_path / "pruned",
        method="emp-magnitude",
        targets="all-linear",
    )
    assert len(list((tmp_path / "pruned").glob("*.safetensors"))) == 3


def test_the_first_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notebook-like script of docs/, as its reader runs it, from any folder."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(SCRIPTS.parent / "docs" / "first_day.py"))
    told = capsys.readouterr().out
    assert "beta 1: 36.9% of the targets" in told
    assert "differences: []" in told
    assert re.search(r"emp-column_share keeps [3456]\d\.\d%", told)
    first, again = re.search(
        r"([\d,]+) weights removed; ([\d,]+) again",
        told,
    ).groups()  # type: ignore[union-attr]
    assert first == again


def test_memory_of_a_process_that_resets_its_peak(tmp_path: Path) -> None:
    """As a run of emp-llm does at each stage."""
    reset = "open('/proc/self/clear_refs', 'w').write('5')"
    code = f"import time; x = bytes(range(256)) * 800_000; time.sleep(0.2); del x; {reset}"
    used = bench_helpers.used_by([sys.executable, "-c", code], tmp_path, tmp_path / "log")
    assert 0.2 < used["anonymous"] <= used["memory"] < 0.5
    failed = bench_helpers.used_by([sys.executable, "-c", "1 / 0"], tmp_path, tmp_path / "log")
    assert failed == {"failed": "ended with 1: ZeroDivisionError: division by zero"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "missing"], "--model: missing/config.json: no such file or folder."),
        (["--shared", "missing"], "--shared: missing: no such file or folder."),
        (["--samples", "0"], "--samples and --repeats must be at least 1."),
        (["--rows", "wand a"], "--rows: none is named so. They are: wanda 0.5 ours; "),
    ],
)
def test_bad_input_of_the_bench_of_peers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: list[str],
    said: str,
) -> None:
    given = ["--model", str(SCRIPTS / "demo" / "model"), "--shared", str(tmp_path), *words]
    assert run(monkeypatch, "bench_peers", str(tmp_path / "out"), *given) == 2
    assert said in capsys.readouterr().err


def test_a_peer_that_does_not_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its row says so, and the others run. A later bench tries it again."""
    (tmp_path / "datasets").mkdir()
    tried = []

    def without_an_index(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        tried.append(words[2])
        return subprocess.CompletedProcess(
            words, int(words[2] == "pip"), "", "\nnothing is found\n"
        )

    monkeypatch.setattr(bench_peers, "subprocess", SimpleNamespace(run=without_an_index))
    monkeypatch.setattr(bench_peers, "OURS", {"wanda": "--method magnitude --bogus"})
    given = [str(tmp_path), "--model", str(SCRIPTS / "demo" / "model"), "--shared", str(tmp_path)]
    command = [*given, "--repeats", "1", "--rows", "wanda", "--write", str(tmp_path / "page")]
    assert run(monkeypatch, "bench_peers", *command) == 0
    table = (tmp_path / "page" / "peers.md").read_text()
    assert "| llm-compressor | does not install: nothing is found" in table
    assert "| emp-llm | ended with 2: " in table
    runs = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [one["row"][2] for one in runs] == ["ours", "papers", "llm-compressor"]
    assert run(monkeypatch, "bench_peers", *command) == 0
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 6
    assert tried == ["venv", "pip"] * 2


@pytest.mark.parametrize("method", peers.UNITS)
def test_peers_that_remove_units(method: str, tmp_path: Path) -> None:
    """What does nothing goes: the smaller model has the logits of the dense one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=5, initializer_range=0.5, **sizes)
    dense = AutoModelForCausalLM.from_config(config).eval()
    dead = slice(3, 11)
    with torch.no_grad():
        for layer in dense.model.layers:
            layer.mlp.up_proj.weight[dead] = 0
            layer.mlp.down_proj.weight[:, dead] = 0
        for layer in dense.model.layers[2:4]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    dense.save_pretrained(tmp_path / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SCRIPTS / "demo" / "model" / name, tmp_path / "dense" / name)
    tokens = torch.randint(50, (4, 32))
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    of_layers = method in ("shortgpt", "replaceme")
    places = [str(tmp_path / name) for name in ("dense", "tokens.safetensors", "out")]
    peers.main(["units", method, "3" if of_layers else "16", *places])
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert len(smaller.model.layers) == smaller.config.num_hidden_layers == (3 if of_layers else 5)
    assert smaller.config.intermediate_size == (24 if of_layers else 16)
    assert smaller.config.mlp_bias is (method == "flap")
    with torch.no_grad():
        torch.testing.assert_close(
            smaller(tokens).logits, dense(tokens).logits, atol=1e-4, rtol=1e-4
        )


@torch.no_grad()
def test_the_bias_of_flap(tmp_path: Path) -> None:
    """It gives what the removed neurons give on average."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=1, initializer_range=0.5, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    mlp = model.model.layers[0].mlp
    outputs: list[torch.Tensor] = []
    mlp.register_forward_hook(lambda _, __, output: outputs.append(output))
    tokens = torch.randint(50, (1, 32))
    model(tokens)
    peers.flap(model, tokens, 10)
    model(tokens)
    before, after = (output.mean((0, 1)) for output in (outputs[0], outputs[-1]))
    torch.testing.assert_close(after, before)
    assert mlp.down_proj.bias.norm() > 0


def test_peers_take_the_methods_of_their_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["papers", "flap", "8", "model", "tokens", "out"])
    assert "papers has no method flap" in capsys.readouterr().err


def test_torch_for_cpus_is_taken_where_nobody_needs_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without a card, without settings of pip, and where the index answers."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "torch").mkdir()
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve)
    Thread(target=server.serve_forever, daemon=True).start()
    index = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(torch_index, "INDEX", index)
    monkeypatch.setattr(torch_index, "CARD", ())
    monkeypatch.setattr(sys, "platform", "linux")

    def told() -> tuple[str, str]:
        torch_index.main([])
        return capsys.readouterr()

    argument, which = told()
    assert argument == f"--extra-index-url {index}\n"
    assert "taking torch for CPUs" in which
    with monkeypatch.context() as patch:
        patch.setenv("PIP_INDEX_URL", "https://mine/simple")
        assert told() == ("", "")
    with monkeypatch.context() as patch:
        patch.setattr(torch_index, "CARD", (str(tmp_path),))
        assert told() == ("", "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert told() == ("", "")
    server.shutdown()
    server.server_close()
    assert told() == ("", ""), "it does not answer"
