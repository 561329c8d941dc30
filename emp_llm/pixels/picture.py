"""Pictures: any image that Pillow opens, as channels of numbers, and back."""

import warnings
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.common.errors import UserError, reason

if TYPE_CHECKING:
    from PIL.Image import Image

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

    def image(self) -> "Image":
        """The picture for Pillow."""
        from PIL import Image

        if self.alpha is None and len(self.channels) == 1:
            return Image.fromarray(np.ascontiguousarray(self.channels[0]))
        planes = [*self.channels, *([] if self.alpha is None else [self.alpha])]
        return Image.merge({2: "LA", 3: "RGB", 4: "RGBA"}[len(planes)], [Image.fromarray(plane) for plane in planes])

    def encoded(self) -> bytes:
        """The content of a file that holds the picture without loss: PNG, or TIFF for numbers that PNG does not have."""
        file = BytesIO()
        kind: dict[str, Any] = {"format": "PNG" if self.suffix == ".png" else "TIFF"}
        self.image().save(file, **kind, **({} if self.profile is None else {"icc_profile": self.profile}))
        return file.getvalue()


def read_picture(path: Path) -> Picture:
    """The first frame of an image file, upright.

    Raises:
        UserError: Pillow is not installed; or there is no such file, or it is not an image, damaged or too large.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise UserError(needs_image_extra(error)) from error
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
        raise UserError(f"{path}: not an image in a format that Pillow reads; give a PNG, JPEG, TIFF or WebP file.") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{path}: the image is too large ({reason(error)}); give a smaller one.") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError) as error:  # as the readers of formats raise them
        raise UserError(f"{path}: the image is damaged ({reason(error)}); give an intact file.") from error


def needs_image_extra(error: ImportError) -> str:
    """The message for a missing package of the extra `image`."""
    return f"emp-llm image needs Pillow and scikit-image ({reason(error)}). Install them: pip install 'emp-llm[image]'"


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
