"""Files become a repository of the Hub, or a branch of one, by a single commit: readers see all of them or none.

Large files are uploaded first, which the Hub remembers by their SHA-256, so an upload that was cut off goes on behind the
last finished file; nothing is kept here for that.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, validate_repo_id
from huggingface_hub.utils._runtime import is_xet_available

from emp_llm.models.checkpoint import OTHER_WEIGHTS
from emp_llm.models.digests import digest_of
from emp_llm.models.errors import UserError
from emp_llm.services.hub_calls import (
    LOG_IN,
    NO_ANSWER,
    WAITS,
    explaining,
    passes,
    patiently,
    pause,
    plain_addresses,
    status_of,
)

logger = logging.getLogger(__name__)
_TEXT = (".json", ".md", ".txt", ".jinja", ".py")
_CONFLICTS = (409, 412)
_OFFICIAL = "https://huggingface.co"


@dataclass(frozen=True)
class Destination:
    """Where to: a repository, and what may be done to it.

    Attributes:
        name: USER/NAME; made where it is not there.
        branch: made from main where it is not there; None: main.
        private: make a private one; one that is there has to be private.
        overwrite: replace other weights that the branch holds.
    """

    name: str
    branch: str | None = None
    private: bool = False
    overwrite: bool = False

    def check_name(self) -> None:
        """Raise UserError where the name cannot be that of a repository."""
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise UserError(f"{self.name!r} is not a name on the Hub; give USER/NAME.") from error
        if "/" not in self.name:
            raise UserError(f"{self.name!r}: whose? Give USER/NAME, or ORGANISATION/NAME.")

    def check(self) -> None:
        """Raise UserError where the name is wrong, the Hub switched off, or nobody logged in."""
        self.check_name()
        if constants.HF_HUB_OFFLINE:
            raise UserError(f"{self.name}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it.")
        if get_token() is None:
            raise UserError(f"{self.name}: {LOG_IN}")


def check_login(to: Destination) -> None:
    """See, before hours of work, that the Hub knows the token and lets it write; nothing is made there.

    Raises:
        UserError: the name is none, there is no token, or it is invalid or for reading only, or the Hub cannot be reached.
    """
    to.check()
    with explaining(to.name):
        user = patiently(HfApi().whoami)
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"{to.name}: your token is for reading only. Make one with write access: hf auth login --force")
    try:
        there = HfApi().model_info(to.name, revision=to.branch).siblings or []
    except NO_ANSWER:  # it, or its branch, will be made
        there = []
    if not to.overwrite and any(_is_weights(each.rfilename) for each in there):
        logger.warning("warning: %s: it holds weights already; if they are others, the push needs --overwrite.", to.name)
    names = [user.get("name"), *(each.get("name") for each in user.get("orgs", []))]
    if to.name.partition("/")[0] not in names:
        logger.warning(
            "warning: %s: you are %s, and of no organisation of that name; the push may be refused.", to.name, user.get("name")
        )


def upload(files: Mapping[str, Path], digests: Mapping[str, str], to: Destination, message: str) -> dict[str, Any]:
    """Make a branch hold some files, by one commit; other weights in it go, everything else in it stays.

    Args:
        files: by the path that they have in the repository.
        digests: SHA-256 of those of which it is known; what is uploaded is compared with it before it is committed.
        to: the repository.
        message: of the commit.

    Returns:
        "commit": its id, or that of the one there where all was there; "url": of the repository at it; "uploaded" and
        "deleted": paths that the commit changed.

    Raises:
        UserError: the Hub refuses, cannot be reached, or the branch holds other weights.
    """
    to.check()
    _keep_token_out(files)
    with explaining(to.name), plain_addresses():
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

    def run(self, message: str) -> dict[str, Any]:
        self._make_repository()
        self._make_branch()
        self._check_storage()
        changed: list[str] = []
        stale: list[str] = []
        for wait in (*WAITS, None):
            head, held = self._state()
            found, left = self._changed(held), self._stale(held)
            if not found and not left:
                return self._made(head, changed, stale)
            self._check_weights(held, found, left)
            changed, stale = found, left
            self._upload_large(changed)
            try:
                self._commit(changed, stale, message, head)
                break
            except NO_ANSWER as error:
                # It may have been made all the same: an answer that was lost. Only the branch itself can tell.
                if wait is None or not (passes(error) or status_of(error) in _CONFLICTS):
                    raise
                pause(error, wait)
        head, held = self._state()
        if missing := self._changed(held):
            raise UserError(
                f"{self._to.name}: {missing[0]} is not in the commit that was to hold it. If a .gitignore there names it, "
                "remove it; then run the same command."
            )
        return self._made(head, changed, stale)

    def _made(self, head: str | None, changed: list[str], stale: list[str]) -> dict[str, Any]:
        url = f"{constants.ENDPOINT}/{self._to.name}" + (f"/tree/{self._revision}" if self._to.branch else "")
        return {"commit": head, "url": url, "uploaded": changed, "deleted": stale}

    def _upload_large(self, paths: list[str]) -> None:
        """Upload the large ones of some files; the Hub keeps them for the commit that will name them."""
        additions = [self._addition(path) for path in paths]
        patiently(lambda: self._api.preupload_lfs_files(self._to.name, additions, revision=self._revision, free_memory=False))
        self._check_content(paths)

    def _commit(self, changed: list[str], stale: list[str], message: str, parent: str | None) -> None:
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(self._addition(path) for path in changed),
            *(CommitOperationDelete(path) for path in stale),
        ]
        self._api.create_commit(
            self._to.name, operations, commit_message=message, revision=self._revision, parent_commit=parent
        )

    def _make_repository(self) -> None:
        private = self._to.private or None
        patiently(lambda: self._api.create_repo(self._to.name, private=private, exist_ok=True))
        if private and not patiently(lambda: self._api.model_info(self._to.name)).private:
            raise UserError(
                f"{self._to.name}: it is there and public, and --private does not change that. Make it private in its "
                "settings, or name another repository."
            )

    def _make_branch(self) -> None:
        branch = self._to.branch
        if branch is None or branch.startswith("refs/"):
            return
        refs = patiently(lambda: self._api.list_repo_refs(self._to.name))
        heads = {each.name: each.target_commit for each in refs.branches}
        if branch not in heads:
            patiently(lambda: self._api.create_branch(self._to.name, branch=branch, exist_ok=True))
            heads[branch] = heads.get(constants.DEFAULT_REVISION, "")
        # A branch that is where main is has been made just now, here or by a push that was cut off: nothing on it is its own.
        if branch != constants.DEFAULT_REVISION and heads[branch] == heads.get(constants.DEFAULT_REVISION, ""):
            self._overwrite = True

    def _check_storage(self) -> None:
        """A mirror of the Hub may lack xet, and the client then waits for it without an end."""
        if not is_xet_available() or constants.ENDPOINT == _OFFICIAL:
            return
        url = f"{constants.ENDPOINT}/api/models/{self._to.name}/xet-write-token/{quote(self._revision, safe='')}"
        answer = patiently(lambda: get_session().get(url, headers=build_hf_headers()))
        if answer.status_code == 404:
            raise UserError(
                f"{self._to.name}: the Hub at {constants.ENDPOINT} has no xet storage, and the client would upload to it. Set "
                "HF_HUB_DISABLE_XET=1 to upload by LFS."
            )
        hf_raise_for_status(answer)

    def _state(self) -> tuple[str | None, dict[str, RepoFile]]:
        """The commit that the branch is at, and its files."""
        head = patiently(lambda: self._api.model_info(self._to.name, revision=self._revision)).sha
        tree = patiently(lambda: list(self._api.list_repo_tree(self._to.name, recursive=True, revision=head or self._revision)))
        return head, {each.path: each for each in tree if isinstance(each, RepoFile)}

    def _changed(self, held: dict[str, RepoFile]) -> list[str]:
        """Our files that the branch does not hold as they are."""
        return [path for path in self._files if path not in held or not self._same(path, held[path])]

    def _same(self, path: str, there: RepoFile) -> bool:
        file = self._files[path]
        if there.size != file.stat().st_size:
            return False
        if there.lfs is not None:
            return bool(there.lfs.sha256 == self._digest(path))
        content = file.read_bytes()
        return bool(there.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())

    def _digest(self, path: str) -> str:
        return self._digests.get(path) or digest_of(self._files[path])

    def _stale(self, held: dict[str, RepoFile]) -> list[str]:
        """Weights and indexes of another checkpoint: beside ours, loaders would take them, or some of them."""
        return [path for path in held if path not in self._files and (_is_weights(path) or path.endswith(".index.json"))]

    def _check_weights(self, held: dict[str, RepoFile], changed: list[str], stale: list[str]) -> None:
        others = [path for path in (*changed, *stale) if path in held and _is_weights(path)]
        if others and not self._overwrite:
            raise UserError(
                f"{self._to.name}: {others[0]} on branch {self._revision} is of other weights. Name another repository or "
                "branch, or add --overwrite: the old ones stay in the history."
            )

    def _addition(self, path: str) -> CommitOperationAdd:
        """Of a file, the same at every try, so that it is hashed once."""
        if path not in self._additions:
            self._additions[path] = CommitOperationAdd(path, str(self._files[path]))
        return self._additions[path]

    def _check_content(self, paths: list[str]) -> None:
        for path in paths:
            found, known = self._additions[path].upload_info.sha256.hex(), self._digests.get(path)
            if known not in (None, found):
                raise UserError(
                    f"{self._files[path]}: it is not the file that was written (its SHA-256 is {found}), so nothing was "
                    f"published. Look at it: python -m emp_llm.verify {self._files[path].parent}"
                )


def _is_weights(path: str) -> bool:
    return path.endswith(OTHER_WEIGHTS) and not path.startswith("emp_llm/")


def _keep_token_out(files: Mapping[str, Path]) -> None:
    token = (get_token() or "").encode()
    for path, file in files.items():
        if token and path.endswith(_TEXT) and token in file.read_bytes():
            raise UserError(f"{file}: your access token stands in it, so nothing was published. Remove it there.")
