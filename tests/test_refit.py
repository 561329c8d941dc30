"""`prune --refit`, `--method sparsegpt` and `admm`: the weights are those of a plain reference,
for every family and method.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
import torch
from refit_reference import references
from transformers import AutoModelForCausalLM, AutoTokenizer

from emp_llm import prune, verify
from emp_llm.common.errors import UserError
from emp_llm.records.run_report import RunReport

GIVEN: dict[str, Any] = {"samples": 4, "seqlen": 64, "batch_size": 3, "device_map": "cpu"}


@dataclass(frozen=True)
class Run:
    """One run: from where, to where, and its report."""

    source: Path
    out: Path
    report: RunReport

    def masks(self) -> dict[str, Any]:
        """Which weights of each target are not zero, as they are stored."""
        stored = oracle.tensors(self.out)
        return {
            layer: oracle.bits(stored[entry.tensor]) != 0
            for layer, entry in self.report.matrices.items()
        }

    def errors(self, name: str) -> float:
        """The mean of an error over the fitted targets."""
        values = [getattr(fit, name) for fit in self.report.fits.values()]
        return float(np.mean([value for value in values if value is not None]))


Pruning = Callable[..., Run]


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in float32."""
    return tiny.make_model(
        tmp_path_factory.mktemp("float32") / "llama", dtype=torch.float32, max_shard_size="150KB"
    )


@pytest.fixture(scope="module")
def pruned(
    models: Callable[[str], Path],
    float32: Path,
    text: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Pruning:
    """Prune a tiny model in-process; each combination once."""
    made = {}

    def call(family: str | Path, method: str = "wanda", **options: Any) -> Run:
        key = f"{family} {method} {sorted(options.items())}"
        if key not in made:
            source = (
                float32
                if family == "float32"
                else models(family)
                if isinstance(family, str)
                else family
            )
            out = tmp_path_factory.mktemp("pruned") / "out"
            report = prune(
                model=source,
                output=out,
                method=method,
                **{"calibration": str(text)} | GIVEN | options,
            )
            assert isinstance(report, RunReport)
            made[key] = Run(source, out, report)
        return made[key]

    return call


def tokens_of(source: Path, text: Path, samples: int = 4) -> torch.Tensor:
    """The calibration tokens: the first of the text."""
    ids = AutoTokenizer.from_pretrained(source)(text.read_text())["input_ids"]
    return torch.tensor(ids[: samples * 64]).reshape(samples, 64)


def changed_bytes_are_of_targets(before: Path, after: Path, run: Run) -> None:
    """Two checkpoints differ in the bytes of targets only."""
    targets = {entry.tensor for entry in run.report.matrices.values()}
    one = oracle.tensors(before)
    other = oracle.tensors(after)
    assert one.keys() == other.keys()
    for name in one.keys() - targets:
        assert np.array_equal(oracle.bits(one[name]), oracle.bits(other[name])), name
    for shard in before.glob("*.safetensors"):
        assert oracle.header(shard) == oracle.header(after / shard.name)
    for path in before.iterdir():
        if path.suffix != ".safetensors":
            assert path.read_bytes() == (after / path.name).read_bytes()


def check_verified(run: Run) -> None:
    """verify finds no difference, and has looked at every target."""
    findings = verify(run.out, source=str(run.source))
    assert findings.differences == []
    assert findings.checked["targets"] == len(run.report.matrices)


def loaded(folder: Path) -> Any:
    """A model loaded without a word."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def masks_are_equal(one: Run, other: Run) -> None:
    masks = one.masks()
    others = other.masks()
    assert masks.keys() == others.keys()
    for layer, mask in masks.items():
        assert np.array_equal(mask, others[layer]), layer


@pytest.mark.parametrize(
    ("targets", "weighting", "damping", "restored"),
    [
        ("mlp", "equal", 0.01, "layer"),
        ("mlp", "equal", 0.01, None),
        ("all-linear", "relative", 0.05, "block"),
    ],
)
def test_weights_are_those_of_the_reference(
    pruned: Pruning, text: Path, targets: str, weighting: Any, damping: float, restored: str | None
) -> None:
    options = {"targets": targets, "samples": 6}
    refit = {
        "refit": True,
        "refit_weighting": weighting,
        "refit_damping": damping,
        "refit_target": restored,
    }
    run = pruned("float32", **options, **refit)
    plain = pruned("float32", **options)
    wanted = references(
        run.source,
        run.out,
        tokens_of(run.source, text, 6),
        damping,
        weighting == "relative",
        restored != "layer",
    )
    assert wanted.keys() == run.report.matrices.keys() == run.report.fits.keys()
    assert len(wanted) == (6 if targets == "mlp" else 14)
    masks_are_equal(run, plain)
    changed_bytes_are_of_targets(run.source, run.out, run)
    for name, layer in wanted.items():
        assert bool((layer.written <= layer.least * 1.001 + 1e-9).all()), name
        fit = run.report.fits[name]
        assert fit.tokens == 5 * 64
        assert fit.damping == damping
        assert fit.error_before == pytest.approx(layer.before, rel=1e-3)
        assert fit.error_after == pytest.approx(layer.after, rel=1e-3)
        assert fit.held_out_before == pytest.approx(layer.held_out_before, rel=1e-3)
        assert fit.held_out_after == pytest.approx(layer.held_out_after, rel=1e-3)
        weight = torch.from_numpy(oracle.weight(run.out, f"{name}.weight").copy())
        assert float((weight - layer.exact).norm() / layer.exact.norm()) < 0.02, name
    assert sum(layer.after for layer in wanted.values()) < 0.8 * sum(
        layer.before for layer in wanted.values()
    )


FAMILIES = ("llama", "gpt2", "opt", "gemma3", "gpt_neox", "mixtral", "gpt_oss", "float16")
GPT_OSS = tiny.GLU | {
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_contract(
    pruned: Pruning, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The error is lower, the masks stay, nothing else changes, and verify finds no difference."""
    model = family
    # A mixture whose experts have fused matrices, stored transposed, and biases.
    if family == "gpt_oss":
        monkeypatch.setitem(tiny.FAMILIES, "gpt_oss", ("GptOssConfig", GPT_OSS))
        model = tiny.make_model(tmp_path / "model", "gpt_oss", max_shard_size="150KB")
    elif family == "float16":
        model = tiny.make_model(tmp_path / "model", "llama", dtype=torch.float16)
    plain = pruned(model, targets="all-linear")
    run = pruned(model, targets="all-linear", refit=True)
    masks_are_equal(run, plain)
    changed_bytes_are_of_targets(run.source, run.out, run)
    assert run.report.fits.keys() == run.report.matrices.keys()
    assert run.errors("error_after") < 0.85 * run.errors("error_before")
    for fit in run.report.fits.values():
        assert (
            fit.error_before is None
            or fit.error_after is None
            or fit.error_after <= 1.001 * fit.error_before
        )
    assert run.report.targets == plain.report.targets
    check_verified(run)
    tokens = tokens_of(run.source, text)
    with torch.no_grad():
        dense, masked, fitted = (
            loaded(each)(tokens).logits.float() for each in (run.source, plain.out, run.out)
        )
    assert float((fitted - dense).square().mean()) < float((masked - dense).square().mean())


MASKS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "emp-relative": {"method": "emp-relative", "sparsity": 0.5},
    "ria": {"method": "ria"},
    "2:4": {"method": "wanda", "pattern": "2:4"},
    "group all": {"method": "emp-magnitude", "group": "all"},
    "relative weighting": {"method": "wanda", "refit_weighting": "relative"},
    "norms of pruned blocks": {"method": "wanda", "propagate": "pruned"},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_every_method_stay(pruned: Pruning, name: str) -> None:
    options = MASKS[name]
    without = {key: value for key, value in options.items() if key != "refit_weighting"}
    plain = pruned("llama", **without)
    run = pruned("llama", refit=True, **options)
    masks_are_equal(run, plain)
    assert run.errors("error_after") < 0.9 * run.errors("error_before")
    before = oracle.tensors(plain.out)
    after = oracle.tensors(run.out)
    for entry in run.report.matrices.values():
        assert not np.array_equal(
            oracle.bits(before[entry.tensor]), oracle.bits(after[entry.tensor])
        )
    assert run.report.matrices == plain.report.matrices
    update = run.report.recipe.update
    assert update.refit.weighting == options.get("refit_weighting", "equal")
    check_verified(run)


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"sparsity": 0.3}), ("gpt2", {"pattern": "2:4"}), ("mixtral", {})],
)
def test_sparsegpt(pruned: Pruning, text: Path, family: str, options: dict[str, Any]) -> None:
    """It removes exactly as much of each matrix as asked for; a refit of its masks comes closer
    to the dense model.
    """
    run = pruned(family, "sparsegpt", **options)
    refitted = pruned(family, "sparsegpt", refit=True, **options)
    for pruned_run in (run, refitted):
        for layer, mask in pruned_run.masks().items():
            entry = pruned_run.report.matrices[layer]
            assert (
                np.count_nonzero(mask)
                == entry.kept
                == mask.size - int(options.get("sparsity", 0.5) * mask.size)
            )
            dense = oracle.tensors(pruned_run.source)[entry.tensor]
            magnitudes = np.abs(oracle.values(oracle.bits(dense), dense.dtype)).reshape(mask.shape)
            assert entry.kept_mass == pytest.approx(
                (magnitudes * mask).sum() / magnitudes.sum(), rel=1e-5
            )
            assert pruned_run.report.sizes.mask == 0  # a mask alone does not restore it
            if "pattern" in options:
                rows = mask.T if family == "gpt2" else mask
                assert (rows.reshape(len(rows), -1, 4).sum(2) == 2).all()
        assert pruned_run.errors("error_after") < pruned_run.errors("error_before")
        changed_bytes_are_of_targets(pruned_run.source, pruned_run.out, pruned_run)
        check_verified(pruned_run)
    tokens = tokens_of(run.source, text)
    with torch.no_grad():
        dense, without, after = (
            loaded(each)(tokens).logits.float() for each in (run.source, run.out, refitted.out)
        )
    assert float((after - dense).square().mean()) < float((without - dense).square().mean())


ADMM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a size": ("llama", "emp-admm", {"sparsity": 0.3}),
    "beta 1": ("qwen3_moe", "emp-admm", {"targets": "all-linear"}),
    "2:4 of Conv1D": ("gpt2", "admm", {"pattern": "2:4"}),
    "matrices": ("llama", "admm", {"group": "matrix"}),
}


@pytest.mark.parametrize("name", ADMM)
def test_admm(pruned: Pruning, name: str) -> None:
    """Every group has as many weights as magnitude pruning keeps; the error is far below that of
    its masks, also refitted.
    """
    family, method, options = ADMM[name]
    counts = pruned(family, method.replace("admm", "magnitude"), refit=True, **options)
    run = pruned(family, method, **options)
    refitted = pruned(family, method, refit=True, **options)
    for pruned_run in (run, refitted):
        assert pruned_run.report.matrices.keys() == counts.report.matrices.keys()
        others = counts.masks()
        for layer, mask in pruned_run.masks().items():
            other = others[layer]
            if family == "gpt2":
                mask = mask.T
                other = other.T
            if options.get("group") == "matrix":
                assert mask.sum() == other.sum() == pruned_run.report.matrices[layer].kept
            elif "pattern" in options:
                assert (mask.reshape(len(mask), -1, 4).sum(2) == 2).all()
            else:
                assert np.array_equal(mask.sum(-1), other.sum(-1)), layer
        assert pruned_run.report.sizes.mask == 0  # a mask alone does not restore it
        changed_bytes_are_of_targets(pruned_run.source, pruned_run.out, pruned_run)
        check_verified(pruned_run)
    # ADMM's own weights are nearly the best.
    assert refitted.errors("error_after") < 1.1 * run.errors("error_after")
    assert refitted.errors("error_after") < 0.95 * counts.errors("error_after")
    assert run.errors("error_after") < 0.9 * run.errors("error_before")


@pytest.mark.parametrize("kind", ["rows", "2:4", "matrix"])
def test_a_weight_too_many_is_found(pruned: Pruning, tmp_path: Path, kind: str) -> None:
    """verify checks the number in each group, whose masks it cannot decide again."""
    options = {
        "rows": {"sparsity": 0.3},
        "2:4": {"pattern": "2:4"},
        "matrix": {"group": "matrix"},
    }[kind]
    run = pruned("llama", "emp-admm" if kind == "rows" else "admm", **options)
    name = next(iter(run.report.matrices))
    tensor = run.report.matrices[name].tensor
    mask = run.masks()[name]
    (row, column), (other, place) = (
        np.argwhere(each)[which] for each, which in ((~mask, 0), (mask, -1))
    )

    def add(bits: Any) -> None:
        bits[row, column] = 0x3F80  # 1.0

    def move(bits: Any) -> None:
        add(bits)
        bits[other, place] = 0

    def found(edit: Callable[[Any], None]) -> list[str]:
        changed = oracle.edited_copy(run.out, tmp_path / edit.__name__, tensor, edit)
        return [
            difference
            for difference in verify(changed, source=str(run.source)).differences
            if "weights are left" in difference
        ]

    assert found(add) == [
        f"{name}: {mask.sum() + 1:,} weights are left; its recipe keeps {mask.sum():,}."
    ]
    groups = {"rows": "row", "2:4": "group"}.get(kind)
    said = f"{name}: more weights are left in 1 {groups} than the recipe keeps."
    assert found(move) == ([] if groups is None else [said])


def test_from_disk_as_from_memory(pruned: Pruning) -> None:
    """Offloaded weights and hidden states in a file give the same bytes."""
    runs = [
        pruned("llama", refit=True, targets="all-linear", **more)
        for more in ({}, {"device_map": "disk", "hidden_states": "disk"})
    ]
    assert oracle.shards(runs[0].out) == oracle.shards(runs[1].out)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_experts_with_few_tokens_keep_their_weights(pruned: Pruning, method: str) -> None:
    run = pruned(
        "mixtral",
        method,
        refit=method == "wanda",
        min_expert_tokens=1000,
        targets="all-linear",
        sparsity=0.3,
    )
    experts = {name for name in run.report.fits if ".experts." in name}
    assert len(experts) == 24
    before = oracle.tensors(run.source)
    after = oracle.tensors(run.out)
    for name, fit in run.report.fits.items():
        tensor = run.report.matrices[name].tensor
        dense = oracle.bits(before[tensor])
        written = oracle.bits(after[tensor])
        kept = written != 0
        assert np.array_equal(written[kept], dense[kept]) == (name in experts)
        assert (fit.error_after is None) == (name in experts)
        assert (fit.damping is None) == (name in experts)
        assert fit.tokens < 1000
    assert any(fit.tokens > 0 for name, fit in run.report.fits.items() if name in experts)
    (said,) = [warning for warning in run.report.warnings if "too few tokens" in warning]
    assert said.startswith(
        "24 of 32 matrices saw too few tokens for a fit and keep their weights, "
        "such as model.layers.0."
    )
    check_verified(run)


@pytest.mark.parametrize(
    "options", [{"refit": True}, {"method": "sparsegpt"}], ids=["refit", "sparsegpt"]
)
def test_inputs_that_are_zero(
    pruned: Pruning, tiny_llama: Path, tmp_path: Path, options: Any
) -> None:
    gate = "model.layers.0.mlp.gate_proj"
    down = "model.layers.0.mlp.down_proj"
    model = oracle.edited_copy(
        tiny_llama, tmp_path / "model", f"{gate}.weight", lambda bits: bits.fill(0)
    )
    run = pruned(model, **options)
    for fit in run.report.fits.values():
        assert fit.error_after is not None
        assert fit.error_before is not None
        assert 0 <= fit.error_after <= fit.error_before
    assert run.report.fits[gate].error_after == run.report.fits[down].error_after == 0
    weight = oracle.weight(run.out, f"{down}.weight")
    assert np.isfinite(weight).all()
    dense = oracle.weight(model, f"{down}.weight")
    assert np.array_equal(weight[weight != 0], dense[weight != 0])
    check_verified(run)


def test_a_raised_damping_is_said(pruned: Pruning) -> None:
    run = pruned(
        "llama", samples=2, seqlen=8, refit=True, refit_damping=1e-30, targets="all-linear"
    )
    raised = [name for name, fit in run.report.fits.items() if (fit.damping or 0) > 1e-30]
    assert raised
    (said,) = [
        warning for warning in run.report.warnings if "damping" in warning and "raised" in warning
    ]
    assert said.startswith(f"the damping of {len(raised)} of 14 matrices was raised, up to ")
    assert all(
        np.isfinite(oracle.weight(run.out, entry.tensor)).all()
        for entry in run.report.matrices.values()
    )
    assert not any("raised" in warning for warning in pruned("llama", refit=True).report.warnings)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_layers_outside_the_blocks_are_not_fitted(
    pruned: Pruning, tmp_path: Path, method: str
) -> None:
    name, values = tiny.FAMILIES["opt"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, "opt-350m", (name, values | {"word_embed_proj_dim": 18}))
        model = tiny.make_model(tmp_path / "model", "opt-350m")
    run = pruned(model, method, refit=method == "wanda", targets="all-linear", sparsity=0.3)
    outside = run.report.matrices.keys() - run.report.fits.keys()
    assert outside == {"model.decoder.project_in", "model.decoder.project_out"}
    assert any(
        warning.startswith("2 of 14 matrices lie outside the decoder blocks and were not fitted")
        for warning in run.report.warnings
    )
    before = oracle.tensors(run.source)
    after = oracle.tensors(run.out)
    for layer in outside:
        tensor = run.report.matrices[layer].tensor
        kept = oracle.bits(after[tensor]) != 0
        assert 0.6 < kept.mean() < 0.75
        assert np.array_equal(oracle.bits(after[tensor])[kept], oracle.bits(before[tensor])[kept])
    check_verified(run)


@pytest.mark.parametrize(("method", "match_by"), [("wanda", "total"), ("sparsegpt", "matrix")])
def test_as_many_weights_as_another_run(pruned: Pruning, method: str, match_by: Any) -> None:
    other = pruned("llama", "emp-wanda", beta=0.8)
    run = pruned("llama", method, refit=True, match=other.out, match_by=match_by)
    assert run.report.targets.zeros == other.report.targets.zeros
    if match_by == "matrix":
        assert {n: m.kept for n, m in run.report.matrices.items()} == {
            n: m.kept for n, m in other.report.matrices.items()
        }
    assert run.errors("error_after") < run.errors("error_before")
    check_verified(run)


def test_verify_finds_a_changed_weight(pruned: Pruning, tmp_path: Path) -> None:
    """A removed weight that is not zero, and a kept one that is not finite."""
    name = "model.layers.0.mlp.up_proj"
    run = pruned("llama", refit=True, targets="all-linear")
    kept = run.masks()[name]
    for number, (place, value) in enumerate(
        [(np.argwhere(~kept)[0], 0x3F80), (np.argwhere(kept)[0], 0x7FC0)]
    ):

        def edit(bits: Any, place: Any = place, value: int = value) -> None:
            bits[tuple(place)] = value

        changed = oracle.edited_copy(run.out, tmp_path / f"{number}", f"{name}.weight", edit)
        differences = verify(changed, source=str(run.source)).differences
        assert f"{name}: 1 weight not as the recipe decides." in differences


@pytest.mark.parametrize(
    "options",
    [{"method": "magnitude", "refit": True}, {"method": "sparsegpt"}],
    ids=["refit", "sparsegpt"],
)
def test_weights_that_are_not_finite(
    pruned: Pruning, tiny_llama: Path, tmp_path: Path, options: Any
) -> None:
    for name, match in (
        (
            "mlp.down_proj",
            r"mlp\.down_proj.* holds NaN or infinity.* is damaged; download it again",
        ),
        (
            "self_attn.q_proj",
            r"mlp\.gate_proj: the second moments of its inputs hold NaN or "
            r"infinity.*Try --dtype float32",
        ),
    ):

        def edit(bits: Any) -> None:
            bits[0, 0] = 0x7FC0

        damaged = oracle.edited_copy(
            tiny_llama, tmp_path / name, f"model.layers.0.{name}.weight", edit
        )
        with pytest.raises(UserError, match=match):
            pruned(damaged, **options)


def test_a_block_that_writes_into_the_outputs_of_its_layers(
    pruned: Pruning, tmp_path: Path
) -> None:
    """Falcon adds the attention to the output of the last layer in place. In float32, no
    conversion makes a copy of it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, "falcon", ("FalconConfig", tiny.GLU | {"bias": True}))
        narrow = tiny.make_model(tmp_path / "bfloat16", "falcon")
    wide = tmp_path / "float32"
    AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.float32).save_pretrained(wide)
    tiny.make_tokenizer().save_pretrained(wide)
    runs = [
        pruned(model, "magnitude", refit=True, targets="all-linear") for model in (narrow, wide)
    ]
    for name, fit in runs[0].report.fits.items():
        assert fit.error_before == pytest.approx(
            runs[1].report.fits[name].error_before, rel=0.05
        ), name
        assert fit.error_after == pytest.approx(runs[1].report.fits[name].error_after, rel=0.05), (
            name
        )
