"""What a rotation is worth: recipes on a model as it is, rotated, and rotated with its columns in
an order for 2:4.

    python scripts/study_rotate.py MODEL --calibration demo --samples 103 --text
    eval/demo/heldout.txt

Prints a table: the increase of the perplexity over the dense model, with its paired standard error
over the blocks. docs/rotate.md has it for three models.
"""

import argparse
import copy
import math
import os
from pathlib import Path
from typing import Any

import torch

from emp_llm.options.recipe_options import recipe_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RECIPES: dict[str, dict[str, Any]] = {
    "50 %, MLP alone, Wanda": {"method": "wanda", "targets": "mlp"},
    "50 %, Wanda": {"method": "wanda"},
    "50 %, admm, refit": {"method": "admm", "sparsity": 0.5, "refit": True},
    "50 %, emp-admm, refit": {"method": "emp-admm", "sparsity": 0.5, "refit": True},
    "60 %, emp-admm, refit": {"method": "emp-admm", "sparsity": 0.6, "refit": True},
    "2:4, admm, refit": {"method": "admm", "pattern": "2:4", "refit": True},
    "2:4, Wanda": {"method": "wanda", "pattern": "2:4"},
}


def main(line: list[str] | None = None) -> None:
    """Print the table of a model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument(
        "--text", default="eval/demo/heldout.txt", help="text file or recipe to judge on"
    )
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--limit", type=int, default=100, help="blocks of the text")
    parser.add_argument("--steps", type=int, default=120, help="of the rotation")
    parser.add_argument(
        "--recipes", default=";".join(RECIPES), help="rows of the table, separated by semicolons"
    )
    options = parser.parse_args(line)
    from emp_llm import prune_model, rotate_model
    from emp_llm.calibration.texts import find_corpus
    from emp_llm.common.tables import Rows, markdown_table
    from emp_llm.evaluation.perplexity import perplexity, text_tokens
    from emp_llm.models.loading import load_model, load_tokenizer

    tokenizer = load_tokenizer(options.model)
    how = {"samples": options.samples, "seqlen": options.seqlen}
    judged = text_tokens(find_corpus(options.text), tokenizer)

    def losses(model: Any) -> torch.Tensor:
        found = perplexity(model, judged, options.block, limit=options.limit).block_losses
        return torch.tensor(found, dtype=torch.float64)

    models = {
        basis: load_model(options.model) for basis in ("as it is", "rotated", "rotated, in order")
    }
    dense = losses(models["as it is"])
    given = (options.calibration, tokenizer)
    rotate_model(models["rotated"], *given, steps=options.steps, **how)
    rotate_model(models["rotated, in order"], *given, steps=options.steps, pattern="2:4", **how)
    rows: Rows = [["", *models]]
    for name in options.recipes.split(";"):
        recipe = recipe_of(**{"targets": "all-linear"} | RECIPES[name])
        cells = []
        for basis, model in models.items():
            if basis == "rotated, in order" and recipe.n_of_m is None:
                cells.append("")
                continue
            pruned = copy.deepcopy(model)
            prune_model(pruned, recipe, *given, **how)
            more = losses(pruned) - dense
            error = math.exp(more.mean()) * more.std() / math.sqrt(len(more))
            cells.append(f"{100 * math.expm1(more.mean()):+.2f} ± {100 * error:.2f} %")
        rows.append([name, *cells])
        print(name, *cells, sep="  ", flush=True)
    print(markdown_table(rows, as_markdown=True))


if __name__ == "__main__":
    main()
