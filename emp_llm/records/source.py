"""The origin of a number: the model, the text, the recipe, and the stages of the run."""

from typing import Any

import msgspec

from emp_llm.records.base import Part


class ModelSource(Part, kw_only=True):
    """A model.

    Attributes:
        model: the name or path that the user gave.
        revision: its commit, if it comes from the Hub.
        identity: a hash of all its weights (`checkpoint.identity`).
        sha256_of_samples: in files of version 1 only: a hash of a few bytes of each tensor.
    """

    model: str
    revision: str | None
    identity: str | None = None
    sha256_of_samples: str | None = None

    @property
    def key(self) -> str:
        """The most reliable known name of the weights: the identity, else the hash of samples, else the model's name."""
        return self.identity or self.sha256_of_samples or self.model


class TextRecord(Part, kw_only=True):
    """A text. The fields are those of a corpus recipe (`records.corpus`).

    Attributes:
        sha256: hash of a local file.
    """

    dataset: str | None = None
    config: str | None = None
    split: str | None = None
    column: str | None = None
    image: str | None = None
    file: str | None = None
    join: str | None = None
    stream: bool = False
    shuffle: bool = False
    samples: int | None = None
    seqlen: int | None = None
    sha256: str | None = None


class QuantizationRecord(Part, kw_only=True):
    """Quantisation by bitsandbytes."""

    bits: str
    format: str = ""
    bitsandbytes: str = ""


class CriterionRecord(Part, kw_only=True):
    """A score of the user's own.

    Attributes:
        function: of a registered criterion, MODULE:FUNCTION; source: SHA-256 of its file.
        scores: name of a file of scores; digest: a hash of the scores.
        score_map: how signed scores become non-negative.
    """

    function: str | None = None
    source: str | None = None
    scores: str | None = None
    digest: str | None = None
    score_map: str | None = None


class RefitRecord(Part, kw_only=True):
    """The refit of the kept weights.

    Attributes:
        weighting: of the tokens, "equal" or "relative" to each target's output.
        target: what the last layer of a block restores, the outputs of the "block" or of the "layer".
        damping: pull towards the dense weights, as a share of the mean second moment; missing: inputs / tokens of the layer,
            at least 0.01.
    """

    weighting: str = "equal"
    target: str = msgspec.field(default_factory=lambda: "block")
    damping: float | None = None


class StructureRecipe(Part, kw_only=True):
    """The options of structured pruning, defaults filled in. Fields are those of `options.structure`."""

    structure: str
    group: str = "layer"
    head_unit: str | None = None
    keep_shapes: bool = False
    width_multiple: int | None = None


class RecipeRecord(Part, kw_only=True):
    """The options that decide the masks, defaults filled in. Fields that a method does not use are missing.

    Attributes:
        method, group, targets, ignore, min_expert_tokens: as for `options.recipe.Recipe`.
        beta, order, neff_dtype: of emp methods only.
        sparsity, pattern, match, match_by: of the other methods only.
        criterion: of a score of the user's own.
        refit: of the kept weights, if asked for.
        score: "relative" if the norms are those relative to the outputs; missing for plain norms.
        count_by: "magnitude" if the effective number of the magnitudes sets the counts; missing for that of the scores.
        shares: "owl" if the sparsities of the blocks depend on their outliers, with owl_lambda and owl_m.
        blocks: name of the list of decoder blocks, if the user gave it.
        tower: the part of a multimodal model, if it is not the language tower.
        dtype, device_map: of the forward passes.
        structure: of heads and neurons in place of weights.
    """

    method: str = ""
    # Default factories, so that both fields are always written.
    group: str = msgspec.field(default_factory=lambda: "row")
    targets: str | list[str] = msgspec.field(default_factory=lambda: "mlp")
    ignore: str | list[str] | None = None
    min_expert_tokens: int | None = None
    beta: float | None = None
    order: float | None = None
    neff_dtype: str | None = None
    sparsity: float | None = None
    pattern: str | None = None
    match: str | None = None
    match_by: str | None = None
    criterion: CriterionRecord | None = None
    refit: RefitRecord | None = None
    score: str | None = None
    count_by: str | None = None
    shares: str | None = None
    owl_lambda: float | None = None
    owl_m: float | None = None
    blocks: str | None = None
    tower: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    structure: StructureRecipe | None = None


class CalibrationRecord(Part, kw_only=True):
    """The origin of activations.

    Attributes:
        model, revision, identity: the model.
        text, tokens: the calibration text, and the number of tokens; seed: of a shuffled text only.
        texts: for a mix, its parts in place of `text`; each has its number of samples.
        dtype, quantization, batch_size, ranks: of the forward passes.
        execution, propagate, hidden_states: as for `options.calibration.CalibrationOptions`.
        pruned_by: for pruned propagation, the recipe of the masks.
        versions: of the packages.
        fingerprint: in files of version 1, in place of the identity.
    """

    model: str = ""
    revision: str | None = None
    identity: str | None = None
    text: TextRecord | None = None
    texts: list[TextRecord] = []
    seed: int | None = None
    tokens: int | None = None
    dtype: str | None = None
    quantization: QuantizationRecord | None = None
    batch_size: int | None = None
    ranks: int | None = None
    execution: str | None = None
    propagate: str | None = None
    hidden_states: str | None = None
    pruned_by: RecipeRecord | None = None
    versions: dict[str, str] = {}
    fingerprint: dict[str, Any] | None = None

    @property
    def all_texts(self) -> list[TextRecord]:
        """The calibration texts: one, or the parts of a mix."""
        return self.texts if self.text is None else [self.text]


class StageRecord(Part, kw_only=True):
    """Time of a stage in seconds, and its peak memory in bytes."""

    seconds: float
    peak_bytes: float = 0
    peak_cuda_bytes: float | None = None


def with_revision(source: Any) -> Any:
    """The JSON of a `ModelSource` with the field `revision` added, as null, if it is missing."""
    return {"revision": None} | source if isinstance(source, dict) else source
