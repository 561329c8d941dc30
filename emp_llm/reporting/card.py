"""The model card of a pruned checkpoint: its origin, its measurements, and its recipe."""

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import EvalResult, HfApi, ModelCardData, constants
from huggingface_hub.repocard import metadata_load
from jinja2 import Environment, FileSystemLoader

from emp_llm.common.errors import count_of
from emp_llm.common.paths import ACTIVATIONS_NAME, CARD_NAME
from emp_llm.common.tables import Rows, markdown_table
from emp_llm.evaluation.comparison import compare
from emp_llm.evaluation.results import EvaluatedModel, models_of_report
from emp_llm.hub.client import HUB_ERRORS
from emp_llm.options.recipe import Recipe
from emp_llm.records.bench import Bench
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import ModelSource
from emp_llm.reporting.public import cached_repository
from emp_llm.reporting.run_tables import SPEED_NOTE, pruning_lines, pruning_rows, speed_rows, structure_lines, structure_rows

_METHOD_WORDS = {
    "emp-wanda": "Effective Model Pruning (EMP) with Wanda scores (weight magnitude times input norm)",
    "emp-magnitude": "Effective Model Pruning (EMP) with weight magnitudes as scores",
    "emp-relative": "Effective Model Pruning (EMP) with relative scores (weight magnitude times relative input norm)",
    "emp-ria": "Effective Model Pruning (EMP) with RIA scores (relative importance and activations)",
    "wanda": "Wanda (weight magnitude times input norm)",
    "relative": "relative scores (weight magnitude times input norm relative to each token's output)",
    "ria": "RIA (relative importance and activations)",
    "magnitude": "weight magnitude",
    "sparsegpt": "SparseGPT",
    "admm": "masks and weights searched for together (ADMM)",
    "emp-admm": "Effective Model Pruning (EMP) with counts by magnitudes, masks and weights searched for together (ADMM)",
}
_UNIT_SCORES = {
    "magnitude": "the norms of their weights",
    "wanda": "the norms of their weights and activations",
    "taylor": "their first-order effect on the loss (Taylor)",
}


def _method_words(recipe: Recipe) -> str:
    """The method of a run in words."""
    how = _METHOD_WORDS.get(recipe.method, recipe.method)
    if recipe.structure is not None:
        kinds = {"both": "attention heads and MLP neurons", "heads": "attention heads", "neurons": "MLP neurons"}
        how = f"{'EMP' if recipe.method.startswith('emp-') else 'a fixed share'} of whole {kinds[recipe.structure.structure]}"
        how += f" scored by {_UNIT_SCORES[recipe.method.removeprefix('emp-')]},"
    if recipe.score == "relative" and recipe.method.removeprefix("emp-") != "relative":
        how += ", with input norms relative to the output"
    if recipe.shares == "owl":
        how += ", with a sparsity for each block by its outliers (OWL)"
    if recipe.count_by == "magnitude":
        how += ", and as many weights in each group as its magnitudes are worth"
    if recipe.refit:
        how += ", with a refit of the kept weights"
    return how


logger = logging.getLogger(__name__)
_NO_CARD: tuple[type[Exception], ...] = (*HUB_ERRORS, ValueError)  # no answer, or metadata that cannot be parsed
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")


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
    revision = source.revision
    folder = None
    if revision is None:
        folder = Path(source.model).expanduser()
        name, revision = cached_repository(source.model) or (None, None)
    if base_model is not None and base_model != name:
        name, revision = base_model, None
    metadata = _of_folder(folder) if folder is not None else {}
    if name is None:
        logger.warning("warning: the model was pruned from a folder, so the card names no base model. Give --base-model ID.")
    elif not metadata:
        metadata = _of_hub(name, revision)
    if not metadata.get("license"):
        logger.warning("warning: no licence of the base model was found, so the card names none. Add it before others use it.")
    carried = {key: metadata[key] for key in _CARRIED if metadata.get(key)}
    tags = metadata.get("tags")
    return Origin(name, revision, carried | {"tags": [str(tag) for tag in tags] if isinstance(tags, list) else []})


def _of_folder(folder: Path) -> dict[str, Any]:
    card = folder / CARD_NAME
    if not card.is_file():
        return {}
    try:
        return metadata_load(card) or {}
    except Exception as error:  # people write cards by hand, so anything can be wrong in them
        logger.info("%s: its metadata cannot be read (%s).", card, type(error).__name__)
        return {}


def _of_hub(name: str, revision: str | None) -> dict[str, Any]:
    if constants.HF_HUB_OFFLINE:
        return {}
    try:
        data = HfApi().model_info(name, revision=revision).card_data
    except _NO_CARD as error:
        logger.warning("warning: %s: its card cannot be read (%s).", name, type(error).__name__)
        return {}
    return {} if data is None else dict(data.to_dict())  # type: ignore[no-untyped-call]


_MARK = "<!-- emp-llm writes this card again at every push. Delete this line to keep your own changes. -->"


def is_ours(path: Path) -> bool:
    """Whether emp-llm wrote a card and nobody deleted its mark to keep changes."""
    return _MARK in path.read_text(encoding="utf-8", errors="replace")


def card_text(
    name: str,
    branch: str | None,
    report: RunReport,
    origin: Origin,
    evaluated: list[EvaluatedModel],
    plots: list[str],
    benches: Sequence[Bench],
    files: Collection[str],
) -> str:
    """The model card by the template card.md.j2, metadata first.

    Args:
        name, branch: the repository, and the branch; None: main.
        report: of the pruning run, in its public form.
        origin: the dense model.
        evaluated: models of results files.
        plots: PNG files by their path in the repository.
        benches: outputs of `bench` for this checkpoint.
        files: the other files of the repository.
    """
    measured, suites, structure = models_of_report(report), by_suite(evaluated), report.structure
    tables = [compare(measured, "markdown", ["dense", "pruned"])] if len(measured) == 2 else []
    fitted = sum(fit.error_after is not None for fit in report.fits.values())
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("card.md.j2").render(
        metadata=_metadata(name, report, origin, [each for suite in [measured, *suites] for each in suite if each.this]),
        mark=_MARK,
        name=name,
        branch=branch,
        report=report,
        origin=origin,
        base=f"[{origin.name}](https://huggingface.co/{origin.name})" if origin.name else f"`{report.source.model}`",
        method=_method_words(report.recipe),
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


def _metadata(name: str, report: RunReport, origin: Origin, evaluated: list[EvaluatedModel]) -> str:
    """The metadata as YAML; `evaluated` are the measurements of this checkpoint."""
    carried = dict(origin.metadata)
    kind = ["sparse", "unstructured-sparsity"] if report.structure is None else ["structured-pruning"]
    results = [
        result
        for each in evaluated
        if not (each.made_by.quantization or each.made_by.limit)  # another model, or some of the questions
        for result in [*_perplexity_result(each), *_task_results(each)]
    ]
    unique = {(each.dataset_type, each.dataset_config, each.metric_name): each for each in results}
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=carried.pop("pipeline_tag", "text-generation"),
        base_model=origin.name,
        # The Hub has four relations; this is the one for changed weights in the same architecture.
        base_model_relation="finetune" if origin.name else None,
        tags=["emp-llm", "pruning", *kind, report.recipe.method, *carried.pop("tags", [])],
        model_name=name.partition("/")[2],
        eval_results=list(unique.values()) or None,
        **carried,
    )
    if data.eval_results is None:
        data.pop("model_name")
    return str(data.to_yaml()).strip()


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


def by_suite(evaluated: list[EvaluatedModel]) -> list[list[EvaluatedModel]]:
    """Models grouped by text, tasks and limit; in each group dense models first, then this checkpoint, then the others."""
    suites: dict[str, list[EvaluatedModel]] = {}
    for each in evaluated:
        made_by = msgspec.to_builtins(each.made_by)
        key = json.dumps([made_by.get(part) for part in ("text", "tasks", "limit")], sort_keys=True)
        suites.setdefault(key, []).append(each)
    return [sorted(suite, key=lambda each: (each.pruned is not None, not each.this)) for suite in suites.values()]


def _perplexity_result(evaluated: EvaluatedModel) -> list[EvalResult]:
    entry, text = evaluated.measures.perplexity, evaluated.made_by.text
    if entry is None or entry.partial or entry.perplexity is None:
        return []
    dataset = (text.dataset or text.file if text is not None else None) or "text"
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_config=None if text is None else text.config,
            dataset_split=None if text is None else text.split,
            metric_type="perplexity",
            metric_name=f"perplexity per token, blocks of {entry.block_length}",
            metric_value=entry.perplexity,
        )
    ]


def _task_results(evaluated: EvaluatedModel) -> list[EvalResult]:
    found = []
    for task in evaluated.measures.tasks.values():
        for name, metrics in task.results.items():
            for key, value in metrics.items():
                metric = key.partition(",")[0]
                if metric in ("acc", "acc_norm") and isinstance(value, float):
                    shots = task.n_shot.get(name)
                    found.append(
                        EvalResult(
                            task_type="text-generation",
                            dataset_type=name,
                            dataset_name=name,
                            metric_type=metric,
                            metric_name=f"{metric} by lm-eval" + (f", {shots}-shot" if shots is not None else ""),
                            metric_value=value,
                        )
                    )
    return found
