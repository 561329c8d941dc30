"""All methods on real small models: sparsity and perplexity, each EMP run beside its criterion at
the same sparsity.

    python scripts/study_small_models.py --shared DIR [--samples N] [--limit N] >
    scripts/results/small_models.md

A quick trial: --samples 4 --limit 2. DIR holds `models/stories260K`, `models/wiki-llama-5m`,
`text/tinystories_train.txt`, `text/tinystories_valid.txt`, and `datasets/` laid out by Hub id.
Every model is calibrated on the train split and evaluated on the test split of the same text, with
the paper's settings (128 x 512 calibration tokens; blocks of 2048 tokens, or of the model's
context); wiki-llama-5m also in blocks of 512, its training length.
"""

import argparse
import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from emp_llm.calibrate import calibrate
from emp_llm.common.machine import versions
from emp_llm.evaluation.perplexity import block_length, perplexity, text_tokens
from emp_llm.evaluation.suites import Suite, find_suite
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.prune import prune
from emp_llm.records.evaluation import PerplexityRecord
from emp_llm.records.run_report import RunReport

METHODS: tuple[str, ...] = ("emp-wanda", "wanda", "emp-magnitude", "magnitude")


def main(line: list[str] | None = None) -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, required=True, help="folder with models, texts and data sets"
    )
    parser.add_argument(
        "--samples", type=int, help="calibration samples; default: those of the recipe (128)"
    )
    parser.add_argument("--limit", type=int, help="blocks of the test text; default: all")
    arguments = parser.parse_args(line)
    shared: Path = arguments.shared.resolve()
    logging.disable(logging.WARNING)
    os.chdir(shared / "datasets")  # load_dataset finds the data sets here by their Hub ids
    print("# All methods on real small models\n")
    print("`python scripts/study_small_models.py --shared DIR > scripts/results/small_models.md`\n")
    print(
        ", ".join(f"{name} {version}" for name, version in versions().items()) + "; CPU, the "
        "models' own dtypes."
    )
    print(
        "Sparsity is that of the MLP linear layers. `wanda = emp-wanda` is Wanda at the sparsity "
        "of emp-wanda (`--match`): as"
    )
    print("many weights removed in total, the same share of each row.\n")
    with tempfile.TemporaryDirectory() as scratch:
        stories = _stories_suite(shared, Path(scratch))
        for model, texts in (
            ("stories260K", {"TinyStories": [stories], "WikiText-2": ["perplexity"]}),
            (
                "wiki-llama-5m",
                {"WikiText-2": ["perplexity", "perplexity,seqlen=512"], "TinyStories": [stories]},
            ),
        ):
            for text, names in texts.items():
                corpus = (
                    "wikitext2"
                    if text == "WikiText-2"
                    else str(shared / "text" / "tinystories_train.txt")
                )
                suites = [find_suite(name).limited(arguments.limit) for name in names]
                for row in _study(
                    shared / "models" / model,
                    text,
                    corpus,
                    suites,
                    Path(scratch),
                    arguments.samples,
                ):
                    print(row, flush=True)


def _study(
    model: Path, text: str, corpus: str, suites: list[Suite], scratch: Path, samples: int | None
) -> Iterator[str]:
    """The lines of the table of one model and one text."""
    dense = _perplexities(model, suites)
    yield f"## {model.name} on {text}\n"
    yield (
        "| method | sparsity % | "
        + " | ".join(f"perplexity, blocks of {block}" for _, block in dense)
        + " |"
    )
    yield "|---|---|" + "---|" * len(suites)
    yield f"| dense | 0.00 | {' | '.join(f'{value:.3f}' for value, _ in dense)} |"
    activations = scratch / f"{model.name}-{text}.safetensors"
    calibrate(str(model), output=activations, calibration=corpus, samples=samples)
    for method in METHODS:
        for match in (
            (None, scratch / f"emp-{method}") if not method.startswith("emp-") else (None,)
        ):
            output = scratch / (method if match is None else f"{method}-matched")
            report = prune(
                str(model),
                output=output,
                method=method,
                match=match,
                activations=activations,
                overwrite=True,
            )
            assert isinstance(report, RunReport)
            values = [
                f"{value:.3f} ({100 * (value / base - 1):+.1f} %)"
                for (value, _), (base, _) in zip(_perplexities(output, suites), dense, strict=True)
            ]
            name = method if match is None else f"{method} = emp-{method}"
            yield (
                f"| {name} | {100 * report.targets.sparsity_of_targets:.2f} | "
                f"{' | '.join(values)} |"
            )
    yield ""


def _perplexities(folder: Path, suites: list[Suite]) -> list[tuple[float, int]]:
    """(perplexity, block length) of a model by each suite."""
    model = load_model(folder, "cpu")
    tokenizer = load_tokenizer(folder)
    results = [_perplexity(model, tokenizer, suite) for suite in suites]
    del model
    gc.collect()
    return [(result.value, result.block_length) for result in results]


def _perplexity(model: PreTrainedModel, tokenizer: Any, suite: Suite) -> PerplexityRecord:
    assert suite.corpus is not None
    length = block_length(suite.corpus, model.config)
    return perplexity(model, text_tokens(suite.corpus, tokenizer), length, limit=suite.limit)


def _stories_suite(shared: Path, scratch: Path) -> str:
    path = scratch / "tinystories.toml"
    path.write_text(
        f'[perplexity]\nfile = "{shared / "text" / "tinystories_valid.txt"}"\nseqlen = 2048\n'
    )
    return str(path)


if __name__ == "__main__":
    main()
