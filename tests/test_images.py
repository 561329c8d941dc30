"""Calibration on images: the norms of both towers, the data that can be used, and what is
refused.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import oracle
import pytest
import tiny
import torch
import transformers
from conftest import Run
from multimodal import load_own, make_multimodal
from pictures import (
    CHATS,
    TEMPLATE,
    TEXTS,
    make_images,
    make_llava,
    make_pictures,
    make_processor,
    write_lines,
)

from emp_llm import prune_model, recipe_of
from emp_llm.calibrate import calibrate
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.data import ImageRow, inputs_of
from emp_llm.common.errors import UserError

SAMPLES = 5
SEQLEN = 24


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def chatty(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    folder = Path(shutil.copytree(llava, tmp_path_factory.mktemp("chatty") / "model"))
    make_processor(TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data"))


def plain_inputs(number: int) -> Any:
    """What a user of transformers gives the model for a row of text."""
    return make_processor()(
        text=[f"<image>{TEXTS[number]}"], images=[make_images()[number]], return_tensors="pt"
    )


def chat_inputs(number: int) -> Any:
    text = f"<user><image>What is in picture {number}?<assistant>A lamp."
    return make_processor()(text=[text], images=[make_images()[number]], return_tensors="pt")


def cut(inputs: Any, seqlen: int) -> dict[str, torch.Tensor]:
    return {
        name: value if name == "pixel_values" else value[:, :seqlen]
        for name, value in inputs.items()
    }


def norms_of_hooks(
    source: Path | torch.nn.Module, inputs: list[Any], seqlen: int = SEQLEN
) -> dict[str, torch.Tensor]:
    """The norms of all linear layers of both towers, by plain hooks."""
    load = transformers.LlavaForConditionalGeneration.from_pretrained
    model = load(source).eval() if isinstance(source, Path) else source
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    sums: dict[str, torch.Tensor] = {}
    relative: dict[str, torch.Tensor] = {}
    mixtures.watch(model, names, sums, relative)
    with torch.no_grad():
        for each in inputs:
            model(**cut(each | {"pixel_values": each["pixel_values"].to(model.dtype)}, seqlen))
    both = sums | {f"{name}.relative": total for name, total in relative.items()}
    return {name: total.sqrt().float() for name, total in both.items()}


def assert_norms(file: Path, wanted: dict[str, torch.Tensor]) -> Activations:
    norms = Activations.load(file)
    assert {*norms.input_of, *(f"{name}.relative" for name in norms.relative)} == set(wanted)
    assert any("vision_tower" in name for name in wanted)
    for name, norm in wanted.items():
        found = norms.norm(name.removesuffix(".relative"), name.endswith(".relative"))
        assert found is not None
        np.testing.assert_allclose(found.numpy(), norm.numpy(), rtol=1e-5, err_msg=name)
    return norms


def arguments(folder: Path, calibration: str, **more: Any) -> list[Any]:
    options = {"samples": SAMPLES, "seqlen": SEQLEN, "device_map": "cpu"} | more
    line: list[Any] = ["--model", folder, "--calibration", calibration]
    for name, value in options.items():
        line += [f"--{name.replace('_', '-')}", value]
    return line


def calibrated(command: Run, folder: Path, model: Path, calibration: str, **options: Any) -> Path:
    """The norms that `calibrate` writes."""
    done = command(
        "calibrate", *arguments(model, calibration, **options), "--output", folder / "norms"
    )
    assert done.returncode == 0, done.stderr
    return folder / "norms"


def refused(sentence: str, command: Run, *line: Any) -> None:
    done = command(*line)
    assert done.returncode == 2, done.stderr
    assert re.search(sentence, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("source", "where"),
    [
        *((f"{name},image=picture", "cpu") for name in ("rows.jsonl", "bytes.parquet")),
        *((name, "cpu") for name in ("hub.toml", "streamed.toml")),
        ("rows.jsonl,image=picture", "disk"),
    ],
)
def test_the_norms_are_those_of_plain_hooks(
    llava: Path, data: Path, tmp_path: Path, command: Run, source: str, where: str
) -> None:
    """A text gets the placeholder of its image in front, and is cut at its end. An offloaded
    model runs whole.
    """
    inputs = [plain_inputs(number) for number in range(SAMPLES)]
    file = calibrated(command, tmp_path, llava, f"{data}/{source}", device_map=where)
    norms = assert_norms(file, norms_of_hooks(llava, inputs))
    lengths = [min(each["input_ids"].shape[1], SEQLEN) for each in inputs]
    assert len(set(lengths)) > 1
    assert norms.about.tokens == sum(lengths)
    assert norms.about.text is not None
    assert norms.about.text.image == "picture"
    assert (norms.about.execution, norms.about.batch_size, norms.about.text.samples) == (
        "model",
        1,
        SAMPLES,
    )
    assert norms.tokens_of("model.language_model.layers.0.mlp.up_proj") == sum(lengths)


@pytest.mark.parametrize("source", ["chats.jsonl,image=pictures", "marked.jsonl,image=picture"])
def test_conversations_are_rendered_by_the_processor(
    chatty: Path, data: Path, tmp_path: Path, command: Run, source: str
) -> None:
    file = calibrated(command, tmp_path, chatty, f"{data}/{source}", seqlen=100)
    assert_norms(
        file, norms_of_hooks(chatty, [chat_inputs(number) for number in range(SAMPLES)], 100)
    )


def test_a_text_is_the_message_of_a_user() -> None:
    """A plain text goes through the chat template if there is one, with its image in front."""
    processor = make_processor(TEMPLATE)
    made = inputs_of(ImageRow("row 1", "A lamp.", [make_images()[0]]), processor, 100)
    wanted = make_processor()(
        text=["<user><image>A lamp."], images=[make_images()[0]], return_tensors="pt"
    )
    assert torch.equal(made["input_ids"], wanted["input_ids"])
    assert torch.equal(made["pixel_values"], wanted["pixel_values"])


def test_a_cut_never_divides_an_image(llava: Path, data: Path, command: Run) -> None:
    """An image has four tokens. With one of the text they fit; three tokens, or an image after
    five of the text, do not.
    """
    image = make_images()[1]
    made = inputs_of(ImageRow("row 1", "A lamp.", [image]), make_processor(), 5)
    assert made["input_ids"].tolist() == [[256] * 4 + make_processor().tokenizer("A")["input_ids"]]
    assert made["attention_mask"].shape == (1, 5)
    assert made["pixel_values"].shape == (1, 3, 16, 16)
    with pytest.raises(
        UserError,
        match=r"row 1: the tokens of its images end after 9 "
        r"tokens.*Raise --seqlen to 9",
    ):
        inputs_of(ImageRow("row 1", "Lamp:<image> is lit.", [image]), make_processor(), 6)
    line = arguments(llava, f"{data}/rows.jsonl,image=picture", seqlen=3)
    refused(
        r"rows\.jsonl, row 1: the tokens of its images end after 4 tokens.*at most "
        r"3.*--seqlen",
        command,
        "calibrate",
        *line,
    )


def test_both_towers_are_pruned(llava: Path, data: Path, tmp_path: Path, command: Run) -> None:
    """The masks are those of the oracle for the norms of plain hooks, and the norms can be used
    again.
    """
    source = f"{data}/rows.jsonl,image=picture"
    line = arguments(llava, source)
    done = command(
        "prune", *line, "--method", "wanda", "--tower", "all", "--output", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    norms = norms_of_hooks(llava, [plain_inputs(number) for number in range(SAMPLES)])
    kept = Activations.load(tmp_path / "out" / "emp_llm" / "activations.safetensors")
    model = transformers.LlavaForConditionalGeneration.from_pretrained(llava)
    batches = [cut(plain_inputs(number), SEQLEN) for number in range(SAMPLES)]
    found = prune_model(model, recipe_of(method="wanda", tower="all"), data=batches).masks
    assert {*kept.input_of, *(f"{name}.relative" for name in kept.relative)} == set(norms)
    assert (
        command("report", tmp_path / "out", "--output", tmp_path / "page", "--no-plots").returncode
        == 0
    )
    assert ("rows.jsonl, 5 rows with images, of up to 24 tokens") in (
        tmp_path / "page" / "report.md"
    ).read_text()
    report = json.loads((tmp_path / "out" / "emp_report.json").read_text())
    assert report["calibration"]["text"]["image"] == "picture"
    before = oracle.tensors(llava)
    after = oracle.tensors(tmp_path / "out")
    towers = set()
    for layer, entry in report["matrices"].items():
        stored = entry["tensor"]
        mask = oracle.row_masks(
            oracle.scores(oracle.weight(llava, stored), norms[layer].numpy()), adaptive=False
        )
        wanted = np.where(mask, oracle.bits(before[stored]), 0)
        assert (oracle.bits(after[stored]) == wanted).mean() > 0.999, layer
        assert (found[f"{layer}.weight"].numpy() == mask).mean() > 0.999, layer
        towers.add(layer.split(".")[1])
    assert towers == {"vision_tower", "language_model"}
    calibrate(
        model=str(llava),
        output=tmp_path / "norms",
        calibration=source,
        samples=SAMPLES,
        seqlen=SEQLEN,
        device_map="cpu",
    )
    again = Activations.load(tmp_path / "norms")
    assert all(torch.equal(norm, kept.norms[name]) for name, norm in again.norms.items())
    assert all(torch.equal(norm, kept.relative[name]) for name, norm in again.relative.items())
    given = ("--activations", tmp_path / "norms", "--output", tmp_path / "vision")
    done = command("prune", "--model", llava, "--method", "wanda", "--tower", "vision", *given)
    assert done.returncode == 0, done.stderr


def test_measure_and_a_mix_with_text(
    llava: Path, data: Path, text: Path, tmp_path: Path, command: Run
) -> None:
    mix = f"{data}/rows.jsonl:4,image=picture,{text}:3"
    line = ["--model", llava, "--calibration", mix, "--seqlen", SEQLEN, "--device-map", "cpu"]
    done = command("calibrate", *line, "--output", tmp_path / "norms")
    assert done.returncode == 0, done.stderr
    about = Activations.load(tmp_path / "norms").about
    assert [(part.image, part.samples) for part in about.texts] == [("picture", 4), (None, 3)]
    assert about.tokens == 3 * SEQLEN + sum(
        min(plain_inputs(i)["input_ids"].shape[1], SEQLEN) for i in range(4)
    )
    done = command(
        "measure",
        *line,
        "--criteria",
        "wanda",
        "--tower",
        "vision",
        "--output",
        tmp_path / "measure.json",
    )
    assert done.returncode == 0, done.stderr
    assert "vision_tower" in (tmp_path / "measure.json").read_text()


def test_a_perplexity_is_of_text_alone(
    llava: Path, data: Path, tmp_path: Path, command: Run
) -> None:
    (tmp_path / "suite.toml").write_text(
        f'[perplexity]\nfile = "{data}/rows.jsonl"\nimage = "picture"\n'
    )
    line = ("evaluate", "--model", llava, "--suite", "suite.toml")
    refused("a perplexity is of text alone; leave image=picture out", command, *line)


@pytest.mark.parametrize("form", ["name", "rows", "folder"])
def test_a_model_in_memory(llava: Path, data: Path, form: str) -> None:
    """The processor takes the place of the tokenizer; the masks are those of the batches that it
    makes.
    """
    batches = [plain_inputs(number) for number in range(SAMPLES)]
    rows: Any = [
        {"text": line, "image": image} for line, image in zip(TEXTS, make_images(), strict=True)
    ]
    rows = f"{data}/rows.jsonl,image=picture" if form == "name" else rows
    load = transformers.LlavaForConditionalGeneration.from_pretrained
    recipe = recipe_of(method="wanda", tower="all")
    processor = llava if form == "folder" else make_processor()
    found = prune_model(
        load(llava), recipe, data=rows, tokenizer=processor, samples=SAMPLES, seqlen=100
    )
    wanted = prune_model(load(llava), recipe, data=batches)
    assert found.masks.keys() == wanted.masks.keys()
    assert all(torch.equal(found.masks[name], wanted.masks[name]) for name in wanted.masks)
    assert any("vision_tower" in name for name in wanted.masks)
    with pytest.raises(UserError, match=r"vision tower.*batches with images to prune_model"):
        prune_model(
            load(llava), recipe, data=torch.ones((2, 20), dtype=torch.int64), samples=2, seqlen=20
        )


def test_the_images_of_gemma(tmp_path: Path, data: Path, command: Run) -> None:
    """Its placeholder in a text is another token than those of the image, among which a cut must
    not fall.
    """
    names = {"image_token": "<soft>", "boi_token": "<begin>", "eoi_token": "<end>"}
    backend = tiny.make_tokenizer().backend_tokenizer
    backend.add_special_tokens([f"<{number}>" for number in range(4)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=names
    )
    pixels = transformers.Gemma3ImageProcessor(size={"height": 16, "width": 16})
    template = TEMPLATE.replace("<image>", "<begin>")
    processor = transformers.Gemma3Processor(
        pixels, tokenizer, chat_template=template, image_seq_length=4
    )
    folder = make_multimodal(tmp_path / "gemma", "gemma3")
    processor.save_pretrained(folder)
    source = f"{data}/chats.jsonl,image=pictures"
    file = calibrated(command, tmp_path, folder, source, seqlen=30)
    chats = [
        [
            {
                **CHATS[i][0],
                "content": [{"type": "image", "image": each}, CHATS[i][0]["content"][1]],
            },
            CHATS[i][1],
        ]
        for i, each in enumerate(make_images()[:SAMPLES])
    ]
    inputs = [
        processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        for chat in chats
    ]
    model = load_own(folder, "gemma3")
    assert all(each["input_ids"].shape[1] > 30 for each in inputs)
    assert_norms(file, norms_of_hooks(model, inputs, 30))
    refused(
        "row 1: the tokens of its images end after 13 tokens",
        command,
        "calibrate",
        *arguments(folder, source, seqlen=12),
    )


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "blocks": (
        "rows.jsonl,image=picture",
        ["--execution", "blocks"],
        r"--execution blocks: "
        r".*images runs the whole model",
    ),
    "no column": (
        "rows.jsonl,image=photo",
        [],
        r"rows\.jsonl: no column of images 'photo'; it has "
        r"text, picture\.",
    ),
    "an empty name": ("rows.jsonl,image=", [], r"image must name the column"),
    "a column of numbers": (
        "numbers.jsonl,image=picture",
        [],
        r"row 1: column 'picture' does not "
        r"hold images",
    ),
    "a text file": (
        "rows.txt,image=picture",
        [],
        r"image=picture.* a \.txt file has no "
        r"columns.*\.jsonl",
    ),
    "joined": ("rows.jsonl,image=picture,join= ", [], r"cannot be joined; leave out join or image"),
    "too few rows": (
        "rows.jsonl,image=picture",
        ["--samples", "7"],
        r"rows\.jsonl: 6 rows, too "
        r"few for 7 samples.*--samples",
    ),
    "a missing file": (
        "missing.jsonl,image=picture",
        [],
        r"row 2: its image \S+/nowhere\.png "
        r"cannot be opened \(no such file",
    ),
    "a damaged image": (
        "damaged.parquet,image=picture",
        [],
        r"row 2: its image cannot be opened "
        r"\(cannot identify",
    ),
    "conversations": (
        "chats.jsonl,image=pictures",
        [],
        r"row 1: it is a conversation.*no chat "
        r"template.*,column=NAME",
    ),
    "text alone": (
        "rows.jsonl",
        ["--tower", "vision"],
        r"no input activations\. Calibrate on "
        r"images too.*,image=COLUMN",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(llava: Path, data: Path, tmp_path: Path, command: Run, case: str) -> None:
    source, options, sentence = REFUSED[case]
    refused(
        sentence,
        command,
        "calibrate",
        *arguments(llava, f"{data}/{source}"),
        *options,
        "--output",
        tmp_path / "norms",
    )
    assert not (tmp_path / "norms").exists()


def test_numbers_of_images(chatty: Path, data: Path, tmp_path: Path, command: Run) -> None:
    """A conversation with one place for an image, and two images."""
    write_lines(
        tmp_path / "two.jsonl", messages=CHATS[:1], pictures=[["pictures/0.png", "pictures/1.png"]]
    )
    shutil.copytree(data / "pictures", tmp_path / "pictures")
    line = arguments(chatty, "two.jsonl,image=pictures", samples=1)
    refused(
        "row 1: its conversation has 1 place for images, and its column 2 images",
        command,
        "calibrate",
        *line,
    )


def test_models_that_cannot_be_used(
    llava: Path,
    models: Callable[[str], Path],
    data: Path,
    tmp_path: Path,
    command: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = f"{data}/rows.jsonl,image=picture"
    output = ("--output", tmp_path / "out")

    def refuses(sentence: str, model: Path, *options: str) -> None:
        refused(sentence, command, "prune", *arguments(model, source), *options, *output)

    refuses(r"reads only text. Leave out image= of --calibration", models("llama"))
    refuses(r"--propagate pruned: .*runs the whole model", llava, "--propagate", "pruned")
    bare = Path(
        shutil.copytree(
            llava, tmp_path / "bare", ignore=shutil.ignore_patterns("processor_config.json")
        )
    )
    refuses(r"no image processor that transformers can load.*processor_config\.json", bare)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    refuses(r"images needs Pillow\. Install it: pip install pillow", llava)
    assert not (tmp_path / "out").exists()
