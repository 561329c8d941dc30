"""The model card of a pruned checkpoint: its origin, its measurements, and its recipe."""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import EvalResult, HfApi, ModelCardData, constants
from huggingface_hub.repocard import metadata_load

from emp_llm.common.errors import count_of
from emp_llm.common.paths import ACTIVATIONS_NAME, CARD_NAME
from emp_llm.common.tables import Rows, markdown_table
from emp_llm.evaluation.comparison import compare
from emp_llm.evaluation.results import EvaluatedModel, models_of_report
from emp_llm.hub.client import HUB_ERRORS
from emp_llm.hub.public import cached_repository
from emp_llm.options.recipe import Recipe
from emp_llm.records.bench import Bench
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import ModelSource
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
_UNIT_GLOSSARY = (
    "*units*: whole heads (or groups of heads that share keys and values) or MLP neurons; *by the rule*: how many the rule "
    "keeps before all layers get one width; *N_eff/N*: the effective number of the units' scores in a layer, divided by their "
    "number; *s_eff*: the share of the total score that the N_eff largest scores hold, and *bound* its lower bound."
)
_GLOSSARY = (
    "*kept*: the share of weights that were kept, overall and by row; *N_eff/N*: the effective number of weights in a row, "
    "divided by the row's length; *s_eff*: the share of the total score that the N_eff largest scores hold, and *bound* its "
    "lower bound; *kept mass*: the share of the total score that was kept."
)


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


class Card:
    """A model card.

    Args:
        name, branch: the repository, and the branch; None: main.
        report: of the pruning run, in its public form.
        origin: the dense model.
        evaluated: models of results files.
        plots: PNG files by their path in the repository.
        benches: outputs of `bench` for this checkpoint.
    """

    def __init__(
        self,
        name: str,
        branch: str | None,
        report: RunReport,
        origin: Origin,
        evaluated: list[EvaluatedModel],
        plots: list[str],
        benches: Sequence[Bench] = (),
    ) -> None:
        self._name, self._branch = name, branch
        self._report = report
        self._origin = origin
        self._plots = plots
        self._benches = benches
        self._suites = by_suite(evaluated)
        self._measured = models_of_report(report)  # dense and pruned, measured by the run itself

    def text(self, files: Iterable[str]) -> str:
        """The card, metadata first.

        Args:
            files: the other files of the repository.
        """
        names = set(files)
        parts = [
            f"---\n{self._metadata()}\n---",
            _MARK,
            f"# {self._name.partition('/')[2]}",
            self._summary(),
            "## Benefits and limits",
            self._benefits(),
            "## Use",
            self._use(),
            "## Removed weights",
            *self._removed(),
            *self._warnings(),
            "## Evaluation",
            *self._evaluation(),
            *self._speed(),
            *(f"![{Path(plot).stem.replace('_', ' ').replace('-', ' ')}]({plot})" for plot in self._plots),
            "## Reproduction",
            self._reproduction(names),
            "## Licence",
            self._licence(names),
        ]
        return "\n\n".join(parts) + "\n"

    @property
    def _base(self) -> str:
        """The dense model, as a link if it is on the Hub."""
        name = self._origin.name
        return f"[{name}](https://huggingface.co/{name})" if name else f"`{self._report.source.model}`"

    def _metadata(self) -> str:
        carried = dict(self._origin.metadata)
        kind = ["sparse", "unstructured-sparsity"] if self._report.structure is None else ["structured-pruning"]
        tags = ["emp-llm", "pruning", *kind, self._report.recipe.method, *carried.pop("tags", [])]
        data = ModelCardData(
            library_name="transformers",
            pipeline_tag=carried.pop("pipeline_tag", "text-generation"),
            base_model=self._origin.name,
            # The Hub has four relations; this is the one for changed weights in the same architecture.
            base_model_relation="finetune" if self._origin.name else None,
            tags=tags,
            model_name=self._name.partition("/")[2],
            eval_results=self._eval_results() or None,
            **carried,
        )
        if data.eval_results is None:
            data.pop("model_name")
        return str(data.to_yaml()).strip()

    def _eval_results(self) -> list[EvalResult]:
        found = []
        for evaluated in (each for suite in [self._measured, *self._suites] for each in suite if each.this):
            made_by = evaluated.made_by
            if made_by.quantization or made_by.limit:  # another model, or some of the questions
                continue
            found += [*_perplexity_result(evaluated), *_task_results(evaluated)]
        return list({(each.dataset_type, each.dataset_config, each.metric_name): each for each in found}.values())

    def _summary(self) -> str:
        how = _method_words(self._report.recipe)
        shown = pruning_lines(self._report) if self._report.structure is None else structure_lines(self._report)
        lines = "\n".join(f"- {line}" for line in shown)
        return f"{self._base}, pruned by {how} after training, without retraining.\n\n{lines}"

    def _removed(self) -> list[str]:
        if self._report.structure is None:
            return [markdown_table(pruning_rows(self._report)), _GLOSSARY]
        return [markdown_table(structure_rows(self._report.structure)), _UNIT_GLOSSARY]

    def _benefits(self) -> str:
        structure = self._report.structure
        if structure is not None and structure.config:
            return (
                "A smaller dense model: plain safetensors with the names and dtypes of the base model, fewer rows and columns, "
                f"and a `config.json` that says so. {self._other_bytes()} It loads with `from_pretrained` and in every runtime "
                "that reads these numbers from `config.json`."
            )
        zeros = 100 * (self._report.targets.sparsity_of_all_parameters or 0.0)
        return (
            f"The files are plain safetensors with the names, shapes and dtypes of the base model. {zeros:.1f} % of the "
            f"parameters are zero. {self._other_bytes()} The checkpoint loads wherever the base model "
            "loads. **By itself it is neither smaller nor faster**: dense kernels multiply by the zeros too. To benefit from "
            "the zeros, pack the files (`emp-llm pack`), run the packed model (`emp-llm generate`, `emp_llm.runtime.load`), or "
            "train further and keep the zeros (an ordinary optimizer step or a merged adapter fills them)."
        )

    def _other_bytes(self) -> str:
        fitted = sum(fit.error_after is not None for fit in self._report.fits.values())
        if not fitted:
            return "All other bytes are those of the base model."
        which = count_of(fitted, "matrix", "matrices")
        return f"The kept weights of {which} were fitted to the calibration text; all other bytes are those of the base model."

    def _use(self) -> str:
        branch = f', revision="{self._branch}"' if self._branch else ""
        return (
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{self._name}"{branch}, dtype="auto")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{self._name}"{branch})\n```'
        )

    def _warnings(self) -> list[str]:
        warnings = self._report.warnings
        more = [f"- and {len(warnings) - 10} more in `emp_report.json`"] if len(warnings) > 10 else []
        return ["\n".join(["Notes:", "", *(f"- {each}" for each in warnings[:10]), *more])] if warnings else []

    def _evaluation(self) -> list[str]:
        tables = [compare(self._measured, "markdown", ["dense", "pruned"])] if len(self._measured) == 2 else []
        tables += [compare(suite, "markdown") for suite in self._suites]
        return tables or ["This checkpoint has not been evaluated."]

    def _speed(self) -> list[str]:
        return ["## Speed", markdown_table(speed_rows(self._benches)), SPEED_NOTE] if self._benches else []

    def _reproduction(self, files: set[str]) -> str:
        report = self._report
        source, calibration = report.source, report.calibration
        recipe = {name: getattr(report.recipe, name) for name in report.recipe.__struct_fields__}
        rows: Rows = [["", ""]]
        if self._origin.revision:
            rows.append(["commit of the base model", f"`{self._origin.revision}`"])
        if source.identity:
            rows.append(["identity of its weights (BLAKE3)", f"`{source.identity}`"])
        rows += [[name, f"`{_as_json(value)}`"] for name, value in recipe.items() if value is not None]
        for name, value in {} if calibration is None else calibration.as_dict().items():
            if name in ("text", "texts", "tokens", "dtype", "propagate"):
                rows.append([f"calibration: {name}", f"`{json.dumps(value)}`"])
        rows += [[package, version] for package, version in report.versions.items()]
        norms = f" `{ACTIVATIONS_NAME}` holds the input norms of the scores." if str(ACTIVATIONS_NAME) in files else ""
        commit = f" --revision {self._origin.revision}" if self._origin.revision else ""
        check = f"{self._origin.name or 'BASE_MODEL'}{commit}"
        branch = f" --revision {self._branch}" if self._branch else ""
        return (
            f"```bash\n{report.command}\n```\n\n{markdown_table(rows)}\n\n"
            "`emp_report.json` lists the kept fraction and the effective number of every matrix, `emp_manifest.json` the hash "
            f"of every file.{norms} To check all bytes and masks against the base model:\n\n"
            f"```bash\nhf download {self._name}{branch} --local-dir pruned\n"
            f"emp-llm verify pruned --source {check}\n```"
        )

    def _licence(self, files: set[str]) -> str:
        name = self._origin.metadata.get("license_name") or self._origin.metadata.get("license")
        texts = sorted(file for file in files if file.upper().startswith(("LICENSE", "NOTICE", "USE_POLICY")))
        text_links = f" Its text: {', '.join(f'[{text}]({text})' for text in texts)}." if texts else ""
        if name:
            return f"The licence of the base model, {name}, applies: a pruned model is a derived work.{text_links}"
        return f"The licence of the base model, {self._base}, applies. The base model's card names none.{text_links}"


def _as_json(value: Any) -> str:
    """A value of a recipe as JSON; a record with all of its fields."""
    if isinstance(value, msgspec.Struct):
        value = {name: each for name, each in msgspec.structs.asdict(value).items() if each is not None}
    return json.dumps(value)


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
