"""Attention heads by the effective number: the paper's table of GPT-2 on WikiText-2, for it or for
any other model.

    python scripts/paper/gpt2_heads.py [--model gpt2 ...] [--calibration wikitext2 ...] [--text TEXT
    ...] [--samples N]
        [--seqlen N] [--block N] [--limit N] [--dtype TYPE] [--output DIR] [--threads N]

Heads are scored by Taylor |dL/dY * Y| and by the norm of their columns of the output projection.
All heads of a model are one group, and those that Algorithm 1 removes are set to zero, by
`emp-llm prune --structure heads`. The perplexity is that of `emp_llm.evaluation`. With several
models, --calibration and --text name one text for each, or one for all. GPT-2 (124M) takes an
estimated two hours on two cores; a GPU is used if there is one.
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from paper_pages import Beside, Page, beside_table, options_of, shown_argument, written_page

from emp_llm.common.errors import UserError
from emp_llm.records.evaluation import PerplexityRecord

BETAS = (0.8, 0.9, 1.0, 1.2)
CRITERIA = {"Taylor": "emp-taylor", "weight norm": "emp-magnitude"}
HEADS = 144  # of GPT-2
PUBLISHED_DENSE = 34.86
PUBLISHED = {
    "Taylor": (141.4, 2.1, 35.20),
    "weight norm": (134.0, 6.9, 37.14),
}  # N_eff, sparsity in percent, perplexity
_MEASURES = (
    "N_eff / N, %",
    "heads kept",
    "sparsity",
    "perplexity",
    "increase, %",
    "its standard error",
)
REASONS = {
    "published rows": "They are those of GPT-2 with 144 heads. The rows of other models are no "
    "reproduction; they show what the rule does elsewhere.",
    "dense perplexity": "The paper does not say in which blocks it reads the text, and the "
    "perplexity depends on them. Compare the increases.",
    "Taylor": "The paper's formula is summed here over the tokens and the features of a head. Its "
    "50,000 tokens are here the sequences of the line above each table.",
    "standard error": "It is that of the mean difference of the losses of the same blocks, dense "
    "and pruned.",
}


class HeadRun(NamedTuple):
    """One pruned model.

    Attributes:
        n_eff: of the scores of all heads.
        kept, heads: numbers of heads.
        measured: its perplexity, and the mean loss of each block of the text.
    """

    n_eff: float
    kept: int
    heads: int
    measured: PerplexityRecord


class HeadModel:
    """A model, its texts, and the losses of the dense model.

    Args:
        name: as for `--model` of the command.
        calibration, text: as for `--calibration`; None: WikiText-2, train and test.
    """

    def __init__(
        self, name: str, calibration: str | None, text: str | None, options: argparse.Namespace
    ) -> None:
        import torch

        from emp_llm.calibration.texts import find_corpus
        from emp_llm.evaluation.evaluate import block_length, text_tokens
        from emp_llm.evaluation.results import find_suite
        from emp_llm.models.loading import load_tokenizer
        from emp_llm.models.local_model import find_model

        self.name = name
        self.options = options
        self.folder = find_model(name).folder
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        corpus = find_suite("perplexity").corpus if text is None else find_corpus(text)
        assert corpus is not None
        self.tokens = text_tokens(corpus, load_tokenizer(self.folder))
        model = self._load(self.folder)
        self.block = options.block or block_length(corpus, model.config)
        self.dense = self._measure(model)
        self._how: dict[str, Any] = {
            "dtype": options.dtype,
            "quiet": True,
            "keep_shapes": True,
        }
        self._data = {
            "calibration": calibration,
            "samples": options.samples,
            "seqlen": options.seqlen,
        }

    def run(self, method: str, beta: float) -> HeadRun | None:
        """Prune by a rule; None if it keeps all heads."""
        from emp_llm import prune
        from emp_llm.records.run_report import RunReport

        data = self._data if method == "emp-taylor" else {}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "pruned"
            try:
                report = prune(
                    self.name,
                    output=out,
                    structure="heads",
                    structure_group="all",
                    method=method,
                    beta=beta,
                    **self._how,
                    **data,
                )
            except UserError as error:
                if "the rule keeps all" in str(error):
                    return None
                raise
            assert isinstance(report, RunReport)
            assert report.structure is not None
            layers = list(report.structure.layers.values())
            measured = self._measure(self._load(out))
        n_eff = layers[0].n_eff_together
        assert n_eff is not None
        return HeadRun(
            n_eff, sum(each.kept for each in layers), sum(each.units for each in layers), measured
        )

    def _load(self, folder: Path) -> Any:
        from emp_llm.models.loading import load_model

        return load_model(folder, self.device, self.options.dtype)

    def _measure(self, model: Any) -> PerplexityRecord:
        from emp_llm.evaluation.evaluate import perplexity

        return perplexity(model, self.tokens, self.block, limit=self.options.limit)


def main(line: list[str] | None = None) -> None:
    """Prune every model by both scores at each beta, and write the page."""
    parser = options_of(__doc__, images=False)
    parser.add_argument("--model", nargs="+", default=["gpt2"], help="folders, or names of the Hub")
    parser.add_argument(
        "--calibration", nargs="+", default=["wikitext2"], help="texts for the Taylor scores"
    )
    parser.add_argument(
        "--text", nargs="+", help="texts of the perplexity; default: WikiText-2 test"
    )
    parser.add_argument("--samples", type=int, default=98, help="calibration sequences")
    parser.add_argument(
        "--seqlen", type=int, default=512, help="tokens of each; 98 x 512 are the paper's 50,000"
    )
    parser.add_argument(
        "--block",
        type=int,
        help="tokens of a block of the text; default: the model's context, at most 2048",
    )
    parser.add_argument("--limit", type=int, help="blocks of the text; default: all")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(line)
    with written_page("gpt2_heads", "Attention heads", options, line) as page:
        page.add(
            "All heads of a model are one group. Heads that go are set to zero. Nothing is trained "
            "afterwards. beta = 1 is the method."
        )
        count = len(options.model)
        texts = zip(
            options.model,
            _each(options, "calibration", count),
            _each(options, "text", count),
            strict=True,
        )
        for name, calibration, text in texts:
            _add_model(page, HeadModel(name, calibration, text, options))
        if "gpt2" not in options.model:
            page.add(
                f"## gpt2, not run\n\nPublished: dense perplexity {PUBLISHED_DENSE}, {HEADS} heads."
            )
            page.add(
                _table(
                    [Beside((score, "1"), (None,) * 5, _published(score)) for score in CRITERIA], 5
                )
            )
        page.explain(REASONS)


def _each(options: argparse.Namespace, name: str, count: int) -> list[str | None]:
    """One text for each model."""
    values: list[str | None] = list(getattr(options, name) or [None])
    if len(values) not in (1, count):
        raise UserError(
            f"--{name} names {len(values)} texts for {count} models. Give one for each, or one for "
            "all."
        )
    return values if len(values) == count else values * count


def _add_model(page: Page, model: HeadModel) -> None:
    """The table of a model."""
    options = model.options
    dense = model.dense
    rows = []
    for score, method in CRITERIA.items():
        runs = {beta: model.run(method, beta) for beta in BETAS}
        some = next((run for run in runs.values() if run is not None), None)
        for beta, run in runs.items():
            if run is None and some is not None:  # the rule keeps all heads
                run = some._replace(kept=some.heads, measured=dense)
            published = _published(score) if beta == 1.0 and model.name == "gpt2" else ()
            rows.append(Beside((score, f"{beta:g}"), _numbers(run, dense), published))
    blocks = (
        f"{dense.blocks:,} block{'s' if dense.blocks != 1 else ''} of at most {model.block:,} "
        "tokens"
    )
    theirs = f" (published {PUBLISHED_DENSE})" if model.name == "gpt2" else ""
    page.add(f"## {shown_argument(model.name)}")
    page.add(
        f"Dense perplexity {dense.perplexity:.3f}{theirs} on {blocks}. Taylor scores of "
        f"{options.samples} sequences of at most {options.seqlen} tokens; {options.dtype}."
    )
    page.add(_table(rows, len(_MEASURES)))


def _table(rows: list[Beside], measures: int) -> str:
    return beside_table(
        ("score", "beta"), _MEASURES[:measures], rows, (1, 0, 1, 3, 2, 2)[:measures]
    )


def _published(score: str) -> tuple[float | None, ...]:
    n_eff, sparsity, perplexity = PUBLISHED[score]
    increase = 100 * (perplexity / PUBLISHED_DENSE - 1)
    return 100 * n_eff / HEADS, math.floor(n_eff), sparsity, perplexity, increase


def _numbers(run: HeadRun | None, dense: PerplexityRecord) -> tuple[float | None, ...]:
    """The measures of a run, for its row."""
    if run is None:
        return (None,) * len(_MEASURES)
    pairs = zip(dense.block_losses or [], run.measured.block_losses or [], strict=True)
    changes = [after - before for before, after in pairs]
    assert run.measured.perplexity is not None
    assert dense.perplexity is not None
    growth = run.measured.perplexity / dense.perplexity
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else None
    return (
        100 * run.n_eff / run.heads,
        run.kept,
        100 * (1 - run.kept / run.heads),
        run.measured.perplexity,
        100 * (growth - 1),
        None if error is None else 100 * growth * error,
    )


if __name__ == "__main__":
    main()
