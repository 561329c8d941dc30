"""Rows of a data set that hold a text and images. An image is opened when its row is used."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.calibration.corpora import open_data_set, text_in
from emp_llm.common.errors import UserError, reason
from emp_llm.common.wording import quotable
from emp_llm.records.corpus import Corpus

if TYPE_CHECKING:
    from PIL.Image import Image

Text = str | list[dict[str, Any]]  # a text, or the messages of a conversation


@dataclass(frozen=True)
class ImageRow:
    """A row.

    Attributes:
        name: of the data set and the row, for errors.
        text: a text, or the messages of a conversation.
        cells: its images, as the data set holds them: paths, bytes, {"bytes", "path"}, or images of Pillow.
        folder: where relative paths start.
    """

    name: str
    text: Text
    cells: tuple[Any, ...]
    folder: Path = Path()

    def images(self) -> list["Image"]:
        """The images, in RGB.

        Raises:
            UserError: one cannot be opened.
        """
        return [self._opened(cell) for cell in self.cells]

    def _opened(self, cell: Any) -> "Image":
        from PIL import Image, ImageOps

        try:
            image = _image_of(cell, self.folder)
            return ImageOps.exif_transpose(image).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            file = cell.get("path") if isinstance(cell, Mapping) else cell
            shown = f" {quotable(str(file))}" if isinstance(file, str | Path) else ""
            raise UserError(
                f"{self.name}: its image{shown} cannot be opened ({reason(error)}). Mend the row, or leave it out."
            ) from error


def image_rows(corpus: Corpus, seed: int = 0) -> Iterator[ImageRow]:
    """The rows of a corpus with a column of images, in order. Rows are counted from 1.

    Args:
        seed: for corpora that are shuffled.

    Raises:
        UserError: Pillow is not installed; the data set or one of its columns does not exist, or does not hold text or images.
    """
    check_pillow()
    assert corpus.image is not None
    data, column = open_data_set(corpus, seed)
    data = _undecoded(data, corpus.image)
    folder = Path(corpus.file).parent if corpus.file else Path()
    for number, row in enumerate(data, 1):
        name = f"{corpus.source}, row {number}"
        text = text_in(row[column], f"{name}: column {column!r}")
        yield ImageRow(name, text, image_cells(row[corpus.image], f"{name}: column {corpus.image!r}"), folder)


def image_cells(value: Any, where: str) -> tuple[Any, ...]:
    """The images of a row: of one image, a list of them, or None.

    Raises:
        UserError: the value is something else. The message begins with `where`.
    """
    from PIL.Image import Image

    cells = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(cell, str | bytes | Path | Image) or _is_stored(cell) for cell in cells):
        raise UserError(f"{where} does not hold images. Name a column of images, or of the paths of image files.")
    return cells


def check_pillow() -> None:
    """Raise UserError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UserError("Calibration on images needs Pillow. Install it: pip install pillow") from error


def _is_stored(cell: Any) -> bool:
    """Whether a value is an image as data sets store it."""
    return isinstance(cell, Mapping) and (cell.get("bytes") is not None or cell.get("path") is not None)


def _undecoded(data: Any, column: str) -> Any:
    """The data set with its images as stored, so that one that cannot be opened is found with its row."""
    import datasets

    stored = datasets.Image(decode=False)
    feature = (data.features or {}).get(column)
    if isinstance(feature, datasets.Image):
        return data.cast_column(column, stored)
    if isinstance(getattr(feature, "feature", None), datasets.Image):
        return data.cast_column(column, datasets.List(stored))
    return data


def _image_of(cell: Any, folder: Path) -> "Image":
    """An image of a cell. OSError, ValueError or SyntaxError if it cannot be read."""
    from PIL import Image

    if isinstance(cell, Image.Image):
        return cell
    data: Any = cell.get("bytes") if isinstance(cell, Mapping) else cell
    path: Any = cell.get("path") if isinstance(cell, Mapping) else cell
    if isinstance(data, bytes):
        return Image.open(BytesIO(data))
    if isinstance(cell, Mapping) and "://" in str(path):  # in an archive, or on the Hub
        import datasets

        decoded: Image.Image = datasets.Image().decode_example({"bytes": None, "path": path})
        return decoded
    return Image.open(folder / path)
