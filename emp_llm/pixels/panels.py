"""The figure of a pruned image: the original and the pruned ones side by side, by Pillow alone."""

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from emp_llm.pixels.picture import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE = 640  # pixels: the longer side of a panel; small images are enlarged by whole numbers
_GAP, _LINE, _TITLE = 24, 30, 24
_BLACK, _GREY = "#111111", "#555555"


def panels(pictures: list[Picture], titles: list[tuple[str, str]]) -> bytes:
    """A PNG of pictures of one size side by side, each with a title and a line below it.

    Args:
        pictures: at least one. Numbers that are not of 8 bits are scaled by the range of the first picture.
        titles: for each picture the title and the line below.
    """
    from PIL import Image, ImageDraw, ImageFont

    first = pictures[0]
    low, high = float(first.channels.min()), float(first.channels.max())
    shown = [_panel(picture, low, high) for picture in pictures]
    width, height = shown[0].size
    step = max(width, 320)
    figure = Image.new("RGB", (len(shown) * (step + _GAP) + _GAP, height + 2 * _LINE + 3 * _GAP), "white")
    draw = ImageDraw.Draw(figure)
    title_font, font = ImageFont.load_default(_TITLE), ImageFont.load_default(_TITLE - 5)
    for number, (panel, (title, below)) in enumerate(zip(shown, titles, strict=True)):
        left = _GAP + number * (step + _GAP)
        figure.paste(panel, (left + (step - width) // 2, _GAP))
        middle, top = left + step / 2, height + 2 * _GAP
        draw.text((middle, top), title, _BLACK, title_font, anchor="mm")
        draw.text((middle, top + _LINE), below, _GREY, font, anchor="mm")
    file = BytesIO()
    figure.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _panel(picture: Picture, low: float, high: float) -> "Image":
    """A picture in 8 bits on white, at the size of a panel."""
    from PIL import Image

    if picture.bits != 8:
        scaled = (picture.channels.astype(np.float64) - low) * (255 / (high - low) if high > low else 0.0)
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
