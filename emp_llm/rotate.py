"""`emp-llm rotate`: dense model + text -> a model that computes the same and loses less when it
is pruned.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from emp_llm.cli import command, run
from emp_llm.common.errors import UserError, shortened_list
from emp_llm.common.paths import EXTRAS, INDEX_NAME, REPORT_NAME, ROTATION_NAME, SELF_NAME
from emp_llm.common.progress import load_packages
from emp_llm.options.base import Opt, Some
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.model import LoadingOptions, ModelOptions
from emp_llm.options.recipe import parse_pattern
from emp_llm.records.rotation import RotationRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rotated:
    """Result of a rotation: the folder, and its record, which is also in the folder as
    emp_llm/rotation.json.
    """

    output: str
    record: RotationRecord


@command
def rotate(
    model: ModelOptions,
    text: Annotated[
        CalibrationOptions, Some(("calibration", "samples", "seqlen", "batch_size", "seed"))
    ],
    loading: Annotated[LoadingOptions, Some(("device_map",))],
    *,
    steps: Annotated[
        int,
        Opt("Steps of the search; 0: the eigenvectors of the inputs' second moments.", minimum=0),
    ] = 120,
    pattern: Annotated[str | None, Opt("Also order the columns for this N:M pattern.")] = None,
    output: Annotated[Path | None, Opt("Folder to write; default: MODEL-rotated.")] = None,
    overwrite: Annotated[bool, Opt("Replace an existing checkpoint at the output.")] = False,
) -> Rotated:
    """Rotate the basis of a dense model: it computes the same, but fewer weights matter, so that
    pruning costs less.

    The weights of the RMSNorms are folded into the layers that read them. Then the residual stream
    and the values of each head are rotated to the basis with the smallest N_eff of the scores. The
    result is an ordinary checkpoint of the same class. Prune it with --sparsity or --pattern; a
    beta of 1 removes too much.

    Needs the model in memory in float32. Refused where the function would change: other norms than
    RMSNorm, norms behind a layer, towers for images.

    Returns N_eff/N before and after, and the difference of the logits.
    """
    load_packages()
    from emp_llm.calibration.data import calibration_data, keep_generated
    from emp_llm.calibration.passes import fit_origin, model_origin
    from emp_llm.checkpoint.checkpoint import SAVE_AGAIN, Checkpoint
    from emp_llm.checkpoint.output import OutputFolder
    from emp_llm.common.machine import command_line
    from emp_llm.common.progress import stage
    from emp_llm.common.ranks import ranks
    from emp_llm.hub.local_model import find_model
    from emp_llm.models.architecture import Architecture
    from emp_llm.models.one_model import OneModel
    from emp_llm.rotation.rotation import rotate_model

    if ranks().count > 1:
        raise UserError(
            "rotate runs in one process. A --device-map spreads the model over several GPUs."
        )
    if pattern is not None:
        parse_pattern(pattern)
    source = find_model(model.model, model.revision, model.trust_remote_code)
    if (source.folder / REPORT_NAME).is_file():
        raise UserError(
            f"{source.name}: it is pruned, and a rotation would fill its zeros. Rotate the dense "
            "model, then prune."
        )
    checkpoint = Checkpoint(source.folder)
    path = output or Path(f"{source.short_name}-rotated")
    # A tied one gets weights of its own.
    head = max(tensor.end - tensor.start for tensor in checkpoint.tensors.values())
    with OutputFolder(path, [source.folder], checkpoint.output_bytes + head, overwrite) as out:
        architecture = Architecture.of_checkpoint(checkpoint, None, model.trust_remote_code)
        # Old Llama checkpoints hold the angles of the rotary embeddings, which stay.
        unused = [name for name in architecture.unused if not name.endswith("rotary_emb.inv_freq")]
        if unused:
            raise UserError(
                f"{source.name}: transformers does not load {shortened_list(unused)}, so they "
                f"would stay in the old basis. Rotate a model without them: {SAVE_AGAIN}."
            )
        models = OneModel(loading.device_map, "auto", model.trust_remote_code)
        data = calibration_data(text, architecture, models)
        turned = models.get(source.folder)
        with stage("rotate"):
            record = rotate_model(
                turned,
                data.tokens,
                steps=steps,
                pattern=pattern,
                batch_size=text.batch_size,
                seed=text.seed,
            )
        if record.n_eff_after >= record.n_eff_before:
            logger.warning(
                "warning: N_eff/N is not lower than before; prune %s as it is.", source.name
            )
        out.begin({})
        turned.save_pretrained(out.files)
        for shard in out.files.glob("*.safetensors"):
            # Safetensors may let only the owner read.
            shutil.copymode(out.files / "config.json", shard)
        for name in checkpoint.side_files():
            if name.name not in ("config.json", INDEX_NAME):
                (out.files / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.folder / name, out.files / name)
        record.source = fit_origin(
            data,
            text.batch_size,
            model_origin(source.name, source.revision, checkpoint),
            "model",
        )
        record.command = command_line()
        (out.files / EXTRAS).mkdir()
        keep_generated(out.files / SELF_NAME, data)
        record.files = sorted(
            str(file.relative_to(out.files)) for file in out.files.rglob("*") if file.is_file()
        )
        record.save(out.files / ROTATION_NAME)
        checkpoint.check_unchanged()
        out.complete()
    logger.info("written to %s (%.1f s)", path, record.seconds)
    return Rotated(str(path), record)


def show(rotated: Rotated) -> None:
    """Print what the rotation did, and what to do next."""
    record = rotated.record
    print(
        f"{rotated.output}: N_eff/N {record.n_eff_before:.3f} -> {record.n_eff_after:.3f}, and "
        "the same logits"
    )
    if record.parameters_after > record.parameters_before:
        more = 100 * (record.parameters_after / record.parameters_before - 1)
        print(f"its head is no longer tied to the embeddings: {more:.1f} % more parameters")
    print(
        "prune it with "
        f"--{'sparsity' if record.pattern is None else f'pattern {record.pattern}'}, not by beta"
    )


if __name__ == "__main__":
    run(rotate, show)
