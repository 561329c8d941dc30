"""Multimodal and encoder-decoder models: which layers are pruned, with which norms, and what is
refused.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mixtures
import multimodal
import numpy as np
import oracle
import pytest
import tiny
import torch
from conftest import Run
from multimodal import ENCODER_DECODER, FAMILIES, MULTIMODAL, load_own, make_multimodal
from runs import check_verified
from safetensors.torch import save_file
from tiny import weights_of
from transformers import AutoTokenizer, PreTrainedModel, ViTConfig, ViTForImageClassification

from emp_llm import evaluate, prune, prune_model, reapply_mask, recipe_of
from emp_llm.common.errors import UserError

Towers = Callable[[str], Path]
ALL_METHODS = ("emp-wanda", "emp-magnitude", "wanda", "magnitude")
# The methods share all code but the scores, so two families run all of them, and the others one of
# each kind.
PAIRS = [(name, method) for name in ("llava", "t5") for method in ALL_METHODS]
PAIRS += [
    (name, method)
    for name in FAMILIES
    if name not in ("llava", "t5")
    for method in ("emp-wanda", "magnitude")
]


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Towers:
    """Folder of a tiny model by family name; created on first use. Read-only."""
    made = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_multimodal(tmp_path_factory.mktemp("towers") / name, name)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def pruned(
    towers: Towers, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Prune a tiny model in-process, each combination once: (output folder, report)."""
    made = {}

    def call(name: str, method: str, **options: Any) -> tuple[Path, dict[str, Any]]:
        key = f"{name} {method} {options}"
        if key not in made:
            out = tmp_path_factory.mktemp("pruned") / "out"
            given = (
                {"calibration": str(text), "samples": 4, "seqlen": 32}
                if method.endswith("wanda")
                else {}
            )
            report = prune(
                model=towers(name), output=out, method=method, device_map="cpu", **given, **options
            )
            made[key] = out, report.as_dict()
        return made[key]

    return call


Pruned = Callable[..., tuple[Path, dict[str, Any]]]


def changed_names(before: Path, after: Path) -> set[str]:
    """The tensors whose bits differ; everything else must be equal."""
    old = oracle.tensors(before)
    new = oracle.tensors(after)
    assert [(name, each.dtype, each.shape, each.start) for name, each in old.items()] == [
        (name, each.dtype, each.shape, each.start) for name, each in new.items()
    ]
    for path in before.iterdir():
        if path.suffix != ".safetensors":
            assert path.read_bytes() == (after / path.name).read_bytes()
    return {
        name for name in old if not np.array_equal(oracle.bits(old[name]), oracle.bits(new[name]))
    }


def stored_names(report: dict[str, Any]) -> set[str]:
    return {entry["tensor"] for entry in report["matrices"].values()}


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_the_mlps_of_the_language_tower_have_the_masks_of_the_oracle(
    towers: Towers, pruned: Pruned, name: str, method: str
) -> None:
    family = FAMILIES[name]
    out, report = pruned(name, method)
    before = oracle.tensors(towers(name))
    after = oracle.tensors(out)
    wanted = {each for each in before if re.fullmatch(family.mlp, each)}
    assert len(wanted) == family.number
    assert changed_names(towers(name), out) == stored_names(report) == wanted
    assert list(report["targets"]["dense_towers"]) == list(family.dense)
    if name == "llama4":
        return  # several layers have one tensor
    norms = (
        oracle.load_norms(out / "emp_llm/activations.safetensors")
        if method.endswith("wanda")
        else {}
    )
    for layer, entry in report["matrices"].items():
        stored = entry["tensor"]
        scores = oracle.scores(oracle.weight(towers(name), stored), norms.get(layer))
        mask = oracle.row_masks(scores, method.startswith("emp-"))
        np.testing.assert_array_equal(
            oracle.bits(after[stored]), np.where(mask, oracle.bits(before[stored]), 0), layer
        )


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama4"])
def test_the_norms_are_those_of_plain_hooks(
    towers: Towers, pruned: Pruned, text: Path, name: str
) -> None:
    """In an encoder-decoder model, the encoder reads the text, and the decoder the same text,
    shifted by one.
    """
    out, report = pruned(name, "emp-wanda")
    model = load_own(towers(name), name)
    sums = {}
    mixtures.watch(model, list(report["matrices"]), sums)
    tokens = torch.tensor(list(text.read_bytes()[: 4 * 32])).reshape(4, 32)
    with torch.no_grad():
        for row in _ids(towers(name), tokens).split(1):
            given = {"labels": row} if name in ENCODER_DECODER else {}
            model(input_ids=row, **given)
    norms = oracle.load_norms(out / "emp_llm/activations.safetensors")
    assert sums.keys() == report["matrices"].keys()
    for layer, total in sums.items():
        np.testing.assert_allclose(norms[layer], total.sqrt().numpy(), rtol=5e-3, err_msg=layer)


def _ids(folder: Path, characters: torch.Tensor) -> torch.Tensor:
    words = ["".join(map(chr, row.tolist())) for row in characters]
    return torch.tensor(AutoTokenizer.from_pretrained(folder)(words)["input_ids"])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_result_loads_with_its_zeros(pruned: Pruned, towers: Towers, name: str) -> None:
    """transformers' own class finds every zero, under whatever name it stores the weight."""
    out, report = pruned(name, "magnitude")
    dense = load_own(towers(name), name)
    sparse = load_own(out, name)
    assert (
        removed_weights(dense, sparse)
        == report["targets"]["weights"] - report["targets"]["kept"]
        > 0
    )
    check_verified(out, towers(name))
    assert reapply_mask(dense, out) == report["targets"]["weights"] - report["targets"]["kept"]
    assert all(
        torch.equal(weight, dense.get_parameter(key)) for key, weight in sparse.named_parameters()
    )


def removed_weights(dense: PreTrainedModel, sparse: PreTrainedModel) -> int:
    return sum(
        int(((weight == 0) & (dense.get_parameter(key) != 0)).sum())
        for key, weight in sparse.named_parameters()
    )


def test_names_of_earlier_checkpoints(towers: Towers, text: Path, tmp_path: Path) -> None:
    """LLaVA as it is stored on the Hub: transformers renames every part of it while it loads."""
    older = {
        r"^vision_tower\.(?!vision_model)": "vision_tower.vision_model.",
        r"^model\.language_model\.": "language_model.model.",
    }
    source = tmp_path / "model"
    shutil.copytree(
        towers("llava"), source, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json")
    )
    tensors = weights_of(towers("llava"))
    for pattern, new in older.items():
        tensors = {re.sub(pattern, new, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    how = {
        "calibration": str(text),
        "samples": 2,
        "seqlen": 32,
        "device_map": "cpu",
    }
    prune(model=source, output=tmp_path / "out", method="wanda", **how)
    prune(model=source, output=tmp_path / "vision", method="magnitude", tower="vision")
    assert changed_names(source, tmp_path / "out") == {
        name for name in tensors if re.fullmatch(FAMILIES["llava"].mlp, name)
    }
    assert len(changed_names(source, tmp_path / "vision")) == 6
    dense = load_own(towers("llava"), "llava")
    sparse = load_own(tmp_path / "vision", "llava")
    assert removed_weights(dense, sparse) == 6 * 32 * 64 // 2


@pytest.mark.parametrize("name", MULTIMODAL)
def test_block_by_block_gives_the_same_norms(pruned: Pruned, name: str) -> None:
    files = [
        pruned(name, "emp-wanda", **how)[0] / "emp_llm/activations.safetensors"
        for how in ({}, {"execution": "blocks"})
    ]
    whole, by_blocks = (oracle.load_norms(file) for file in files)
    assert whole.keys() == by_blocks.keys()
    for layer, norm in whole.items():
        np.testing.assert_allclose(by_blocks[layer], norm, rtol=1e-5, err_msg=layer)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_vision_tower_alone(towers: Towers, pruned: Pruned, name: str) -> None:
    pattern, number = FAMILIES[name].vision or ("", 0)
    out, report = pruned(name, "magnitude", tower="vision")
    assert changed_names(towers(name), out) == {
        each for each in oracle.tensors(towers(name)) if re.fullmatch(pattern, each)
    }
    assert len(report["matrices"]) == number
    assert report["recipe"]["targets"]["tower"] == "vision"
    (share,) = report["targets"]["dense_towers"].values()
    assert 0.2 < share < 0.8
    assert {entry["role"].partition(".")[0] for entry in report["matrices"].values()} == {"vision"}
    check_verified(out, towers(name))
    assert reapply_mask(load_own(towers(name), name), out) > 0


def test_batches_with_images_reach_both_towers(towers: Towers, tmp_path: Path, text: Path) -> None:
    """The masks are those of the oracle for norms of plain hooks. The command prunes the vision
    tower by the norms, and text alone does not reach it.
    """
    random = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.full((3, 4), 260), torch.randint(256, (3, 20), generator=random)], 1)
    pixels = torch.randn(3, 3, 16, 16, generator=random)
    batches = [
        {"input_ids": row[None], "pixel_values": image[None]}
        for row, image in zip(ids, pixels, strict=True)
    ]
    model = load_own(towers("llava"), "llava").float()
    recipe = recipe_of(method="wanda", tower="all")
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".mlp." in name
    ]
    sums = {}
    handles = mixtures.watch(model, names, sums)
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in names}
    report = prune_model(model, recipe, batches)
    assert {name.split(".")[1] for name in names} == {"vision_tower", "language_model"}
    for name, weight in weights.items():
        scores = oracle.scores(weight.numpy(), sums[name].sqrt().float().numpy())
        mask = oracle.row_masks(scores, adaptive=False)
        assert (report.masks[f"{name}.weight"].numpy() == mask).mean() > 0.999, name
    report.activations.save(tmp_path / "norms")
    how = {"model": towers("llava"), "tower": "vision", "method": "wanda"}
    pruned = prune(**how, activations=tmp_path / "norms", output=tmp_path / "out")
    assert len(pruned.matrices) == 6
    with pytest.raises(UserError, match=r"vision tower.*batches with images to prune_model"):
        prune(**how, calibration=str(text), output=tmp_path / "text")
    with pytest.raises(UserError, match=r"vision tower.*batches with images to prune_model"):
        prune_model(model, recipe, ids, samples=3, seqlen=24)


def test_all_towers(towers: Towers, pruned: Pruned) -> None:
    out, report = pruned("llava", "emp-magnitude", tower="all", targets="all-linear")
    weights = [
        each for each, tensor in oracle.tensors(towers("llava")).items() if len(tensor.shape) == 2
    ]
    kept = [each for each in weights if re.search(r"embed|lm_head", each)]
    assert changed_names(towers("llava"), out) == set(weights) - set(kept)
    assert report["targets"]["dense_towers"] == {}
    roles = {entry["role"] for entry in report["matrices"].values()}
    assert {"vision.mlp.fc1", "mlp.up_proj", "model.multi_modal_projector.linear_1"} <= roles


@pytest.mark.parametrize(
    ("targets", "number"), [("attention", 8), ("all-linear", 14), (r".*(down_proj|fc1)", 2)]
)
def test_other_targets_stay_in_the_language_tower(
    pruned: Pruned, targets: str, number: int
) -> None:
    _, report = pruned("llava", "magnitude", targets=targets)
    assert len(report["matrices"]) == number
    assert all(name.startswith("model.language_model.") for name in report["matrices"])


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_roles_tell_encoder_and_decoder_apart(pruned: Pruned, name: str) -> None:
    _, report = pruned(name, "magnitude", targets="all-linear")
    places = [(entry["role"], entry["block"]) for entry in report["matrices"].values()]
    assert len(set(places)) == len(places)
    assert {role.partition(".")[0] for role, _ in places} == {"encoder", "decoder"}
    assert not any("relative_attention_bias" in role for role, _ in places), (
        "T5's position bias is a table"
    )


def test_a_dry_run_names_what_stays_dense(towers: Towers, command: Run) -> None:
    done = command("prune --method magnitude --dry-run --model", towers("llava"))
    match = re.search(
        r"stay dense, of all parameters: model\.vision_tower \((.*) %\), model\.multi_modal_pro.* "
        r"\((.*) %\)",
        done.stdout,
    )
    assert match is not None, done.stdout
    stored = oracle.tensors(towers("llava"))
    sizes = {name: int(np.prod(tensor.shape)) for name, tensor in stored.items()}
    vision = sum(size for name, size in sizes.items() if name.startswith("vision_tower"))
    assert float(match[1]) == pytest.approx(100 * vision / sum(sizes.values()), abs=0.01)
    assert "6 of 14 matrices in blocks" in done.stdout


def test_perplexity_of_the_language_tower(towers: Towers, tmp_path: Path, text: Path) -> None:
    (tmp_path / "short.txt").write_text(text.read_text()[:400])
    suite = tmp_path / "suite.toml"
    suite.write_text('[perplexity]\nfile = "short.txt"\nseqlen = 64\n')
    record = evaluate(
        towers("qwen3_vl"), suite=str(suite), device_map="cpu", output=tmp_path / "results.json"
    )
    model = load_own(towers("qwen3_vl"), "qwen3_vl")
    ids = _ids(towers("qwen3_vl"), torch.tensor([list(text.read_bytes()[:64])]))
    with torch.no_grad():
        first = float(model(input_ids=ids, labels=ids).loss)
    assert record.results.perplexity.block_losses[0] == pytest.approx(first, rel=1e-2)
    with pytest.raises(UserError, match=r"perplexity is for models that continue a text.*--tasks"):
        evaluate(towers("t5"), suite=str(suite), device_map="cpu", output=tmp_path / "t5.json")


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_encoder_decoders_in_memory(towers: Towers, pruned: Pruned, text: Path, name: str) -> None:
    """The same masks from texts and from batches of token ids as from the command."""
    out, report = pruned(name, "emp-wanda")
    ids = _ids(towers(name), torch.tensor(list(text.read_bytes()[: 4 * 32])).reshape(4, 32))
    for data in (ids, [{"input_ids": ids}]):
        model = load_own(towers(name), name)
        found = prune_model(model, data=data, samples=4, seqlen=32)
        assert found.matrices.keys() == report["matrices"].keys()
        kept = [
            (entry.kept, report["matrices"][layer]["kept"])
            for layer, entry in found.matrices.items()
        ]
        assert sum(abs(one - other) for one, other in kept) <= 0.002 * report["targets"]["weights"]
        if data is ids:
            assert all(
                torch.equal(weight, model.get_parameter(key))
                for key, weight in load_own(out, name).named_parameters()
            )


def test_tasks_of_an_encoder_decoder_model(tmp_path: Path, task_suite: Path) -> None:
    folder = make_multimodal(tmp_path / "bart", "bart")
    tokenizer = tiny.make_tokenizer()
    tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens(
        [0, 1, 2]
    )
    tokenizer.save_pretrained(folder)
    suite = tmp_path / "suite.toml"
    suite.write_text(f'[[tasks]]\nnames = ["sums"]\nfolder = "{task_suite.parent / "tasks"}"\n')
    record = evaluate(folder, suite=str(suite), device_map="cpu", output=tmp_path / "results.json")
    measured = record.results.measures.tasks["sums"]
    assert "acc" in str(measured.as_dict())


REFUSED: dict[str, tuple[str, str, str]] = {
    "vision of a text model": (
        "llama",
        "--tower vision",
        r"--tower vision: .*has no vision tower.*Leave it out",
    ),
    "by activations": (
        "llava",
        "--tower all --method wanda",
        r"vision tower.*no input activations.*magnitude",
    ),
    "two choices": (
        "llava",
        "--tower all --blocks model.language_model.layers",
        r"--blocks and --tower.*only one",
    ),
    "a layer of another tower": (
        "llava",
        "--targets fc1",
        r"'fc1' matches no layer of the language tower.*--tower all",
    ),
    "two lists": (
        "t5",
        "--method wanda --execution blocks",
        r"two lists of blocks.*--execution model",
    ),
    "propagation": (
        "bart",
        "--method wanda --propagate pruned",
        r"two lists of blocks.*--propagate dense",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(
    towers: Towers,
    models: Callable[[str], Path],
    text: Path,
    tmp_path: Path,
    command: Run,
    case: str,
) -> None:
    name, options, sentence = REFUSED[case]
    given = [] if "--method" in options else ["--method", "magnitude"]
    if "wanda" in options:
        given += ["--calibration", str(text), "--samples", "2", "--seqlen", "32"]
    folder = towers(name) if name in FAMILIES else models(name)
    done = command(
        f"prune --device-map cpu --model {folder} --output {tmp_path}/out",
        *given,
        *options.split(),
        code=2,
    )
    assert re.search(sentence, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert "--trust-remote-code" not in done.stderr
    assert not (tmp_path / "out").exists()


def edit_config(source: Path, folder: Path, **values: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_architecture_that_transformers_does_not_know(
    towers: Towers, text: Path, tmp_path: Path, command: Run
) -> None:
    """A forward pass is impossible; without one, the towers are known by their names."""
    folder = edit_config(
        towers("llava"), tmp_path / "model", model_type="future_vl", architectures=["FutureVL"]
    )
    line = (
        f"prune --samples 2 --seqlen 32 --model {folder} --output {tmp_path}/out "
        f"--calibration {text}",
    )
    done = command(*line, code=2)
    assert re.search(
        r"transformers [\d.]+ does not know the model type 'future_vl'\. Install a "
        r"version that does",
        done.stderr,
    )
    assert "--trust-remote-code" not in done.stderr
    done = command(f"prune --method magnitude --model {folder} --output {tmp_path}/out")
    assert changed_names(folder, tmp_path / "out") == {
        name for name in oracle.tensors(folder) if re.fullmatch(FAMILIES["llava"].mlp, name)
    }
    assert "stay dense, of all parameters: vision_tower" in done.stdout
    code = edit_config(
        folder, tmp_path / "code", auto_map={"AutoModelForImageTextToText": "modeling.FutureVL"}
    )
    done = command(f"prune --output {tmp_path}/other --calibration {text} --model", code, code=2)
    assert "if you trust it, add --trust-remote-code" in done.stderr


def test_a_model_without_a_language_tower(tmp_path: Path, text: Path, command: Run) -> None:
    ViTForImageClassification(ViTConfig(**multimodal.CLIP)).save_pretrained(tmp_path / "vit")
    line = f"prune --model {tmp_path}/vit --output {tmp_path}/out"
    done = command(line, "--method", "magnitude", code=2)
    assert re.search(
        r"--tower language: .*has no language tower; its layers belong to: "
        r"vision.*--tower all",
        done.stderr,
    )
    done = command(line, "--calibration", text, code=2)
    assert re.search(
        r"has no causal language model, image-text-to-text or encoder-decoder class for ViT",
        done.stderr,
    )
    done = command(line, "--method", "magnitude", "--tower", "vision")
    assert len(changed_names(tmp_path / "vit", tmp_path / "out")) == 6
