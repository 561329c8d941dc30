"""`python -m emp_llm.verify`: a pruned checkpoint looked at again, by slower and simpler means than those that made it."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from emp_llm.cli import run
from emp_llm.models.activations import Activations
from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.errors import UserError
from emp_llm.models.manifest import ACTIVATIONS_NAME, read_manifest
from emp_llm.models.targets import Architecture, build_skeleton
from emp_llm.models.verification import Findings, check_files, check_masks, check_norms, check_other_bytes, check_source
from emp_llm.services.hub import find_model
from emp_llm.services.options import Blocks, PrunedFolder, Revision, TrustRemoteCode


def verify(
    folder: PrunedFolder,
    source: Annotated[str | None, Option(help="The dense model, folder or Hub id: compare bytes and masks.")] = None,
    activations: Annotated[Path | None, Option(help="The norms that were used; default: those in the folder.")] = None,
    blocks: Blocks = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> dict[str, Any]:
    """Check a pruned checkpoint: sizes and hashes of all files; with --source every byte and every mask. Only reads.

    Returns "differences", a sentence for each, and "checked", how many things were looked at. From the shell the exit code is 1
    where something differs.

    Raises:
        UserError: the folder is no finished output, or the source or activations are not those it was made from.
    """
    folder = Path(folder)
    if activations is not None and source is None:
        raise UserError("--activations are for deciding the masks again, which needs the dense model too; add --source.")
    findings = Findings()
    manifest = read_manifest(folder)
    check_files(folder, manifest, findings)
    try:
        pruned = Checkpoint(folder)
    except UserError as error:
        findings.differences.append(str(error))
        return {"differences": findings.differences, "checked": findings.checked}
    findings.count("tensors", len(pruned.tensors))
    if source is not None:
        found = find_model(source, revision, trust_remote_code)
        dense = Checkpoint(found.folder)
        check_source(dense, manifest)
        norms = _norms(folder, manifest, activations)
        recipe = manifest["recipe"]
        try:
            model = build_skeleton(found.folder, trust_remote_code)
        except UserError:
            if norms is not None:
                raise
            model = None
        targets = Architecture(dense, model, blocks).select(recipe["targets"], recipe["ignore"])
        if check_other_bytes(dense, pruned, targets, findings):
            check_masks(dense, pruned, targets, manifest, norms, findings)
    return {"differences": findings.differences, "checked": findings.checked}


def _norms(folder: Path, manifest: dict[str, Any], given: Path | None) -> Activations | None:
    """The norms that decided the masks; None where none did."""
    if manifest["activations"] is None:
        return None
    path = given or folder / ACTIVATIONS_NAME
    if given is None and not path.is_file():
        raise UserError(f"{folder}: its masks were decided by norms that are not in it. Give the file: --activations FILE")
    norms = Activations.load(path)
    check_norms(norms, manifest, str(path))
    return norms


def show(result: dict[str, Any]) -> None:
    """Print what was found; exit with 1 where something differs."""
    for sentence in result["differences"]:
        print(sentence)
    looked = ", ".join(f"{number:,} {kind}" for kind, number in result["checked"].items())
    print(f"{len(result['differences'])} differences; looked at {looked}.")
    if result["differences"]:
        raise SystemExit(1)


if __name__ == "__main__":
    run(verify, show)
