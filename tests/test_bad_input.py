"""Wrong input: an error of one or two sentences and exit code 2; the input is unchanged, and no
output is left.

The patterns match the wrong option or file, and the remedy.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import oracle
import pytest
import tiny
import torch
import transformers
from conftest import Run
from safetensors.torch import load_file, save_file
from test_fp8 import make_fp8

from emp_llm import calibrate, prune
from emp_llm.calibration.activations import Activations
from emp_llm.common.errors import UserError
from emp_llm.common.paths import SINGLE_NAME

Refused = Callable[..., None]
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama, which the test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def content_of(folder: Path) -> tuple[list[Path], dict[str, tuple[str, int]]]:
    return sorted(folder.rglob("*")), oracle.digest(folder)


@pytest.fixture
def refused(model: Path, text: Path, tmp_path: Path) -> Refused:
    """Check that a command refuses some options with a matching error, and changes no files."""

    def call(match: str, /, command: Callable[..., object] = prune, **options: Any) -> None:
        common = {
            "model": str(model),
            "output": tmp_path / "out",
            "calibration": str(text),
            "samples": 4,
            "seqlen": 64,
        }
        common["device_map"] = "cpu"
        before = content_of(tmp_path)
        with pytest.raises(UserError, match=match) as caught:
            command(**common | options)
        assert content_of(tmp_path) == before
        check_sentences(str(caught.value))

    return call


def check_sentences(message: str) -> None:
    """One short line, ended by at most one full stop."""
    assert "\n" not in message.strip()
    assert len(message) < 500
    assert not message.endswith("..")


def parameters(cases: dict[str, tuple[Any, ...]]) -> list[Any]:
    """The cases as parameters of a test, with their names as ids."""
    return [pytest.param(*values, id=name.replace(" ", "-")) for name, values in cases.items()]


LONG = "9" * 5000
PRUNE = "prune model --output out --device-map cpu"
TEXT = "--calibration text.txt --samples 4 --seqlen 64"
# Command lines in a folder of a model and texts, or only options of PRUNE with TEXT, and what the
# one error says. A name in braces is a tiny model of this family.
LINES = (
    ("--beta 0", r"^--beta must be .* above 0"),
    ("--beta nan", r"^--beta must be a finite number, got nan"),
    ("--order -0.5", r"^--order must be .* >= 0"),
    ("--method wanda --sparsity 1", r"^--sparsity must be .* below 1"),
    ("--method wanda --sparsity -0.1", r"^--sparsity must be at least 0"),
    ("--method emp-magnitude --sparsity 1.0", "^--sparsity must be at least 0 and below 1"),
    ("--method emp-magnitude --sparsity 0.9999", "0.9999: every group keeps at least one weight"),
    ("--method wanda --pattern 3:2", r"^--pattern must be N:M.* N < M; got '3:2'"),
    ("--method wanda --pattern 2:4 --group matrix", r"pattern.* row.*matrix"),
    ("--method magnitude --pattern 3:5 --targets q_proj", r"32.*multiple of 5"),
    ("--pattern 2:4", "^--pattern does not go with method emp-wanda"),
    ("--method wanda --beta 1", r"--beta .*wanda.*Use --sparsity, or --method emp-wanda"),
    ("--sparsity 0.5 --beta 1", r"^--sparsity finds the beta of emp-wanda; leave out --beta"),
    ("--sparsity 0.5 --neff-dtype bfloat16", "leave out --neff-dtype"),
    ("--sparsity 0.5 --propagate pruned", "--sparsity needs the scores of all"),
    ("--match run", r"--match .*--method wanda"),
    ("--method wanda --sparsity 0.5 --pattern 2:4", r"--sparsity and --pattern"),
    ("--neff-dtype float32", r"^--neff-dtype 'float32' is not one of float64"),
    ("--neff-dtype bfloat16 --order 1", r"^--neff-dtype bfloat16.*order 2"),
    (
        "--method wanda --neff-dtype bfloat16",
        r"^--neff-dtype does not go with method wanda.*--method emp-wanda",
    ),
    ("--method wanda --match no-run", r"no-run: no emp_report.json.*--output"),
    ("--method obs", r"'obs' is not one of emp-wanda"),
    ("--method magnitude --group columns", r"group.*columns.*row"),
    ("--dtype int8", r"^--dtype 'int8'.*bfloat16"),
    ("--targets w1,w2", r"^--targets 'w1' matches no layer\..*mlp.down_proj"),
    (
        "--targets gate_porj,up_proj",
        r"^--targets 'gate_porj' matches .*\. Did you mean gate_proj\?",
    ),
    ("--targets all_linear", r"^--targets 'all_linear' matches .*\. Did you mean all-linear\?"),
    (
        "--targets all-linear --ignore k_proj,q_porj",
        r"^--ignore 'q_porj' matches no layer\. Did you mean q_proj\?",
    ),
    (
        "--targets all-linear --ignore .*q_porj",
        r"^--ignore '\.\*q_porj' matches no layer\. The layers",
    ),
    (r"--targets (\w|[\w.])*[!?]", r"matches no layer"),  # for which re takes forever
    ("--targets " + "(" * 2000, r"is not a valid regular expression \(.*recursion"),
    ("--targets (?R)", r"'\(\?R\)' is not a valid regular expression \(it is nested too deeply"),
    ("--targets (*", r"'\(\*' is not a valid regular expression"),
    ("--targets embed_tokens", r"embed_tokens: an embedding .*magnitude"),
    ("--ignore .*", r"without '.*' match nothing"),
    ("--blocks model.norm", r"^--blocks 'model.norm' is not a list of .*are: model\.layers\."),
    ("--calibration wikitext3", r"'wikitext3' is not a recipe.*wikitext2.*\.txt"),
    ("--calibration nothing.toml", r"nothing\.toml: cannot be read"),
    ("--device-map gpu", r"device-map 'gpu' is not one of auto.*cpu"),
    ("--device-map cuda:99", r"cuda:99: torch sees \d GPUs? here.* Use cpu or auto"),
    ("--device-map map.json", r"device-map map\.json: .*no such file"),
    ('--device-map {"":1', r"device-map .*JSON"),
    ("--samples 4000", r"text\.txt: [\d,]+ tokens, too short for 4000 samples x 64"),
    ("--samples 0", r"^--samples must be at least 1, got 0"),
    ("--seqlen 129", r"^--seqlen 129 .*context of 128"),
    ("--activations norms", r"norms: no such activations file.*calibrate"),
    ("--activations text.txt", r"text\.txt: not a readable activations"),
    ("--revision main", r"--revision main"),
    (
        "--refit --load-in-8bit",
        r"^--refit cannot change quantised weights; leave out --load-in-8bit",
    ),
    ("--refit --refit-damping 0", r"^--refit-damping must be above 0 and at most 1, got 0"),
    (
        "--refit-damping 0.1",
        r"^--refit-damping has no effect without --refit\. Add --refit, or leave it out",
    ),
    ("--refit --refit-weighting own", r"^--refit-weighting 'own' is not one of equal, relative"),
    (
        "--refit --method magnitude --targets lm_head",
        r"^--refit moves weights of the language model's decoder blocks, and no target is in one\. "
        r"Leave out --refit",
    ),
    (
        f"{PRUNE} --refit --method magnitude",
        r"^--refit fits weights to a calibration text, and method magnitude needs none\. Leave out "
        r"--refit, or .*--calibration",
    ),
    (
        f"{PRUNE} --refit --method wanda --activations norms",
        r"^--refit .*--activations holds only its norms\. Leave out --activations, or --refit; or "
        r".*--calibration",
    ),
    ("--method emp-sparsegpt", r"^--method emp-sparsegpt: SparseGPT .*Use --method sparsegpt"),
    ("--method emp-admm --group all", r"^--group all .*emp-admm, .*each matrix.*Leave it out"),
    ("--method sparsegpt --group matrix", r"^--group matrix .*sparsegpt.*Leave it out"),
    ("--method sparsegpt --beta 1", r"^--beta .*Use --sparsity, or --method emp-admm"),
    ("--method sparsegpt --score relative", r"^--score .*sparsegpt.*Leave it out"),
    (f"{PRUNE} --method magnitude --score relative", "and method magnitude needs none"),
    ("--method relative --score relative", "method relative has relative norms. Leave it out"),
    ("--method wanda --count-by magnitude", "with method wanda: its sparsity is fixed"),
    ("--method relative --count-by own", "--count-by does not go with method relative"),
    ("--method emp-relative --neff-dtype bfloat16", "bfloat16 is the paper's arithmetic for the"),
    (
        "--method emp-relative --propagate pruned --count-by own --sparsity 0.5",
        "--sparsity needs the scores of all",
    ),
    (
        f"{PRUNE} --method emp-relative --activations old",
        "old: it has no norms relative to the outputs, which relative scores need",
    ),
    (
        f"{PRUNE} --method wanda --score relative --activations old",
        "Run emp-llm calibrate again",
    ),
    ("--propagate both", "--propagate 'both' is not one of dense, pruned"),
    ("--propagate pruned --group all", "--group all needs the scores of all; leave one out"),
    ("--propagate pruned --execution model", "leave out --execution model"),
    (f"{PRUNE} --propagate pruned --activations norms", "leave out --activations"),
    (f"{PRUNE} --propagate pruned --method magnitude", "need activations; magnitude needs none"),
    ("--execution graph", "--execution 'graph' is not one of auto, model, blocks"),
    ("--hidden-states ram", "--hidden-states 'ram' is not one of auto, device, cpu, disk"),
    ("--method emp-wanda --shares cost", "^--shares does not go with method emp-wanda"),
    ("--method wanda --shares cost --pattern 2:4", "--shares cost goes with --sparsity, not with"),
    ("--method wanda --shares cost --group all", "--shares cost fixes the sparsity of every block"),
    ("--method wanda --shares cost --propagate pruned", "block by block, and --shares cost needs"),
    ("--method wanda --shares cost --load-in-8bit", "--shares cost masks the weights in memory"),
    ("--method wanda --shares cost --loss 2%", "leave out --shares, or --loss"),
    (
        f"{PRUNE} --method wanda --shares cost --activations norms",
        "--shares cost measures held-out text, and --activations holds only norms",
    ),
    (
        "--method wanda --shares cost --samples 307",
        "--shares cost needs at least 6 sequences of text",
    ),
    (f"{PRUNE} --calibration self:absent.jsonl", "absent.jsonl: no such file"),
    (f"{PRUNE} --calibration self:absent", "'absent' is not a recipe"),
    (
        f"{PRUNE} --calibration self:long.jsonl --seqlen 16",
        "long.jsonl: no prompt of 1 to 8 tokens",
    ),
    (f"{PRUNE} --calibration self:long.jsonl --seqlen 1", "no prompt of 1 to 0 tokens"),
    (f"{PRUNE} --calibration self --activations norms", "holds the norms of a text already"),
    (
        f"{PRUNE} --calibration ids.jsonl --samples 1 --seqlen 2",
        "is beyond the model's 256 tokens",
    ),
    (
        "prune {llama} --output out --structure experts --beta 1",
        "LlamaForCausalLM has no routed experts",
    ),
    (
        "prune model --method emp-magnitude --output / --overwrite",
        "--output /: it is the root of a",
    ),
    (
        "prune model --method emp-magnitude --output /proc --overwrite",
        "--output /proc: it is the ro",
    ),
    ("prune /nothing --output out", r"^/nothing: no such model folder"),
    ("prune nobody/nothing --output out", r"^nobody/nothing: .*cache.*cannot be reached"),
    (
        f"{PRUNE} --calibration nobody/nothing --seqlen 64",
        r"^nobody/nothing/train: the data set cannot be loaded: .*Hub cannot be reached\. "
        r"Give a file .*where there is a network",
    ),
    (
        "calibrate {gemma2} --output norms --calibration text.txt,bos=first",
        r"bos=first: bos: expected str matching regex '\^\(auto\|each\|none\)\$'",
    ),
    (
        "calibrate {gemma2} --output norms --calibration text.txt,bos=each",
        "bos=each: the tokenizer has neither a bos_token nor an eos_token",
    ),
    (
        "calibrate model --output norms --calibration wikitext2,samples=0",
        "samples must be at least 1",
    ),
    ("measure model --output m.json --criteria taylor", "'taylor' is not one of wanda, magnitude"),
    ("measure model --output m.json --criteria=", "^--criteria '': expected values"),
    ("measure model --output m.json --orders -2", "^--order must be"),
    ("measure model --output m.json --betas 0.5,much", "^--betas '0.5,much': expected numbers"),
    ("measure model --output m.json --betas 0,1", "^--beta must be a number above 0"),
    ("measure model --output m.json --targets w9", "^--targets 'w9' matches no layer"),
    ("measure model --output m.json --activations absent", "no such activations file"),
    ("evaluate model --suite demo --output o.json --batch-size ²", "--batch-size '²': expected a"),
    (f"evaluate model --suite demo --output o.json --batch-size {LONG}", "--batch-size '?9+"),
    ("verify model --revision main", "--revision is for .* dense model; name that with --source"),
    ("unpack model new --revision main", "main is of the dense model; name that with --base"),
)


@pytest.fixture(scope="module")
def inputs(
    tiny_llama: Path,
    llama_norms: Path,
    text: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(tiny_llama, folder / "model")
    shutil.copyfile(text, folder / "text.txt")
    (folder / "long.jsonl").write_text(json.dumps({"text": "The lamp is lit. " * 20}))
    (folder / "ids.jsonl").write_text('{"input_ids": [1, 999]}')
    found = Activations.load(llama_norms)
    replace(found, statistics={"norm": found.statistics["norm"]}).save(folder / "old")
    return Path(folder)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("line", "says"), LINES, ids=[line[-60:] for line, _ in LINES])
def test_lines_that_are_refused(
    command: Run, models: Callable[[str], Path], inputs: Path, line: str, says: str
) -> None:
    before = content_of(inputs)
    line = line if line[0] != "-" else f"{PRUNE} {TEXT} {line}"
    for family in re.findall(r"{(\w+)}", line):
        line = line.replace(f"{{{family}}}", str(models(family)))
    done = command(line, cwd=inputs, code=2)
    assert content_of(inputs) == before
    (error,) = re.findall(r"^error: (.*)", done.stderr, re.MULTILINE)
    assert re.search(says, error)
    assert "Traceback" not in done.stderr
    check_sentences(error)


def test_targets_in_a_list(refused: Refused) -> None:
    says = r"^--targets 'attenton' matches no layer\. Did you mean attention\?"
    refused(says, targets=["mlp", "attenton"])


def test_models_that_cannot_be_refitted(refused: Refused, tiny_llama: Path, tmp_path: Path) -> None:
    t5 = tmp_path / "t5"
    config = transformers.T5Config(
        vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(t5)
    tiny.make_tokenizer().save_pretrained(t5)
    says = (
        r"^--refit runs block by block, which an encoder-decoder model cannot\. Leave out "
        r"--refit"
    )
    refused(says, model=str(t5), method="wanda", refit=True)
    for dry_run in (True, False):
        how = {"method": "wanda", "heal": True, "dry_run": dry_run}
        refused("--heal is for decoders", model=str(t5), **how)
    fp8 = make_fp8(tiny_llama, tmp_path / "fp8")
    says = r"_proj is stored in FP8, whose scales --refit would change\. Use the unquantised model"
    refused(says, model=str(fp8), method="wanda", refit=True)
    refused(says.replace("refit", "heal"), model=str(fp8), method="wanda", heal=True)


def _json(name: str, **values: Any) -> Callable[[Path], object]:
    """Change fields of a model's JSON file."""

    def edit(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))

    return edit


def _in_index(file: str) -> Callable[[Path], object]:
    """Assign a tensor to another file in the index."""
    return lambda folder: _json(INDEX, weight_map=_weight_map(folder) | {"lm_head.weight": file})(
        folder
    )


def _weight_map(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def _only(name: str, content: bytes = b"{}") -> Callable[[Path], object]:
    """Replace the weights by another file."""

    def edit(folder: Path) -> None:
        _remove("model*")(folder)
        (folder / name).write_bytes(content)

    return edit


def _remove(pattern: str) -> Callable[[Path], object]:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def _raw(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / SHARD).write_bytes(change((folder / SHARD).read_bytes()))


def _saved_as(rename: Callable[[str], str], config: bool = True) -> Callable[[Path], object]:
    """Save the weights in one file under other names."""

    def edit(folder: Path) -> None:
        shards = sorted(folder.glob("*.safetensors"))
        weights = {name: value for shard in shards for name, value in load_file(shard).items()}
        _remove("model*" if config else "*")(folder)
        save_file({rename(name): value for name, value in weights.items()}, folder / SINGLE_NAME)

    return edit


def _in_layer(name: str) -> str:
    return name.replace("_proj.weight", "_proj.base_layer.weight")


UNMERGED = r"is of an adapter that is not merged\. Merge it .*merge_and_unload"
MODELS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "adapter around it": (UNMERGED, _saved_as(lambda n: f"base_model.model.{n}"), "wanda"),
    "adapter in it": (UNMERGED, _saved_as(_in_layer), "emp-wanda"),
    "adapter without config": (UNMERGED, _saved_as(_in_layer, config=False), "magnitude"),
    "compiled": (
        r"_orig_mod\..* is the name of a tensor in a compiled or parallel model",
        _saved_as(lambda n: f"_orig_mod.{n}"),
        "wanda",
    ),
    "empty": (
        r"model: it holds no model\.safetensors and no model\.safetensors\.index\.json",
        _remove("*"),
        "emp-wanda",
    ),
    "pickle": (
        r"pytorch_model\.bin.*Convert.*save_pretrained",
        _only("pytorch_model.bin"),
        "emp-wanda",
    ),
    "adapter": (r"PEFT adapter.*merge_and_unload", _only("adapter_config.json"), "emp-wanda"),
    "shard missing": (rf"{INDEX}: it names {SHARD}, which is missing", _remove(SHARD), "emp-wanda"),
    "index of other shards": (
        rf"{INDEX}: it places lm_head\.weight in {SHARD}",
        _in_index(SHARD),
        "emp-wanda",
    ),
    "index without a map": (
        rf"{INDEX}: its weight_map "
        r"must",
        _json(INDEX, weight_map=[1]),
        "emp-wanda",
    ),
    "index broken": (
        rf"{INDEX}: cannot be read as "
        r"JSON",
        lambda f: (f / INDEX).write_text("{"),
        "emp-wanda",
    ),
    "shard truncated": (
        rf"{SHARD}: not a complete safetensors "
        r"file.*again",
        _raw(lambda raw: raw[:-1]),
        "emp-wanda",
    ),
    "quantised": (
        r"already quantised.*original model",
        _json("config.json", quantization_config={"bits": 4}),
        "magnitude",
    ),
    "no config": (r"no config\.json", _remove("config.json"), "emp-wanda"),
    "config broken": (
        r"config\.json: cannot be read as JSON",
        lambda f: (f / "config.json").write_text("{"),
        "emp-wanda",
    ),
    "config of no class": (
        r"model: transformers .* does not know the model type 'nothing'",
        _json("config.json", model_type="nothing"),
        "wanda",
    ),
    "config of other shapes": (r"model: ", _json("config.json", intermediate_size=96), "wanda"),
}


@pytest.mark.parametrize(("match", "damage", "method"), parameters(MODELS))
def test_damaged_models(
    refused: Refused, model: Path, match: str, damage: Callable[[Path], object], method: str
) -> None:
    damage(model)
    refused(match, method=method)


@pytest.mark.parametrize(
    ("raised", "printed"),
    [
        ("--sparsity must be below 1", "sparsity must be below 1"),
        ("Say it with --map: abs", "Say it with score_map: abs"),
        (
            "--batch-size 4: lower it, or --load-in-8bit.",
            "batch_size 4: lower it, or load_in_8bit.",
        ),
        ("run-3--old/a: see https://a.b/c--d", "run-3--old/a: see https://a.b/c--d"),
        (
            "no norms (emp-llm calibrate --model m makes some); add --ignore",
            "no norms (emp-llm calibrate --model m makes some); add ignore",
        ),
        (
            "Run emp-llm calibrate --model m again, or use --method",
            "Run emp-llm calibrate --model m again, or use method",
        ),
        (
            "Try emp-llm unpack ./a.b DIR --base M. Add --map.",
            "Try emp-llm unpack ./a.b DIR --base M. Add score_map.",
        ),
        (
            "Not of emp-llm here, so --overwrite does not help",
            "Not of emp-llm here, so overwrite does not help",
        ),
    ],
)
def test_errors_in_python_name_arguments(
    monkeypatch: pytest.MonkeyPatch, raised: str, printed: str
) -> None:
    assert str(UserError(raised)) == raised
    monkeypatch.setattr(UserError, "in_shell", False)
    assert str(UserError(raised)) == printed


def test_python_and_the_shell_name_an_option_in_their_own_words(
    model: Path, tmp_path: Path
) -> None:
    program = f"import emp_llm\nemp_llm.prune({str(model)!r}, method='wanda', sparsity=1.5)"
    lines = (
        ["-c", program],
        ["-m", "emp_llm", "prune", model, "--method", "wanda", "--sparsity", "1.5"],
    )
    said = [
        subprocess.run(
            [sys.executable, *line], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for line in lines
    ]
    assert (
        said[0]
        .stderr.splitlines()[-1]
        .startswith("emp_llm.common.errors.UserError: sparsity must be at least 0")
    )
    assert said[1].stderr.startswith("error: --sparsity must be at least 0")


@pytest.mark.parametrize("place", ["folder", "file"])
def test_gguf_is_named_with_its_remedy(tmp_path: Path, command: Run, place: str) -> None:
    file = tmp_path / "tiny-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for line in (["prune --method magnitude"], ["evaluate"]):
        done = command(*line, "--model", tmp_path if place == "folder" else file, code=2)
        assert "GGUF" in done.stderr
        assert "safetensors checkpoint of the model that it was made from" in done.stderr
        check_sentences(done.stderr.removeprefix("error: ").strip())


@pytest.mark.parametrize(
    ("bad", "method"), [(0x7FC0, "magnitude"), (0xFF80, "emp-magnitude")], ids=["NaN", "infinity"]
)
@pytest.mark.parametrize("group", ["row", "matrix", "all"])
def test_weights_that_are_not_finite(
    refused: Refused, model: Path, tmp_path: Path, bad: int, group: str, method: str
) -> None:
    damaged = oracle.edited_copy(
        model, tmp_path / "damaged", f"{DOWN}.weight", lambda matrix: np.put(matrix, 7, bad)
    )
    match = rf"model-0000\d-of-00002\.safetensors: {DOWN}\.weight holds NaN or inf"
    refused(match, model=str(damaged), method=method, group=group)


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (
            DOWN,
            rf"{DOWN}\.weight "
            r"holds",
        ),
        ("model.embed_tokens", "NaN.*(damaged|weights)"),
    ],
)
def test_weights_that_are_not_finite_in_a_calibration(
    refused: Refused, model: Path, tmp_path: Path, tensor: str, match: str
) -> None:
    """The error names the damaged checkpoint, and does not suggest another dtype."""
    damaged = oracle.edited_copy(
        model, tmp_path / "damaged", f"{tensor}.weight", lambda matrix: matrix.fill(0x7FC0)
    )
    refused(match, model=str(damaged), method="emp-wanda")


def test_activations_of_another_model(
    refused: Refused, norms: Callable[[str], Path], model: Path
) -> None:
    refused(
        r"gpt2\.safetensors: .*mlp\.\w+_proj has no norms.*calibrate",
        activations=norms("gpt2"),
    )
    refused(rf"{SHARD}: this is not an activations file of emp-llm", activations=model / SHARD)


@pytest.mark.parametrize(("factor", "says"), [(float("nan"), "NaN"), (-1.0, "negative")])
def test_invalid_norms(
    refused: Refused, llama_norms: Path, tmp_path: Path, factor: float, says: str
) -> None:
    file = tmp_path / "norms.safetensors"
    valid = Activations.load(llama_norms)
    values = valid.statistics["norm"].items()
    wrong = {"norm": {name: norm * factor for name, norm in values}}
    Activations(wrong, valid.input_of, valid.about).save(file)
    refused(rf"norms\.safetensors.*{says}", activations=file)
    short = {"norm": {name: norm[:48] for name, norm in values}}
    Activations(short, valid.input_of, valid.about).save(file)
    refused(r"norms\.safetensors: .*_proj has \d+ norms for \d+ inputs", activations=file)


@pytest.mark.parametrize(
    ("report", "match"),
    [
        (None, r"run: that run had 4096 target weights, this one has \d+; .*--targets"),
        ("{", r"run/emp_report\.json: cannot be read as JSON"),
        ("{}", r"run/emp_report\.json: this is not a run file of emp-llm"),
        ('{"format": "emp-llm run 3"}', r"run/emp_report\.json: missing field source"),
        (
            '{"format": "emp-llm run 3", "targets": {"weights": 15360, "kept": "all"}}',
            r"run/emp_report\.json: targets\.kept",
        ),
    ],
    ids=["other-targets", "broken", "empty", "without-source", "text"],
)
def test_match_with_an_unsuitable_run(
    refused: Refused, model: Path, tmp_path: Path, report: str | None, match: str
) -> None:
    prune(model=model, output=tmp_path / "run", method="magnitude", targets="q_proj,o_proj")
    if report is not None:
        (tmp_path / "run" / "emp_report.json").write_text(report)
    refused(match, method="magnitude", match=tmp_path / "run")


@pytest.mark.parametrize("place", ["model", "model/inside", ".", "other/../model", "link"])
def test_output_that_is_the_input(refused: Refused, tmp_path: Path, place: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    refused(
        r"output .*the input folder, lies inside it or contains it; name",
        output=tmp_path / place,
        overwrite=True,
    )


def test_output_that_cannot_be_written(refused: Refused, tmp_path: Path) -> None:
    """Calibrate says it before the forward passes, so that no work is lost."""
    out = tmp_path / "out"
    out.mkdir()
    refused(r"out: it exists.*--overwrite", method="magnitude")
    (out / "thesis.tex").write_text("all of it")
    refused(
        r"out: it is not a model folder.*remove it yourself",
        method="magnitude",
        overwrite=True,
    )
    refused(r"thesis\.tex: it is not a model folder", output=out / "thesis.tex", overwrite=True)
    refused(
        r"thesis\.tex/out: cannot be written there",
        output=out / "thesis.tex" / "out",
        method="magnitude",
    )
    # And no parent of it is left.
    refused("too short", output=tmp_path / "new" / "deep" / "out", samples=4000)
    for overwrite in (False, True):
        refused(r"out: ", calibrate, output=out, overwrite=overwrite)
        refused(
            r"thesis\.tex/norms",
            calibrate,
            output=out / "thesis.tex" / "norms.safetensors",
            overwrite=overwrite,
        )


def test_disk_that_is_too_small(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=8 * 4096))
    for dry_run in (True, False):
        refused(r"out: it needs .*free.*--output", method="magnitude", dry_run=dry_run)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries refuse to use the network, as with HF_HUB_OFFLINE=1."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


DEEP = "[" * 100_000


CONFIGS: dict[str, dict[str, Any]] = {
    "no heads": {"num_attention_heads": 0},
    "no heads of keys": {"num_key_value_heads": 0},
    "heads that do not divide": {"num_attention_heads": 3},
    "vocabulary negative": {"vocab_size": -5},
    "width of text": {"hidden_size": "a"},
    "activation of a number": {"hidden_act": 5},
    "architectures of a number": {"architectures": 7},
    "dtype unknown": {"dtype": "float99"},
    "code of a number": {"auto_map": 5},
}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "values", [pytest.param(values, id=name.replace(" ", "-")) for name, values in CONFIGS.items()]
)
def test_malformed_configs(
    command: Run, model: Path, text: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    _json("config.json", **values)(model)
    suite = f"perplexity,file={text},seqlen=64"
    for line in (
        (
            "prune --method wanda --sparsity 0.5 --calibration",
            text,
            "--output",
            tmp_path / "out",
        ),
        ("evaluate --suite", suite, "--output", tmp_path / "out.json"),
        ("generate --prompt a",),
    ):
        done = command(*line, "--model", model, code=2)
        message = done.stderr.splitlines()[-1]
        assert re.match(
            rf"error: {model}: (transformers cannot|no tokenizer that transformers can "
            r"load) ",
            message,
        )
        check_sentences(message)


@pytest.mark.parametrize(
    "content", ["{", "[]", "3", '{"a":' + DEEP], ids=["open", "list", "number", "deep"]
)
def test_malformed_generation_config(
    command: Run, model: Path, text: Path, tmp_path: Path, content: str
) -> None:
    (model / "generation_config.json").write_text(content)
    for line in (
        ("generate --prompt a",),
        ("generate --prompt a --runtime dense",),
        (
            "evaluate --suite",
            f"perplexity,file={text},seqlen=64",
            "--output",
            tmp_path / "out.json",
        ),
    ):
        done = command(*line, "--model", model, code=2)
        message = done.stderr.splitlines()[-1]
        assert message.startswith(f"error: {model / 'generation_config.json'}: ")
        check_sentences(message)


@pytest.mark.parametrize("runtime", ["sparse", "dense"])
def test_an_end_of_text_that_is_no_number(command: Run, model: Path, runtime: str) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, "</s>"]}))
    done = command(f"generate --prompt a --model {model} --runtime", runtime, code=2)
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"error: {model / 'generation_config.json'}: eos_token_id ")
    check_sentences(message)


@pytest.mark.usefixtures("offline")
def test_files_nested_too_deeply(command: Run, model: Path, tmp_path: Path) -> None:
    toml = tmp_path / "deep.toml"
    norms = tmp_path / "norms.safetensors"
    toml.write_text(f"a = {DEEP}")
    save_file({"a": torch.ones(2)}, norms, {"emp_llm": DEEP})
    out = ("--output", tmp_path / "out")
    for named, line in {
        toml: ("prune --model", model, "--calibration", toml, *out),
        f"{toml} ": ("evaluate --model", model, "--suite", toml, *out),
        f"{toml}": ("plan", toml, *out),
        norms: ("prune --method wanda --model", model, "--activations", norms, *out),
        "--device-map": (
            "prune --method wanda --model",
            model,
            "--device-map",
            '{"a":' + DEEP,
            *out,
        ),
    }.items():
        done = command(*line, code=2)
        assert f"error: {str(named).strip()}" in done.stderr


@pytest.mark.usefixtures("offline")
def test_names_that_are_too_long(command: Run, model: Path, text: Path, tmp_path: Path) -> None:
    long = tmp_path / ("o" * 5000)
    how = ("--calibration", text, "--samples", 4, "--seqlen", 64)
    for line in (
        ("prune --method magnitude --sparsity 0.5 --model", model, "--output", long),
        ("calibrate --model", model, *how, "--output", long),
        ("bench", model, "--output", long),
        ("plan --models", model, "--output", long),
        ("measure --model", model, *how, "--output", long),
        (
            "prune --method wanda --model",
            model,
            "--activations",
            long,
            "--output",
            tmp_path / "out",
        ),
        ("verify", long),
    ):
        done = command(*line, code=2)
        assert "file name too long" in done.stderr


@pytest.mark.usefixtures("offline")
def test_names_in_files_cannot_write_to_the_terminal(
    command: Run, model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    suite = tmp_path / "suite.toml"
    name = r'"nobody/\u001b[2J\u009b2J\nerror: all is well"'
    recipe.write_text(f"dataset = {name}")
    suite.write_text(f"[perplexity]\ndataset = {name}")
    for line in (("prune --calibration", recipe), ("evaluate --suite", suite)):
        done = command(*line, "--model", model, "--output", tmp_path / "out", code=2)
        assert "the data set cannot be loaded" in done.stderr
        assert not set(done.stderr) & set("\x1b\x9b")
        assert "\nerror: all is well" not in done.stderr
