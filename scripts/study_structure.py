"""Heads and neurons removed by the rule, beside uniform ones at the same totals: size, speed,
perplexity.

    python scripts/study_structure.py MODEL --calibration demo --text eval/demo/heldout.txt --write
    docs/structure/demo.md

Neurons, a layer at a time: zeros by the rule's own counts; zeros with as many neurons in every
layer, scored in the same way; removed to one width; the same with a refit of the down projections.
Heads: zeros by the rule, over all layers, and as many in every layer.
Perplexities are increases over the dense model with paired standard errors over the blocks of the
text.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PROMPT = 512  # tokens
ROUNDS = 7


def main(line: list[str] | None = None) -> None:
    """Run the rows and write their table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--text", default="eval/demo/heldout.txt")
    parser.add_argument("--text-name")
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--methods", default="magnitude,wanda,taylor")
    parser.add_argument("--betas", default="1,0.8,0.6")
    parser.add_argument("--width-multiple", type=int, default=16)
    parser.add_argument(
        "--dtype",
        default="float32",
        help="float32: processors without bfloat16 instructions emulate it",
    )
    parser.add_argument("--write", type=Path, help="Markdown page to write")
    options = parser.parse_args(line)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        study = StructureStudy(options, Path(folder))
        rows = study.neurons() + study.heads()
    text = page(options, study, rows, time.perf_counter() - start)
    print(text)
    if options.write is not None:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text, encoding="utf-8")


class StructureStudy:
    """The rows of one model."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from emp_llm.calibration.texts import find_corpus
        from emp_llm.evaluation.perplexity import text_tokens
        from emp_llm.models.loading import load_tokenizer

        self._options = options
        self._folder = folder
        self._text = text_tokens(find_corpus(options.text), load_tokenizer(Path(options.model)))
        self.dense = self._losses(Path(options.model))

    def neurons(self) -> list[list[str]]:
        """The rows of neurons."""
        rows = []
        for method in self._options.methods.split(","):
            for beta in map(float, self._options.betas.split(",")):
                name = f"{method}-{beta:g}"
                rule = self._prune(
                    f"{name}-rule", "neurons", f"emp-{method}", beta=beta, keep_shapes=True
                )
                even = self._prune(
                    f"{name}-even",
                    "neurons",
                    method,
                    match=self._folder / f"{name}-rule",
                    keep_shapes=True,
                )
                width: dict[str, Any] = {
                    "beta": beta,
                    "width_multiple": self._options.width_multiple,
                }
                cut = self._prune(f"{name}-cut", "neurons", f"emp-{method}", **width)
                fitted = self._prune(
                    f"{name}-fit", "neurons", f"emp-{method}", refit=True, calibration=True, **width
                )
                rows.append(["neurons", method, f"{beta:g}", *self._cells(rule, even, cut, fitted)])
        return rows

    def heads(self) -> list[list[str]]:
        """The rows of heads, which are set to zero."""
        rows = []
        for method in self._options.methods.split(","):
            for beta in map(float, self._options.betas.split(",")):
                name = f"heads-{method}-{beta:g}"
                more: dict[str, Any] = {"keep_shapes": True}
                rule = self._prune(
                    f"{name}-rule",
                    "heads",
                    f"emp-{method}",
                    beta=beta,
                    structure_group="all",
                    **more,
                )
                even = self._prune(
                    f"{name}-even", "heads", method, match=self._folder / f"{name}-rule", **more
                )
                rows.append(["heads", method, f"{beta:g}", *self._cells(rule, even, None, None)])
        return rows

    def _prune(
        self, name: str, structure: Any, method: str, calibration: bool = False, **more: Any
    ) -> Any:
        """(report, losses, folder) of one run; None if the rule keeps everything."""
        from emp_llm import prune
        from emp_llm.common.errors import UserError

        options = self._options
        out = self._folder / name
        if not method.endswith("magnitude") or calibration:
            more |= {"calibration": options.calibration, "samples": options.samples}
        match = more.get("match")
        if match is not None and not match.exists():
            return None
        try:
            report = prune(
                options.model,
                output=out,
                structure=structure,
                method=method,
                dtype=options.dtype,
                quiet=True,
                **more,
            )
        except UserError as error:
            if "the rule keeps" in str(error):
                return None
            raise
        return report, self._losses(out), out

    def _losses(self, folder: Path) -> list[float]:
        from emp_llm.evaluation.perplexity import perplexity
        from emp_llm.models.loading import load_model

        model = load_model(folder, "cpu", self._options.dtype)
        return list(
            perplexity(
                model, self._text, self._options.block, limit=self._options.limit
            ).block_losses
        )

    def _cells(self, rule: Any, even: Any, cut: Any, fitted: Any) -> list[str]:
        cells = ["all"] if rule is None else [_kept(rule[0])]
        cells += [self._increase(rule), self._increase(even)]
        if cut is None:
            return [*cells, "", "", "", "", self._increase(fitted)]
        structure = cut[0].structure
        width = next(iter(structure.layers.values())).kept
        share = structure.pruned.parameters / structure.dense.parameters
        return [
            *cells,
            f"{width:,}",
            f"{100 * share:.1f} %",
            self._speed(cut[2]),
            self._increase(cut),
            self._increase(fitted),
        ]

    def _speed(self, folder: Path) -> str:
        """How many times as fast as the dense model a smaller one reads a prompt: measured in turn,
        and by the FLOPs.
        """
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        from emp_llm.models.loading import load_model

        places = (Path(self._options.model), folder)
        models = [load_model(place, "cpu", self._options.dtype) for place in places]
        ids = torch.arange(PROMPT)[None] % models[0].config.vocab_size
        seconds: tuple[list[float], list[float]] = ([], [])
        flops = []
        with torch.no_grad():
            for _ in range(ROUNDS):
                for model, of_model in zip(models, seconds, strict=True):
                    start = time.perf_counter()
                    model(ids, use_cache=False)
                    of_model.append(time.perf_counter() - start)
            for model in models:
                with FlopCounterMode(display=False) as counter:
                    model(ids, use_cache=False)
                flops.append(counter.get_total_flops())
        dense, smaller = map(statistics.median, seconds)
        return f"{dense / smaller:.3f} x of {flops[0] / flops[1]:.3f} x"

    def _increase(self, run: Any) -> str:
        """The increase of the perplexity with its paired standard error; "-" for a run that
        removes nothing.
        """
        if run is None:
            return "-"
        changes = [after - before for before, after in zip(self.dense, run[1], strict=True)]
        mean = statistics.fmean(changes)
        error = statistics.stdev(changes) / math.sqrt(len(changes))
        return f"{100 * math.expm1(mean):+.2f} ± {100 * math.exp(mean) * error:.2f} %"


def _kept(report: Any) -> str:
    layers = report.structure.layers.values()
    return f"{sum(each.kept for each in layers):,} of {sum(each.units for each in layers):,}"


def page(
    options: argparse.Namespace, study: StructureStudy, rows: list[list[str]], seconds: float
) -> str:
    """The table as a page."""
    from emp_llm.common.tables import markdown_table

    head = [
        "units",
        "score",
        "β",
        "the rule keeps",
        "zeros by the rule",
        "uniform zeros",
        "one width",
        "parameters",
        "speed",
    ]
    name = options.name or Path(options.model).name
    text = options.text_name or Path(options.text).name
    dense = math.exp(statistics.fmean(study.dense))
    return (
        f"# Heads and neurons of {name}\n\nDense perplexity on {text}, blocks of {options.block}: "
        f"{dense:.3f}. Calibrated on {options.samples} sequences of {options.calibration}; "
        f"{options.dtype}. Perplexities are increases with paired standard errors. Speed: of a "
        f"prompt of {PROMPT} tokens, measured, and what the FLOPs promise.\n\n"
        + markdown_table([[*head, "removed", "removed, refit"], *rows], as_markdown=True)
        + f"\n\n{seconds:.0f} seconds.\n"
    )


if __name__ == "__main__":
    main()
