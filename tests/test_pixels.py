"""`scripts/paper/image.py`: pixels pruned as an oracle prunes them, images of every kind, and
wrong input.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from image import PHOTOGRAPHS, main, photograph
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from pixels import prune_image, prune_pixels
from skimage.metrics import structural_similarity

Pixels = NDArray[Any]


def picture(width: int = 37, height: int = 26) -> Image.Image:
    """A drawing with edges, a gradient, noise and an even area; sides that are no multiples of
    4.
    """
    noise = np.random.default_rng(0).integers(0, 60, (height, width, 3))
    ramp = np.linspace(0, 180, width)[None, :, None] * np.array([1.0, 0.5, 0.2])
    drawn = Image.fromarray((noise + ramp).astype(np.uint8))
    ImageDraw.Draw(drawn).rectangle((4, 4, 19, 15), (200, 30, 90))
    return drawn


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    picture().save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def expected(
    channel: Pixels, beta: float, patch: int | None, channel_mean: bool = False
) -> tuple[Pixels, Pixels]:
    """The mask and the pruned channel of integers by the oracle, patch by patch."""
    side = patch or max(channel.shape)
    mask = np.zeros(channel.shape, bool)
    pruned = channel.copy()
    for top in range(0, channel.shape[0], side):
        for left in range(0, channel.shape[1], side):
            area = np.s_[top : top + side, left : left + side]
            whole = channel if channel_mean else channel[area]
            total = whole.sum(dtype=np.float64)
            # N x - sum x is exact: pixels equally far from the mean have equal scores.
            scores = np.abs(channel[area].astype(np.float64) * whole.size - total).ravel()
            mask[area] = oracle.keep(scores, oracle.count(scores, beta)).reshape(mask[area].shape)
            pruned[area] = np.where(
                mask[area], channel[area], np.rint(total / whole.size).astype(channel.dtype)
            )
    return mask, pruned


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    ("patch", "channel_mean"), [(None, False), (4, False), (4, True), (5, False), (1, False)]
)
def test_pixels_are_pruned_as_by_the_oracle(
    beta: float, patch: int | None, channel_mean: bool
) -> None:
    channels = np.ascontiguousarray(np.moveaxis(np.asarray(picture()), 2, 0))
    found = prune_pixels(channels, beta, patch, channel_mean)
    for number, channel in enumerate(channels):
        mask, pruned = expected(channel, beta, patch, channel_mean)
        np.testing.assert_array_equal(found.kept[number], mask)
        np.testing.assert_array_equal(found.channels[number], pruned)


def test_images_figure_and_figures_of_merit(
    photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main([str(photo), "--beta", "0.8"])
    shown = capsys.readouterr().out
    out = tmp_path / "photo-emp"
    original = np.asarray(picture())
    record = json.loads((out / "image.json").read_text())
    assert {path.name for path in out.iterdir()} == {
        "channel.png",
        "patch.png",
        "figure.png",
        "image.json",
    }
    assert (record["width"], record["height"], record["beta"], record["patch"]) == (37, 26, 0.8, 4)
    for entry, side in zip(record["groups"], (None, 4), strict=True):
        pruned = np.asarray(Image.open(out / entry["file"]))
        wanted = [expected(original[..., channel], 0.8, side) for channel in range(3)]
        np.testing.assert_array_equal(pruned, np.stack([each for _, each in wanted], axis=2))
        kept = [int(mask.sum()) for mask, _ in wanted]
        assert (entry["kept"], entry["sparsity"]) == (
            sum(kept),
            pytest.approx(1 - sum(kept) / original.size),
        )
        assert list(entry["sparsity_of_channels"].values()) == pytest.approx(
            [1 - each / (37 * 26) for each in kept]
        )
        error = np.mean((original.astype(float) - pruned) ** 2)
        assert entry["psnr"] == pytest.approx(10 * math.log10(255**2 / error))
        assert entry["ssim"] == pytest.approx(
            structural_similarity(original, pruned, channel_axis=2)
        )
        assert all(
            words in shown
            for words in (f"{entry['kept']:,}", f"{entry['psnr']:.1f}", f"{entry['ssim']:.3f}")
        )
    assert Image.open(out / "figure.png").width > 3 * 320
    with pytest.raises(SystemExit, match="2"):
        main([str(photo)])
    assert (
        "photo-emp: it exists; name another folder, or add --overwrite."
    ) in capsys.readouterr().err
    main([str(photo), "--group", "patch", "--patch", "8", "--mean", "channel", "--overwrite"])
    assert {path.name for path in out.iterdir()} == {"patch.png", "figure.png", "image.json"}
    record = json.loads((out / "image.json").read_text())
    assert (record["patch"], record["mean"], [entry["group"] for entry in record["groups"]]) == (
        8,
        "channel",
        ["patch"],
    )


def _kind(mode: str) -> Image.Image:
    """The picture in a mode of Pillow."""
    if mode in ("I;16", "I"):
        grey = np.asarray(picture().convert("L")).astype(np.int64)
        return Image.fromarray(
            (grey * 250).astype("u2") if mode == "I;16" else (grey * -90_000).astype("i4")
        )
    image = picture().quantize(16) if mode == "P" else picture().convert(mode)
    if mode == "P":
        image.info["transparency"] = 3
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


@pytest.mark.parametrize(
    ("mode", "suffix", "channels", "bits", "alpha"),
    [
        ("1", "png", 1, 8, False),
        ("LA", "png", 1, 8, True),
        ("P", "png", 3, 8, True),
        ("RGB", "webp", 3, 8, False),
        ("RGBA", "png", 3, 8, True),
        ("CMYK", "jpg", 3, 8, False),
        ("I;16", "png", 1, 16, False),
        ("I", "tiff", 1, 32, False),
    ],
)
def test_every_kind_of_image(
    tmp_path: Path, mode: str, suffix: str, channels: int, bits: int, alpha: bool
) -> None:
    source = tmp_path / f"in.{suffix}"
    _kind(mode).save(source)
    record = prune_image(source, tmp_path / "out")
    assert (len(record.channels), record.bits, record.alpha, (record.width, record.height)) == (
        channels,
        bits,
        alpha,
        (37, 26),
    )
    assert record.notes == ["its colours (CMYK) are converted to RGB."] * (mode == "CMYK")
    with Image.open(source) as opened:
        plain = (
            opened.convert(("RGBA" if alpha else "RGB") if channels == 3 else "L")
            if mode in ("1", "P", "CMYK", "RGB")
            else opened
        )
        before = np.atleast_3d(np.asarray(plain))
    for entry in record.groups:
        after = np.atleast_3d(np.asarray(Image.open(tmp_path / "out" / entry.file)))
        assert after.shape == before.shape
        for channel in range(channels):
            _, pruned = expected(
                before[..., channel].astype(after.dtype), 1.0, 4 if entry.group == "patch" else None
            )
            np.testing.assert_array_equal(after[..., channel], pruned)
        if alpha:
            np.testing.assert_array_equal(after[..., -1], before[..., -1])


def test_frames_and_orientation(tmp_path: Path) -> None:
    picture().save(tmp_path / "in.gif", save_all=True, append_images=[picture().rotate(180)])
    assert prune_image(tmp_path / "in.gif", tmp_path / "gif").notes == [
        "it holds 2 frames; the first is used."
    ]
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    picture().save(tmp_path / "in.jpg", exif=exif)
    record = prune_image(tmp_path / "in.jpg", tmp_path / "jpg")
    with Image.open(tmp_path / "jpg" / "patch.png") as turned:
        assert (record.width, record.height) == turned.size == (26, 37)
        assert not turned.getexif()


@pytest.mark.parametrize(("mode", "size"), [("L", (1, 1)), ("RGBA", (9, 8)), ("F", (9, 8))])
def test_one_colour_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, size: tuple[int, int]
) -> None:
    Image.new(mode, size, 77 if mode != "RGBA" else (1, 2, 3, 4)).save(tmp_path / "in.tiff")
    main([str(tmp_path / "in.tiff"), "--output", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert (shown.count("infinite"), shown.count(" 0.00 ")) == (2, 2)
    assert ("SSIM needs an image of at least 7 x 7 pixels" in shown) == (size == (1, 1))
    record = json.loads((tmp_path / "out" / "image.json").read_text())
    assert [(entry["psnr"], entry["ssim"]) for entry in record["groups"]] == [
        (None, None if size == (1, 1) else 1.0)
    ] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("none.png", "none.png: there is no such file"),
        ("text.png", "text.png: not an image in a format that Pillow reads"),
        ("cut.png", "cut.png: the image is damaged"),
        ("nan.tiff", "nan.tiff: the image holds NaN or infinity"),
        ("photo.png --beta 0", "--beta must be a number above 0"),
        ("photo.png --patch 0", "--patch must be at least 1 pixel"),
        ("photo.png --group row", "--group"),
        (
            "photo.png --output out.jpg",
            "--output out.jpg: it is a folder for the pruned images; give a name without .jpg.",
        ),
        ("photo.png --output own", "it exists and holds no image.json, so it is never replaced"),
    ],
)
def test_wrong_input_is_answered(
    photo: Path,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("no image at all")
    (tmp_path / "cut.png").write_bytes(photo.read_bytes()[:900])
    Image.fromarray(np.full((8, 8), np.nan, np.float32)).save(tmp_path / "nan.tiff")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*-emp")), "nothing was written"


def test_the_page_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page has the published rows, and ours for each photograph; the photographs here are
    crops.
    """
    monkeypatch.setattr("image.photograph", lambda name: photograph(name)[100:140, 200:248])
    main(["--output", str(tmp_path / "page")])
    page = (tmp_path / "page" / "image.md").read_text()
    table = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert table[1][:1] + table[1][3:] == ["the paper's", "26.7", "29.4", "0.912"]
    assert [row[0] for row in table[3:]] == [
        f"{name}, 48 × 40" for name in PHOTOGRAPHS for _ in range(3)
    ]
    crop = np.ascontiguousarray(np.moveaxis(photograph("coffee")[100:140, 200:248], 2, 0))
    shares = [
        1 - np.mean([expected(each, 1.0, patch, literal)[0] for each in crop])
        for patch, literal in ((None, False), (4, False), (4, True))
    ]
    assert [row[3] for row in table[6:9]] == [f"{100 * share:.1f}" for share in shares]
    assert Image.open(tmp_path / "page" / "image.jpg").width == 1100
    assert "image.jpg" in capsys.readouterr().out
