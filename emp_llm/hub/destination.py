"""The repository to push to, and the checks that are possible before hours of work."""

import logging
from dataclasses import dataclass

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from emp_llm.common.errors import UserError
from emp_llm.common.paths import EXTRAS, OTHER_WEIGHTS
from emp_llm.hub.explained_errors import LOG_IN, hub_errors_explained
from emp_llm.hub.retries import HUB_ERRORS, with_retries

logger = logging.getLogger(__name__)


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
    if not to.overwrite and any(is_weights(each.rfilename) for each in held):
        logger.warning("warning: %s: it already holds weights. To replace other weights, add --overwrite.", to.name)
    names = [user.get("name"), *(each.get("name") for each in user.get("orgs", []))]
    owner = to.name.partition("/")[0]
    if owner not in names:
        logger.warning(
            "warning: %s: you are %s, not a member of %s; the push may be refused.", to.name, user.get("name"), owner
        )


def is_weights(path: str) -> bool:
    """Whether a file of a repository holds weights of the model."""
    return path.endswith(OTHER_WEIGHTS) and not path.startswith(f"{EXTRAS}/")
