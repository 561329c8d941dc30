"""One contract for every model family and method, checked against an oracle that shares no code
with the package.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import oracle
import pytest
import tiny
import torch
from oracle import Array
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from emp_llm import Recipe, calibrate, prune

METHODS = ("emp-wanda", "emp-magnitude", "wanda", "magnitude")
GLU = r"model\.layers\.[01]\.mlp\.(gate|up|down|gate_up)_proj\.weight"
# What "mlp" has to mean, written down by hand: the stored names of each family, and how many
# matrices these are.
MLP = dict.fromkeys(tiny.FAMILIES, (GLU, 6)) | {
    "phi3": (GLU, 4),
    "gpt2": (r"(transformer\.)?h\.[01]\.mlp\.c_(fc|proj)\.weight", 4),
    "opt": (r"model\.decoder\.layers\.[01]\.fc[12]\.weight", 4),
    "mixtral": (r"model\.layers\.[01]\.block_sparse_moe\.experts\.[0-3]\.w[123]\.weight", 24),
    "qwen3_moe": (r"model\.layers\.[01]\.mlp\.experts\.[0-3]\.(gate|up|down)_proj\.weight", 24),
    "gpt_neox": (r"gpt_neox\.layers\.[01]\.mlp\.dense_(h_to_4h|4h_to_h)\.weight", 4),
}
MORE = ("emp-relative", "relative", "emp-ria", "ria")
PAIRS = [(family, method) for family in MLP for method in METHODS]
PAIRS += [(family, method) for family in ("llama", "phi3", "gpt2", "mixtral") for method in MORE]
every_pair = pytest.mark.parametrize(("family", "method"), PAIRS)


@dataclass(frozen=True, eq=False)
class Pruned:
    """One run: where from, where to, and what it said."""

    source: Path
    out: Path
    report: dict[str, Any]

    @property
    def method(self) -> str:
        return Recipe.of_dict(self.report["recipe"]).method

    @property
    def transposed(self) -> bool:
        return json.loads((self.source / "config.json").read_text())["model_type"] == "gpt2"

    def matrices(self) -> dict[str, str]:
        """Layer name -> name of the stored tensor, in the report's order."""
        return {layer: entry["tensor"] for layer, entry in self.report["matrices"].items()}

    @cache  # noqa: B019
    def scores(self, layer: str) -> Array:
        """The oracle's scores of a layer from the run's own norms, one output to a row."""
        matrix = self.magnitudes(layer)
        method = self.method
        if method.endswith("magnitude"):
            return matrix
        norm = norms_of(
            self.out / "emp_llm" / "activations.safetensors", method.endswith("relative")
        )[layer]
        return oracle.ria(matrix, norm) if method.endswith("ria") else oracle.scores(matrix, norm)

    def magnitudes(self, layer: str) -> Array:
        """|W| of a layer, one output to a row."""
        return oracle.scores(oracle.weight(self.source, self.matrices()[layer], self.transposed))

    def counting(self, layer: str) -> Array:
        """The scores of a layer whose effective number sets the counts."""
        return self.magnitudes(layer) if self.method == "emp-relative" else self.scores(layer)

    def mask(self, layer: str) -> Array:
        """The oracle's mask of a layer at the method's defaults."""
        adaptive = self.method.startswith("emp-")
        return oracle.row_masks(self.scores(layer), adaptive, counting=self.counting(layer))

    def kept(self, layer: str) -> Array:
        """Which weights of a layer are not zero in the output, one output to a row."""
        return oracle.weight(self.out, self.matrices()[layer], self.transposed) != 0


norms_of = cache(oracle.load_norms)
Pruning = Callable[..., Pruned]


@pytest.fixture(scope="module")
def pruned(
    models: Callable[[str], Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Pruning:
    """Prune a tiny model in-process; each combination once."""
    made = {}

    def call(family: str | Path, method: str, **options: Any) -> Pruned:
        key = f"{family} {method} {options}"
        if key not in made:
            source = models(family) if isinstance(family, str) else family
            out = tmp_path_factory.mktemp("pruned") / "out"
            common = {
                "calibration": str(text),
                "samples": 4,
                "seqlen": 64,
                "batch_size": 3,
                "device_map": "cpu",
            } | options
            report = prune(model=source, output=out, method=method, **common)
            made[key] = Pruned(source, out, report.as_dict())
        return made[key]

    return call


def calibration_tokens(source: Path, text: Path) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(source)(text.read_text())["input_ids"]
    return torch.tensor(ids[: 4 * 64]).reshape(4, 64)


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def check_bits(run: Pruned, masks: dict[str, Array]) -> None:
    """Targets hold their own bits where a mask keeps them and +0 elsewhere."""
    before = oracle.tensors(run.source)
    after = oracle.tensors(run.out)
    assert run.matrices().keys() == masks.keys()
    for layer, name in run.matrices().items():
        mask = masks[layer].T if run.transposed else masks[layer]
        np.testing.assert_array_equal(
            oracle.bits(after[name]), np.where(mask, oracle.bits(before[name]), 0), err_msg=layer
        )


@every_pair
def test_only_targets_change_by_the_masks_of_the_oracle(
    pruned: Pruning, family: str, method: str
) -> None:
    run = pruned(family, method)
    pattern, number = MLP[family]
    stored = oracle.tensors(run.source)
    targets = {name for name in stored if re.fullmatch(pattern, name)}
    assert len(targets) == number
    assert set(run.matrices().values()) == targets
    ours = {"emp_report.json", "emp_manifest.json"}
    ours |= set() if method.endswith("magnitude") else {"emp_llm/activations.safetensors"}
    assert oracle.digest(run.out).keys() == oracle.digest(run.source).keys() | ours
    for path in sorted(run.source.iterdir()):
        before = bytearray(path.read_bytes())
        after = bytearray((run.out / path.name).read_bytes())
        assert len(before) == len(after)
        for tensor in (stored[name] for name in targets if stored[name].shard == path):
            before[tensor.start : tensor.end] = after[tensor.start : tensor.end] = bytes(
                tensor.end - tensor.start
            )
        assert before == after, path.name
    check_bits(run, {layer: run.mask(layer) for layer in run.matrices()})


@pytest.mark.parametrize("family", MLP)
def test_norms_are_those_of_plain_hooks(pruned: Pruning, text: Path, family: str) -> None:
    run = pruned(family, "emp-relative")
    model = mixtures.load(run.source)
    sums = {}
    relative = {}
    mixtures.watch(model, list(run.matrices()), sums, relative)
    with torch.no_grad():
        # One by one: the sums may not depend on the batch.
        for sequence in calibration_tokens(run.source, text).split(1):
            model(sequence)
    file = run.out / "emp_llm" / "activations.safetensors"
    for norms, wanted in (
        (norms_of(file), sums),
        (oracle.load_norms(file, relative=True), relative),
    ):
        for layer, total in wanted.items():
            # The batch size moves single bfloat16 activations by their last bit, 2^-8, and their
            # sum over 256 tokens by less.
            np.testing.assert_allclose(norms[layer], total.sqrt().numpy(), rtol=1e-3, err_msg=layer)
        assert wanted.keys() == run.matrices().keys()


@pytest.mark.parametrize("family", MLP)
def test_loads_and_runs_as_masked_in_memory(pruned: Pruning, text: Path, family: str) -> None:
    run = pruned(family, "emp-wanda")
    dense = load(run.source)
    model = load(run.out)
    for layer in run.matrices():
        mask = torch.from_numpy(run.mask(layer))
        mixtures.weight(dense, layer, run.transposed).masked_fill_(~mask, 0)
    tokens = calibration_tokens(run.source, text)[:1]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, dense(tokens).logits)


@every_pair
def test_report_agrees_with_the_files(pruned: Pruning, family: str, method: str) -> None:
    run = pruned(family, method)
    assert json.loads((run.out / "emp_report.json").read_text()) == run.report
    kept = zeros = weights = 0
    for layer, entry in run.report["matrices"].items():
        mask = run.mask(layer)
        scores = run.scores(layer)
        assert entry["kept"] == mask.sum(), layer
        assert (entry["rows"], entry["columns"]) == mask.shape
        assert entry["n_eff_mean"] == pytest.approx(
            np.mean([oracle.effective(row) for row in run.counting(layer)])
        )
        assert entry["s_eff_mean"] == pytest.approx(np.mean([oracle.mass(row) for row in scores]))
        if method == "emp-relative":  # N_eff and s_eff are of different scores
            assert entry["s_eff_bound_mean"] is entry["least_margin_over_bound"] is None
        else:
            assert entry["s_eff_bound_mean"] == pytest.approx(
                np.mean([oracle.mass_bound(row) for row in scores])
            )
            assert entry["least_margin_over_bound"] >= 0
        assert entry["kept_mass"] == pytest.approx((scores * mask).sum() / scores.sum())
        kept = kept + int(mask.sum())
        weights = weights + mask.size
        zeros = zeros + int((~run.kept(layer)).sum())
    targets = run.report["targets"]
    parameters = sum(int(np.prod(tensor.shape)) for tensor in oracle.tensors(run.source).values())
    assert (targets["weights"], targets["kept"], targets["zeros"], targets["parameters"]) == (
        weights,
        kept,
        zeros,
        parameters,
    )
    assert targets["sparsity_of_targets"] == pytest.approx(1 - kept / weights)
    assert targets["sparsity_of_all_parameters"] == pytest.approx((weights - kept) / parameters)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_tied_embeddings_stay_tied_and_dense(pruned: Pruning, family: str) -> None:
    run = pruned(family, "magnitude", targets="all-linear")
    dense = load(run.source)
    model = load(run.out)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, dense.get_input_embeddings().weight)


@pytest.mark.parametrize("method", ["emp-magnitude", "magnitude", "wanda"])
def test_rows_of_zeros_and_of_ties(
    tiny_llama: Path, pruned: Pruning, tmp_path: Path, method: str
) -> None:
    """A row of zeros keeps all its weights, negative zeros too; uniform magnitudes give N_eff =
    N; ties go to the left.
    """
    source = oracle.edited_copy(
        tiny_llama, tmp_path / "planted", "model.layers.0.mlp.up_proj.weight", _plant
    )
    run = pruned(source, method)
    check_bits(run, {name: run.mask(name) for name in run.matrices()})
    if method == "emp-magnitude":
        assert run.report["matrices"]["model.layers.0.mlp.up_proj"]["kept_fraction"]["max"] == 1.0


def _plant(matrix: Array) -> None:
    matrix[0] = [0x8000, 0] * 16  # -0.0 and 0.0
    matrix[1] = [0x3DCD, 0xBDCD] * 16  # 0.1 and -0.1: neither a power of two
    # 1, 1/4, 1/4, -1/4: the cut falls among equals.
    matrix[2] = [0x3F80, 0x3E80, 0x3E80, 0xBE80] * 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["emp-wanda", "magnitude"])
def test_other_dtypes(pruned: Pruning, tmp_path: Path, dtype: torch.dtype, method: str) -> None:
    run = pruned(tiny.make_model(tmp_path / "model", "llama", dtype), method)
    # Scores of float64 weights are not rounded to float32.
    if dtype == torch.float64 and method.endswith("wanda"):
        norms = norms_of(run.out / "emp_llm" / "activations.safetensors")
        scores = {
            name: np.abs(oracle.weight(run.source, f"{name}.weight")) * norms[name]
            for name in run.matrices()
        }
        masks = {name: oracle.row_masks(matrix, True) for name, matrix in scores.items()}
    else:
        masks = {name: run.mask(name) for name in run.matrices()}
    check_bits(run, masks)


@pytest.mark.parametrize("group", ["row", "matrix", "all"])
def test_match_removes_the_same_total(pruned: Pruning, group: str) -> None:
    adaptive = pruned("llama", "emp-wanda")
    run = pruned("llama", "wanda", match=adaptive.out, group=group)
    assert run.report["targets"]["kept"] == adaptive.report["targets"]["kept"]
    assert (
        sum(run.kept(layer).sum() for layer in run.matrices()) == adaptive.report["targets"]["kept"]
    )
    share = run.report["targets"]["kept"] / run.report["targets"]["weights"]
    for kept in (run.kept(layer) for layer in run.matrices() if group == "row"):
        assert (np.abs(kept.sum(1) - share * kept.shape[1]) < 1).all(), (
            "every row loses the same share, rounded down or up"
        )


def reverse_shards(folder: Path) -> None:
    """Give the first shard the last one's name and so on."""
    shards = sorted(folder.glob("*.safetensors"))
    content = {
        shard.name: other.read_bytes()
        for shard, other in zip(shards, reversed(shards), strict=True)
    }
    renamed = {
        shard.name: other.name for shard, other in zip(shards, reversed(shards), strict=True)
    }
    for name, raw in content.items():
        (folder / name).write_bytes(raw)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {tensor: renamed[name] for tensor, name in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "emp-wanda"), ("gpt2", "emp-magnitude"), ("llama", "magnitude")],
)
@pytest.mark.parametrize("group", ["matrix", "all"])
def test_larger_groups(
    pruned: Pruning, tmp_path: Path, family: str, method: str, group: str
) -> None:
    """Ties are spent in the order of the report, also where the shards hold the targets in
    another.
    """
    source = tiny.make_model(tmp_path / "model", family, max_shard_size="24KB")
    reverse_shards(source)
    run = pruned(source, method, group=group)
    stored = oracle.tensors(run.source)
    places = [(stored[name].shard.name, stored[name].start) for name in run.matrices().values()]
    assert len({shard for shard, _ in places}) > 1
    assert places != sorted(places)
    scores = {layer: run.scores(layer) for layer in run.matrices()}
    groups = [list(scores)] if group == "all" else [[layer] for layer in scores]
    masks = {}
    for layers in groups:
        flat = np.concatenate([scores[layer].reshape(-1) for layer in layers])
        mask = oracle.keep(
            flat, oracle.count(flat) if method.startswith("emp-") else flat.size - flat.size // 2
        )
        for layer in layers:
            size = scores[layer].size
            masks[layer], mask = mask[:size].reshape(scores[layer].shape), mask[size:]
    check_bits(run, masks)


@pytest.mark.parametrize(("family", "method"), [("llama", "wanda"), ("gpt2", "magnitude")])
def test_two_of_four(pruned: Pruning, family: str, method: str) -> None:
    run = pruned(family, method, pattern="2:4")
    scores = {layer: run.scores(layer) for layer in run.matrices()}
    check_bits(
        run,
        {
            name: oracle.row_masks(all_.reshape(-1, 4), False).reshape(all_.shape)
            for name, all_ in scores.items()
        },
    )


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.01}, {"beta": 0.7}, {"beta": 1.3}, {"beta": 100.0}, {"order": 0.5}, {"order": 1.0}],
    ids=str,
)
def test_counts_follow_beta_and_the_order(pruned: Pruning, options: dict[str, float]) -> None:
    run = pruned("llama", "emp-magnitude", **options)
    for layer in run.matrices():
        assert list(run.kept(layer).sum(1)) == [
            oracle.count(row, **options) for row in run.scores(layer)
        ]


@pytest.mark.parametrize(
    ("targets", "ignore", "expected"),
    [
        (["down_proj", "q_proj"], None, r"model\.layers\.\d\.(mlp\.down|self_attn\.q)_proj"),
        ("down_proj, q_proj", None, r"model\.layers\.\d\.(mlp\.down|self_attn\.q)_proj"),
        ("1.mlp.up_proj", None, r"model\.layers\.1\.mlp\.up_proj"),
        (r"model\.layers\.0\..*_proj", None, r"model\.layers\.0\..*_proj"),
        ("mlp", "down_proj", r"model\.layers\.\d\.mlp\.(gate|up)_proj"),
        ("mlp", r".*\.0\..*", r"model\.layers\.1\.mlp\..*"),
        ("attention", None, r"model\.layers\.\d\.self_attn\.[qkvo]_proj"),
        ("all-linear", None, r"model\.layers\..*_proj"),
        (".*", None, r"model\.layers\..*_proj"),
        ("lm_head", None, "lm_head"),
        ("embed_tokens", None, r"model\.embed_tokens"),
        (r".*(lm_head|up_proj)", None, r"lm_head|model\.layers\.\d\.mlp\.up_proj"),
    ],
)
def test_targets(
    pruned: Pruning, targets: str | list[str], ignore: str | None, expected: str
) -> None:
    run = pruned("llama", "magnitude", targets=targets, ignore=ignore)
    layers = (
        name.removesuffix(".weight")
        for name in oracle.tensors(run.source)
        if name.endswith(".weight")
    )
    assert set(run.matrices()) == {layer for layer in layers if re.fullmatch(expected, layer)}
    check_bits(run, {layer: run.mask(layer) for layer in run.matrices()})


def test_both_names_of_a_tied_weight(pruned: Pruning) -> None:
    """They are one tensor: pruned once, and counted once."""
    run = pruned("llama-tied", "magnitude", targets="lm_head,embed_tokens")
    assert run.report["targets"]["weights"] == 256 * 32
    assert run.report["targets"]["zeros"] == 256 * 16


def test_activations_file_serves_as_calibrating_inline(
    pruned: Pruning, text: Path, tmp_path: Path
) -> None:
    inline = pruned("llama", "emp-wanda")
    file = tmp_path / "norms.safetensors"
    options = {
        "calibration": str(text),
        "samples": 4,
        "seqlen": 64,
        "batch_size": 3,
        "device_map": "cpu",
    }
    calibrate(model=str(inline.source), output=file, **options)
    run = pruned("llama", "emp-wanda", activations=file)
    assert oracle.shards(inline.out) == oracle.shards(run.out)
