"""The record of a pruned image. It lies here because the room of records is full."""

import math
from typing import ClassVar

import msgspec

from emp_llm.records.base import FileRecord, Part


class PixelGroupRecord(Part, kw_only=True, omit_defaults=False):
    """An image pruned with one kind of group.

    Attributes:
        group: "channel" or "patch".
        file: of the pruned image.
        pixels, kept: values of all channels, and those that are kept; an RGB image has three for each pixel.
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


class ImageRecord(FileRecord, kw_only=True, omit_defaults=False):
    """The output of `image`.

    Attributes:
        image: name of the file; width, height: in pixels; bits: of a number.
        channels: their names; alpha: whether there is an alpha channel, which is never pruned.
        notes: on what the file holds and was not used.
        beta, patch: the multiple of N_eff, and the side of a patch.
        mean: "group" if patches were centred on their own mean, "channel" if on that of their channel.
        groups: the results.
        seconds: of pruning, without reading, comparing and drawing.
    """

    KIND: ClassVar[str] = "image"

    image: str
    width: int
    height: int
    bits: int
    channels: list[str]
    alpha: bool = False
    notes: list[str] = msgspec.field(default_factory=list)
    beta: float
    patch: int
    mean: str
    groups: list[PixelGroupRecord]
    seconds: float = 0.0
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    command: str = ""
