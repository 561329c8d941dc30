"""The model card of a pruned checkpoint, by the template card.md.j2."""

import json
import logging
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader

from emp_llm.common.errors import count_of
from emp_llm.common.paths import ACTIVATIONS_NAME, CARD_MARK, CARD_NAME
from emp_llm.common.tables import Rows, markdown_code, markdown_table, markdown_text, printable_text
from emp_llm.evaluation.results import results_of_report
from emp_llm.options.recipe import ByCost, Given, Match, Own, Share
from emp_llm.records.bench import Bench
from emp_llm.records.manifest import Manifest
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import ModelSource
from emp_llm.reporting import run_tables
from emp_llm.reporting.points import compare, evaluation_table

logger = logging.getLogger(__name__)
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "tags")


@dataclass(frozen=True)
class Origin:
    """The dense model.

    Attributes:
        name: Hub id; None for a folder without a known repository.
        revision: its commit.
        metadata: the part of its card that holds for a pruned model too: licence, languages,
            pipeline tag, tags.
    """

    name: str | None
    revision: str | None
    metadata: dict[str, Any]


def find_origin(source: ModelSource, base_model: str | None = None) -> Origin:
    """The dense model, from the report, its folder and the Hub. Missing information is a warning,
    not an error.

    Args:
        source: the dense model, as the report of the pruning run names it.
        base_model: its Hub id, if the user gave it.
    """
    name: str | None = source.model
    revision = source.revision
    cards = []
    if revision is None:
        card = Path(source.model).expanduser() / CARD_NAME
        cards = [str(card)] if card.is_file() else []
        name, revision = cached_repository(source.model) or (None, None)
    if base_model is not None and base_model != name:
        name = base_model
        revision = None
    if name is None:
        logger.warning(
            "warning: the model was pruned from a folder, so the card names no base "
            "model. Give --base-model ID."
        )
    else:
        cards.append(name)
    metadata: dict[str, Any] = {}
    for place in cards:
        try:
            metadata = metadata or ModelCard.load(place, ignore_metadata_errors=True).data.to_dict()
        except Exception as error:  # people write cards by hand, so anything can be wrong in them
            logger.warning(
                "warning: %s: its card cannot be read (%s).", place, type(error).__name__
            )
    if not metadata.get("license"):
        logger.warning(
            "warning: no licence of the base model was found, so the card names none. "
            "Add it before others use it."
        )
    return Origin(name, revision, {key: metadata[key] for key in _CARRIED if metadata.get(key)})


def card_text(
    name: str,
    branch: str | None,
    report: RunReport,
    origin: Origin,
    evaluated: list[Results],
    this: str | None,
    benches: Sequence[Bench],
    files: Collection[str],
    manifest: Manifest | None = None,
) -> str:
    """The model card by the template card.md.j2, metadata first.

    Args:
        name, branch: the repository, and the branch; None: main.
        report: of the pruning run, in its public form.
        origin: the dense model.
        evaluated: results files; this: the identity of the checkpoint, whose results are among
            them.
        benches: outputs of `bench` for this checkpoint.
        files: the other files of the repository.
        manifest: of the checkpoint; None: of one that emp-llm wrote, without norms.
    """
    measured = results_of_report(report)
    suites = by_suite(evaluated, this)
    structure = report.structure
    tables = [
        evaluation_table(report, "markdown"),
        *(compare(suite, "markdown") for suite in suites),
    ]
    of_this = [results for results in measured if results.pruned is not None]
    of_this += [
        results for suite in suites for results in suite if results.made_by.model.identity == this
    ]
    if structure is None:
        lines = run_tables.pruning_lines(report)
        removed = run_tables.pruning_rows(report)
    else:
        lines = run_tables.structure_lines(report, structure)
        removed = run_tables.structure_rows(structure)
    if report.loss is not None:
        lines.append(f"{report.loss.flag}: {run_tables.chosen_line(report.loss)}")
    lines += run_tables.healing_lines(report)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "text": markdown_text,
        "code": markdown_code,
        "word": shlex.quote,
        "address": quote,
    }
    return environment.get_template("card.md.j2").render(
        metadata=_metadata(name, report, origin, of_this),
        mark=CARD_MARK,
        name=name,
        branch=branch,
        report=report,
        origin=origin,
        base=_base(report, origin),
        summary=_summary(report),
        lines=lines,
        same=_same(report),
        # Then save_pretrained wrote the checkpoint.
        saved=manifest is not None and manifest.source.identity is None,
        check=_check(report),
        removed=markdown_table(removed),
        tables=list(filter(None, tables)),
        speeds=markdown_table(run_tables.speed_rows(benches)) if benches else "",
        speed_note=run_tables.SPEED_NOTE,
        reproduction=markdown_table(_reproduction_rows(report, origin)),
        norms=ACTIVATIONS_NAME if str(ACTIVATIONS_NAME) in files else "",
        to_verify=_to_verify(report, manifest, files),
        licence=origin.metadata.get("license_name") or origin.metadata.get("license"),
        texts=sorted(
            file for file in files if file.upper().startswith(("LICENSE", "NOTICE", "USE_POLICY"))
        ),
    )


def _summary(report: RunReport) -> str:
    """How the model was made, in sentences that begin with the dense model."""
    recipe = report.recipe
    healing = report.healing
    updated = recipe.moves or report.trained
    how = "pruned after training" if updated else "pruned after training, without retraining,"
    text = f"{how} by {recipe.but(heal=None).words}."
    if healing is not None:
        texts = [] if healing.origin is None else [each.name for each in healing.origin.all_texts]
        text += " Then it was trained: healed by self-distillation from the dense model, "
        text += count_of(healing.steps, "step")
        text += f" on {', '.join(texts)}." if texts else "."
        if not healing.best:
            text += " No step improved it, so its weights are those before the healing."
    if report.trained:
        # A record does not say which of the two came first.
        text += " Then it was fine-tuned." if healing is None else " It was also fine-tuned."
        text += " The removed weights are still zero." if report.structure is None else ""
    return text


def _check(report: RunReport) -> str:
    """The perplexity of held-out text, in a sentence; empty if it was not measured."""
    check = report.check
    if check is None:
        return ""
    dense, pruned, change, tokens = run_tables.describe_check(check)
    text = "held-out text" if check.text is None else f"text of {check.text} that was held out"
    perplexities = f"{dense} of the base model, {pruned} of this one ({change})"
    return f"Perplexity on {text}, {tokens}: {perplexities}."


def _same(report: RunReport) -> str:
    """Which weights are those of the dense model, in sentences."""
    if report.trained:
        return (
            "Its other weights may differ from those of the base model, because they were trained."
        )
    updated = []
    fitted = sum(fit.error_after is not None for fit in report.fits.values())
    if fitted:
        matrices = count_of(fitted, "matrix", "matrices")
        updated.append(f"The kept weights of {matrices} were fitted to the calibration text.")
    healing = report.healing
    if healing is not None and healing.best and report.recipe.heal is not None:
        trained = (
            "the pruned matrices"
            if report.recipe.heal.weights == "targets"
            else "all linear layers in the blocks, and their norms,"
        )
        updated.append(f"The kept weights of {trained} were trained by the healing.")
    others = "other" if updated or report.structure is None else "kept"
    return " ".join([*updated, f"All {others} weights are those of the base model."])


def _to_verify(report: RunReport, manifest: Manifest | None, files: Collection[str]) -> str:
    """The options of `verify` for what the repository does not hold, from a space on."""
    score = report.recipe.score
    options = ""
    if isinstance(score, Own):
        options += f" --criterion FILE.py:{shlex.quote(score.method)}"
    if isinstance(score, Given):
        options += " --scores FILE"
    needs_norms = manifest is not None and manifest.activations is not None
    if needs_norms and str(ACTIVATIONS_NAME) not in files:
        options += " --activations FILE"
    return options


def _base(report: RunReport, origin: Origin) -> str:
    """The dense model: a link to the Hub, or its name as code."""
    if origin.name is not None and HUB_ID.fullmatch(origin.name):
        return f"[{origin.name}](https://huggingface.co/{origin.name})"
    return f"`{markdown_code(origin.name or report.source.model)}`"


def by_suite(evaluated: list[Results], this: str | None) -> list[list[Results]]:
    """Models grouped by text, tasks and limit: in each group dense models first, then the one of
    the identity `this`.
    """
    suites: dict[bytes, list[Results]] = {}
    for results in evaluated:
        made_by = results.made_by
        key = msgspec.json.encode([made_by.text, made_by.tasks, made_by.limit])
        suites.setdefault(key, []).append(results)

    def order(results: Results) -> tuple[bool, bool]:
        return results.pruned is not None, results.made_by.model.identity != this

    return [sorted(suite, key=order) for suite in suites.values()]


def _metadata(name: str, report: RunReport, origin: Origin, evaluated: list[Results]) -> str:
    """The metadata as YAML; `evaluated` are the measurements of this checkpoint."""
    carried = dict(origin.metadata)
    if report.structure is not None:
        sparsity_tags = ["structured-pruning"]
    elif report.recipe.n_of_m is not None:
        sparsity_tags = ["sparse", "semi-structured-sparsity"]
    else:
        sparsity_tags = ["sparse", "unstructured-sparsity"]
    results = {
        (result.dataset_type, result.dataset_config, result.metric_name): result
        for measured in evaluated
        # Another model, or some of the questions.
        if not (measured.made_by.quantization or measured.made_by.limit)
        for result in _results_of(measured)
    }
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=carried.pop("pipeline_tag", "text-generation"),
        base_model=origin.name,
        # The Hub has four relations; this is the one for changed weights in the same architecture.
        base_model_relation="finetune" if origin.name else None,
        tags=["emp-llm", "pruning", *sparsity_tags, report.recipe.method, *carried.pop("tags", [])],
        model_name=name.partition("/")[2] if results else None,
        eval_results=list(results.values()) or None,
        **carried,
    )
    return "\n".join(map(printable_text, str(data.to_yaml()).strip().split("\n")))


def _results_of(evaluated: Results) -> Iterator[EvalResult]:
    """The whole perplexity of a model, and the accuracies of its tasks, for the metadata."""
    perplexity = evaluated.measures.perplexity
    text = evaluated.made_by.text
    if perplexity is not None and perplexity.perplexity is not None and not perplexity.partial:
        dataset = (text.dataset or text.file if text is not None else None) or "text"
        yield EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_config=None if text is None else text.config,
            dataset_split=None if text is None else text.split,
            metric_type="perplexity",
            metric_name="perplexity per token, blocks of "
            f"{perplexity.block_length}{'' if text is None else text.bos_note}",
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
        rows.append(["commit of the base model", f"`{markdown_code(origin.revision)}`"])
    if report.source.identity:
        rows.append(
            ["identity of its weights (BLAKE3)", f"`{markdown_code(report.source.identity)}`"]
        )
    recipe = report.recipe
    if isinstance(recipe.counts, Match):  # the numbers of all matrices are in the report
        recipe = recipe.but(counts=replace(recipe.counts, removed=None))
    elif isinstance(recipe.counts, Share) and recipe.counts.shares is not None:
        recipe = recipe.but(counts=replace(recipe.counts, shares=ByCost()))
    rows += [
        [name, f"`{markdown_code(json.dumps(value))}`"]
        for name, value in recipe.as_dict().items()
        if value is not None
    ]
    for name, value in {} if report.calibration is None else report.calibration.as_dict().items():
        if name in ("text", "texts", "tokens", "dtype", "quantization", "propagate"):
            rows.append([f"calibration: {name}", f"`{markdown_code(json.dumps(value))}`"])
    origin_of_healing = None if report.healing is None else report.healing.origin
    for text in [] if origin_of_healing is None else origin_of_healing.all_texts:
        rows.append(["healing: text", f"`{markdown_code(json.dumps(text.as_dict()))}`"])
    return rows + [[package, version] for package, version in report.versions.items()]


def cached_repository(path: str) -> tuple[str, str] | None:
    """(Hub id, commit) of a folder in the Hub cache; None for any other folder."""
    match = _CACHED.search(str(Path(path).expanduser().absolute()))
    return (f"{match[1]}/{match[2]}", match[3]) if match else None
