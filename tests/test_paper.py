"""The scripts of the paper's tables, on small data sets made here; and on the real ones where
they are.
"""

import gzip
import json
import re
import shlex
import struct
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import beta
import board
import cifar_weights
import fc
import gpt2_heads
import kan
import loss_change
import numpy as np
import pytest
import tiny
import torch
from networks import VGG16, CifarResNet, fc_network, given_resnet, new_network
from PIL import Image
from safetensors.torch import load_file, save_file
from test_scripts import NAMES
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from training import evaluate_on
from vision_data import ImageData, image_data
from weight_pruning import (
    CRITERIA,
    effective,
    fixed_share,
    magnitudes,
    masked,
    nonzero_flops,
    select_weights,
)

from emp_llm import plan
from emp_llm.cli import main
from emp_llm.common.errors import UserError
from emp_llm.options.words import recipe_of
from emp_llm.runs.prune_model import prune_model
from emp_llm.selection.effective import effective_mask

# script -> the arguments of a quick run
QUICK = {
    "fc": "--models fc2 --seeds 2",
    "bounds": "--draws 5",
    "loss_change": "--models mnist:fc2 --probes 1 --loss-images 10",
    "cifar_weights": "--models vgg16 --width 0.05 --gradient-images 10",
    "kan": "--grid 3 --score-images 20",
    "beta": "--networks mnist:fc2 --units weights",
    "structured": "--networks mnist:fc2 --gradient-images 10",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST and CIFAR-10 in small: noise that is brighter in the row of its label, and a
    ResNet-20 with random weights.
    """
    folder = tmp_path_factory.mktemp("vision")
    generator = np.random.default_rng(0)
    for name in ("mnist", "cifar10", "resnet_cifar10"):
        (folder / name).mkdir()
    for part, count in (("train", 300), ("t10k", 100)):
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        images = generator.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), labels * 2] = 255
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">2xBB{values.ndim}I", 8, values.ndim, *values.shape)
            (folder / "mnist" / f"{part}-{name}-ubyte.gz").write_bytes(
                gzip.compress(head + values.tobytes(), 1)
            )
    for number in (0, 50):
        pixels = generator.integers(0, 256, (1000, 1024, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(
            folder / "cifar10" / f"cifar10_batch_{number}.png", compress_level=0
        )
    (folder / "cifar10" / "labels.bin").write_bytes(
        generator.integers(0, 10, 51_000, dtype=np.uint8).tobytes()
    )
    torch.manual_seed(0)
    values = {
        name: value
        for name, value in CifarResNet(20).state_dict().items()
        if "num_batches" not in name
    }
    save_file(values, folder / "resnet_cifar10" / "resnet20.safetensors")
    return folder


def test_every_script_is_tried() -> None:
    paper = {name for name, path in NAMES.items() if path.startswith("scripts/paper/")}
    # These have tests of their own.
    assert paper == {*QUICK, "attention_edges", "board", "gpt2_heads", "image", "token_gating"}


@pytest.mark.parametrize("name", QUICK)
def test_pages(name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each script writes a page with its command, tables of equal rows, figures that exist, and
    reasons.
    """
    shared = [
        "--data",
        str(data),
        "--cache",
        str(tmp_path / "cache"),
        "--output",
        str(tmp_path),
        "--threads",
        "1",
    ]
    small = ["--train-images", "64", "--test-images", "10", "--epochs", "1"]
    import_module(name).main([*QUICK[name].split(), *small, *shared])
    page = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert page == capsys.readouterr().out.removesuffix("\n")
    assert f"`python scripts/paper/{name}.py {QUICK[name]}" in page
    assert str(tmp_path) not in page
    assert "Why the numbers differ:" in page
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert tables
    for table in tables:
        assert (
            len({len(line.split(" | ")) for line in table.splitlines() if "---" not in line}) == 1
        )
    trained = [(path.name, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*")]
    if name == "fc":  # a network of another seed has its own file, and none is trained again
        assert len(trained) == 2
        fc.main(["--models", "fc2", "--seeds", "3", *small, *shared])
        assert set(trained) < {
            (path.name, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*")
        }
    for figure in re.findall(r"\]\(([^)]+\.svg)\)", page):
        assert (tmp_path / figure).read_bytes().startswith(b"<?xml")


def test_the_board(models: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The committed page is what the script writes from the committed rows; a study adds its
    rows, or replaces them.
    """
    page = tmp_path / "board.md"
    rows = tmp_path / "board.jsonl"
    board.main(["--page", str(page)])
    assert page.read_text(encoding="utf-8") == board.PAGE.read_text(encoding="utf-8")
    tables = [
        board.ROOT / "scripts" / "paper" / name for name in ("board.toml", "board_refit.toml")
    ]
    for file in tables:
        assert tomllib.loads(file.read_text(encoding="utf-8"))["models"] == list(board.PUBLISHED)
    (tmp_path / "text.txt").write_text(
        "A board has rows, and each row has a number and an error. " * 20
    )
    (tmp_path / "suite.toml").write_text('[perplexity]\nfile = "text.txt"\nseqlen = 64\n')
    text = {
        "calibration": f"{tmp_path / 'text.txt'}",
        "samples": 4,
        "seqlen": 16,
        "suite": f"{tmp_path / 'suite.toml'}",
    }
    study = plan(
        tables[0],
        models=f"{models('llama')}",
        methods="wanda",
        output=tmp_path / "study",
        **text,
    ).study
    half = study.points[0]  # Wanda at 50 %
    run = f"runs/llama.{half.name}"
    model = str(models("llama"))
    monkeypatch.chdir(tmp_path / "study")
    for name, options, output in (
        (f"evaluate --model {model}", study.evaluate, "results/llama.dense.json"),
        (f"prune --model {model}", half.prune, run),
        (f"evaluate --model {run}", study.evaluate, f"results/llama.{half.name}.json"),
    ):
        words = shlex.split(f"{name} {options} --output {output}")
        monkeypatch.setattr(sys, "argv", ["emp-llm", *words])
        main(words)
    for _ in range(2):
        board.main(
            [
                str(tmp_path / "study"),
                "--commit",
                "abc1234",
                "--rows",
                str(rows),
                "--page",
                str(page),
            ]
        )
    assert len(rows.read_text().splitlines()) == 2
    (line,) = [
        line
        for line in page.read_text(encoding="utf-8").splitlines()
        if "| Wanda | 50 % | **" in line
    ]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[:2] == ["Wanda", "50 %"]
    assert re.fullmatch(r"\*\*[\d.]+\*\*", cells[2])
    assert re.fullmatch(r"[+-]?[\d.]+ ± [\d.]+ %", cells[3])
    text = "calibrated with `--calibration text.txt --samples 4 --seqlen 16`."
    (head,) = [line for line in page.read_text(encoding="utf-8").splitlines() if text in line]
    assert head.endswith("; commit abc1234.")
    prune = "emp-llm prune --model llama --method wanda --sparsity 0.5 --targets all-linear"
    assert json.loads(rows.read_text().splitlines()[1])["command"] == (
        f"{prune} --calibration text.txt --samples 4 --seqlen 16 --propagate pruned"
    )
    assert str(tmp_path) not in page.read_text(encoding="utf-8") + rows.read_text(encoding="utf-8")


def test_heads_of_gpt2(
    data: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny GPT-2: N_eff of all heads by a float64 reference, its whole part of heads kept,
    dense where all are.
    """
    monkeypatch.setattr(gpt2_heads, "BETAS", (1.0, 1.2))
    monkeypatch.setattr(beta, "BETAS", (0.5, 2.0))
    model = tiny.make_model(tmp_path / "model", "gpt2", torch.float32)
    text = tmp_path / "text.txt"
    text.write_text("A head reads, another writes; most of them do both. " * 8)
    common = ["--block", "32", "--threads", "1", "--output", str(tmp_path)]
    line = [
        "--model",
        str(model),
        "--calibration",
        str(text),
        "--samples",
        "3",
        "--seqlen",
        "32",
        "--limit",
        "4",
        *common,
    ]
    gpt2_heads.main(["--text", str(text), *line])
    page = (tmp_path / "gpt2_heads.md").read_text(encoding="utf-8")
    weights = {}
    for file in model.glob("*.safetensors"):
        weights |= load_file(file)
    rows = [
        weights[f"transformer.h.{layer}.attn.c_proj.weight"].double().view(4, -1).norm(dim=1)
        for layer in (0, 1)
    ]
    scores = torch.cat(rows)
    number = float(scores.sum() ** 2 / scores.square().sum())
    assert 7 < number < 8
    dense = re.findall(r"Dense perplexity ([\d.]+) on 4 blocks of at most 32 tokens", page)
    for factor in (1.0, 1.2):
        kept = min(8, int(factor * number))
        (row,) = re.findall(rf"\| weight norm \| {factor:g} \| (.+) \|\n", page.split("not run")[0])
        share, heads, sparsity, perplexity, increase, _ = row.split(" | ")
        assert (share, heads, sparsity) == (
            f"{100 * number / 8:.1f}",
            str(kept),
            f"{100 * (1 - kept / 8):.1f}",
        )
        assert (perplexity == dense[0]) == (kept == 8)
        assert float(increase) == pytest.approx(
            100 * (float(perplexity) / float(dense[0]) - 1), abs=0.01
        )
    assert "| Taylor | 1 | - (98.2) | - (141) | - (2.1) | - (35.200) | - (0.98) |" in page
    with pytest.raises(SystemExit, match="2"):
        gpt2_heads.main(["--text", "a", "b", *line])
    assert (
        "--text names 2 texts for 1 models. Give one for each, or one for all."
    ) in capsys.readouterr().err
    # The curves of heads and neurons: more of them go with a lower beta.
    line = [
        "--networks",
        "mnist:fc2",
        "--units",
        "neurons",
        "heads",
        "--heads",
        str(model),
        "--text",
        str(text),
    ]
    small = ["--train-images", "64", "--test-images", "10", "--epochs", "1", "--data", str(data)]
    beta.main([*line, *small, *common, "--cache", str(tmp_path / "cache")])
    page = (tmp_path / "beta.md").read_text(encoding="utf-8")
    assert re.search(
        r"\| mnist:fc2, neurons \| ([\d.]+) \| [\d.]+ \([45]\d\.0\) \| \1 \(0\.0\) \|\n",
        page,
    )
    assert re.search(r"\| model, heads \| (\d+) \| \d+ \((50\.0|62\.5)\) \| \1 \(0\.0\) \|\n", page)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "fc --models fc2",
            "train-images-idx3-ubyte.gz: no such file. Put the four files of mnist into",
        ),
        ("fc --dataset letters", "--dataset 'letters' is not one of mnist, fashion-mnist, cifar10"),
        ("cifar_weights", "no CIFAR-10. Put there data_batch_1.bin"),
        (
            "cifar_weights --dataset cifar100 --models resnet18",
            "no CIFAR-100. Put there train.bin and test.bin",
        ),
        (
            "cifar_weights --dataset tiny-imagenet --models resnet50",
            "Unpack tiny-imagenet-200.zip there",
        ),
        ("loss_change --models fc5", "--models 'fc5' has no data set; give it as cifar10:fc5."),
        (
            "beta --networks resnet20",
            "--networks 'resnet20' has no data set; give it as cifar10:resnet20.",
        ),
    ],
)
def test_missing_data(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what to put where, the exit code is 2, and no page is written."""
    name, *arguments = line.split()
    with pytest.raises(SystemExit, match="2"):
        import_module(name).main(
            [*arguments, "--data", str(tmp_path), "--output", str(tmp_path / "pages")]
        )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "pages").exists()


def test_damaged_data(data: Path, tmp_path: Path) -> None:
    def damaged(name: str, said: str, files: dict[str, bytes]) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
        with pytest.raises(UserError, match=said):
            image_data(name, tmp_path)

    numbers, sheets = (
        {path.name: path.read_bytes() for path in (data / name).iterdir()}
        for name in ("mnist", "cifar10")
    )
    damaged("mnist", "not an idx file of bytes", {name: raw[:-30] for name, raw in numbers.items()})
    cut = {name: raw[:5000] for name, raw in sheets.items()}
    damaged("cifar10", r"cifar10_batch_0.png: not a sheet of images of 32 x 32 pixels", cut)
    damaged(
        "cifar10",
        "5000 labels, too few for cifar10_batch_50",
        sheets | {"labels.bin": cut["labels.bin"]},
    )
    binary = {f"{part}.bin": bytes(3075) for part in ("train", "test")}
    damaged("cifar100", "not in the binary version of cifar100", binary)
    with pytest.raises(UserError, match=r"resnet56.safetensors: no such file"):
        given_resnet(56, data)
    with pytest.raises(
        UserError,
        match=r"--models 'alexnet' is not one of fc2, fc5, fc12, vgg16, resnet18, resnet50",
    ):
        new_network("alexnet", 10, 1, 0)


def test_other_data_sets(tmp_path: Path) -> None:
    """CIFAR-100: two labels a row, of which the second counts. CIFAR-10: one. Tiny ImageNet: a
    folder of photographs.
    """
    for name, labels, files in (
        ("cifar100", [7, 42], ("train", "test")),
        ("cifar10", [9], ("data_batch_1", "test_batch")),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / f"{file}.bin").write_bytes(
                (bytes(labels) + bytes(range(256)) * 12) * 3
            )
        found = image_data(name, tmp_path)
        assert found.train.shape == (3, 3, 32, 32)
        assert (found.test_labels.tolist(), found.train[0, 0, 1, 3]) == ([labels[-1]] * 3, 35)
        assert found.classes == (100 if name == "cifar100" else 10)
    folder = tmp_path / "tiny-imagenet-200"
    for place in ("train/n2/images/a", "train/n1/images/b", "val/images/v"):
        (folder / place).parent.mkdir(parents=True)
        Image.new("L", (64, 64), 200).save(folder / f"{place}.JPEG")
    (folder / "wnids.txt").write_text("n1\nn2\n")
    (folder / "val" / "val_annotations.txt").write_text("v.JPEG\tn2\t0\t0\t1\t1\n")
    found = image_data("tiny-imagenet", tmp_path)
    assert (found.train_labels.tolist(), found.test_labels.tolist()) == ([0, 1], [1])
    assert found.test.shape == (1, 3, 64, 64)


@pytest.mark.parametrize("scope", ["block", "global"])
def test_weights_are_those_of_prune_model(scope: str) -> None:
    """The script's rule for any network selects the same weights as `prune_model`, of which it
    counts the same sparsity.
    """
    torch.manual_seed(0)
    model = fc_network((30, 20, 10), 12)
    selected = select_weights(magnitudes(model), effective(1.0), scope)
    report = prune_model(model, recipe_of(method="emp-magnitude", group=fc.GROUPS[scope]))
    assert selected.sparsity == pytest.approx(report.targets.sparsity_of_targets)
    for name, mask in selected.masks.items():
        assert torch.equal(mask, report.masks[name])


def test_gradient_scores_follow_algorithm_1() -> None:
    """Taylor and saliency by hand, and the N_eff largest of them are kept, not the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    batches = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(2)]
    weight = model[0].weight
    gradients = list[Tensor]()
    for images, labels in batches:
        outputs = model(images).softmax(1) - nn.functional.one_hot(labels, 3)
        gradients.append((outputs.T @ images / 8).detach())
    expected = {
        "Taylor": sum((g * weight).abs() for g in gradients) / 2,
        "saliency": sum(g.abs() for g in gradients) / 2,
    }  # type: ignore[operator]
    for name, scores in expected.items():
        found = CRITERIA[name](model, batches)
        torch.testing.assert_close(found["0.weight"].float(), scores.detach(), rtol=1e-4, atol=1e-6)
        selected = select_weights(found, effective(1.0), "global")
        assert torch.equal(selected.masks["0.weight"], effective_mask(found["0.weight"], dim=None))
        assert selected.sparsity == pytest.approx(1 - int(selected.n_eff) / 18)
    shares = select_weights({"a": torch.rand(7, 5), "b": torch.rand(9)}, fixed_share(0.5), "global")
    assert sum(int(mask.sum()) for mask in shares.masks.values()) == 22


def test_flops_of_zeros_do_not_count() -> None:
    torch.manual_seed(0)
    for network in (VGG16(10, 0.1), CifarResNet(8)):
        model = network.eval()
        image = torch.randn(1, 3, 32, 32)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(image)
        assert nonzero_flops(model, image) == counter.get_total_flops()
        before = model(image)
        with masked(model, select_weights(magnitudes(model), fixed_share(0.5), "block").masks):
            assert nonzero_flops(model, image) == pytest.approx(
                counter.get_total_flops() / 2, rel=1e-3
            )
            assert not torch.equal(model(image), before)
        assert torch.equal(model(image), before)


def test_the_trace_of_a_hessian() -> None:
    """Softmax regression: the trace is the mean over images of |x|^2 times the sum of p (1 - p)."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (20, 1, 3, 2), dtype=torch.uint8)
    labels = torch.randint(0, 4, (20,))
    data = ImageData("mnist", images, labels, images, labels, (0.0,), (1.0,), 4)
    model = fc_network((4,), 6)
    shares = model(data.inputs(images)).softmax(1).detach()
    exact = ((shares * (1 - shares)).sum(1) * data.inputs(images).square().sum((1, 2, 3))).mean()
    found = loss_change.hessian_trace(model, data, 300, 20)
    assert found == pytest.approx(float(exact), rel=0.1)


def test_splines() -> None:
    """B-splines of order 3 by the recursion of Cox and de Boor; and nodes that are removed for
    real.
    """
    torch.manual_seed(0)
    layer = kan.SplineLayer(3, 2, 4)
    wide = torch.linspace(-3, 3, 240)
    knots = torch.arange(-3, 8) / 2 - 1
    found = ((wide[:, None] >= knots[:-1]) & (wide[:, None] < knots[1:])).float()
    for order in (1, 2, 3):
        rising = (wide[:, None] - knots[: -order - 1]) / (order / 2) * found[:, :-1]
        found = rising + (knots[order + 1 :] - wide[:, None]) / (order / 2) * found[:, 1:]
    assert torch.allclose(layer.bases(wide), found, atol=1e-5)
    values = torch.linspace(-0.99, 0.99, 30).view(10, 3)
    first = layer.norms(values)[:, 0]
    model = kan.KAN(3, 8)
    kept = torch.tensor([True, False, True, True, False, True, True, True])
    images = torch.rand(5, 1, 28, 28)
    smaller = model.with_nodes(kept)
    with torch.no_grad():
        for each, inputs in ((layer, [1, 2]), (model.second, ~kept)):
            each.base[:, inputs] = 0
            each.coefficients[:, inputs] = 0
    # Of the function of one input alone.
    assert torch.allclose(first, layer(values).abs().mean(0), atol=1e-5)
    assert sum(each.numel() for each in smaller.parameters()) == 6 / 8 * sum(
        each.numel() for each in model.parameters()
    )
    assert torch.allclose(smaller(images), model(images), atol=1e-5)


def test_the_given_resnet_on_real_images(shared: Path) -> None:
    """ResNet-20 has its published accuracy, so the architecture, the pixels and the labels are
    right.
    """
    if not (shared / "vision" / "resnet_cifar10").is_dir():
        pytest.skip("no shared/vision")
    images = image_data("cifar10", shared / "vision").shortened(100, 200)
    assert evaluate_on(given_resnet(20, shared / "vision"), images).accuracy > 0.88
    assert cifar_weights.count_weights(given_resnet(20, shared / "vision")) == 268_336
