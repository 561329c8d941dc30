"""How many weights should stay: effective numbers of several orders and groups, at their own and at
equal counts.

    python scripts/study_counts.py OUT --shared DIR [--smollm2 FOLDER] [--models NAME ...] [--limit
    N]

DIR holds models, texts and data sets; FOLDER is what `make smollm2` makes (smollm2/model). Each
point is a line of OUT/points.jsonl, and is not measured again. The tables of all points are
printed, and OUT/starving.svg is drawn. Own counts: beta = 1. Equal counts: as many zeros as order 2
by rows removes. The targets are the MLP layers; starving rows keep less than 5 % of their weights.
"""

import argparse
import json
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from emp_llm import calibrate, effective_number, prune
from emp_llm.common.tables import markdown_table
from emp_llm.evaluation.comparison import Value, change_of, change_text, losses_of
from emp_llm.evaluation.perplexity import block_length, perplexity, text_tokens
from emp_llm.evaluation.suites import find_suite
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.pruning.starving import LEAST
from emp_llm.records.evaluation import PerplexityRecord
from emp_llm.records.run_report import RunReport

ROOT = Path(__file__).parents[1]
OWN: dict[str, dict[str, Any]] = {
    "rows, order 2 (the paper)": {},
    "rows, order 1": {"order": 1.0},
    "rows, order 0.5": {"order": 0.5},
    "matrix, order 2": {"group": "matrix"},
    "rows, order 2 of the magnitudes": {"count_by": "magnitude"},
}
COUNTED_BY_MAGNITUDE = ("magnitude", "admm")  # already
MEAN = "rows, order 2, mean of each matrix's rows"
UNIFORM = "uniform rows (order 0)"
ROW = 1536  # weights of a row of SmolLM2's down_proj


@dataclass(frozen=True)
class Model:
    """A model, its calibration text and the suite of its perplexity."""

    folder: Path
    text: str
    samples: int
    suite: str
    limit: int


def main(line: list[str] | None = None) -> None:
    """Measure the points that are missing, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.add_argument(
        "--criteria",
        nargs="+",
        default=["wanda", "relative", "magnitude", "admm"],
        help="scores, or an update that chooses",
    )
    parser.add_argument(
        "--limit", type=int, help="blocks of the test text; default: those of each model"
    )
    options = parser.parse_args(line)
    logging.disable(logging.WARNING)
    path = options.out.resolve() / "points.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    points = [json.loads(row) for row in path.read_text().splitlines()] if path.is_file() else []
    with tempfile.TemporaryDirectory() as scratch:
        models = {
            name: each
            for name, each in models_of(options, Path(scratch)).items()
            if name in (options.models or [name])
        }
        # load_dataset finds the data sets here by their Hub ids.
        os.chdir(options.shared / "datasets")
        for name, model in models.items():
            for point in measured(name, model, options, points, Path(scratch)):
                points.append(point)
                with path.open("a") as file:
                    file.write(json.dumps(point) + "\n")
    if any(point["criterion"] == "wanda" for point in points):
        draw(points, path.with_name("starving.svg"))
    print(tables(points))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of a study of four models."""
    parser.add_argument("out", type=Path, help="folder of the points")
    parser.add_argument(
        "--shared", type=Path, required=True, help="folder with models, texts and data sets"
    )
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M, as made by scripts/smollm2.py")
    parser.add_argument("--models", nargs="+", help="only these; default: all")


def models_of(options: argparse.Namespace, scratch: Path) -> dict[str, Model]:
    """The models that are there."""
    shared = options.shared.resolve()
    stories = scratch / "stories.toml"
    stories.write_text(
        f'[perplexity]\nfile = "{shared}/text/tinystories_valid.txt"\nseqlen = 512\n'
    )
    found = {
        "demo": Model(ROOT / "scripts" / "demo" / "model", "demo", 64, "demo", 64),
        "stories260K": Model(
            shared / "models" / "stories260K",
            str(shared / "text" / "tinystories_train.txt"),
            64,
            str(stories),
            64,
        ),
        "wiki-llama-5m": Model(
            shared / "models" / "wiki-llama-5m", "wikitext2", 64, "perplexity,seqlen=512", 64
        ),
    }
    if options.smollm2 is not None:
        found["SmolLM2-135M"] = Model(
            options.smollm2.resolve(), "wikitext2", 128, "perplexity,seqlen=1024", 40
        )
    return {name: model for name, model in found.items() if model.folder.is_dir()}


def measured(
    name: str,
    model: Model,
    options: argparse.Namespace,
    points: list[dict[str, Any]],
    scratch: Path,
) -> Iterator[dict[str, Any]]:
    """The points of a model that are missing, one after the other."""
    known = {
        (point["criterion"], point["counts"], point["equal"])
        for point in points
        if point["model"] == name
    }
    suite = find_suite(model.suite)
    assert suite.corpus is not None
    tokens = text_tokens(suite.corpus, load_tokenizer(model.folder))
    limit = options.limit or model.limit

    def judged(folder: Path) -> PerplexityRecord:
        loaded = load_model(folder)
        assert suite.corpus is not None
        return perplexity(loaded, tokens, block_length(suite.corpus, loaded.config), limit=limit)

    def point(
        criterion: str, counts: str, equal: bool, recipe: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        if (criterion, counts, equal) in known:
            return
        out = scratch / "out"
        report = prune(model.folder, output=out, overwrite=True, **needs[criterion], **recipe)
        assert isinstance(report, RunReport)
        judged_now = judged(out)
        yield {
            "model": name,
            "criterion": criterion,
            "counts": counts,
            "equal": equal,
            "sparsity": report.targets.sparsity_of_targets,
            "starving": starving(out, report),
            "perplexity": judged_now.value,
            "losses": losses_of(judged_now),
        }

    norms = scratch / f"{name}.safetensors"
    text: dict[str, Any] = {"calibration": model.text, "samples": model.samples, "seqlen": 512}
    needs: dict[str, dict[str, Any]] = {
        "wanda": {"activations": norms},
        "relative": {"activations": norms},
        "magnitude": {},
        "admm": text,
    }
    calibrate(
        model.folder,
        output=norms,
        overwrite=True,
        **text,
    )
    if ("", "dense", False) not in known:
        dense = judged(model.folder)
        about = {"model": name, "criterion": "", "counts": "dense", "equal": False, "sparsity": 0.0}
        yield about | {"perplexity": dense.value, "losses": losses_of(dense)}
    for criterion in options.criteria:
        counted: dict[str, Any] = {"count_by": "own"} if criterion == "relative" else {}
        first = prune(
            model.folder,
            output=scratch / "paper",
            overwrite=True,
            method=f"emp-{criterion}",
            **needs[criterion],
            **counted,
        )
        removed = first.targets.sparsity_of_targets
        for counts, recipe in OWN.items():
            if criterion in COUNTED_BY_MAGNITUDE and "count_by" in recipe:
                continue
            how = {"method": f"emp-{criterion}"} | counted | recipe
            yield from point(criterion, counts, False, how)
            if recipe:
                yield from point(criterion, counts, True, how | {"sparsity": removed})
        yield from point(
            criterion,
            MEAN,
            True,
            {"method": criterion, "match": scratch / "paper", "match_by": "matrix"},
        )
        yield from point(
            criterion, UNIFORM, True, {"method": criterion, "match": scratch / "paper"}
        )


def starving(folder: Path, report: RunReport) -> dict[str, float]:
    """Name of a target -> the share of its rows that keep less than 5 % of their weights."""
    names = {entry.tensor: name for name, entry in report.matrices.items()}
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for tensor in names.keys() & set(file.keys()):
                weight = file.get_tensor(tensor)
                found[names[tensor]] = float(
                    ((weight != 0).sum(1) < LEAST * weight.shape[1]).float().mean()
                )
    return {name: found[name] for name in names.values()}


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """What one dominant input leaves of a row by each order; and the starving rows of each block,
    by the paper's counts of Wanda's scores, of the model that has most.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "counts"  # the same file for the same points
    paper = [
        point
        for point in points
        if point["criterion"] == "wanda" and point["counts"] == next(iter(OWN))
    ]
    point = max(paper, key=lambda each: sum(each["starving"].values()))
    roles: dict[str, list[float]] = defaultdict(list)
    for name, share in point["starving"].items():
        roles[name.rpartition(".")[2]].append(100 * share)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    percents = [number / 2 for number in range(1, 121)]
    for order in (2.0, 1.0, 0.5):
        left.plot(
            percents, [kept_beside(each / 100, order) for each in percents], label=f"{order:g}"
        )
    left.set_xlabel("share of the largest score, in %")
    left.set_ylabel("weights that stay, in %")
    left.set_title(f"a row of {ROW} weights, the others equal", fontsize=10)
    left.legend(title="order", frameon=False)
    for role, of_blocks in roles.items():
        right.plot(of_blocks, label=role, marker=".")
    right.set_xlabel("block")
    right.set_ylabel("rows that keep less than 5 %, in %")
    right.set_title(f"{point['model']}: order 2, Wanda's scores", fontsize=10)
    right.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def kept_beside(share: float, order: float) -> float:
    """The percentage of a row that its effective number keeps, where one score has a share of the
    row's and all others are equal.
    """
    scores = torch.full((ROW,), (1 - share) / (ROW - 1), dtype=torch.float64)
    scores[0] = share
    return 100 * float(effective_number(scores, order=order)) / ROW


def tables(points: list[dict[str, Any]]) -> str:
    """A table for each model: counts x criteria."""
    parts = []
    for name in dict.fromkeys(point["model"] for point in points):
        own = [point for point in points if point["model"] == name]
        dense = value_of(own[0])
        criteria = list(dict.fromkeys(point["criterion"] for point in own if point["criterion"]))
        blocks = own[0]["losses"]
        parts.append(f"### {name}: dense {dense.value:.2f}, {len(blocks)} blocks of {blocks[0][1]}")
        for equal in (False, True):
            title = "zeros as with order 2 by rows" if equal else "own counts"
            rows = [[title, *(f"{each}: zeros, perplexity" for each in criteria)]]
            paper = next(iter(OWN))  # it has its own count in both tables
            some = [
                point
                for point in own
                if point["criterion"] and (point["equal"] == equal or point["counts"] == paper)
            ]
            for counts in dict.fromkeys(point["counts"] for point in some):
                found = {point["criterion"]: point for point in some if point["counts"] == counts}
                rows.append([counts, *(cell(found.get(each), dense) for each in criteria)])
            parts.append(markdown_table(rows, as_markdown=True))
    return "\n\n".join(parts)


def value_of(point: dict[str, Any]) -> Value:
    """The perplexity of a point, with the losses of its blocks."""
    return Value(
        point["perplexity"], losses=tuple((loss, tokens) for loss, tokens in point["losses"])
    )


def cell(point: dict[str, Any] | None, dense: Value) -> str:
    """Zeros, and the change of the perplexity with its paired error."""
    if point is None:
        return ""
    return (
        f"{100 * point['sparsity']:.1f} %, "
        f"{change_text('perplexity', change_of('perplexity', value_of(point), dense))}"
    )


if __name__ == "__main__":
    main()
