"""The push of a finished checkpoint to the Hub: the files, their public form, the model card, and a single commit.

The client uploads large files before it commits. The Hub keeps them by their SHA-256, so an interrupted upload resumes after
the last finished large file without any state here.
"""

import hashlib
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import msgspec
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_session, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, validate_repo_id

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import file_hash, write_text
from emp_llm.common.errors import UserError, count_of, format_bytes, reason
from emp_llm.common.paths import ACTIVATIONS_NAME, CARD_NAME, EXTRAS, MANIFEST_NAME, OTHER_WEIGHTS, REPORT_NAME
from emp_llm.common.tables import table
from emp_llm.evaluation.results import EvaluatedModel, model_of_results, read_results
from emp_llm.hub.client import CONFLICTS, HUB_ERRORS, LOG_IN, TRANSIENT, hide_signatures, hub_errors_explained, with_retries
from emp_llm.pruning.counts import read_report
from emp_llm.pruning.verification import Findings, check_files
from emp_llm.pruning.writing import read_manifest
from emp_llm.records.bench import Bench
from emp_llm.records.manifest import FileEntry, Manifest
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.reporting.card import by_suite, card_text, find_origin, is_ours
from emp_llm.reporting.public import local_folder, public
from emp_llm.reporting.run_tables import split_benches

logger = logging.getLogger(__name__)
_TEXTS = (".json", ".md", ".txt", ".jinja", ".py")
_OFFICIAL = "https://huggingface.co"


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
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise UserError(f"{self.name!r} is not a name on the Hub; give USER/NAME.") from error
        if "/" not in self.name:
            raise UserError(f"{self.name!r} names no owner. Give USER/NAME, or ORGANISATION/NAME.")

    def check(self) -> None:
        """Raise UserError if the name is wrong, HF_HUB_OFFLINE is set, or nobody is logged in."""
        self.check_name()
        if constants.HF_HUB_OFFLINE:
            raise UserError(f"{self.name}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it.")
        if get_token() is None:
            raise UserError(f"{self.name}: {LOG_IN}")


def check_login(to: Destination) -> None:
    """Check before hours of work that the Hub accepts the token and that it may write. Nothing is created.

    Raises:
        UserError: the name is wrong, there is no valid token with write access, or the Hub cannot be reached.
    """
    to.check()
    with hub_errors_explained(to.name):
        user = with_retries(HfApi().whoami)
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"{to.name}: your token can only read. Make one with write access: hf auth login --force")
    try:
        held = HfApi().model_info(to.name, revision=to.branch).siblings or []
    except HUB_ERRORS:  # the repository or its branch will be created
        held = []
    if not to.overwrite and any(_is_weights(each.rfilename) for each in held):
        logger.warning("warning: %s: it already holds weights. To replace other weights, add --overwrite.", to.name)
    names = [user.get("name"), *(each.get("name") for each in user.get("orgs", []))]
    owner = to.name.partition("/")[0]
    if owner not in names:
        logger.warning(
            "warning: %s: you are %s, not a member of %s; the push may be refused.", to.name, user.get("name"), owner
        )


def _upload(files: Mapping[str, Path], to: Destination, message: str) -> tuple[str | None, list[str], list[str]]:
    """Make a branch hold some files, by one commit. Other weights in it are deleted; all its other files stay.

    Args:
        files: by their path in the repository.
        to: the repository.
        message: of the commit.

    Returns:
        The id of the branch's newest commit, and the paths that were uploaded and deleted: none if nothing had to change.

    Raises:
        UserError: the Hub refuses or cannot be reached, the branch holds other weights, or a file holds the access token.
    """
    to.check()
    _check_for_token(files)
    hide_signatures()
    api, branch = HfApi(), to.branch or constants.DEFAULT_REVISION
    additions: dict[str, CommitOperationAdd] = {}  # one for all attempts, so that each file is hashed once
    changed: list[str] = []
    deleted: list[str] = []

    def differences() -> tuple[str | None, dict[str, RepoFile], list[str], list[str]]:
        """The newest commit, its files, our files that are missing or differ there, and weights of another checkpoint."""
        head = api.model_info(to.name, revision=branch).sha
        tree = api.list_repo_tree(to.name, recursive=True, revision=head or branch)
        held = {each.path: each for each in tree if isinstance(each, RepoFile)}
        other = [path for path, file in files.items() if path not in held or not _same(file, held[path], additions.get(path))]
        stale = [path for path in held if path not in files and (_is_weights(path) or path.endswith(".index.json"))]
        return head, held, other, stale

    def attempt() -> str | None:
        """Commit what differs. If an earlier attempt's commit was made and its answer lost, nothing differs."""
        head, held, other, stale = differences()
        if not other and not stale:
            return head
        changed[:], deleted[:] = other, stale
        weights = [path for path in (*changed, *deleted) if path in held and _is_weights(path)]
        if weights and not overwrite:
            raise UserError(
                f"{to.name}: {weights[0]} on branch {branch} holds other weights. Name another repository or branch, or add "
                "--overwrite: the old ones stay in the history."
            )
        for path in changed:
            additions.setdefault(path, CommitOperationAdd(path, str(files[path])))
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(additions[path] for path in changed),
            *(CommitOperationDelete(path) for path in deleted),
        ]
        api.create_commit(to.name, operations, commit_message=message, revision=branch, parent_commit=head)
        return head

    with hub_errors_explained(to.name):
        _create_repository(api, to)
        overwrite = _create_branch(api, to, branch) or to.overwrite
        _check_storage(to, branch)
        with_retries(attempt, answered=True, retried=(*TRANSIENT, *CONFLICTS))
        head, _, missing, _ = with_retries(differences, answered=True)
    if missing:
        raise UserError(
            f"{to.name}: {missing[0]} is missing from the commit. If a .gitignore there names it, remove that entry; then run "
            "the same command."
        )
    return head, changed, deleted


def _create_repository(api: HfApi, to: Destination) -> None:
    private = to.private or None
    with_retries(lambda: api.create_repo(to.name, private=private, exist_ok=True))
    if private and not with_retries(lambda: api.model_info(to.name)).private:
        raise UserError(
            f"{to.name}: the repository exists and is public; --private does not change that. Make it private in its settings, "
            "or name another repository."
        )


def _create_branch(api: HfApi, to: Destination, branch: str) -> bool:
    """Create the branch if it is missing. True if it is at main's commit: this push or an interrupted one created it."""
    main = constants.DEFAULT_REVISION
    if branch == main or branch.startswith("refs/"):
        return False
    heads = {each.name: each.target_commit for each in with_retries(lambda: api.list_repo_refs(to.name)).branches}
    if branch not in heads:
        with_retries(lambda: api.create_branch(to.name, branch=branch, exist_ok=True))
    return heads.get(branch, heads.get(main)) == heads.get(main)


def _check_storage(to: Destination, branch: str) -> None:
    """Refuse a mirror of the Hub without xet storage: the client would retry for minutes."""
    if find_spec("hf_xet") is None or constants.HF_HUB_DISABLE_XET or constants.ENDPOINT == _OFFICIAL:
        return
    url = f"{constants.ENDPOINT}/api/models/{to.name}/xet-write-token/{quote(branch, safe='')}"
    if with_retries(lambda: get_session().get(url, headers=build_hf_headers())).status_code == 404:
        raise UserError(
            f"{to.name}: the Hub at {constants.ENDPOINT} has no xet storage, and the client would upload to it. Set "
            "HF_HUB_DISABLE_XET=1 to upload by LFS."
        )


def _same(file: Path, remote: RepoFile, addition: CommitOperationAdd | None) -> bool:
    """Whether a repository's file has the content of ours; `addition` knows its hash."""
    if remote.size != file.stat().st_size:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == (addition.upload_info.sha256.hex() if addition else file_hash(file, "sha256")))
    content = file.read_bytes()
    return bool(remote.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())


def _is_weights(path: str) -> bool:
    """Whether a file of a repository holds weights of the model."""
    return path.endswith(OTHER_WEIGHTS) and not path.startswith(f"{EXTRAS}/")


def _check_for_token(files: Mapping[str, Path]) -> None:
    """Raise UserError if a text file holds the user's access token."""
    token = (get_token() or "").encode()
    for path, file in files.items():
        if token and path.endswith(_TEXTS) and token in file.read_bytes():
            raise UserError(f"{file}: it holds your access token, so nothing was pushed. Remove the token from it.")


@dataclass(frozen=True)
class Pushed:
    """Result of a push, or of a dry run.

    Attributes:
        repository, branch: the destination; branch None: main.
        files: bytes of each file by its path in the repository.
        dry_run: nothing was changed; the fields below are empty.
        folder: the checkpoint.
        commit, url: the commit that holds the files, and the repository's address at the branch.
        uploaded, deleted: paths that the commit changed.
    """

    repository: str
    branch: str | None
    files: dict[str, int]
    dry_run: bool = False
    folder: str = ""
    commit: str | None = None
    url: str = ""
    uploaded: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())


def pushed_words(pushed: Pushed) -> str:
    """One line about a push; for a dry run, a table of the files."""
    if pushed.dry_run:
        rows = [["file", "size"], *([path, format_bytes(size)] for path, size in sorted(pushed.files.items()))]
        branch = f", branch {pushed.branch}" if pushed.branch else ""
        total = f"{count_of(len(pushed.files), 'file')}, {format_bytes(pushed.bytes)}"
        return f"{table(rows)}\n{total}, would be pushed to {pushed.repository}{branch}"
    unchanged = len(pushed.files) - len(pushed.uploaded)
    deleted = f", {count_of(len(pushed.deleted), 'file')} of other weights deleted" if pushed.deleted else ""
    return (
        f"{pushed.url} holds {pushed.folder}: {count_of(len(pushed.uploaded), 'file')} pushed, {unchanged} unchanged{deleted} "
        f"(commit {str(pushed.commit)[:10]})"
    )


@dataclass(frozen=True)
class Evidence:
    """Further content of the card, in addition to the report of the run.

    Attributes:
        results: results files of `evaluate`, of this checkpoint and of models to compare with; and outputs of `bench`.
        plots: PNG files, in addition to those in the checkpoint's folder `emp_llm`.
        base_model: Hub id of the dense model, if the report names a folder.
    """

    results: tuple[Path, ...] = ()
    plots: tuple[Path, ...] = ()
    base_model: str | None = None


def push_checkpoint(folder: Path, to: Destination, evidence: Evidence, dry_run: bool = False) -> Pushed:
    """Push a pruned checkpoint with a model card, which is also written to its folder as README.md.

    A README.md that emp-llm did not write is pushed as it is. Report, manifest, activations and results are pushed in a public
    form: they name models and files, not folders of this machine.

    Args:
        folder: the output of a finished prune.
        to: the destination.
        evidence: further content of the card.
        dry_run: check everything and list the files; neither the folder nor the Hub is changed.

    Raises:
        UserError: the folder is no finished checkpoint, it differs from its manifest, or a results file or plot does not fit;
            or the Hub refuses.
    """
    to.check_name()
    manifest, own_report = read_manifest(folder), read_report(folder)
    _check_against_manifest(folder, manifest)
    paths, benches = split_benches(evidence.results)
    benches = _public_benches(folder, benches)
    own_results = {path: read_results(path, "--results") for path in paths}
    folders = [name for each in (own_report.source, *own_results.values()) for name in local_folder(each)]
    report = public(own_report, *folders)
    results = {path: public(each, *folders) for path, each in own_results.items()}
    evaluated = _evaluated(folder, results)
    plots = _plots(folder, evidence.plots)
    names = [path.name for path in (*plots, *results)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{twice}: two files of this name would be pushed to the same folder; rename one.")
    with TemporaryDirectory(prefix="emp-llm-push-") as scratch:
        files = _public_files(folder, manifest, report, results, Path(scratch))
        files |= {f"{EXTRAS}/{path.name}": path for path in plots}
        sizes = {path: file.stat().st_size for path, file in files.items()}
        card, text = folder / CARD_NAME, ""
        if card.exists() and not is_ours(card):
            logger.info("%s: not written by emp-llm, so it is pushed as it is. Remove it to get a model card.", card)
        else:
            origin = find_origin(own_report.source, evidence.base_model)
            names = [f"{EXTRAS}/{path.name}" for path in plots]
            text = card_text(to.name, to.branch, report, origin, evaluated, names, benches, list(files))
        sizes[CARD_NAME] = len(text.encode()) if text else card.stat().st_size
        pushed = Pushed(to.name, to.branch, sizes, dry_run=dry_run, folder=str(folder))
        if dry_run:
            return pushed
        try:
            if text:
                write_text(card, text)
        except OSError as error:
            raise UserError(f"{card}: the model card cannot be written ({reason(error)}).") from error
        message = f"{report.source.model} pruned by {report.recipe.method} with emp-llm"
        commit, uploaded, deleted = _upload(files | {CARD_NAME: card}, to, message)
    return replace(pushed, commit=commit, url=to.url, uploaded=uploaded, deleted=deleted)


def push_finished(folder: Path, to: Destination) -> Pushed:
    """`push_checkpoint` at the end of a pruning run. If the push fails, the message holds the command that repeats it."""
    options = [*(["--private"] if to.private else []), *(["--revision", to.branch] if to.branch else [])]
    options += ["--overwrite"] if to.overwrite else []
    again = f"repeat the push: emp-llm push {shlex.join([str(folder), to.name, *options])}"
    try:
        return push_checkpoint(folder, to, Evidence())
    except UserError as error:
        raise UserError(f"{error} The checkpoint is complete in {folder}; {again}") from error
    except BaseException:
        logger.warning("the checkpoint is complete in %s; %s", folder, again)
        raise


def _check_against_manifest(folder: Path, manifest: Manifest) -> None:
    """Raise UserError for everything that `verify` finds in the files: sizes, hashes, weights that the manifest lacks."""
    findings = Findings()
    check_files(folder, manifest, findings)
    if findings.differences:
        more = len(findings.differences) - 1
        rest = f" ({more} more)" if more else ""
        raise UserError(
            f"{folder / findings.differences[0]}{rest} Nothing was pushed. To see all differences: emp-llm verify {folder}"
        )


def _public_files(
    folder: Path,
    manifest: Manifest,
    report: RunReport,
    results: dict[Path, Results],
    scratch: Path,
) -> dict[str, Path]:
    """All files to push except the card and the plots, by their path in the repository.

    Args:
        report, results: in their public form.
        scratch: folder for the files that differ from those of the checkpoint.
    """
    files = {name: folder / name for name in manifest.files}
    entries = dict(manifest.files)
    norms = str(ACTIVATIONS_NAME)
    if norms in files:
        activations = Activations.load(files[norms])
        about = public(activations.about, *local_folder(activations.about))
        if about != activations.about:
            files[norms] = scratch / norms
            replace(activations, about=about).save(files[norms])
            entries[norms] = FileEntry(bytes=files[norms].stat().st_size, blake3=file_hash(files[norms]))
    files[MANIFEST_NAME] = scratch / MANIFEST_NAME
    msgspec.structs.replace(public(manifest), files=entries).save(files[MANIFEST_NAME])
    files[REPORT_NAME] = scratch / REPORT_NAME
    report.save(files[REPORT_NAME])
    for path, measured in results.items():
        name = f"{EXTRAS}/{path.name}"
        files[name] = scratch / name
        measured.save(files[name])
    return files


def _evaluated(folder: Path, results: dict[Path, Results]) -> list[EvaluatedModel]:
    """The models of some results files.

    In every suite one of them must be this checkpoint, so that no other model's numbers are mistaken for its own.
    """
    if not results:
        return []
    checkpoint = Checkpoint(folder)
    evaluated: dict[Path, EvaluatedModel] = {}
    for path, measured in results.items():
        if not measured.complete:
            raise UserError(f"--results {path}: that run has not finished; run its command again to resume it.")
        if path.suffix != ".json" or path.name.startswith("."):
            raise UserError(f"--results {path}: it is pushed beside the model, so its name must end in .json.")
        model = measured.made_by.model
        this = model.identity == identity_of(checkpoint)
        evaluated[path] = model_of_results(measured, this)
    for suite in by_suite(list(evaluated.values())):
        if not any(each.this for each in suite):
            path = next(path for path, each in evaluated.items() if each is suite[0])
            raise UserError(f"--results {path}: it is of other weights than those in {folder}. Evaluate this checkpoint.")
    return list(evaluated.values())


def _public_benches(folder: Path, benches: list[Bench]) -> list[Bench]:
    """Outputs of `bench` in their public form; UserError if one is of another model."""
    identity = identity_of(Checkpoint(folder)) if benches else None
    for bench in benches:
        if bench.identity != identity:
            raise UserError(f"--results: the bench of {bench.model} is of other weights than those in {folder}.")
    return [public(each, *local_folder(each.dense), *local_folder(each.sparse)) for each in benches]


def _plots(folder: Path, given: tuple[Path, ...]) -> list[Path]:
    for path in given:
        if not path.is_file() or path.suffix.lower() != ".png":
            raise UserError(f"--plot {path}: no such PNG file.")
    return [*sorted((folder / EXTRAS).glob("*.png")), *given]
