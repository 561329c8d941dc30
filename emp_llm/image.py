"""`emp-llm image`: an image -> the pruned images, a figure and PSNR and SSIM."""

from pathlib import Path
from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.image import ImageOptions

if TYPE_CHECKING:
    from emp_llm.pixels.image_record import ImageRecord


@takes(ImageOptions)
def image(options: ImageOptions) -> "ImageRecord":
    """Prune the pixels of an image by EMP: in each channel, or in each 4 x 4 patch, the N_eff most distinct pixels are kept.

    The score of a pixel is its distance from the mean of its group, and a removed pixel becomes that mean. The output folder
    holds the pruned images, a figure that shows them beside the original, and image.json with PSNR and SSIM. Any image that
    Pillow opens can be pruned; its alpha channel is kept.

    Returns the content of image.json.
    """
    from emp_llm.pixels.image_folder import PixelRecipe, check_output_name, prune_image

    options.check()
    output = options.output or Path(f"{options.image.stem}-emp")
    check_output_name(output)
    how = PixelRecipe(options.groups, options.beta, options.patch, options.mean)
    return prune_image(options.image, output, how, options.overwrite)


def show(record: "ImageRecord") -> None:
    """Print the table."""
    from emp_llm.pixels.image_folder import image_words

    print(image_words(record))


callable_module(__name__)

if __name__ == "__main__":
    run(image, show)
