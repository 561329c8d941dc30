"""The towers of multimodal and encoder-decoder models: all classes of transformers, built on the
meta device.

    python scripts/check_towers.py [MODEL_TYPE ...]

Each class is built with its default sizes. It must have a list of decoder blocks in its language
tower, as long as its text config says, and a tower for each encoder of images or sound in its
config. The exit code is 1 if a model has not.
"""

import argparse
import sys
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from emp_llm.common.errors import count_of
from emp_llm.models.modules import Towers, find_towers, model_layers

_CLASSES = {
    "AutoModelForMultimodalLM": modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
_LENGTHS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")


def main(line: list[str] | None = None) -> None:
    """Build, check, and print the towers of every class."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="default: all")
    types = parser.parse_args(line).types
    transformers.logging.set_verbosity_error()
    wrong = []
    unbuilt = []
    count = 0
    for kind, auto in {kind: auto for auto, kinds in _CLASSES.items() for kind in kinds}.items():
        if types and kind not in types:
            continue
        try:
            config = transformers.AutoConfig.for_model(kind)
            with torch.device("meta"):
                model = getattr(transformers, auto).from_config(config)
        # A default config that its own class refuses, or a package that is not installed.
        except Exception as error:
            unbuilt.append(f"{kind} ({type(error).__name__})")
            continue
        count += 1
        towers = find_towers(model)
        problem = _problem(model, towers)
        shown = ", ".join(
            f"{each.tower}: {each.path} x {len(each.modules)}" for each in towers.lists
        )
        print(f"{kind}: {shown}" + (f" - WRONG: {problem}" if problem else ""))
        if problem:
            wrong.append(kind)
    print(
        f"{count_of(count, 'model')}; wrong: {', '.join(wrong) or 'none'}; not built: "
        f"{', '.join(unbuilt) or 'none'}"
    )
    sys.exit(1 if wrong else 0)


def _problem(model: Any, towers: Towers) -> str | None:
    """What is wrong with the towers of a model; None if nothing is."""
    own = [each for each in towers.lists if each.tower == "language"]
    text = model.config.get_text_config(decoder=True)
    lengths = {
        getattr(text, name) for name in _LENGTHS if isinstance(getattr(text, name, None), int)
    }
    if not own or (lengths and not any(len(each.modules) in lengths for each in own)):
        return f"no decoder blocks of length {sorted(lengths)}"
    for tower, names in (
        ("vision", ("vision_config",)),
        ("audio", ("audio_config", "encoder_config")),
    ):
        given = any(getattr(model.config, name, None) is not None for name in names)
        if given and tower not in towers.others.values():
            return f"its config has a {tower} encoder, and no tower was found"
    chosen = [
        layer
        for layer in model_layers(model)
        if layer.purpose == "mlp" and layer.tower == "language"
    ]
    return None if chosen or "experts" in str(model) else "no layer of an MLP in the language tower"


if __name__ == "__main__":
    main()
