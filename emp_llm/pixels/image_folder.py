"""The output folder of `image`: the pruned images, the figure and the record."""

import logging
import math
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from emp_llm.common.errors import UserError
from emp_llm.common.machine import command_line, versions
from emp_llm.common.tables import percent_cell, table
from emp_llm.common.errors import count_of
from emp_llm.pixels.fidelity import SSIM_WINDOW, check_skimage, peak_signal_to_noise, structural_similarity_of
from emp_llm.pixels.image_record import ImageRecord, PixelGroupRecord
from emp_llm.pixels.panels import panels
from emp_llm.pixels.picture import Picture, read_picture
from emp_llm.pixels.pruned_pixels import PrunedPixels, prune_pixels
from emp_llm.checkpoint.output import check_folder, write_folder

logger = logging.getLogger(__name__)
RECORD_NAME, FIGURE_NAME = "image.json", "figure.png"
_OPTION = "OUT"


@dataclass(frozen=True)
class PixelRecipe:
    """How pixels are pruned.

    Attributes:
        groups: "channel", "patch" or both.
        beta: multiple of the effective number to keep.
        patch: side of a patch.
        mean: "group" if patches are centred on their own mean, "channel" if on that of their channel.
    """

    groups: tuple[str, ...] = ("channel", "patch")
    beta: float = 1.0
    patch: int = 4
    mean: str = "group"


def prune_image(path: Path, output: Path, how: PixelRecipe, overwrite: bool) -> ImageRecord:
    """Prune an image by groups, compare the results with the original, and write a folder.

    Args:
        path: the image.
        output: the folder to write: GROUP.png for each group (TIFF where PNG has no such numbers), figure.png and image.json.
        how: groups and options.
        overwrite: replace an older output.

    Raises:
        UserError: the image cannot be read, a package is missing, or the output may not be written.
    """
    check_skimage()
    check_folder(output, overwrite, RECORD_NAME, _OPTION)
    original = read_picture(path)
    for note in original.notes:
        logger.warning("warning: %s: %s", path, note)
    started = time.perf_counter()
    sides = [how.patch if group == "patch" else None for group in how.groups]
    pruned = [prune_pixels(original.channels, how.beta, side, how.mean == "channel") for side in sides]
    seconds = round(time.perf_counter() - started, 3)
    logger.info("%s: pruned in %.1f s; comparing.", path, seconds)
    found = [_group_record(original, result, group) for result, group in zip(pruned, how.groups, strict=True)]
    record = ImageRecord(
        image=path.name,
        width=original.width,
        height=original.height,
        bits=original.bits,
        channels=list(original.names),
        alpha=original.alpha is not None,
        notes=list(original.notes),
        beta=how.beta,
        patch=how.patch,
        mean=how.mean,
        groups=found,
        seconds=seconds,
        versions=versions() | {package: version(package) for package in ("pillow", "scikit-image")},
        command=command_line(),
    )
    pictures = [original.with_channels(result.channels) for result in pruned]
    files = {each.file: picture.encoded() for each, picture in zip(found, pictures, strict=True)}
    files[FIGURE_NAME] = panels([original, *pictures], _titles(record))
    files[RECORD_NAME] = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    write_folder(output, files, overwrite, RECORD_NAME, _OPTION)
    return record


def check_output_name(output: Path) -> None:
    """Raise UserError for an output that is named like an image file; it is a folder."""
    if output.suffix.lower() in (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".gif", ".bmp"):
        raise UserError(f"OUT {output}: it is a folder for the pruned images; give a name without {output.suffix}.")


def image_words(record: ImageRecord) -> str:
    """The results as a table."""
    rows = [["group", "kept", "removed %", "PSNR dB", "SSIM"]]
    for each in record.groups:
        ssim = "-" if each.ssim is None else f"{each.ssim:.3f}"
        rows.append([_label(each, record), f"{each.kept:,}", percent_cell(each.sparsity), _decibels(each), ssim])
    colours = count_of(len(record.channels), "channel")
    kind = f"{record.width} x {record.height} pixels, {colours} of {record.bits} bits{', alpha kept' if record.alpha else ''}"
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
        titles.append((_label(each, record), f"{100 * each.sparsity:.1f} % removed, PSNR {decibels} dB{ssim}"))
    return titles


def _label(each: PixelGroupRecord, record: ImageRecord) -> str:
    return f"patches {record.patch} x {record.patch}" if each.group == "patch" else "channel"


def _decibels(each: PixelGroupRecord) -> str:
    return "infinite" if each.psnr is None else f"{each.psnr:.1f}"
