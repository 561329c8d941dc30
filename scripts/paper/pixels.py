"""Pixels pruned by the rule of the weights: an image -> the pruned images, a figure that compares
them, PSNR and SSIM.

    s = |x - mu|, a removed pixel becomes mu

The score of a pixel is its distance from the mean of its group: a whole channel, or a square patch
of a channel (section "Featurewise Effective Pruning" of the paper). The text of the paper centres
patches on the mean of the channel; its published numbers are those of the patches' own means.
Pillow reads images, scikit-image compares them.
"""

import json
import logging
import math
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from emp_llm.checkpoint.output import check_folder, write_folder
from emp_llm.common.errors import UserError, count_of, reason
from emp_llm.common.machine import command_line, versions
from emp_llm.common.tables import percent_cell, table
from emp_llm.selection.effective import effective_mask
from emp_llm.selection.reference import sum_rows, sum_vector
from emp_llm.selection.rule import check_beta

_ROWS = 1 << 12  # patches at a time: their sums stay in a core's cache


@dataclass(frozen=True)
class PrunedPixels:
    """A pruned picture.

    Attributes:
        channels: dtype and shape of the original, with the mean in place of removed pixels.
        kept: bool, shape of `channels`, true where the pixel is kept.
    """

    channels: NDArray[Any]
    kept: NDArray[np.bool_]


def prune_pixels(
    channels: NDArray[Any], beta: float = 1.0, patch: int | None = None, channel_mean: bool = False
) -> PrunedPixels:
    """Keep the clip(floor(beta * N_eff), 1, N) pixels of each group that are farthest from the
    mean.

    Args:
        channels: integer or floating, finite, shape (channels, height, width).
        beta: multiple of the effective number to keep.
        patch: side of a patch; patches at the right and lower edge may be smaller. None: a group is
            a channel.
        channel_mean: patches are centred on the mean of the whole channel, not on their own.

    Returns:
        The pixels and their mask. The mean is rounded if pixels are integers. A group of equal
        pixels is kept whole.

    Raises:
        NonFiniteError: a pixel is NaN or infinite.
        ValueError: beta is not a positive finite number.
    """
    pruned = np.empty_like(channels)
    kept = np.empty(channels.shape, dtype=np.bool_)
    for number, channel in enumerate(channels):
        values = torch.from_numpy(channel.astype(np.float64))
        if patch is None:
            mask, means = (
                each.reshape(channel.shape)
                for each in _prune_rows(values.reshape(1, -1), beta, None)
            )
        else:
            centre = (sum_vector(values), values.numel()) if channel_mean else None
            mask, means = _prune_patches(values, beta, patch, centre)
        kept[number] = mask.numpy()
        fill = means.numpy() if channel.dtype.kind == "f" else means.round().numpy()
        pruned[number] = np.where(kept[number], channel, fill.astype(channel.dtype))
    return PrunedPixels(pruned, kept)


# Sum and number of the pixels whose mean centres all groups; None: each its own.
_Centre = tuple[Tensor, int] | None


def _prune_patches(
    values: Tensor, beta: float, side: int, centre: _Centre
) -> tuple[Tensor, Tensor]:
    """As `_prune_rows`, for a channel whose patches are groups."""
    mask = torch.empty(values.shape, dtype=torch.bool)
    means = torch.empty_like(values)
    for rows in _spans(values.shape[0], side):
        for columns in _spans(values.shape[1], side):
            part = values[rows, columns]
            height = min(side, part.shape[0])
            width = min(side, part.shape[1])
            grid = part.reshape(part.shape[0] // height, height, -1, width).transpose(1, 2)
            pieces = [
                _prune_rows(piece, beta, centre)
                for piece in torch.split(grid.reshape(-1, height * width), _ROWS)
            ]
            for whole, found in zip((mask, means), zip(*pieces, strict=True), strict=True):
                whole[rows, columns] = (
                    torch.cat(found).reshape(grid.shape).transpose(1, 2).reshape(part.shape)
                )
    return mask, means


def _spans(size: int, side: int) -> list[slice]:
    """The pixels that fill whole patches, and the others."""
    whole = size - size % side
    return [span for span in (slice(0, whole), slice(whole, size)) if span.start < span.stop]


def _prune_rows(rows: Tensor, beta: float, centre: _Centre) -> tuple[Tensor, Tensor]:
    """The mask of rows of pixels, each a group, and the mean in place of each pixel: both of the
    shape of the rows.
    """
    total, size = (
        (sum_rows(rows, lambda x: x)[0][:, None], rows.shape[1]) if centre is None else centre
    )
    # N times the score: N x - sum x is exact for integers, so that equal distances are exactly
    # equal.
    mask = effective_mask(rows * size - total, beta=beta)
    return mask, (total / size).expand(rows.shape)


_NAMES = {"L": ("grey",), "RGB": ("red", "green", "blue")}
# Mode of Pillow -> mode with channels of its own. Others are converted to RGB.
_PLAIN = {"1": "L", "La": "LA", "RGBX": "RGB", "RGBa": "RGBA", "PA": "RGBA"}
_KEPT = ("L", "LA", "RGB", "RGBA")
_CONVERTED = ("CMYK", "YCbCr", "LAB", "HSV")


@dataclass(frozen=True)
class Picture:
    """An image as numbers.

    Attributes:
        channels: uint8, uint16, int32 or float32, shape (channels, height, width), without alpha.
        names: of the channels.
        alpha: uint8, shape (height, width); None for an opaque image.
        profile: the colour profile (ICC) of the file.
        notes: sentences on what the file holds and this picture does not.
    """

    channels: NDArray[Any]
    names: tuple[str, ...]
    alpha: NDArray[np.uint8] | None = None
    profile: bytes | None = None
    notes: tuple[str, ...] = ()

    @property
    def height(self) -> int:
        return int(self.channels.shape[1])

    @property
    def width(self) -> int:
        return int(self.channels.shape[2])

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return self.channels.dtype.itemsize * 8

    @property
    def suffix(self) -> str:
        """Of a file that holds the picture without loss."""
        return ".png" if self.channels.dtype in (np.uint8, np.uint16) else ".tiff"

    def with_channels(self, channels: NDArray[Any]) -> "Picture":
        """This picture with other numbers."""
        return replace(self, channels=channels)

    def image(self) -> Image.Image:
        """The picture for Pillow."""
        if self.alpha is None and len(self.channels) == 1:
            return Image.fromarray(np.ascontiguousarray(self.channels[0]))
        planes = [*self.channels, *([] if self.alpha is None else [self.alpha])]
        return Image.merge(
            {2: "LA", 3: "RGB", 4: "RGBA"}[len(planes)],
            [Image.fromarray(plane) for plane in planes],
        )

    def encoded(self) -> bytes:
        """The content of a file that holds the picture without loss: PNG, or TIFF for numbers
        that PNG does not have.
        """
        file = BytesIO()
        kind: dict[str, Any] = {"format": "PNG" if self.suffix == ".png" else "TIFF"}
        self.image().save(
            file, **kind, **({} if self.profile is None else {"icc_profile": self.profile})
        )
        return file.getvalue()


def read_picture(path: Path) -> Picture:
    """The first frame of an image file, upright.

    Raises:
        UserError: there is no such file, or it is not an image, damaged or too large.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; give an image.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, and of damaged metadata
            with Image.open(path) as file:
                notes = _notes(file)
                file.load()
                return _picture(ImageOps.exif_transpose(file), file.info.get("icc_profile"), notes)
    except UnidentifiedImageError as error:
        raise UserError(
            f"{path}: not an image in a format that Pillow reads; give a PNG, JPEG, "
            "TIFF or WebP file."
        ) from error
    except Image.DecompressionBombError as error:
        raise UserError(
            f"{path}: the image is too large ({reason(error)}); give a smaller one."
        ) from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    # As the readers of formats raise them.
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError) as error:
        raise UserError(
            f"{path}: the image is damaged ({reason(error)}); give an intact file."
        ) from error


def _notes(file: Any) -> tuple[str, ...]:
    notes = []
    frames = getattr(file, "n_frames", 1)
    if frames > 1:
        notes.append(f"it holds {frames} frames; the first is used.")
    if file.mode in _CONVERTED:
        notes.append(f"its colours ({file.mode}) are converted to RGB.")
    if file.mode in ("RGB", "RGBA", "LA") and any(";16" in str(tile) for tile in file.tile):
        notes.append("Pillow reads 8 of the 16 bits of its colours.")
    return tuple(notes)


def _picture(image: Any, profile: bytes | None, notes: tuple[str, ...]) -> Picture:
    mode: str = image.mode
    if mode.startswith("I;16") or mode in ("I", "F"):
        return Picture(_numbers(np.asarray(image))[None], _NAMES["L"], None, profile, notes)
    if image.has_transparency_data and mode in ("P", "L", "RGB", "1"):
        image = image.convert("LA" if mode in ("L", "1") else "RGBA")
    elif mode not in _KEPT:
        image = image.convert(_PLAIN.get(mode, "RGB"))
        profile = None if mode in _CONVERTED else profile  # it is of the other colours
    planes = np.ascontiguousarray(np.moveaxis(np.atleast_3d(np.asarray(image)), 2, 0))
    colours = image.mode.removesuffix("A")
    alpha = planes[-1] if colours != image.mode else None
    return Picture(planes[: len(colours)], _NAMES[colours], alpha, profile, notes)


def _numbers(values: NDArray[Any]) -> NDArray[Any]:
    """16 bits as uint16, whichever mode of Pillow holds them; other numbers as they are."""
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise UserError("the image holds NaN or infinity; replace these pixels.")
        return values
    fits = values.dtype.itemsize == 2 or (values.min() >= 0 and values.max() < 1 << 16)
    return values.astype(np.uint16 if fits else np.int32)


_AT_A_TIME = 1 << 18  # pixels in a strip: its float64 intermediates stay small
SSIM_WINDOW = 7  # pixels: the side of scikit-image's window


def peak_signal_to_noise(original: NDArray[Any], changed: NDArray[Any]) -> float:
    """PSNR in dB over all channels; infinite for equal images. Both of shape (channels, height,
    width).
    """
    if np.array_equal(original, changed):
        return math.inf
    return float(peak_signal_noise_ratio(original, changed, data_range=_data_range(original)))


def structural_similarity_of(original: NDArray[Any], changed: NDArray[Any]) -> float | None:
    """SSIM, the mean over the channels; None for an image that is smaller than the window.
    Arguments as above.
    """
    if min(original.shape[1:]) < SSIM_WINDOW:
        return None
    if np.array_equal(original, changed):
        return 1.0
    span = _data_range(original)
    rim = SSIM_WINDOW - 1
    height, width = map(int, original.shape[1:])
    step = max(1, _AT_A_TIME // width)
    strips = [
        slice(first, min(first + step, height - rim) + rim)
        for first in range(0, height - rim, step)
    ]

    def of_strip(place: tuple[int, slice]) -> float:
        """SSIM of a strip, which has no value in its rim, times the rows that have one."""
        first = original[place]
        second = changed[place]
        return float(structural_similarity(first, second, data_range=span)) * (
            int(first.shape[0]) - rim
        )

    with ThreadPoolExecutor() as pool:
        values = pool.map(
            of_strip, [(channel, strip) for channel in range(len(original)) for strip in strips]
        )
        return math.fsum(values) / (len(original) * (height - rim))


def _data_range(original: NDArray[Any]) -> float:
    """The range of the numbers: that of their 8 or 16 bits, and for others that of the image."""
    if original.dtype in (np.uint8, np.uint16):
        return float(np.iinfo(original.dtype).max)
    return float(original.max()) - float(original.min())


_SIDE = 640  # pixels: the longer side of a panel; small images are enlarged by whole numbers
_GAP = 24
_LINE = 30
_TITLE = 24
_BLACK = "#111111"
_GREY = "#555555"


def panels(pictures: list[Picture], titles: list[tuple[str, str]]) -> bytes:
    """A PNG of pictures of one size side by side, each with a title and a line below it.

    Args:
        pictures: at least one. Numbers that are not of 8 bits are scaled by the range of the first
            picture.
        titles: for each picture the title and the line below.
    """
    first = pictures[0]
    low = float(first.channels.min())
    high = float(first.channels.max())
    shown = [_panel(picture, low, high) for picture in pictures]
    width, height = shown[0].size
    step = max(width, 320)
    figure = Image.new(
        "RGB", (len(shown) * (step + _GAP) + _GAP, height + 2 * _LINE + 3 * _GAP), "white"
    )
    draw = ImageDraw.Draw(figure)
    title_font = ImageFont.load_default(_TITLE)
    font = ImageFont.load_default(_TITLE - 5)
    for number, (panel, (title, below)) in enumerate(zip(shown, titles, strict=True)):
        left = _GAP + number * (step + _GAP)
        figure.paste(panel, (left + (step - width) // 2, _GAP))
        middle = left + step / 2
        top = height + 2 * _GAP
        draw.text((middle, top), title, _BLACK, title_font, anchor="mm")
        draw.text((middle, top + _LINE), below, _GREY, font, anchor="mm")
    file = BytesIO()
    figure.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _panel(picture: Picture, low: float, high: float) -> Image.Image:
    """A picture in 8 bits on white, at the size of a panel."""
    if picture.bits != 8:
        scaled = (picture.channels.astype(np.float64) - low) * (
            255 / (high - low) if high > low else 0.0
        )
        picture = picture.with_channels(scaled.clip(0, 255).round().astype(np.uint8))
    image = picture.image()
    if picture.alpha is not None:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("RGB")
    longer = max(image.size)
    if longer <= _SIDE:
        scale = _SIDE // longer
        return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    size = [max(1, round(side * _SIDE / longer)) for side in image.size]
    return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)


@dataclass(frozen=True, kw_only=True)
class PixelGroupRecord:
    """An image pruned with one kind of group.

    Attributes:
        group: "channel" or "patch".
        file: of the pruned image.
        pixels, kept: values of all channels, and those that are kept; an RGB image has three for
            each pixel.
        sparsity: the share that is removed; by channel: `sparsity_of_channels`.
        psnr: in dB; null if it is infinite because nothing changed.
        ssim: null for an image smaller than its window of 7 x 7 pixels.
    """

    group: str
    file: str
    pixels: int
    kept: int
    sparsity: float
    sparsity_of_channels: dict[str, float]
    psnr: float | None
    ssim: float | None

    @property
    def decibels(self) -> float:
        """The PSNR, infinity included."""
        return math.inf if self.psnr is None else self.psnr


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """The content of image.json.

    Attributes:
        image: name of the file; width, height: in pixels; bits: of a number.
        channels: their names; alpha: whether there is an alpha channel, which is never pruned.
        notes: on what the file holds and was not used.
        beta, patch: the multiple of N_eff, and the side of a patch.
        mean: "group" if patches were centred on their own mean, "channel" if on that of their
            channel.
        groups: the results.
        seconds: of pruning, without reading, comparing and drawing.
    """

    image: str
    width: int
    height: int
    bits: int
    channels: list[str]
    alpha: bool
    notes: list[str]
    beta: float
    patch: int
    mean: str
    groups: list[PixelGroupRecord]
    seconds: float
    versions: dict[str, str]
    command: str


logger = logging.getLogger(__name__)
RECORD_NAME = "image.json"
FIGURE_NAME = "figure.png"


def prune_image(
    path: Path,
    output: Path,
    *,
    groups: Sequence[str] = ("channel", "patch"),
    beta: float = 1.0,
    patch: int = 4,
    mean: str = "group",
    overwrite: bool = False,
) -> ImageRecord:
    """Prune an image by groups, compare the results with the original, and write a folder.

    Args:
        path: the image.
        output: the folder to write: GROUP.png for each group (TIFF where PNG has no such numbers),
            figure.png and image.json.
        groups: "channel", "patch" or both.
        beta: multiple of the effective number to keep.
        patch: side of a patch.
        mean: "group" if patches are centred on their own mean, "channel" if on that of their
            channel.
        overwrite: replace an older output.

    Raises:
        UserError: beta is out of range, the image cannot be read, or the output may not be written.
    """
    try:
        check_beta(beta)
    except ValueError as error:
        raise UserError(f"--{error}.") from error
    if output.suffix.lower() in (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".gif", ".bmp"):
        raise UserError(
            f"--output {output}: it is a folder for the pruned images; give a name "
            f"without {output.suffix}."
        )
    check_folder(output, overwrite, RECORD_NAME)
    original = read_picture(path)
    for note in original.notes:
        logger.warning("warning: %s: %s", path, note)
    started = time.perf_counter()
    sides = [patch if group == "patch" else None for group in groups]
    pruned = [prune_pixels(original.channels, beta, side, mean == "channel") for side in sides]
    seconds = round(time.perf_counter() - started, 3)
    logger.info("%s: pruned in %.1f s; comparing.", path, seconds)
    found = [
        _group_record(original, result, group) for result, group in zip(pruned, groups, strict=True)
    ]
    record = ImageRecord(
        image=path.name,
        width=original.width,
        height=original.height,
        bits=original.bits,
        channels=list(original.names),
        alpha=original.alpha is not None,
        notes=list(original.notes),
        beta=beta,
        patch=patch,
        mean=mean,
        groups=found,
        seconds=seconds,
        versions=versions() | {package: version(package) for package in ("pillow", "scikit-image")},
        command=command_line(),
    )
    pictures = [original.with_channels(result.channels) for result in pruned]
    files = {each.file: picture.encoded() for each, picture in zip(found, pictures, strict=True)}
    files[FIGURE_NAME] = panels([original, *pictures], _titles(record))
    files[RECORD_NAME] = (
        json.dumps(asdict(record) | {"files": sorted(files)}, indent=1) + "\n"
    ).encode()
    write_folder(output, files, overwrite, RECORD_NAME)
    return record


def table_of(record: ImageRecord) -> str:
    """The results as a table."""
    rows = [["group", "kept", "removed %", "PSNR dB", "SSIM"]]
    for each in record.groups:
        ssim = "-" if each.ssim is None else f"{each.ssim:.3f}"
        rows.append(
            [
                _label(each, record),
                f"{each.kept:,}",
                percent_cell(each.sparsity),
                _decibels(each),
                ssim,
            ]
        )
    colours = count_of(len(record.channels), "channel")
    kind = (
        f"{record.width} x {record.height} pixels, {colours} of {record.bits} "
        f"bits{', alpha kept' if record.alpha else ''}"
    )
    lines = [f"{record.image}: {kind}, beta {record.beta:g}", table(rows)]
    if any(each.ssim is None for each in record.groups):
        lines.append(f"SSIM needs an image of at least {SSIM_WINDOW} x {SSIM_WINDOW} pixels")
    return "\n".join(lines)


def _group_record(original: Picture, pruned: PrunedPixels, group: str) -> PixelGroupRecord:
    kept = pruned.kept.sum(axis=(1, 2))
    shares = 1 - kept / (original.height * original.width)
    psnr = peak_signal_to_noise(original.channels, pruned.channels)
    return PixelGroupRecord(
        group=group,
        file=f"{group}{original.suffix}",
        pixels=pruned.kept.size,
        kept=int(kept.sum()),
        sparsity=1 - int(kept.sum()) / pruned.kept.size,
        sparsity_of_channels=dict(zip(original.names, shares.tolist(), strict=True)),
        psnr=None if math.isinf(psnr) else psnr,
        ssim=structural_similarity_of(original.channels, pruned.channels),
    )


def _titles(record: ImageRecord) -> list[tuple[str, str]]:
    titles = [("original", f"{record.width} x {record.height} pixels")]
    for each in record.groups:
        ssim = "" if each.ssim is None else f", SSIM {each.ssim:.3f}"
        decibels = _decibels(each)
        titles.append(
            (_label(each, record), f"{100 * each.sparsity:.1f} % removed, PSNR {decibels} dB{ssim}")
        )
    return titles


def _label(each: PixelGroupRecord, record: ImageRecord) -> str:
    return f"patches {record.patch} x {record.patch}" if each.group == "patch" else "channel"


def _decibels(each: PixelGroupRecord) -> str:
    return "infinite" if each.psnr is None else f"{each.psnr:.1f}"
