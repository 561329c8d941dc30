"""Readers of the image data sets of the paper: MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and
TinyImageNet, from a folder.

A data set that is not there raises UserError, which says what to put where. Nothing is downloaded.
"""

import gzip
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from emp_llm.common.errors import UserError

DATA = Path(__file__).parents[3] / "shared" / "vision"
# ImageNet's, as the given ResNets were trained with
_CIFAR_MEAN = (0.485, 0.456, 0.406)
_CIFAR_STD = (0.229, 0.224, 0.225)
# Mean and std of the training pixels, as is usual.
_IDX_PIXELS = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
_FIRST_TEST = 50  # number of the first sheet of test images of CIFAR-10


@dataclass(frozen=True)
class ImageData:
    """A data set of images.

    Attributes:
        name: "mnist", "fashion-mnist", "cifar10", "cifar100" or "tiny-imagenet".
        train, test: uint8, shape (images, channels, height, width).
        train_labels, test_labels: int64, shape (images,).
        mean, std: of each channel, for pixels from 0 to 1.
        classes: number of labels.
    """

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int = 10

    def inputs(self, images: Tensor) -> Tensor:
        """Images as a network takes them: float32, normalised by channel."""
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        return (images.float() / 255 - mean) / std

    def shortened(self, train: int | None, test: int | None) -> "ImageData":
        """The first images of both parts; None: all."""
        return replace(
            self,
            train=self.train[:train],
            train_labels=self.train_labels[:train],
            test=self.test[:test],
            test_labels=self.test_labels[:test],
        )


def image_data(name: str, data: Path) -> ImageData:
    """Read a data set.

    Args:
        name: as in `ImageData`.
        data: the folder of all data sets.

    Raises:
        UserError: the data set is unknown, not there, or not in the expected format.
    """
    if name not in _READERS:
        raise UserError(f"--dataset {name!r} is not one of {', '.join(_READERS)}.")
    return _READERS[name](name, data)


def _idx_data(name: str, data: Path) -> ImageData:
    """MNIST or Fashion-MNIST: four idx files, compressed or not."""
    mean, std = _IDX_PIXELS[name]
    folder = data / name.replace("-", "_")
    parts = [
        _idx(folder, name, f"{part}-{what}")
        for part in ("train", "t10k")
        for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    images, labels, test, test_labels = parts
    return ImageData(
        name, images[:, None], labels.long(), test[:, None], test_labels.long(), (mean,), (std,)
    )


def _idx(folder: Path, name: str, file: str) -> Tensor:
    """An idx file of bytes: two zero bytes, the type 8, the number of dimensions, the big-endian
    sizes, the values.
    """
    plain = folder / file
    packed = folder / f"{file}.gz"
    if not plain.is_file() and not packed.is_file():
        raise UserError(
            f"{packed}: no such file. Put the four files of {name} into {folder}: "
            "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
            "t10k-labels-idx1-ubyte.gz; or give another --data."
        )
    try:
        content = gzip.decompress(packed.read_bytes()) if packed.is_file() else plain.read_bytes()
        shape = struct.unpack_from(f">{content[3]}I", content, 4)
        return torch.from_numpy(
            np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape).copy()
        )
    except (OSError, EOFError, ValueError, IndexError, struct.error) as error:
        raise UserError(
            f"{packed if packed.is_file() else plain}: not an idx file of bytes. Copy it again."
        ) from error


def _cifar10(name: str, data: Path) -> ImageData:
    """CIFAR-10, in the binary version of its authors, or as PNG sheets of 1,000 images, one a
    row.
    """
    folder = data / name
    if (folder / "data_batch_1.bin").is_file():
        train = [folder / f"data_batch_{number}.bin" for number in range(1, 6)]
        return _cifar_binary(
            name, [path for path in train if path.is_file()], folder / "test_batch.bin", 1, 10
        )
    sheets = sorted(
        (int(path.stem.rpartition("_")[2]), path) for path in folder.glob("cifar10_batch_*.png")
    )
    labels = folder / "labels.bin"
    if (
        not sheets
        or not labels.is_file()
        or sheets[-1][0] < _FIRST_TEST
        or sheets[0][0] >= _FIRST_TEST
    ):
        raise UserError(
            f"{folder}: no CIFAR-10. Put there data_batch_1.bin to data_batch_5.bin and "
            "test_batch.bin of the binary version; or labels.bin and sheets cifar10_batch_N.png of "
            "1000 images, one a row, N from 0 for training and from 50 for testing; or give "
            "another --data."
        )
    found = torch.from_numpy(np.frombuffer(labels.read_bytes(), np.uint8).astype(np.int64))
    parts = []
    for some in (
        [each for each in sheets if each[0] < _FIRST_TEST],
        [each for each in sheets if each[0] >= _FIRST_TEST],
    ):
        places = torch.cat([torch.arange(1000) + 1000 * number for number, _ in some])
        if int(places.max()) >= len(found):
            raise UserError(
                f"{labels}: {len(found)} labels, too few for {some[-1][1].name}. Copy it again."
            )
        parts += [torch.cat([_sheet(path) for _, path in some]), found[places]]
    return ImageData(name, parts[0], parts[1], parts[2], parts[3], _CIFAR_MEAN, _CIFAR_STD)


def _sheet(path: Path) -> Tensor:
    """The 1,000 images of a sheet: uint8, shape (1000, 3, 32, 32)."""
    from PIL import Image

    try:
        pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 32, 32, 3)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: not a sheet of images of 32 x 32 pixels, one a row. Copy it again."
        ) from error
    return torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).contiguous()


def _cifar100(name: str, data: Path) -> ImageData:
    folder = data / name
    if not (folder / "train.bin").is_file():
        raise UserError(
            f"{folder}: no CIFAR-100. Put there train.bin and test.bin of the binary "
            "version; or another --data."
        )
    return _cifar_binary(name, [folder / "train.bin"], folder / "test.bin", 2, 100)


def _cifar_binary(name: str, train: list[Path], test: Path, labels: int, classes: int) -> ImageData:
    """The binary version of CIFAR: for each image its labels, one byte each, the last one the
    finest; then 3072 bytes.
    """
    parts = []
    for path in (*train, test):
        try:
            parts.append(np.fromfile(path, np.uint8).reshape(-1, labels + 3072))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: missing, or not in the binary version of {name}. Copy it again."
            ) from error
    rows = [torch.from_numpy(np.concatenate(parts[:-1])), torch.from_numpy(parts[-1])]
    images = [part[:, labels:].reshape(-1, 3, 32, 32).contiguous() for part in rows]
    found = [part[:, labels - 1].long() for part in rows]
    return ImageData(
        name, images[0], found[0], images[1], found[1], _CIFAR_MEAN, _CIFAR_STD, classes
    )


def _tiny_imagenet(name: str, data: Path) -> ImageData:
    """TinyImageNet: the folder of its archive; the labelled validation images are the test
    images.
    """
    folder = data / "tiny-imagenet-200"
    listed = folder / "wnids.txt"
    noted = folder / "val" / "val_annotations.txt"
    if not listed.is_file() or not noted.is_file():
        raise UserError(
            f"{folder}: no TinyImageNet. Unpack tiny-imagenet-200.zip there, so that wnids.txt, "
            "train/ and val/ lie in it; or give another --data."
        )
    labels = {
        word: number for number, word in enumerate(listed.read_text(encoding="utf-8").split())
    }
    train = [
        (path, labels[path.parts[-3]])
        for path in sorted((folder / "train").glob("*/images/*.JPEG"))
    ]
    rows = [line.split("\t") for line in noted.read_text(encoding="utf-8").splitlines() if line]
    test = [(folder / "val" / "images" / row[0], labels[row[1]]) for row in rows]
    images = [torch.stack([_picture(path) for path, _ in part]) for part in (train, test)]
    found = [torch.tensor([label for _, label in part]) for part in (train, test)]
    return ImageData(
        name, images[0], found[0], images[1], found[1], _CIFAR_MEAN, _CIFAR_STD, len(labels)
    )


def _picture(path: Path) -> Tensor:
    from PIL import Image

    try:
        return torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).permute(2, 0, 1)
    except OSError as error:
        raise UserError(f"{path}: missing, or not an image. Copy it again.") from error


_READERS: dict[str, Callable[[str, Path], ImageData]] = {
    "mnist": _idx_data,
    "fashion-mnist": _idx_data,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "tiny-imagenet": _tiny_imagenet,
}
