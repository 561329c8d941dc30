"""The model card of a pruned checkpoint: its origin, its measurements, and its recipe."""

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader

from emp_llm.common.errors import count_of
from emp_llm.common.paths import ACTIVATIONS_NAME, CARD_NAME
from emp_llm.common.tables import Rows, markdown_table
from emp_llm.evaluation.comparison import compare
from emp_llm.evaluation.results import results_of_report
from emp_llm.options.recipe import Recipe
from emp_llm.records.bench import Bench
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import ModelSource
from emp_llm.reporting.public import cached_repository
from emp_llm.reporting.run_tables import SPEED_NOTE, pruning_lines, pruning_rows, speed_rows, structure_lines, structure_rows

logger = logging.getLogger(__name__)

# How methods choose weights; `emp-` methods choose by the same scores.
_METHODS = {
    "wanda": "Wanda scores (weight magnitude times input norm)",
    "magnitude": "weight magnitudes",
    "relative": "relative scores (weight magnitude times input norm relative to each token's output)",
    "ria": "RIA scores (relative importance and activations)",
    "sparsegpt": "SparseGPT",
    "admm": "masks and weights searched for together (ADMM)",
    "emp-admm": "counts by magnitudes, masks and weights searched for together (ADMM)",
}
_UNIT_SCORES = {
    "magnitude": "the norms of their weights",
    "wanda": "the norms of their weights and activations",
    "taylor": "their first-order effect on the loss (Taylor)",
}
_UNITS = {"both": "attention heads and MLP neurons", "heads": "attention heads", "neurons": "MLP neurons"}
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "tags")
_MARK = "<!-- emp-llm writes this card again at every push. Delete this line to keep your own changes. -->"


def method_words(recipe: Recipe) -> str:
    """The method of a run in words."""
    if recipe.structure is not None:
        rule = "EMP" if recipe.adaptive else "a fixed share"
        how = f"{rule} of whole {_UNITS[recipe.structure.structure]} scored by {_UNIT_SCORES[recipe.name]}"
    else:
        how = _METHODS.get(recipe.method) or _METHODS.get(recipe.name, recipe.name)
        how = f"Effective Model Pruning (EMP) with {how}" if recipe.adaptive else how
    if recipe.score == "relative" and recipe.name != "relative":
        how += ", with input norms relative to the output"
    if recipe.shares == "owl":
        how += ", with a sparsity for each block by its outliers (OWL)"
    if recipe.count_by == "magnitude":
        how += ", and as many weights in each group as its magnitudes are worth"
    if recipe.refit:
        how += ", with a refit of the kept weights"
    return how


@dataclass(frozen=True)
class Origin:
    """The dense model.

    Attributes:
        name: Hub id; None for a folder without a known repository.
        revision: its commit.
        metadata: the part of its card that holds for a pruned model too: licence, languages, pipeline tag, tags.
    """

    name: str | None
    revision: str | None
    metadata: dict[str, Any]


def find_origin(source: ModelSource, base_model: str | None = None) -> Origin:
    """The dense model, from the report, its folder and the Hub. Missing information is a warning, not an error.

    Args:
        source: the dense model, as the report of the pruning run names it.
        base_model: its Hub id, if the user gave it.
    """
    name: str | None = source.model
    revision, cards = source.revision, []
    if revision is None:
        card = Path(source.model).expanduser() / CARD_NAME
        cards = [str(card)] if card.is_file() else []
        name, revision = cached_repository(source.model) or (None, None)
    if base_model is not None and base_model != name:
        name, revision = base_model, None
    if name is None:
        logger.warning("warning: the model was pruned from a folder, so the card names no base model. Give --base-model ID.")
    else:
        cards.append(name)
    metadata: dict[str, Any] = {}
    for place in cards:
        try:
            metadata = metadata or ModelCard.load(place, ignore_metadata_errors=True).data.to_dict()
        except Exception as error:  # people write cards by hand, so anything can be wrong in them
            logger.warning("warning: %s: its card cannot be read (%s).", place, type(error).__name__)
    if not metadata.get("license"):
        logger.warning("warning: no licence of the base model was found, so the card names none. Add it before others use it.")
    return Origin(name, revision, {key: metadata[key] for key in _CARRIED if metadata.get(key)})


def is_ours(path: Path) -> bool:
    """Whether emp-llm wrote a card and nobody deleted its mark to keep changes."""
    return _MARK in path.read_text(encoding="utf-8", errors="replace")


def card_text(
    name: str,
    branch: str | None,
    report: RunReport,
    origin: Origin,
    evaluated: list[Results],
    this: str | None,
    plots: list[str],
    benches: Sequence[Bench],
    files: Collection[str],
) -> str:
    """The model card by the template card.md.j2, metadata first.

    Args:
        name, branch: the repository, and the branch; None: main.
        report: of the pruning run, in its public form.
        origin: the dense model.
        evaluated: results files; this: the identity of the checkpoint, whose results are among them.
        plots: PNG files by their path in the repository.
        benches: outputs of `bench` for this checkpoint.
        files: the other files of the repository.
    """
    measured, suites, structure = results_of_report(report), by_suite(evaluated, this), report.structure
    tables = [compare(measured, "markdown", ["dense", "pruned"])] if len(measured) == 2 else []
    own = [each for each in measured if each.pruned is not None]
    own += [each for suite in suites for each in suite if each.made_by.model.identity == this]
    fitted = sum(fit.error_after is not None for fit in report.fits.values())
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("card.md.j2").render(
        metadata=_metadata(name, report, origin, own),
        mark=_MARK,
        name=name,
        branch=branch,
        report=report,
        origin=origin,
        base=f"[{origin.name}](https://huggingface.co/{origin.name})" if origin.name else f"`{report.source.model}`",
        method=method_words(report.recipe),
        lines=pruning_lines(report) if structure is None else structure_lines(report),
        fitted=count_of(fitted, "matrix", "matrices") if fitted else "",
        removed=markdown_table(pruning_rows(report) if structure is None else structure_rows(structure)),
        tables=[*tables, *(compare(suite, "markdown") for suite in suites)],
        speeds=markdown_table(speed_rows(benches)) if benches else "",
        speed_note=SPEED_NOTE,
        plots=[(plot, Path(plot).stem.replace("_", " ").replace("-", " ")) for plot in plots],
        reproduction=markdown_table(_reproduction_rows(report, origin)),
        norms=ACTIVATIONS_NAME if str(ACTIVATIONS_NAME) in files else "",
        licence=origin.metadata.get("license_name") or origin.metadata.get("license"),
        texts=sorted(file for file in files if file.upper().startswith(("LICENSE", "NOTICE", "USE_POLICY"))),
    )


def by_suite(evaluated: list[Results], this: str | None) -> list[list[Results]]:
    """Models grouped by text, tasks and limit: in each group dense models first, then the one of the identity `this`."""
    suites: dict[bytes, list[Results]] = {}
    for each in evaluated:
        made_by = each.made_by
        suites.setdefault(msgspec.json.encode([made_by.text, made_by.tasks, made_by.limit]), []).append(each)
    return [
        sorted(suite, key=lambda each: (each.pruned is not None, each.made_by.model.identity != this))
        for suite in suites.values()
    ]


def _metadata(name: str, report: RunReport, origin: Origin, evaluated: list[Results]) -> str:
    """The metadata as YAML; `evaluated` are the measurements of this checkpoint."""
    carried = dict(origin.metadata)
    kind = ["sparse", "unstructured-sparsity"] if report.structure is None else ["structured-pruning"]
    results = {
        (result.dataset_type, result.dataset_config, result.metric_name): result
        for each in evaluated
        if not (each.made_by.quantization or each.made_by.limit)  # another model, or some of the questions
        for result in _results_of(each)
    }
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=carried.pop("pipeline_tag", "text-generation"),
        base_model=origin.name,
        # The Hub has four relations; this is the one for changed weights in the same architecture.
        base_model_relation="finetune" if origin.name else None,
        tags=["emp-llm", "pruning", *kind, report.recipe.method, *carried.pop("tags", [])],
        model_name=name.partition("/")[2] if results else None,
        eval_results=list(results.values()) or None,
        **carried,
    )
    return str(data.to_yaml()).strip()


def _results_of(evaluated: Results) -> Iterator[EvalResult]:
    """The whole perplexity of a model, and the accuracies of its tasks, for the metadata."""
    perplexity, text = evaluated.measures.perplexity, evaluated.made_by.text
    if perplexity is not None and perplexity.perplexity is not None and not perplexity.partial:
        dataset = (text.dataset or text.file if text is not None else None) or "text"
        yield EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_config=None if text is None else text.config,
            dataset_split=None if text is None else text.split,
            metric_type="perplexity",
            metric_name=f"perplexity per token, blocks of {perplexity.block_length}",
            metric_value=perplexity.perplexity,
        )
    for task in evaluated.measures.tasks.values():
        for name, metrics in task.results.items():
            for key, value in metrics.items():
                metric = key.partition(",")[0]
                if metric in ("acc", "acc_norm") and isinstance(value, float):
                    shots = f", {task.n_shot[name]}-shot" if name in task.n_shot else ""
                    yield EvalResult(
                        task_type="text-generation",
                        dataset_type=name,
                        dataset_name=name,
                        metric_type=metric,
                        metric_name=f"{metric} by lm-eval{shots}",
                        metric_value=value,
                    )


def _reproduction_rows(report: RunReport, origin: Origin) -> Rows:
    """The recipe, the calibration and the versions of a run."""
    rows: Rows = [["", ""]]
    if origin.revision:
        rows.append(["commit of the base model", f"`{origin.revision}`"])
    if report.source.identity:
        rows.append(["identity of its weights (BLAKE3)", f"`{report.source.identity}`"])
    rows += [[name, f"`{json.dumps(value)}`"] for name, value in report.recipe.as_dict().items()]
    for name, value in {} if report.calibration is None else report.calibration.as_dict().items():
        if name in ("text", "texts", "tokens", "dtype", "propagate"):
            rows.append([f"calibration: {name}", f"`{json.dumps(value)}`"])
    return rows + [[package, version] for package, version in report.versions.items()]
