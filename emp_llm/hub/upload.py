"""Uploads files to a branch of a Hub repository by a single commit: readers see all of them or none.

Large files are uploaded first. The Hub keeps them by their SHA-256, so an interrupted upload resumes after the last finished
large file without any state here.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from huggingface_hub.utils._runtime import is_xet_available

from emp_llm.checkpoint.files import file_hash
from emp_llm.common.errors import UserError
from emp_llm.hub.destination import Destination, is_weights
from emp_llm.hub.explained_errors import hub_errors_explained
from emp_llm.hub.retries import HUB_ERRORS, WAITS, is_transient, signatures_hidden, status_of, wait_to_retry, with_retries

logger = logging.getLogger(__name__)
_TEXT = (".json", ".md", ".txt", ".jinja", ".py")
_CONFLICTS = (409, 412)
_OFFICIAL = "https://huggingface.co"


@dataclass(frozen=True)
class Uploaded:
    """Result of an upload.

    Attributes:
        commit: its id; the branch's newest commit if nothing had to change.
        url: of the repository at the branch.
        uploaded, deleted: paths that the commit changed.
    """

    commit: str | None
    url: str
    uploaded: list[str]
    deleted: list[str]


def upload(files: Mapping[str, Path], digests: Mapping[str, str], to: Destination, message: str) -> Uploaded:
    """Make a branch hold some files, by one commit. Other weights in it are deleted; all its other files stay.

    Args:
        files: by their path in the repository.
        digests: known SHA-256 hashes by the same paths. Uploaded content is compared with them before the commit.
        to: the repository.
        message: of the commit.

    Raises:
        UserError: the Hub refuses or cannot be reached, the branch holds other weights, or a file holds the access token.
    """
    to.check()
    _check_for_token(files)
    with hub_errors_explained(to.name), signatures_hidden():
        return _Upload(files, digests, to).run(message)


class _Upload:
    def __init__(self, files: Mapping[str, Path], digests: Mapping[str, str], to: Destination) -> None:
        self._files = files
        self._digests = digests
        self._to = to
        self._api = HfApi()
        self._revision = to.branch or constants.DEFAULT_REVISION
        self._additions: dict[str, CommitOperationAdd] = {}
        self._overwrite = to.overwrite

    def run(self, message: str) -> Uploaded:
        self._create_repository()
        self._create_branch()
        self._check_storage()
        changed: list[str] = []
        stale: list[str] = []
        for wait in (*WAITS, None):
            head, held = self._state()
            now_changed, now_stale = self._changed(held), self._stale(held)
            if not now_changed and not now_stale:
                return self._uploaded(head, changed, stale)
            changed, stale = now_changed, now_stale
            self._check_weights(held, changed, stale)
            self._upload_large(changed)
            try:
                self._commit(changed, stale, message, head)
                break
            except HUB_ERRORS as error:
                # The commit may exist although its answer was lost. The next round looks at the branch itself.
                if wait is None or not (is_transient(error) or status_of(error) in _CONFLICTS):
                    raise
                wait_to_retry(error, wait)
        head, held = self._state()
        if missing := self._changed(held):
            raise UserError(
                f"{self._to.name}: {missing[0]} is missing from the commit. If a .gitignore there names it, remove that entry; "
                "then run the same command."
            )
        return self._uploaded(head, changed, stale)

    def _uploaded(self, head: str | None, changed: list[str], stale: list[str]) -> Uploaded:
        url = f"{constants.ENDPOINT}/{self._to.name}" + (f"/tree/{self._revision}" if self._to.branch else "")
        return Uploaded(head, url, changed, stale)

    def _upload_large(self, paths: list[str]) -> None:
        """Upload the large ones of some files; the Hub keeps them for the commit that names them."""
        additions = [self._addition(path) for path in paths]
        with_retries(
            lambda: self._api.preupload_lfs_files(self._to.name, additions, revision=self._revision, free_memory=False)
        )
        self._check_content(paths)

    def _commit(self, changed: list[str], stale: list[str], message: str, parent: str | None) -> None:
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(self._addition(path) for path in changed),
            *(CommitOperationDelete(path) for path in stale),
        ]
        self._api.create_commit(
            self._to.name, operations, commit_message=message, revision=self._revision, parent_commit=parent
        )

    def _create_repository(self) -> None:
        private = self._to.private or None
        with_retries(lambda: self._api.create_repo(self._to.name, private=private, exist_ok=True))
        if private and not with_retries(lambda: self._api.model_info(self._to.name)).private:
            raise UserError(
                f"{self._to.name}: the repository exists and is public; --private does not change that. Make it private in its "
                "settings, or name another repository."
            )

    def _create_branch(self) -> None:
        branch = self._to.branch
        if branch is None or branch.startswith("refs/"):
            return
        refs = with_retries(lambda: self._api.list_repo_refs(self._to.name))
        heads = {each.name: each.target_commit for each in refs.branches}
        if branch not in heads:
            with_retries(lambda: self._api.create_branch(self._to.name, branch=branch, exist_ok=True))
            heads[branch] = heads.get(constants.DEFAULT_REVISION, "")
        # A branch at main's commit was created by this push or an interrupted one, so its weights may be replaced.
        if branch != constants.DEFAULT_REVISION and heads[branch] == heads.get(constants.DEFAULT_REVISION, ""):
            self._overwrite = True

    def _check_storage(self) -> None:
        """Refuse a mirror of the Hub without xet storage: the client would retry for minutes."""
        if not is_xet_available() or constants.ENDPOINT == _OFFICIAL:
            return
        url = f"{constants.ENDPOINT}/api/models/{self._to.name}/xet-write-token/{quote(self._revision, safe='')}"
        answer = with_retries(lambda: get_session().get(url, headers=build_hf_headers()))
        if answer.status_code == 404:
            raise UserError(
                f"{self._to.name}: the Hub at {constants.ENDPOINT} has no xet storage, and the client would upload to it. Set "
                "HF_HUB_DISABLE_XET=1 to upload by LFS."
            )
        hf_raise_for_status(answer)

    def _state(self) -> tuple[str | None, dict[str, RepoFile]]:
        """The newest commit of the branch, and its files."""
        head = with_retries(lambda: self._api.model_info(self._to.name, revision=self._revision)).sha
        revision = head or self._revision
        tree = with_retries(lambda: list(self._api.list_repo_tree(self._to.name, recursive=True, revision=revision)))
        return head, {each.path: each for each in tree if isinstance(each, RepoFile)}

    def _changed(self, held: dict[str, RepoFile]) -> list[str]:
        """Our files that the branch does not hold, or holds with other content."""
        return [path for path in self._files if path not in held or not self._same(path, held[path])]

    def _same(self, path: str, remote: RepoFile) -> bool:
        file = self._files[path]
        if remote.size != file.stat().st_size:
            return False
        if remote.lfs is not None:
            return bool(remote.lfs.sha256 == self._digest(path))
        content = file.read_bytes()
        return bool(remote.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())

    def _digest(self, path: str) -> str:
        return self._digests.get(path) or file_hash(self._files[path], "sha256")

    def _stale(self, held: dict[str, RepoFile]) -> list[str]:
        """Weights and indexes of another checkpoint, which a loader might take instead of ours."""
        return [path for path in held if path not in self._files and (is_weights(path) or path.endswith(".index.json"))]

    def _check_weights(self, held: dict[str, RepoFile], changed: list[str], stale: list[str]) -> None:
        others = [path for path in (*changed, *stale) if path in held and is_weights(path)]
        if others and not self._overwrite:
            raise UserError(
                f"{self._to.name}: {others[0]} on branch {self._revision} holds other weights. Name another repository or "
                "branch, or add --overwrite: the old ones stay in the history."
            )

    def _addition(self, path: str) -> CommitOperationAdd:
        """The client's operation for a file; one for all attempts, so that the file is hashed once."""
        if path not in self._additions:
            self._additions[path] = CommitOperationAdd(path, str(self._files[path]))
        return self._additions[path]

    def _check_content(self, paths: list[str]) -> None:
        for path in paths:
            found, known = self._additions[path].upload_info.sha256.hex(), self._digests.get(path)
            if known not in (None, found):
                raise UserError(
                    f"{self._files[path]}: it changed after it was written (its SHA-256 is {found}), so nothing was published. "
                    f"Check it: emp-llm verify {self._files[path].parent}"
                )


def _check_for_token(files: Mapping[str, Path]) -> None:
    """Raise UserError if a text file holds the user's access token."""
    token = (get_token() or "").encode()
    for path, file in files.items():
        if token and path.endswith(_TEXT) and token in file.read_bytes():
            raise UserError(f"{file}: it holds your access token, so nothing was published. Remove the token from it.")
