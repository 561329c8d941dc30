"""Pixels pruned by EMP: an image of yours, or the paper's table on photographs beside the published
numbers.

    python scripts/paper/image.py IN [--output DIR] [--beta B] [--group G] [--patch N] [--mean M]
    [--overwrite] python scripts/paper/image.py [--output DIR]

With an image: in each channel, or in each 4 x 4 patch of it, the N_eff most distinct pixels are
kept. The score of a pixel is its distance from the mean of its group, and a removed pixel becomes
that mean. The folder DIR holds the pruned images, a figure that shows them beside the original, and
image.json with PSNR and SSIM. Any image that Pillow opens can be pruned; its alpha channel is kept.
Needs pillow and scikit-image.

Without one: writes image.md and image.jpg, the figure of the first photograph, to docs/paper. The
paper names neither its photograph nor its size, so the photographs are those that scikit-image
carries. Takes seconds.
"""

import argparse
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from PIL import Image
from pixels import ImageRecord, PixelGroupRecord, prune_image, table_of

from emp_llm.common.errors import UserError
from emp_llm.common.tables import Rows, markdown_table

PHOTOGRAPHS = ("astronaut", "coffee", "chelsea")
# Section "Featurewise Effective Pruning": removed in percent, PSNR in dB, SSIM.
PUBLISHED = {"channel": (26.7, 29.4, 0.912), "patch": (32.3, 38.3, 0.991)}
_FIGURE = "image.jpg"
_WIDTH = 1100  # of the figure in pixels

_PAGE = """# Pixels

EMP on photographs: the most distinct pixels of each channel are kept, or of each 4 × 4 patch of a channel, and the others
become the mean ([images](../paper.md#images)).

{table}

![The first photograph: original, pruned in channels, pruned in patches]({figure})

- The paper does not name its photograph. The share removed in channels depends on the photograph: {channels} % in these.
- In patches, the text of the paper centres the scores on the mean of the whole channel. This removes {literal} % and
  changes the image far more than published. Scores centred on each patch's own mean agree with the published row, so they
  are the default; `--mean channel` follows the text.

{seconds:.0f} s for all rows, with reading, comparing and writing. Photographs: astronaut (NASA, public domain), coffee and
chelsea (CC0), from scikit-image. Made by `python scripts/paper/image.py`.
"""
_GROUPS = {"channel": "channel", "patch": "patch of 4 × 4"}


def photograph(name: str) -> NDArray[Any]:
    """One of scikit-image's photographs: uint8, shape (height, width, 3)."""
    import skimage.data

    pixels: NDArray[Any] = getattr(skimage.data, name)()
    return pixels


def measure(name: str, pixels: NDArray[Any], folder: Path) -> list[ImageRecord]:
    """The records of a photograph: in channels and patches with their own means, and in patches
    with the channel's mean.
    """
    source = folder / f"{name}.png"
    Image.fromarray(pixels).save(source)
    own = prune_image(source, folder / name)
    return [own, prune_image(source, folder / f"{name}-channel", groups=["patch"], mean="channel")]


def rows_of(found: dict[str, list[ImageRecord]]) -> Rows:
    """The table: the published rows first."""
    rows = [["photograph", "group", "centre", "removed %", "PSNR dB", "SSIM"]]
    for group, (removed, psnr, ssim) in PUBLISHED.items():
        rows.append(
            ["the paper's", _GROUPS[group], "", f"{removed:.1f}", f"{psnr:.1f}", f"{ssim:.3f}"]
        )
    for name, records in found.items():
        for record in records:
            for each in record.groups:
                centre = (
                    "channel's mean"
                    if each.group == "channel" or record.mean == "channel"
                    else "patch's mean"
                )
                values = [
                    f"{100 * each.sparsity:.1f}",
                    f"{each.decibels:.1f}",
                    "-" if each.ssim is None else f"{each.ssim:.3f}",
                ]
                rows.append(
                    [
                        f"{name}, {record.width} × {record.height}",
                        _GROUPS[each.group],
                        centre,
                        *values,
                    ]
                )
    return rows


def _range_of(groups: list[PixelGroupRecord]) -> str:
    """The least and the largest share removed, in percent."""
    shares = sorted(round(100 * each.sparsity) for each in groups)
    return f"{shares[0]} to {shares[-1]}"


def main(line: list[str] | None = None) -> None:
    """Prune the image that the command line names, or write the page of the paper. A UserError
    ends it with exit code 2.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image", type=Path, nargs="?", metavar="IN", help="image to prune")
    parser.add_argument(
        "--beta", type=float, default=1.0, help="keep beta x N_eff pixels of a group"
    )
    parser.add_argument(
        "--group",
        choices=[*_GROUPS, "both"],
        default="both",
        help="pixels that compete: of a channel, of a patch; or both, in turn",
    )
    parser.add_argument("--patch", type=int, default=4, help="side of a patch in pixels")
    parser.add_argument(
        "--mean",
        choices=["group", "channel"],
        default="group",
        help="the mean on which patches are centred",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder to write; default: IN's name with -emp, here; or docs/paper",
    )
    options = parser.parse_args(line)
    if options.image is None:
        write_page(options.output or Path(__file__).parents[2] / "docs" / "paper")
        return
    if options.patch < 1:
        parser.error(f"--patch must be at least 1 pixel, got {options.patch}.")
    try:
        record = prune_image(
            options.image,
            options.output or Path(f"{options.image.stem}-emp"),
            groups=list(_GROUPS) if options.group == "both" else [options.group],
            beta=options.beta,
            patch=options.patch,
            mean=options.mean,
            overwrite=options.overwrite,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(table_of(record))


def write_page(output: Path) -> None:
    """Measure the photographs, and write the page and the figure."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = {name: measure(name, photograph(name), folder) for name in PHOTOGRAPHS}
        with Image.open(folder / PHOTOGRAPHS[0] / "figure.png") as figure:
            content = BytesIO()
            height = figure.height * _WIDTH // figure.width
            figure.resize((_WIDTH, height), Image.Resampling.LANCZOS).save(
                content, format="JPEG", quality=82, optimize=True
            )
    seconds = time.perf_counter() - started
    page = _PAGE.format(
        table=markdown_table(rows_of(found), as_markdown=True),
        figure=_FIGURE,
        channels=_range_of([own.groups[0] for own, _ in found.values()]),
        literal=_range_of([literal.groups[0] for _, literal in found.values()]),
        seconds=seconds,
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / _FIGURE).write_bytes(content.getvalue())
    (output / "image.md").write_text(page, encoding="utf-8")
    print(
        f"image.md and {_FIGURE} ({len(content.getvalue()):,} bytes) in {output}, {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
