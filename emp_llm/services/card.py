"""The model card of a pruned checkpoint: what it is, what was measured, and all that made it, from the files of its run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from emp_llm.models.manifest import ACTIVATIONS_NAME
from emp_llm.services.comparison import compare
from emp_llm.services.origin import Origin
from emp_llm.services.results import Record, evaluation_records
from emp_llm.services.tables import Rows, markdown_table
from emp_llm.services.terminal import pruning_lines, pruning_rows
from emp_llm.services.upload import Destination

CARD_NAME = "README.md"
_MARK = "<!-- Written by emp-llm, anew with every push. Delete this line to keep changes of your own. -->"
_METHODS = {
    "emp-wanda": "Effective Model Pruning (EMP) with Wanda scores, weight times input norm",
    "emp-magnitude": "Effective Model Pruning (EMP) with weight magnitudes as scores",
    "wanda": "Wanda, weight times input norm",
    "magnitude": "weight magnitude",
}


def is_ours(path: Path) -> bool:
    """Whether a card was written by this, and not changed by hand since in a way that asks to be kept."""
    return _MARK in path.read_text(encoding="utf-8", errors="replace")


class Card:
    """A model card.

    Args:
        to: where the model goes.
        report: of the pruning run.
        origin: the dense model.
        records: of results files; those of this checkpoint have "this": true.
        plots: PNG files by their path in the repository.
    """

    def __init__(
        self, to: Destination, report: dict[str, Any], origin: Origin, records: list[Record], plots: list[str]
    ) -> None:
        self._to = to
        self._report = report
        self._origin = origin
        self._plots = plots
        self._suites = by_suite(records)
        self._measured: list[Record] = []  # by the run itself, dense and pruned
        if "evaluation" in report:
            dense, pruned = evaluation_records(report)
            self._measured = [dense, pruned | {"this": True}]

    def text(self, files: Iterable[str]) -> str:
        """The card, metadata first.

        Args:
            files: what lies beside it in the repository.
        """
        names = set(files)
        parts = [
            f"---\n{self._metadata()}\n---",
            _MARK,
            f"# {self._to.name.partition('/')[2]}",
            self._summary(),
            "## What you gain, and what not",
            self._gains(),
            "## Use",
            self._use(),
            "## What was removed",
            markdown_table(pruning_rows(self._report)),
            _GLOSSARY,
            *self._warnings(),
            "## Evaluation",
            *self._evaluation(),
            *(f"![{Path(plot).stem.replace('_', ' ').replace('-', ' ')}]({plot})" for plot in self._plots),
            "## How it was made",
            self._making(names),
            "## Licence",
            self._licence(names),
        ]
        return "\n\n".join(parts) + "\n"

    @property
    def _base(self) -> str:
        """The dense model, as a link where it is on the Hub."""
        name = self._origin.name
        return f"[{name}](https://huggingface.co/{name})" if name else f"`{Path(self._report['source']['model']).name}`"

    def _metadata(self) -> str:
        carried = dict(self._origin.metadata)
        tags = [
            "emp-llm",
            "pruning",
            "sparse",
            "unstructured-sparsity",
            self._report["recipe"]["method"],
            *carried.pop("tags", []),
        ]
        data = ModelCardData(
            library_name="transformers",
            pipeline_tag=carried.pop("pipeline_tag", "text-generation"),
            base_model=self._origin.name,
            # Of the Hub's four relations the one for weights that were changed and are loaded as before.
            base_model_relation="finetune" if self._origin.name else None,
            tags=tags,
            model_name=self._to.name.partition("/")[2],
            eval_results=self._eval_results() or None,
            **carried,
        )
        if data.eval_results is None:
            data.pop("model_name")
        return str(data.to_yaml()).strip()

    def _eval_results(self) -> list[EvalResult]:
        found = []
        for record in (record for suite in [self._measured, *self._suites] for record in suite if record.get("this")):
            made_by = record["made_by"]
            if made_by.get("quantization") or made_by.get("limit"):  # of other weights, or of a part of the questions
                continue
            found += [*_perplexity_result(record), *_task_results(record)]
        return list({(each.dataset_type, each.dataset_config, each.metric_name): each for each in found}.values())

    def _summary(self) -> str:
        how = _METHODS.get(self._report["recipe"]["method"], self._report["recipe"]["method"])
        lines = "\n".join(f"- {line}" for line in pruning_lines(self._report))
        return f"{self._base}, pruned after training and without retraining by {how}.\n\n{lines}"

    def _gains(self) -> str:
        zeros = self._report["targets"]["sparsity_of_all_parameters"]
        return (
            f"Plain safetensors of the same names, shapes and dtypes as the base model's, in which {100 * zeros:.1f} % of the "
            "parameters are zero; every other byte is the base model's. They load wherever the base model loads. **By "
            "themselves they are neither smaller nor faster**: dense kernels multiply by the zeros too. What is gained is a "
            "model that is known to do without these weights: to compress (sparse storage), to run on kernels that skip "
            "zeros, or to train on with the zeros held at zero (an ordinary optimizer step or a merged adapter fills them)."
        )

    def _use(self) -> str:
        branch = f', revision="{self._to.branch}"' if self._to.branch else ""
        return (
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{self._to.name}"{branch}, dtype="auto")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{self._to.name}"{branch})\n```'
        )

    def _warnings(self) -> list[str]:
        warnings = self._report["warnings"]
        more = [f"- and {len(warnings) - 10} more in `emp_report.json`"] if len(warnings) > 10 else []
        return ["\n".join(["Of note:", "", *(f"- {each}" for each in warnings[:10]), *more])] if warnings else []

    def _evaluation(self) -> list[str]:
        tables = [compare(self._measured, "markdown", ["dense", "pruned"])] if self._measured else []
        tables += [compare(suite, "markdown") for suite in self._suites]
        return tables or ["It was not evaluated."]

    def _making(self, files: set[str]) -> str:
        report = self._report
        source, calibration = report["source"], report["calibration"] or {}
        rows: Rows = [["", ""]]
        if source["revision"]:
            rows.append(["base model at commit", f"`{source['revision']}`"])
        rows.append(["SHA-256 of samples of its weights", f"`{source['sha256_of_samples']}`"])
        rows += [[name, f"`{json.dumps(value)}`"] for name, value in report["recipe"].items() if value is not None]
        for key in ("text", "tokens", "dtype", "propagate"):
            if calibration.get(key) is not None:
                rows.append([f"calibration: {key}", f"`{json.dumps(_without_folders(calibration[key]))}`"])
        rows += [[package, version] for package, version in report["versions"].items()]
        reuse = f" `{ACTIVATIONS_NAME}` holds the norms that decided the masks." if str(ACTIVATIONS_NAME) in files else ""
        source_revision = f" --revision {source['revision']}" if source["revision"] and self._origin.revision else ""
        check = f"{self._origin.name or 'BASE_MODEL'}{source_revision}"
        branch = f" --revision {self._to.branch}" if self._to.branch else ""
        return (
            f"```bash\n{report['command']}\n```\n\n{markdown_table(rows)}\n\n"
            "`emp_report.json` has the kept fractions and effective numbers of every matrix, `emp_manifest.json` the SHA-256 "
            f"of every file.{reuse} To check all bytes and all masks against the base model:\n\n"
            f"```bash\nhf download {self._to.name}{branch} --local-dir pruned\n"
            f"python -m emp_llm.verify pruned --source {check}\n```"
        )

    def _licence(self, files: set[str]) -> str:
        name = self._origin.metadata.get("license_name") or self._origin.metadata.get("license")
        texts = sorted(file for file in files if file.upper().startswith(("LICENSE", "NOTICE", "USE_POLICY")))
        beside = f" Its texts are beside the weights: {', '.join(f'[{text}]({text})' for text in texts)}." if texts else ""
        if name:
            return f"That of the base model, {name}: a pruned model is a work derived from it.{beside}"
        return f"That of the base model, {self._base}, whose card names none that could be carried over.{beside}"


_GLOSSARY = (
    "*kept*: the share of weights left, in all and by row; *N_eff/N*: the effective number of a row's weights by the row's "
    "length; *s_eff* and *bound*: the share of the scores that the N_eff largest hold, and the least it can be; *kept mass*: "
    "the share of the scores that is left."
)


def by_suite(records: list[Record]) -> list[list[Record]]:
    """Records of the same text, tasks and limit together: dense models first, then this one, then the others."""
    suites: dict[str, list[Record]] = {}
    for record in records:
        key = json.dumps([record["made_by"].get(part) for part in ("text", "tasks", "limit")], sort_keys=True)
        suites.setdefault(key, []).append(record)
    return [sorted(suite, key=_place) for suite in suites.values()]


def _without_folders(value: Any) -> Any:
    """What tells a text, its file by name alone: whose machine it lay on is nobody's business."""
    return value | {"file": Path(value["file"]).name} if isinstance(value, dict) and value.get("file") else value


def _place(record: Record) -> tuple[bool, bool]:
    return record["pruned"] is not None, not record.get("this")


def _perplexity_result(record: Record) -> list[EvalResult]:
    if "perplexity" not in record or record["perplexity"]["partial"]:
        return []
    text, entry = record["made_by"].get("text") or {}, record["perplexity"]
    dataset = text.get("dataset") or text.get("file") or "text"
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_config=text.get("config"),
            dataset_split=text.get("split"),
            metric_type="perplexity",
            metric_name=f"perplexity per token, blocks of {entry['block_length']}",
            metric_value=entry["perplexity"],
        )
    ]


def _task_results(record: Record) -> list[EvalResult]:
    found = []
    for task in record.get("tasks", {}).values():
        for name, metrics in task["results"].items():
            for key, value in metrics.items():
                metric = key.partition(",")[0]
                if metric in ("acc", "acc_norm") and isinstance(value, float):
                    shots = (task.get("n-shot") or {}).get(name)
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
