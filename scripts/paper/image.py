"""The pixels of the paper: EMP on photographs, in channels and in 4 x 4 patches, beside the published numbers.

    python scripts/paper/image.py [--output docs/paper]

Writes image.md and image.jpg, the figure of the first photograph. The paper names neither its photograph nor its size, so the
photographs are those that scikit-image carries. Takes seconds.
"""

import argparse
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from emp_llm.common.tables import Rows, markdown_table
from emp_llm.image import image
from emp_llm.pixels.image_record import ImageRecord, PixelGroupRecord

PHOTOGRAPHS = ("astronaut", "coffee", "chelsea")
# Section "Featurewise Effective Pruning": removed in percent, PSNR in dB, SSIM.
PUBLISHED = {"channel": (26.7, 29.4, 0.912), "patch": (32.3, 38.3, 0.991)}
_FIGURE = "image.jpg"
_WIDTH = 1100  # of the figure in pixels

_PAGE = """# Pixels

EMP on photographs: the most distinct pixels of each channel are kept, or of each 4 × 4 patch of a channel, and the others
become the mean ([`emp-llm image`](../image.md)).

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
    """The records of a photograph: in channels and patches with their own means, and in patches with the channel's mean."""
    from PIL import Image

    source = folder / f"{name}.png"
    Image.fromarray(pixels).save(source)
    own = image(source, output=folder / name, quiet=True)
    return [own, image(source, output=folder / f"{name}-channel", group="patch", mean="channel", quiet=True)]


def rows_of(found: dict[str, list[ImageRecord]]) -> Rows:
    """The table: the published rows first."""
    rows = [["photograph", "group", "centre", "removed %", "PSNR dB", "SSIM"]]
    for group, (removed, psnr, ssim) in PUBLISHED.items():
        rows.append(["the paper's", _GROUPS[group], "", f"{removed:.1f}", f"{psnr:.1f}", f"{ssim:.3f}"])
    for name, records in found.items():
        for record in records:
            for each in record.groups:
                centre = "channel's mean" if each.group == "channel" or record.mean == "channel" else "patch's mean"
                values = [
                    f"{100 * each.sparsity:.1f}",
                    f"{each.decibels:.1f}",
                    "-" if each.ssim is None else f"{each.ssim:.3f}",
                ]
                rows.append([f"{name}, {record.width} × {record.height}", _GROUPS[each.group], centre, *values])
    return rows


def _range_of(groups: list[PixelGroupRecord]) -> str:
    """The least and the largest share removed, in percent."""
    shares = sorted(round(100 * each.sparsity) for each in groups)
    return f"{shares[0]} to {shares[-1]}"


def main(line: list[str] | None = None) -> None:
    """Measure the photographs, and write the page and the figure."""
    from PIL import Image

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[2] / "docs" / "paper", help="folder")
    output: Path = parser.parse_args(line).output
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = {name: measure(name, photograph(name), folder) for name in PHOTOGRAPHS}
        with Image.open(folder / PHOTOGRAPHS[0] / "figure.png") as figure:
            content = BytesIO()
            height = figure.height * _WIDTH // figure.width
            figure.resize((_WIDTH, height), Image.Resampling.LANCZOS).save(content, format="JPEG", quality=82, optimize=True)
    seconds = time.perf_counter() - started
    page = _PAGE.format(
        table=markdown_table(rows_of(found)),
        figure=_FIGURE,
        channels=_range_of([own.groups[0] for own, _ in found.values()]),
        literal=_range_of([literal.groups[0] for _, literal in found.values()]),
        seconds=seconds,
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / _FIGURE).write_bytes(content.getvalue())
    (output / "image.md").write_text(page, encoding="utf-8")
    print(f"image.md and {_FIGURE} ({len(content.getvalue()):,} bytes) in {output}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
