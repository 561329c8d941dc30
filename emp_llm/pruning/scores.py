"""The scores of a model's targets: by a criterion, from the weights and the norms of their
inputs; or given by the user.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from numpy.typing import NDArray

from emp_llm.checkpoint.checkpoint import Checkpoint, StoredTensor, read_header
from emp_llm.checkpoint.files import FilePool, FileReader, file_hash, prefetch, tensor_bytes
from emp_llm.checkpoint.matrices import PRUNABLE_DTYPES, Matrix, Words, as_tensor, dequantise_rows
from emp_llm.common.errors import UserError
from emp_llm.common.paths import file_state
from emp_llm.common.progress import Bar, progress_bar
from emp_llm.models.architecture import Target
from emp_llm.options.criterion import criterion_origin, custom_name, source_hash
from emp_llm.options.recipe import Given, Own, Recipe
from emp_llm.selection.criteria import MAGNITUDE, Criterion, InputStatistics
from emp_llm.selection.rule import NonFiniteError

if TYPE_CHECKING:
    from torch import Tensor

    from emp_llm.calibration.activations import Activations

CHUNK_WEIGHTS = 1 << 21
_CHUNK = 1 << 22  # scores read at a time


class Scores:
    """The scores of each target.

    Args:
        checkpoint: of the targets; it is only read.
        targets: in order.
        recipe: its criterion scores all targets, except those in `by_magnitude`.
        inputs: statistics of the inputs of each target, by its name; empty if none are needed or
            known yet.

    Attributes:
        by_magnitude: name -> number of tokens, of the targets scored by magnitude: those of experts
            that saw fewer tokens than the recipe asks for, because norms over few tokens are
            unreliable.

    Raises:
        UserError: given scores are missing for a target, or have another shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: list[Target],
        recipe: Recipe,
        inputs: Mapping[str, InputStatistics] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.targets = targets
        self.recipe = recipe
        self.criterion = recipe.score.criterion
        self.inputs = inputs or {}
        self.by_magnitude: dict[str, int] = {}
        for target in targets:
            known = self.inputs.get(target.name)
            if not target.layer.routed or known is None or known.tokens is None:
                continue
            if known.tokens < recipe.targets.min_expert_tokens:
                self.by_magnitude[target.name] = known.tokens
        if self.by_magnitude and recipe.group == "all":
            name, tokens = next(iter(self.by_magnitude.items()))
            raise UserError(
                f"--group all: {name} saw {tokens} calibration tokens, too few for norms, and "
                "magnitudes cannot compete with other scores. Use more --samples, or leave the "
                "layer out with --ignore."
            )
        score = recipe.score
        self._given = GivenScores(score.scores, targets) if isinstance(score, Given) else None
        self._last: tuple[str, Tensor] | None = None  # the scores of a whole matrix
        self._extremes: dict[str, tuple[float, float]] = {}

    def with_activations(
        self, activations: "Activations", name: str = "the activations"
    ) -> "Scores":
        """The scores by the statistics of a calibration or a file, which errors call `name`.

        Raises:
            UserError: a statistic of a target is missing, or its number of inputs is wrong.
        """
        relative = self.recipe.score.relative
        read = ("relative" if relative else "norm", *self.criterion.statistics)
        for statistic in read:
            if statistic == "norm" or activations.statistics.get(statistic):
                continue
            if statistic == "relative" and relative:
                raise UserError(
                    f"{name}: it has no norms relative to the outputs, which relative scores need. "
                    "Run emp-llm calibrate again, or use a wanda method without --score relative."
                )
            raise UserError(
                f"{name}: it has no {statistic} of the inputs, which the criterion "
                f"{self.criterion.name} reads. Run emp-llm calibrate --statistics {statistic}."
            )
        inputs = {}
        for target in self.targets:
            values = [activations.of(target.name, statistic) for statistic in read]
            sizes = {0 if value is None else value.numel() for value in values}
            size = target.matrix.columns
            if sizes != {size}:
                wrong = f"{max(sizes)} norms for {size} inputs" if all(sizes) else "no norms"
                raise UserError(
                    f"{name}: {target.name} has {wrong}. Either the norms are of another model or "
                    "of other layers (run emp-llm calibrate for this model), or the forward pass "
                    "does not call this layer (leave it out with --ignore)."
                )
            norms, *others = (value for value in values if value is not None)
            named = dict(zip(self.criterion.statistics, others, strict=True))
            tokens = activations.tokens_of(target.name)
            inputs[target.name] = InputStatistics(norms, tokens, named)
        return Scores(self.checkpoint, self.targets, self.recipe, inputs)

    @contextmanager
    def reading(self, title: str, times: int = 1) -> Iterator[tuple[FilePool, Bar]]:
        """The files of the weights, and progress in weights, for a pass over all targets, or
        several.

        Raises:
            UserError: the weights have changed in the meantime.
        """
        total = times * sum(target.matrix.numel for target in self.targets)
        with self.checkpoint.open_files() as files, progress_bar(total, title, "W") as bar:
            yield files, bar
        self.checkpoint.check_unchanged()

    def of_chunks(
        self,
        targets: Sequence[Target],
        files: FilePool,
        device: str = "cpu",
        chunk_weights: int = CHUNK_WEIGHTS,
    ) -> "Iterator[Tensor]":
        """The scores of each chunk of some targets, in order, on a device.

        Raises:
            UserError: a target holds NaN or infinity, or its scores overflow.
        """
        for target in targets:
            for first, words in read_chunks(target, files, chunk_weights):
                with naming_rows(target, first, words):
                    weights = as_tensor(words, target.matrix.stored.dtype).to(device)
                    scores = self.of(target, first, weights)
                    if not bool(scores.isfinite().all()):  # said here, where the rows have a name
                        raise NonFiniteError("scores hold NaN or infinity")
                yield scores

    def criterion_of(self, target: Target) -> Criterion:
        """The criterion that scores a target."""
        return MAGNITUDE if target.name in self.by_magnitude else self.criterion

    def factors_of(self, target: Target) -> NDArray[Any] | None:
        """The norms by which magnitudes are multiplied, float32, shape (columns,); None for
        magnitude alone.
        """
        if not self.criterion_of(target).calibrated:
            return None
        norms = self.inputs[target.name].norms.detach().cpu().float()
        factors: NDArray[Any] = norms.contiguous().numpy()
        return factors

    def of(self, target: Target, first: int, weights: "Tensor") -> "Tensor":
        """The scores of a chunk of a target's rows: floating, the shape and device of the weights.

        Args:
            first: number of the chunk's first row.
            weights: as stored, or the float32 values of FP8, shape (rows, columns).

        Raises:
            UserError: a score of the user's own is NaN, infinite, or negative without a map.
        """
        criterion = self.criterion_of(target)
        if criterion.whole:
            return self._mapped_rows(target, first, first + weights.shape[0]).to(weights.device)
        values = (
            dequantise_rows(target.matrix, first, weights)
            if weights.element_size() == 1
            else weights
        )
        return criterion.of(values, self.inputs.get(target.name)).contiguous()

    def _mapped_rows(self, target: Target, first: int, last: int) -> "Tensor":
        """The mapped scores of rows first to last - 1, on the CPU.

        Without a map and with "abs" they keep their dtype; "shift" (s - min s) and "exp" (exp(s -
        max s), both over the group) are float64, so that distinct scores stay distinct.
        """
        import torch

        scores = self._finite_rows(target, first, last)
        score = self.recipe.score
        if not isinstance(score, Own | Given):
            return scores
        if score.score_map is None:
            if bool((scores < 0).any()):
                raise UserError(
                    f"{self._source_name}: {target.name} has scores below zero. Say what they mean "
                    "with --map: abs (their size counts), shift or exp (the smallest are removed)."
                )
            return scores
        if score.score_map == "abs":
            return scores.abs()
        scores = scores.double()
        if self.recipe.group == "row":
            least = scores.amin(1, keepdim=True)
            most = scores.amax(1, keepdim=True)
        else:
            least, most = (
                torch.tensor(value, dtype=torch.float64) for value in self._extremes_of(target)
            )
        return scores - least if score.score_map == "shift" else (scores - most).exp()

    def _extremes_of(self, target: Target) -> tuple[float, float]:
        """The minimum and the maximum over the target, or over all targets."""
        key = target.name if self.recipe.group == "matrix" else ""
        if key not in self._extremes:
            least = float("inf")
            most = -float("inf")
            for member in [target] if key else self.targets:
                for first, last in member.matrix.row_chunks(_CHUNK):
                    scores = self._finite_rows(member, first, last)
                    least = min(least, float(scores.min()))
                    most = max(most, float(scores.max()))
            self._extremes[key] = least, most
        return self._extremes[key]

    def _finite_rows(self, target: Target, first: int, last: int) -> "Tensor":
        """The scores of rows first to last - 1 before they are mapped. A criterion's scores are
        cached for the last matrix.
        """
        import torch

        if self._given is not None:
            scores = self._given.rows(target, first, last)
        else:
            if self._last is None or self._last[0] != target.name:
                self._last = None  # free its memory before the next matrix is read
                self._last = target.name, self._scores_of_matrix(target)
            scores = self._last[1][first:last]
        if not bool(torch.isfinite(scores).all()):
            raise UserError(
                f"{self._source_name}: the scores of {target.name} hold NaN or infinity."
            )
        return scores

    def _scores_of_matrix(self, target: Target) -> "Tensor":
        import torch

        matrix = target.matrix
        with self.checkpoint.open_files() as files, torch.no_grad():
            words = matrix.read(files.reader(matrix.stored.shard), 0, matrix.rows)
            weight = dequantise_rows(matrix, 0, as_tensor(words, matrix.stored.dtype))
            try:
                scores = self.criterion.of(weight, self.inputs.get(target.name))
            except Exception as error:
                shape = list(weight.shape)
                error.add_note(
                    f"raised by the {self._source_name} for {target.name}, whose weight "
                    f"has the shape {shape}"
                )
                raise
        if not isinstance(scores, torch.Tensor) or scores.shape != weight.shape:
            what = (
                f"a tensor of shape {list(scores.shape)}"
                if isinstance(scores, torch.Tensor)
                else type(scores).__name__
            )
            raise UserError(
                f"{self._source_name}: it returned {what} for {target.name}, whose weight has the "
                f"shape {list(weight.shape)}; it must return one score per weight."
            )
        return _floating(scores.detach().cpu(), self._source_name, target)

    @property
    def _source_name(self) -> str:
        return f"criterion {self.criterion.name}" if self._given is None else self._given.name


def read_chunks(
    target: Target, files: FilePool, chunk_weights: int = CHUNK_WEIGHTS
) -> Iterator[tuple[int, Words]]:
    """(first row, bits) of each chunk of a target's rows, with the next ones read ahead."""
    matrix = target.matrix
    reader = files.reader(matrix.stored.shard)

    def job(first: int, last: int) -> tuple[int, Words]:
        return first, matrix.read(reader, first, last)

    return prefetch(partial(job, first, last) for first, last in matrix.row_chunks(chunk_weights))


class GivenScores:
    """Scores from safetensors files, or from tensors in memory.

    Args:
        given: a file, a folder of files, or tensors by name. A name is that of the weight in the
            checkpoint, that of the parameter, or that of the layer; the shape is the weight's.
        targets: that need scores.

    Raises:
        UserError: a file is unreadable, or the scores of a target are missing or have another shape
            or dtype.
    """

    def __init__(self, given: str | Path | Mapping[str, Any] | None, targets: list[Target]) -> None:
        if given is None:
            raise UserError(
                "the scores that decided the masks are not at hand; give their file with --scores."
            )
        self._files: list[Path] = []
        self._tensors: Mapping[str, Any]
        if isinstance(given, str | Path):
            self.name = f"--scores {given}"
            path = Path(given)
            self._files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
            if not self._files:
                raise UserError(f"--scores {given}: the folder holds no safetensors files.")
            self._tensors = {
                tensor.name: tensor for file in self._files for tensor in read_header(file)
            }
        else:
            self.name = "the scores"
            self._tensors = given
        for target in targets:
            self._check(target)

    @property
    def digest(self) -> str:
        """A hash of the scores: of the files, or of names and tensors."""
        from torch import Tensor

        digest = blake3()
        for file in self._files:
            digest.update(_hash_of(file, file_state(file)).encode())
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            if isinstance(tensor, Tensor):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor_bytes(tensor.detach().cpu().contiguous()))
        return digest.hexdigest()

    def rows(self, target: Target, first: int, last: int) -> "Tensor":
        """The scores of rows first to last - 1 of a target, on the CPU; UserError if they are
        complex numbers.
        """
        tensor = self._tensors[self._name(target)]
        matrix = target.matrix
        if isinstance(tensor, StoredTensor):
            with FileReader(tensor.shard) as file:
                words = Matrix(tensor, matrix.transposed, matrix.expert).read(file, first, last)
            scores = as_tensor(words, tensor.dtype)
        else:
            whole = tensor.detach() if matrix.expert is None else tensor.detach()[matrix.expert]
            scores = (whole.T if matrix.transposed else whole)[first:last].cpu()
        return _floating(scores, self.name, target).contiguous()

    def _name(self, target: Target) -> str:
        names = (target.matrix.stored.name, target.layer.parameter, target.name)
        for name in names:
            if name in self._tensors:
                return name
        raise UserError(
            f"{self.name}: no scores for {names[0]}. Leave the layer out with --ignore, or add its "
            "scores."
        )

    def _check(self, target: Target) -> None:
        from torch import Tensor

        name = self._name(target)
        tensor = self._tensors[name]
        if not isinstance(tensor, Tensor | StoredTensor):
            raise UserError(f"{self.name}: {name} is a {type(tensor).__name__}, not a tensor.")
        if tuple(tensor.shape) != tuple(target.matrix.stored.shape):
            raise UserError(
                f"{self.name}: {name} has the shape {list(tensor.shape)}; the weight has "
                f"{list(target.matrix.stored.shape)}."
            )
        if isinstance(tensor, StoredTensor) and tensor.dtype not in PRUNABLE_DTYPES:
            raise UserError(
                f"{self.name}: {name} is stored as {tensor.dtype}; give "
                f"{', '.join(PRUNABLE_DTYPES)}."
            )


def as_recorded(recipe: Recipe) -> Recipe:
    """A recipe as records hold it: a custom criterion, or given scores, by name and hash."""
    score = recipe.score
    if isinstance(score, Given) and score.digest is None:
        name = Path(score.scores).name if isinstance(score.scores, str | Path) else "in memory"
        digest = GivenScores(score.scores, []).digest
        return recipe.but(score=replace(score, scores=name, digest=digest))
    if isinstance(score, Own) and score.source is None:
        label, source = criterion_origin(score.criterion)
        named = None if custom_name(label) == score.method else score.method
        return recipe.but(score=replace(score, function=label, named=named, source=source))
    return recipe


def sign(recipe: Recipe) -> dict[str, Any]:
    """`as_recorded` as JSON, for signatures of runs: with the sources of the user's own classes."""
    return as_recorded(recipe).as_dict() | own_sources(recipe)


def own_sources(recipe: Recipe) -> dict[str, str]:
    """Hashes of the sources of a recipe's scores and updates whose classes are the user's own."""
    return {
        f"source of {node.name}": source_hash(node)
        for node in (recipe.score, recipe.update)
        if node is not None and type(node).__module__.partition(".")[0] != "emp_llm"
    }


@contextmanager
def naming_rows(target: Target, first: int, words: Words) -> Iterator[None]:
    """Turn a NonFiniteError into a UserError that names the tensor and the rows."""
    try:
        yield
    except NonFiniteError as error:
        stored = target.matrix.stored
        rows = f"rows {first} to {first + words.shape[0] - 1}"
        if bool(as_tensor(words, stored.dtype).double().isfinite().all()):
            raise UserError(
                f"{target.name}: the scores overflow in {rows}; its activations are too large."
            ) from error
        # A model in memory has no file.
        where = "" if str(stored.shard) == stored.name else f"{stored.shard}: "
        remedy = (
            "The checkpoint is damaged; download it again." if where else "Load the model again."
        )
        raise UserError(f"{where}{stored.name} holds NaN or infinity ({rows}). {remedy}") from error


@cache
def _hash_of(file: Path, state: tuple[int, ...] | None) -> str:
    """The hash of a file in this state, computed once."""
    return file_hash(file)


def _floating(scores: "Tensor", name: str, target: Target) -> "Tensor":
    """Scores in a floating dtype of 16, 32 or 64 bits."""
    if scores.is_complex():
        raise UserError(f"{name}: the scores of {target.name} are complex numbers.")
    if not scores.is_floating_point():
        return scores.double()
    return scores if scores.element_size() >= 2 else scores.float()
