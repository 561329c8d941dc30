"""The report of a model that was pruned in memory, and the files that make its saved folder a
finished checkpoint.
"""

import copy
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, TypedDict, Unpack

import msgspec
import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.calibration.activations import Activations
from emp_llm.calibration.data import IN_MEMORY, CalibrationText, data_in_memory
from emp_llm.calibration.passes import collect_norms, in_evaluation_mode, norms_of_batches
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.declared import check_type, options_of
from emp_llm.common.errors import UserError
from emp_llm.common.machine import Stopwatch, default_modes
from emp_llm.common.paths import ACTIVATIONS_NAME, REPORT_NAME
from emp_llm.common.ranks import alone, device_alone
from emp_llm.evaluation.evaluate import perplexity
from emp_llm.models.architecture import Architecture, Target, check_calibrated
from emp_llm.models.blockwise import NOT_BY_BLOCKS
from emp_llm.models.loading import build_skeleton, load_model, resident_parameter
from emp_llm.models.local_model import find_model
from emp_llm.models.masks import Masks, plain_model
from emp_llm.models.model_weights import ModelWeights, architecture_of, is_convolution, name_of
from emp_llm.models.modules import as_created, is_encoder_decoder, rows_in
from emp_llm.options.prune import PruneOptions
from emp_llm.options.recipe import Recipe
from emp_llm.options.shared import CalibrationOptions, Propagate, check_values
from emp_llm.options.words import RecipeWords, recipe_of
from emp_llm.pruning.counts import Chosen, choose_targets, counts_of, scores_of, starving_rows
from emp_llm.pruning.masks import Chunk, Outcomes, Pruner
from emp_llm.pruning.report import pruned_before, report_of
from emp_llm.pruning.scores import Scores, as_recorded
from emp_llm.pruning.updates import move_weights
from emp_llm.pruning.verification import Findings, check_zeros, digests
from emp_llm.pruning.writing import (
    check_as_written,
    criterion_source,
    files_beside,
    keep_criterion,
    read_manifest,
    write_manifest,
)
from emp_llm.records.base import CalibrationRecord, ModelSource, TextRecord, stage_records
from emp_llm.records.evaluation import CheckRecord, PerplexityRecord
from emp_llm.records.run_report import MatrixRecord, RunReport, TargetsRecord, read_report
from emp_llm.walk.checks import check_update
from emp_llm.walk.updated import UpdatedWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelReport:
    """The effect of pruning a model in memory.

    Attributes:
        record: the report of the run, as `prune` writes it.
        masks: the masks by parameter name.
        activations: the norms that decided them; None for methods without.
        model: the model.
        criterion_source: the source file of a criterion of the user's own; None if there is none.
        weights: digests of the pruned weights, which tell whether they are trained later.
        folder: from which the report was loaded; None: the model was pruned in memory.
    """

    record: RunReport
    masks: Masks
    activations: Activations | None
    model: nn.Module
    criterion_source: bytes | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def __repr__(self) -> str:
        """A short table."""
        return repr(self.record)

    @property
    def targets(self) -> TargetsRecord:
        """Counts over all targets, and the sparsity."""
        return self.record.targets

    @property
    def matrices(self) -> dict[str, MatrixRecord]:
        """The effect on each matrix, by layer name."""
        return self.record.matrices

    @property
    def warnings(self) -> list[str]:
        return self.record.warnings

    @classmethod
    def load(cls, folder: Path | str) -> "ModelReport":
        """The report of a pruned folder, with its masks and norms, and a model without weights.
        After a training, `ModelReport.load("pruned").save("trained")` completes the trained folder.

        Raises:
            UserError: the folder is no finished checkpoint, or its weights have changed since.
        """
        folder = Path(folder)
        record = read_report(folder)
        read_manifest(folder)
        checkpoint = Checkpoint(folder)
        check_as_written(checkpoint)
        architecture = Architecture.of_checkpoint(checkpoint, record.recipe.targets.blocks)
        norms = folder / ACTIVATIONS_NAME
        return cls(
            record,
            Masks.load(folder),
            Activations.load(norms) if norms.is_file() else None,
            build_skeleton(folder, trust_remote_code=False),
            weights=digests(architecture),
            folder=folder,
        )

    def save(self, folder: Path | str) -> None:
        """Complete the folder of the saved model: add the report, the norms and the manifest.

        Save the pruned model and its tokenizer first: `model.save_pretrained(folder)`. Then
        `report`, `verify`, `reapply_mask`, `pack` and `push` take the folder. The manifest does not
        identify the dense model; `verify --source` compares tensors. If weights have changed since
        the pruning, the report says that the model was trained, and leaves out the perplexities
        that were measured before.

        Raises:
            UserError: the folder holds no model, another one, or one whose removed weights are not
                zero.
        """
        folder = Path(folder)
        checkpoint = Checkpoint(folder)
        scope = self.record.recipe.targets
        architecture = Architecture.of_checkpoint(checkpoint, scope.blocks, names_suffice=True)
        targets = architecture.targets_of(scope)
        findings = Findings()
        check_zeros(checkpoint, targets, self.masks, findings)
        if findings.differences:
            raise UserError(
                f"{folder}: {findings.differences[0]} Save the pruned model there first, with "
                "model.save_pretrained; after a training, reapply_mask sets its removed weights to "
                "zero again."
            )
        stored = {target.name: target.matrix.stored.name for target in targets}
        matrices = {
            name: msgspec.structs.replace(entry, tensor=stored.get(name, entry.tensor))
            for name, entry in self.record.matrices.items()
        }
        record = msgspec.structs.replace(self.record, matrices=matrices)
        size = sum(tensor.end - tensor.start for tensor in checkpoint.tensors.values())
        if record.sizes is not None and record.sizes.dense != size:
            record = msgspec.structs.replace(record, sizes=None)  # they are of another dtype
        if (units := record.structure) is not None:
            units = msgspec.structs.replace(
                units, pruned=msgspec.structs.replace(units.pruned, bytes=size)
            )
            record = msgspec.structs.replace(record, structure=units)
        now = digests(architecture)
        if any(now.get(name, digest) != digest for name, digest in self.weights.items()):
            record = _trained(record)
        norms = None if self.activations is None else self.activations.digest
        if self.folder is not None:
            manifest = read_manifest(self.folder)
            norms = None if manifest.activations is None else manifest.activations.norms
            for path in files_beside(self.folder, manifest):
                (folder / path.parent).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / path, folder / path)
        elif self.activations is not None:
            (folder / ACTIVATIONS_NAME).parent.mkdir(exist_ok=True)
            self.activations.save(folder / ACTIVATIONS_NAME)
        record.save(folder / REPORT_NAME)
        keep_criterion(folder, self.criterion_source)
        write_manifest(folder, checkpoint, None, record.recipe, norms, {})


def _trained(record: RunReport) -> RunReport:
    """The report of a model that was trained since: without what holds no more."""
    sizes = None if record.sizes is None else msgspec.structs.replace(record.sizes, mask=0)
    return msgspec.structs.replace(
        record,
        trained=True,
        check=None,
        unchecked="it was trained since; use emp-llm evaluate",
        evaluation=None,
        sizes=sizes,
    )


# Pruning of a model in memory, by the recipes of the command and with the same bits.


_ZEROS = 0.05  # of a matrix; more are not by chance
Data = str | Path | Tensor | Iterable[Any]


class CalibrationArguments(TypedDict, total=False):
    """The keyword arguments of `prune_model` and `masks_of`, which `prune_model` describes."""

    activations: Activations | Path | str | None
    samples: int | None
    seqlen: int | None
    batch_size: int
    seed: int
    propagate: Propagate


@default_modes()
def prune_model(
    model: nn.Module | str | Path,
    recipe: Recipe | str | None = None,
    data: Data | None = None,
    tokenizer: Any = None,
    **options: Unpack[CalibrationArguments],
) -> ModelReport:
    """Prune a model in memory, in place. The masks are those of the command for the same weights,
    recipe and calibration.

    Everything is decided before the first weight changes. In a script of several processes, each
    that calls it does the whole work alone: equal models and data give equal masks. Only healing
    takes all processes.

    Args:
        model: of transformers, on any devices, also with parts offloaded to the CPU; or any module
            with linear layers or convolutions (by magnitude; a filter is a row); also inside of
            torch.compile or DataParallel; or a model folder or Hub id, which is loaded.
        recipe: method, targets and group; or only a method's name; None: EMP-Wanda on the MLP
            layers.
        data: the calibration data, for methods that need it: the name of a recipe ("wikitext2"), a
            text file, texts, conversations, a data set or table with text, conversations or
            `input_ids`, token ids of shape (samples, length), or batches (a DataLoader).
        tokenizer: the model's, or its folder; for texts.
        activations: norms to use in place of `data`, or their file.
        samples, seqlen, seed: number and length of the calibration sequences, and the seed of a
            shuffled text.
        batch_size: sequences per forward pass; a DataLoader has its own.
        propagate: calibrate each block on the outputs of "dense" or of "pruned" blocks.

    Returns:
        The report, with the pruned model as `report.model`. `report.save(folder)` completes a
        folder that `model.save_pretrained(folder)` wrote.

    Raises:
        UserError: options conflict, no layer matches, weights are not in memory, or the data cannot
            be used. The model is unchanged.
    """
    recipe = _recipe_of(recipe, options)
    with alone():
        plain, calibration = _open(model, _calibration_of(recipe, data, tokenizer, **options))
        report, updated, architecture = _decide(plain, recipe, calibration)
        text = _hold_out(plain, calibration)
        held_out = None if text is None else text.held_out
        before = _perplexity(plain, held_out)
    heal = recipe.heal
    dense = None if heal is None else copy.deepcopy(plain)
    report.masks.apply(plain)
    for target, weight in updated:
        parameter = resident_parameter(plain, target.layer.parameter)
        if parameter is not None:
            with as_created(parameter):
                rows_in(parameter, target.layer).copy_(weight)
    if heal is not None and dense is not None:
        from emp_llm.healing.training import heal_model, healing_warnings

        options_of_text = calibration.text
        healing = heal_model(
            plain,
            dense,
            data,
            calibration.tokenizer,
            masks=report.masks,
            weights=heal.weights or "targets",
            steps=heal.steps,
            labels=heal.labels,
            samples=options_of_text.samples,
            seqlen=options_of_text.seqlen,
            batch_size=options_of_text.batch_size,
            seed=options_of_text.seed,
        )
        report.record.healing = healing
        report.record.warnings += healing_warnings(healing)
    report = replace(report, weights=digests(architecture))
    if text is None or before is None:
        report.record.unchecked = "give data= of more sequences than samples="
        return report
    with alone():
        after = _perplexity(plain, held_out)
    if after is not None:
        name = None if text.name == IN_MEMORY else text.name
        report.record.check = CheckRecord(text=name, dense=before, pruned=after)
    return report


@default_modes()
def masks_of(
    model: nn.Module | str | Path,
    recipe: Recipe | str | None = None,
    data: Data | None = None,
    tokenizer: Any = None,
    **options: Unpack[CalibrationArguments],
) -> Masks:
    """The masks that `prune_model` would apply; the model is unchanged. Arguments and errors are
    those of `prune_model`.

    Returns:
        Parameter name -> bool tensor, true where a weight stays. `Masks.save` writes them,
        `reapply_mask` takes them.
    """
    # The masks depend on no healing, and on no refit of given masks.
    asked = _recipe_of(recipe, options).but(heal=None)
    update = asked.update
    if update is not None and not update.searches:
        asked = asked.but(update=None)
    if data is not None and not (asked.needs_activations or asked.moves):
        logger.warning("warning: data has no effect: method %s needs none.", asked.method)
    with alone():
        plain, calibration = _open(model, _calibration_of(asked, data, tokenizer, **options))
        return _decide(plain, asked, calibration)[0].masks


def _recipe_of(given: Recipe | str | None, options: Mapping[str, Any]) -> Recipe:
    """A recipe of weights, given as such or as the name of a method; UserError if it, or the name
    of an option, is wrong.
    """
    for name in options.keys() - CalibrationArguments.__annotations__.keys():
        if name in RecipeWords.options():
            method = given if isinstance(given, str) else "emp-wanda"
            raise UserError(
                f"{name} belongs to the recipe. Give recipe_of({method!r}, {name}=...) as the "
                "second argument."
            )
        raise UserError(
            f"{name} is no argument. There are {', '.join(CalibrationArguments.__annotations__)}."
        )
    recipe = given if isinstance(given, Recipe) else recipe_of(given)
    if recipe.structure is not None:
        raise UserError(
            "structure is for checkpoints: save the model, and use the command prune. Leave it out."
        )
    if recipe.heal is not None and recipe.heal.steps is None:
        raise UserError(
            "--heal-tokens and --heal-minutes are for commands; give the steps: "
            "heal=Heal(steps=300)."
        )
    return recipe


@dataclass(frozen=True)
class _Calibration:
    """What gives the norms and moves the weights, as `prune_model` takes it.

    Attributes:
        text: how the data is cut into sequences, and how many run at a time.
        config: of the model, if it is one of transformers.
    """

    data: Any
    tokenizer: Any
    text: CalibrationOptions
    activations: Activations | Path | str | None
    propagate: Propagate
    config: Any = None

    @cached_property
    def sequences(self) -> CalibrationText | None:
        """The data as token ids, read once; None if it is batches."""
        return data_in_memory(self.data, self.tokenizer, self.text, self.config)


def _calibration_of(
    recipe: Recipe,
    data: Data | None,
    tokenizer: Any,
    activations: Activations | Path | str | None = None,
    samples: int | None = None,
    seqlen: int | None = None,
    batch_size: int = 4,
    seed: int = 0,
    propagate: Propagate = "dense",
) -> _Calibration:
    """The calibration that is asked for; UserError if its options conflict."""
    options_of(PruneOptions)["propagate"].checked(propagate)
    text = CalibrationOptions(samples=samples, seqlen=seqlen, batch_size=batch_size, seed=seed)
    check_values(text)
    check_type("activations", activations, Activations, str, Path, NoneType)
    if propagate == "pruned":
        recipe.check_propagated(activations)
    if data is not None and activations is not None and not recipe.moves:
        raise UserError("activations and data both give the norms; give only one of them.")
    unused = activations is not None or (data is None and (samples, seqlen) != (None, None))
    if unused and not (recipe.needs_activations or recipe.moves):
        logger.warning(
            "warning: activations, samples and seqlen have no effect: method %s needs none.",
            recipe.method,
        )
    return _Calibration(data, tokenizer, text, activations, propagate)


def _open(
    model: nn.Module | str | Path, calibration: _Calibration
) -> tuple[nn.Module, _Calibration]:
    """The model in memory, loaded if it is given by name, with its tokenizer."""
    if isinstance(model, str | Path):
        folder = find_model(str(model)).folder
        calibration = replace(calibration, tokenizer=calibration.tokenizer or folder)
        model = load_model(folder, device_alone() or "auto")
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is a {type(model).__name__}; give a model in memory, its folder or a Hub id."
        )
    plain = plain_model(model)
    config = plain.config if isinstance(plain, PreTrainedModel) else None
    return plain, replace(calibration, config=config)


def _decide(
    model: nn.Module, recipe: Recipe, calibration: _Calibration
) -> tuple[ModelReport, list[tuple[Target, Tensor]], Architecture]:
    """Decide the masks of a model, and the weights that move, by target; the model stays
    unchanged. Its architecture reads the weights, also after they have changed.
    """
    stopwatch = Stopwatch(peaks=False)
    chosen, scores = _choose(model, recipe, calibration)

    # Norms of the inputs. With pruned propagation, the masks of a block are decided before the next
    # is calibrated.
    norms = None
    propagated = None
    if scores.recipe.needs_activations:
        if calibration.propagate == "pruned":
            propagated = Pruner(scores, counts_of(scores))
        with stopwatch("calibrate"):
            norms = _norms(model, chosen, scores.recipe, calibration, propagated)
        scores = scores.with_activations(norms)

    # How many weights of each group stay, which ones, and their values.
    counts = counts_of(scores) if propagated is None else propagated.counts
    pruner = Pruner(scores, counts)
    updated = _update(model, pruner, calibration, stopwatch)
    with stopwatch("prune"):
        masks, outcomes = _masks(model, pruner, updated)

    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    record = report_of(
        ModelSource(model=name_of(model), revision=revision),
        pruner,
        outcomes,
        chosen.coverage,
        updated,
        None if norms is None else norms.about,
    )
    record.stages = stage_records(stopwatch.record)
    starving = starving_rows(pruner, outcomes)
    if starving is not None:
        logger.warning("warning: %s", starving)
        record.warnings.insert(0, starving)
    values = {} if updated is None else updated.weights()
    moves = [(target, values[target.name]) for target in chosen.targets if target.name in values]
    source = criterion_source(pruner.scores.recipe)
    return ModelReport(record, masks, norms, model, source), moves, chosen.architecture


def _choose(model: nn.Module, recipe: Recipe, calibration: _Calibration) -> tuple[Chosen, Scores]:
    """Which weights compete, and by which scores.

    Raises:
        UserError: the recipe does not fit the model or the data.
    """
    weights = ModelWeights(model)
    chosen = choose_targets(architecture_of(model, weights, recipe.targets.blocks), recipe)
    targets = chosen.targets
    first = resident_parameter(model, targets[0].layer.parameter)
    if first is not None and int(first.count_nonzero()) < (1 - _ZEROS) * first.numel():
        logger.warning("%s", pruned_before(name_of(model), recipe))
    data = calibration.data
    update = recipe.update
    if update is not None:
        flag = f"method {recipe.method}" if update.searches else "update=Refit()"
        _check_text(model, data, flag, "block by block")
        if is_encoder_decoder(model):
            raise UserError(NOT_BY_BLOCKS.format(type(model).__name__))
    if recipe.heal is not None:
        from emp_llm.healing.training import text_to_heal

        _check_text(model, data, "heal=Heal()", "as a whole")
        check_update(targets, "--heal", "Leave out --heal")
        steps = recipe.heal.steps
        text_to_heal(data, calibration.tokenizer, calibration.text, model, steps=steps)
    config: Any = model.config.to_dict() if isinstance(model, PreTrainedModel) else {}
    return chosen, scores_of(chosen, recipe, config)


def _check_text(model: nn.Module, data: Any, flag: str, runs: str) -> None:
    """Raise UserError unless there is a model of transformers, and a text to move its weights
    by.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{flag} runs a model of transformers {runs}; {type(model).__name__} is not one."
        )
    if data is None:
        raise UserError(
            f"{flag} fits weights to calibration data; give data=, such as texts or "
            "token ids, or leave it out."
        )


def _norms(
    model: nn.Module,
    chosen: Chosen,
    recipe: Recipe,
    calibration: _Calibration,
    masker: Pruner | None,
) -> Activations:
    """The norms that are given, or those of a calibration on the data."""
    given = calibration.activations
    if given is not None:
        return given if isinstance(given, Activations) else Activations.load(Path(given))
    data = calibration.data
    if data is None:
        raise UserError(
            f"method {recipe.method} needs calibration data: give data=, such as texts, token ids, "
            "a DataLoader or the name of a recipe; or use a magnitude method."
        )
    filters = next(
        (target.name for target in chosen.targets if is_convolution(model, target.layer)), None
    )
    if filters is not None:
        raise UserError(
            f"{filters} is a convolution, which has no norms of input features. Use a magnitude "
            "method, or targets without it."
        )
    sequences = calibration.sequences
    layers = [layer for layer in chosen.layers_to_calibrate() if not is_convolution(model, layer)]
    if sequences is not None:
        check_calibrated(layers)
    name = name_of(model)
    name = Path(name).name if Path(name).is_dir() else name  # the norms may be published
    about = CalibrationRecord(model=name, pruned_by=None if masker is None else as_recorded(recipe))
    batch_size = calibration.text.batch_size
    if sequences is not None and isinstance(model, PreTrainedModel):
        return collect_norms(
            model,
            sequences,
            layers,
            about,
            calibration.text,
            statistics=recipe.statistics,
            masker=masker,
            blocks=recipe.targets.blocks,
        )
    if masker is not None:
        raise UserError(
            "propagate='pruned' runs a model of transformers block by block; give "
            "texts or token ids."
        )
    batches = data
    if sequences is not None:
        batches = list(sequences.tokens.split(batch_size))  # type: ignore[no-untyped-call]
    norms, tokens = norms_of_batches(model, layers, batches, statistics=recipe.statistics)
    about = msgspec.structs.replace(about, text=TextRecord(file=IN_MEMORY), tokens=tokens)
    return replace(norms, about=about)


def _hold_out(model: nn.Module, calibration: _Calibration) -> CalibrationText | None:
    """The data, with the sequences that follow those of the calibration; None if there are none,
    or the model predicts no next token.
    """
    if not isinstance(model, PreTrainedModel) or is_encoder_decoder(model):
        return None
    if calibration.data is None or model.get_output_embeddings() is None:
        return None
    sequences = calibration.sequences
    return None if sequences is None or sequences.held_out is None else sequences


def _perplexity(model: nn.Module, tokens: Tensor | None) -> PerplexityRecord | None:
    """The perplexity of held-out sequences; None without any. A failure is logged."""
    if tokens is None or not isinstance(model, PreTrainedModel):
        return None
    try:
        with in_evaluation_mode(model):
            record = perplexity(model, tokens.flatten(), tokens.shape[1], batch_size=1)
    except UserError as error:
        logger.warning("warning: the perplexity of held-out text was not measured: %s", error)
        return None
    return msgspec.structs.replace(record, seconds=0.0)


def _update(
    model: nn.Module, pruner: Pruner, calibration: _Calibration, stopwatch: Stopwatch
) -> UpdatedWeights | None:
    """The weights that the recipe's update moves; None without one."""
    update = pruner.scores.recipe.update
    if update is None or not isinstance(model, PreTrainedModel):
        return None
    sequences = calibration.sequences
    if sequences is None:
        raise UserError(
            "data: batches cannot run block by block, as a fit of weights does; "
            "give texts or token ids."
        )
    updated = UpdatedWeights()
    with stopwatch(update.name), in_evaluation_mode(model):
        batch_size = calibration.text.batch_size
        move_weights(model, pruner, update, sequences.in_turns, updated, batch_size)
    return updated


def _masks(
    model: nn.Module, pruner: Pruner, updated: UpdatedWeights | None
) -> tuple[Masks, Outcomes]:
    """The masks by parameter, and the outcome of each target."""
    masks = Masks()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    unfinished: dict[str, Any] = {}  # the mask of one parameter, unpacked

    def put(target: Target, chunk: Chunk) -> None:
        name = target.layer.parameter
        if name not in unfinished:
            for done in list(unfinished):  # the targets of a parameter are consecutive
                masks.put(done, unfinished.pop(done))
            unfinished[name] = np.ones(shapes[name], dtype=np.bool_)
        rows_in(unfinished[name], target.layer)[chunk.first : chunk.first + len(chunk.words)] = (
            chunk.words != 0
        )

    outcomes = pruner.decide(put, updated)
    for name, mask in unfinished.items():
        masks.put(name, mask)
    return masks, outcomes
