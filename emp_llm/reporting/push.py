"""The model card of a pruned checkpoint, by the template card.md.j2."""

import json
import logging
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
    constants,
    get_token,
)
from huggingface_hub.hf_api import RepoFile
from jinja2 import Environment, FileSystemLoader

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint, check_links, identity_of
from emp_llm.checkpoint.files import file_hash, write_text
from emp_llm.common.errors import UserError, count_of, format_bytes, quotable, reason, shorten_list
from emp_llm.common.paths import (
    ACTIVATIONS_NAME,
    CARD_MARK,
    CARD_NAME,
    CRITERION_NAME,
    EXTRAS,
    MANIFEST_NAME,
    OTHER_WEIGHTS,
    REPORT_NAME,
    is_hidden,
    shown_name,
)
from emp_llm.common.tables import (
    Rows,
    markdown_code,
    markdown_table,
    markdown_text,
    printable_text,
    table,
)
from emp_llm.evaluation.results import complete_results, results_of_report
from emp_llm.models.hub import explain_hub_errors, with_retries
from emp_llm.options.recipe import ByCost, Given, Match, Own, Share
from emp_llm.pruning.verification import Findings, check_files
from emp_llm.pruning.writing import read_manifest
from emp_llm.records.base import FileRecord, ModelIdentity, ModelSource, Part, converted
from emp_llm.records.evaluation import Bench
from emp_llm.records.run_report import FileEntry, Manifest, Results, RunReport, read_report
from emp_llm.reporting import run_tables
from emp_llm.reporting.run_tables import split_benches
from emp_llm.reporting.studies import compare, evaluation_table

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
        if recipe.heal is not None and recipe.heal.labels:
            text += f"with labels of {recipe.heal.labels:g} from the text, "
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


# The push of a finished checkpoint to the Hub: the files, their public form, and a single commit.
#
# The client uploads large files before it commits. The Hub keeps them by their SHA-256, so an
# interrupted upload resumes after the last finished large file without any state here.


R = TypeVar("R", bound=Part)
_TEXTS = (".txt", ".json", ".jsonl", ".parquet", ".toml", ".gz", ".xz", ".zst")
# Fields and options that hold a Hub id or a folder, and fields that hold a path, or a name without
# slashes.
_MODELS = ("model", "of", "dataset", "--model", "--calibration", "--baseline", "--push-to-hub")
_FILES = ("file", "run", "suite", "folder", "device_map")


def public(record: R, folders: Collection[str] = ()) -> R:
    """The same record without local paths: a path is reduced to its last component; Hub ids of
    models and data sets stay.

    Args:
        record: any record, with everything in it.
        folders: names of models that are known to be folders, although they may look like Hub ids.
    """
    kind: type[R] = type(record)
    return converted(_public(record.as_dict(), "", folders), kind, "record")


def _public(value: Any, key: str, folders: Collection[str]) -> Any:
    """JSON values without folders; `key` is the name of the field that holds the value."""
    if isinstance(value, list):
        return [_public(inner, key, folders) for inner in value]
    if isinstance(value, dict):
        return {name: _public(inner, name, folders) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    if key == "command":
        words = []
        flag = ""
        for word in _words(value):
            if word.startswith("--"):
                flag = word.partition("=")[0]
            words.append(_without_folders(word, flag, folders))
        return shlex.join(words)
    if key in (*_MODELS, *_FILES) or value.startswith(("/", "~", "./", "../")):
        return _without_folders(value, key, folders)
    return value


def _words(command: str) -> list[str]:
    """The words of a command line; one that no shell reads is split at its spaces."""
    try:
        return shlex.split(command)
    except ValueError:  # an open quote
        return command.split()


def _without_folders(text: str, key: str, folders: Collection[str]) -> str:
    """ "PATH", "--option=PATH" or "PATH,field=PATH", with the last component of each path."""
    return re.sub(r"[^,=]+", lambda word: _name_of(word[0], key in _MODELS, folders), text)


def _name_of(path: str, may_be_model: bool, folders: Collection[str]) -> str:
    """The last component of a path; a Hub id as it is."""
    if may_be_model:
        name = path.partition(":")[0]  # without the number of sequences of a calibration text
        if (
            HUB_ID.fullmatch(name)
            and name not in folders
            and not name.endswith(_TEXTS)
            and not Path(name).exists()
        ):
            return path
        cached = cached_repository(path)
        if cached:
            return cached[0]
    return path.rstrip("/").rpartition("/")[2] or path


@dataclass(frozen=True)
class Destination:
    """A repository, and the changes in it that a push may make.

    Attributes:
        name: USER/NAME; created if missing.
        branch: created from main if missing; None: main.
        private: create the repository as a private one; an existing one must be private.
        overwrite: replace other weights that the branch holds.
    """

    name: str
    branch: str | None = None
    private: bool = False
    overwrite: bool = False

    @property
    def url(self) -> str:
        """Address of the repository at the branch."""
        return f"{constants.ENDPOINT}/{self.name}" + (f"/tree/{self.branch}" if self.branch else "")

    def check_name(self) -> None:
        """Raise UserError if the name cannot be that of a repository."""
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.name):
            raise UserError(
                f"{self.name!r} is not a name on the Hub; give USER/NAME, or ORGANISATION/NAME."
            )


@dataclass(frozen=True)
class Pushed:
    """Result of a push, or of a dry run.

    Attributes:
        folder: the checkpoint.
        url: the repository's address at the branch.
        files: bytes of each file by its path in the repository.
        commit: the branch's commit that holds the files; None for a dry run, which changes nothing.
        card: the model card; None for one of the user's own.
    """

    folder: Path
    url: str
    files: dict[str, int]
    commit: str | None = None
    card: str | None = None


def pushed_words(pushed: Pushed) -> str:
    """One line about a push; for a dry run, the model card and a table of the files."""
    total = f"{count_of(len(pushed.files), 'file')}, {format_bytes(sum(pushed.files.values()))}"
    if pushed.commit is not None:
        return f"{pushed.url} holds {pushed.folder}: {total} (commit {pushed.commit[:10]})"
    rows = [
        ["file", "size"],
        *([path, format_bytes(size)] for path, size in sorted(pushed.files.items())),
    ]
    card = "" if pushed.card is None else f"{pushed.card}\n"
    return f"{card}{table(rows)}\n{total}, would be pushed to {pushed.url}"


def check_login(to: Destination) -> None:
    """Check before hours of work that the Hub accepts the token and that it may write. Nothing is
    created.

    Raises:
        UserError: there is no valid token with write access, or the Hub cannot be reached.
    """
    with explain_hub_errors(to.name):
        user = with_retries(HfApi().whoami)
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(
            f"{to.name}: your token can only read. Make one with write access: hf auth "
            "login --force"
        )
    owner = to.name.partition("/")[0]
    names = [account["name"] for account in (user, *user.get("orgs", []))]
    if owner not in names:
        logger.warning(
            "warning: %s: you are %s, not a member of %s; the push may be refused.",
            to.name,
            names[0],
            owner,
        )


def push_finished(folder: Path, to: Destination) -> Pushed:
    """`push_checkpoint` at the end of a pruning run. If the push fails, the message holds the
    command that repeats it.
    """
    options = [
        *(["--private"] if to.private else []),
        *(["--revision", to.branch] if to.branch else []),
    ]
    options += ["--overwrite"] if to.overwrite else []
    again = f"repeat the push: emp-llm push {shlex.join([str(folder), to.name, *options])}"
    try:
        return push_checkpoint(folder, to)
    except UserError as error:
        raise UserError(f"{error} The checkpoint is complete in {folder}; {again}") from error
    except BaseException:
        logger.warning("the checkpoint is complete in %s; %s", folder, again)
        raise


def push_checkpoint(
    folder: Path,
    to: Destination,
    results: Sequence[Path] = (),
    base_model: str | None = None,
    dry_run: bool = False,
) -> Pushed:
    """Push a pruned checkpoint with a model card, which is also written to its folder as README.md.

    A README.md that emp-llm did not write is pushed as it is. Report, manifest, activations and
    results are pushed in a public form: they name models and files, not folders of this machine.
    PNG files in the checkpoint's folder `emp_llm` are shown in the card.

    Args:
        folder: the output of a finished prune.
        to: the destination.
        results: results files of `evaluate`, of this checkpoint and of models to compare with; and
            outputs of `bench`.
        base_model: Hub id of the dense model, if the report names a folder.
        dry_run: check everything, make the card and list the files; neither the folder nor the Hub
            is changed.

    Raises:
        UserError: the folder is no finished checkpoint, it differs from its manifest, or a results
            file does not fit; or the Hub refuses.
    """
    to.check_name()
    manifest = read_manifest(folder)
    report = read_report(folder)
    findings = Findings()
    check_files(folder, manifest, findings)
    check_links(folder)
    pickles = {*OTHER_WEIGHTS} - {".safetensors"}
    kept_back = [
        name
        for name in manifest.files
        if is_hidden(Path(name)) or Path(name).suffix in pickles or name == str(CRITERION_NAME)
    ]
    if kept_back:
        shown = shorten_list([quotable(name) for name in kept_back])
        logger.warning(
            "warning: not pushed: %s; hidden files, pickles, weights of other formats and the "
            "source of a criterion stay here.",
            shown,
        )
    manifest.files = {
        name: entry for name, entry in manifest.files.items() if name not in kept_back
    }
    if findings.differences:
        raise UserError(
            f"{folder / findings.differences[0]} Nothing was pushed. To see all: "
            f"emp-llm verify {folder}"
        )
    paths, benches = split_benches(results)
    measured = {path: complete_results(path, "--results") for path in paths}
    model = ModelIdentity.of(folder, identity_of(Checkpoint(folder)) if results else None)
    this = model.identity
    _check_evidence(folder, model, measured, benches)
    names = [path.name for path in paths]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"{twice}: two files of this name would be pushed to the same folder; rename one."
        )

    # The public form of the records.
    source = report.source
    speeds = [speed for bench in benches for speed in (bench.dense, bench.sparse)]
    models = [source, report.calibration, *measured.values(), *speeds]
    folders = {model.model for model in models if model is not None and model.revision is None}
    report = public(report, folders)
    manifest = public(manifest, folders)
    measured = {path: public(model, folders) for path, model in measured.items()}
    benches = [public(bench, folders) for bench in benches]

    with TemporaryDirectory(prefix="emp-llm-push-") as scratch:
        files = {name: folder / name for name in manifest.files}
        norms = str(ACTIVATIONS_NAME)
        if norms in files:
            activations = Activations.load(files[norms])
            about = public(activations.about, folders)
            if about != activations.about:
                files[norms] = Path(scratch) / norms
                replace(activations, about=about).save(files[norms])
                manifest.files[norms] = FileEntry(
                    bytes=files[norms].stat().st_size, blake3=file_hash(files[norms])
                )
        records: dict[str, FileRecord] = {
            f"{EXTRAS}/{path.name}": model for path, model in measured.items()
        }
        for name, record in (records | {MANIFEST_NAME: manifest, REPORT_NAME: report}).items():
            files[name] = Path(scratch) / name
            record.save(files[name])

        card = folder / CARD_NAME
        text = ""
        # Or its mark was deleted.
        if card.exists() and CARD_MARK not in card.read_text(encoding="utf-8", errors="replace"):
            logger.info(
                "%s: not written by emp-llm, so it is pushed as it is. Remove it to get a "
                "model card.",
                card,
            )
        else:
            origin = find_origin(source, base_model)
            text = card_text(
                to.name,
                to.branch,
                report,
                origin,
                list(measured.values()),
                this,
                benches,
                list(files),
                manifest,
            )
        sizes = {name: file.stat().st_size for name, file in files.items()}
        sizes[CARD_NAME] = len(text.encode()) if text else card.stat().st_size
        if dry_run:
            return Pushed(folder, to.url, sizes, card=text or None)
        try:
            if text:
                write_text(card, text)
        except OSError as error:
            raise UserError(
                f"{card}: the model card cannot be written ({reason(error)})."
            ) from error
        files[CARD_NAME] = card
        message = f"{shown_name(report.source.model)} pruned by {report.recipe.method} with emp-llm"
        message += ", and trained since" if report.trained else ""
        with explain_hub_errors(to.name):
            commit = with_retries(lambda: _commit(files, to, message))
    return Pushed(folder, to.url, sizes, commit, text or None)


def _check_evidence(
    folder: Path, this: ModelIdentity, measured: Mapping[Path, Results], benches: Sequence[Bench]
) -> None:
    """Refuse suites and benches without this checkpoint, whose identity is `this`.

    In every suite one of the models must be this checkpoint, so that no other model's numbers are
    mistaken for its own.
    """
    for suite in by_suite(list(measured.values()), this.identity):
        found = [model.made_by.model.difference(this) for model in suite]
        if all(found):
            same = (model.made_by.model.identity == this.identity for model in suite)
            place = next((place for place, each in enumerate(same) if each), 0)
            path = next(path for path, model in measured.items() if model is suite[place])
            raise UserError(
                f"--results {path}: it is of {found[place]} {folder}. Evaluate this checkpoint."
            )
    for bench in benches:
        if bench.identity != this.identity:
            raise UserError(
                f"--results: the bench of {bench.model} is of other weights than those in {folder}."
            )


def _commit(files: Mapping[str, Path], to: Destination, message: str) -> str:
    """Make a branch hold some files, by one commit. Other weights in it are deleted; all its other
    files stay.

    After a transient error it is called again, and commits what then differs: nothing if the answer
    to a commit was lost.

    Args:
        files: by their path in the repository.
        to: the repository.
        message: the first line of the commit.

    Returns:
        The id of the branch's newest commit.

    Raises:
        UserError: a file holds the access token, the branch holds other weights, or the repository
            is public or ignores a file.
    """
    token = (get_token() or "").encode()
    for path, file in files.items():
        if token and not _is_weights(path) and token in file.read_bytes():
            raise UserError(
                f"{file}: it holds your access token, so nothing was pushed. Remove "
                "the token from it."
            )
    api = HfApi()
    main = constants.DEFAULT_REVISION
    overwrite = to.overwrite
    branch = to.branch or main
    api.create_repo(to.name, private=to.private or None, exist_ok=True)
    if to.private and not api.model_info(to.name).private:
        raise UserError(
            f"{to.name}: the repository is public, and --private does not change that. Change its "
            "settings, or name another."
        )
    if branch != main and not branch.startswith("refs/"):
        api.create_branch(to.name, branch=branch, exist_ok=True)
        branches = api.list_repo_refs(to.name).branches
        heads = {reference.name: reference.target_commit for reference in branches}
        # A new branch has the weights of main.
        overwrite = overwrite or heads[branch] == heads[main]

    head = api.model_info(to.name, revision=branch).sha
    tree = api.list_repo_tree(to.name, recursive=True, revision=head)
    held = {
        entry.path: entry.lfs.sha256 if entry.lfs else None
        for entry in tree
        if isinstance(entry, RepoFile)
    }
    additions = [CommitOperationAdd(path, str(file)) for path, file in files.items()]
    additions = [
        addition
        for addition in additions
        if addition.upload_info.sha256.hex() != held.get(addition.path_in_repo)
    ]
    stale = [
        path
        for path in held
        if path not in files and (_is_weights(path) or path.endswith(".index.json"))
    ]
    other = [
        path
        for path in (*(addition.path_in_repo for addition in additions), *stale)
        if path in held and _is_weights(path)
    ]
    if other and not overwrite:
        raise UserError(
            f"{to.name}: {other[0]} on branch {branch} holds other weights. Name another "
            "repository or branch, or add --overwrite: the old ones stay in the history."
        )
    # The client leaves out small files that are the same there.
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *additions,
        *map(CommitOperationDelete, stale),
    ]
    commit = api.create_commit(
        to.name, operations, commit_message=message, revision=branch, parent_commit=head
    ).oid
    missing = sorted(files.keys() - set(api.list_repo_files(to.name, revision=commit)))
    if missing:
        raise UserError(
            f"{to.name}: {missing[0]} is missing from the commit. If a .gitignore there names it, "
            "remove that entry."
        )
    return commit


def _is_weights(path: str) -> bool:
    """Whether a file of a repository holds weights of the model."""
    return path.endswith(OTHER_WEIGHTS) and not path.startswith(f"{EXTRAS}/")
