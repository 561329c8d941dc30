"""Fidelity of a changed image: PSNR and SSIM, by scikit-image."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.common.errors import UserError
from emp_llm.pixels.picture import needs_image_extra

_AT_A_TIME = 1 << 18  # pixels in a strip: its float64 intermediates stay small
SSIM_WINDOW = 7  # pixels: the side of scikit-image's window


def check_skimage() -> None:
    """Raise UserError if scikit-image is not installed."""
    try:
        import skimage.metrics  # noqa: F401
    except ImportError as error:
        raise UserError(needs_image_extra(error)) from error


def peak_signal_to_noise(original: NDArray[Any], changed: NDArray[Any]) -> float:
    """PSNR in dB over all channels; infinite for equal images. Both of shape (channels, height, width)."""
    from skimage.metrics import peak_signal_noise_ratio

    if np.array_equal(original, changed):
        return math.inf
    return float(peak_signal_noise_ratio(original, changed, data_range=_data_range(original)))


def structural_similarity_of(original: NDArray[Any], changed: NDArray[Any]) -> float | None:
    """SSIM, the mean over the channels; None for an image that is smaller than the window. Arguments as above."""
    from skimage.metrics import structural_similarity

    if min(original.shape[1:]) < SSIM_WINDOW:
        return None
    if np.array_equal(original, changed):
        return 1.0
    span, rim = _data_range(original), SSIM_WINDOW - 1
    height, width = map(int, original.shape[1:])
    step = max(1, _AT_A_TIME // width)
    strips = [slice(first, min(first + step, height - rim) + rim) for first in range(0, height - rim, step)]

    def of_strip(place: tuple[int, slice]) -> float:
        """SSIM of a strip, which has no value in its rim, times the rows that have one."""
        first, second = original[place], changed[place]
        return float(structural_similarity(first, second, data_range=span)) * (int(first.shape[0]) - rim)

    with ThreadPoolExecutor() as pool:
        values = pool.map(of_strip, [(channel, strip) for channel in range(len(original)) for strip in strips])
        return math.fsum(values) / (len(original) * (height - rim))


def _data_range(original: NDArray[Any]) -> float:
    """The range of the numbers: that of their 8 or 16 bits, and for others that of the image."""
    if original.dtype in (np.uint8, np.uint16):
        return float(np.iinfo(original.dtype).max)
    return float(original.max()) - float(original.min())
