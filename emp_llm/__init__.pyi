"""emp-llm: Effective Model Pruning for Hugging Face causal language models.

Written by scripts/write_stub.py.
"""

from pathlib import Path
from typing import Any, Literal, overload

from emp_llm import runtime as runtime
from emp_llm.calibration.activations import Activations as Activations
from emp_llm.commands.evaluate import Evaluated as Evaluated
from emp_llm.commands.generate import Generation as Generation
from emp_llm.commands.pack import Packed as Packed
from emp_llm.commands.plan import PlanSummary as PlanSummary
from emp_llm.commands.report import ReportSummary as ReportSummary
from emp_llm.commands.sweep import SweepDryRun as SweepDryRun
from emp_llm.commands.unpack import Unpacked as Unpacked
from emp_llm.common.errors import UserError as UserError
from emp_llm.healing.training import heal_model as heal_model
from emp_llm.models.callback import SparsityCallback as SparsityCallback
from emp_llm.models.masks import Masks as Masks
from emp_llm.models.masks import reapply_mask as reapply_mask
from emp_llm.options.recipe import ByCost as ByCost
from emp_llm.options.recipe import Effective as Effective
from emp_llm.options.recipe import Given as Given
from emp_llm.options.recipe import Heal as Heal
from emp_llm.options.recipe import Magnitude as Magnitude
from emp_llm.options.recipe import Match as Match
from emp_llm.options.recipe import Own as Own
from emp_llm.options.recipe import Pattern as Pattern
from emp_llm.options.recipe import Recipe as Recipe
from emp_llm.options.recipe import Relative as Relative
from emp_llm.options.recipe import Ria as Ria
from emp_llm.options.recipe import Share as Share
from emp_llm.options.recipe import Targets as Targets
from emp_llm.options.recipe import Wanda as Wanda
from emp_llm.options.words import recipe_of as recipe_of
from emp_llm.pruning.dry_run import DryRun as DryRun
from emp_llm.pruning.verification import Findings as Findings
from emp_llm.records.base import read_record as read_record
from emp_llm.records.evaluation import Bench as Bench
from emp_llm.records.run_report import Measure as Measure
from emp_llm.records.run_report import RunReport as RunReport
from emp_llm.records.run_report import Sweep as Sweep
from emp_llm.reporting.push import Pushed as Pushed
from emp_llm.runs.prune_model import ModelReport as ModelReport
from emp_llm.runs.prune_model import masks_of as masks_of
from emp_llm.runs.prune_model import prune_model as prune_model
from emp_llm.selection.criteria import InputStatistics as InputStatistics
from emp_llm.selection.criteria import exponential as exponential
from emp_llm.selection.criteria import shift as shift
from emp_llm.selection.effective import effective_mask as effective_mask
from emp_llm.selection.effective import effective_mass as effective_mass
from emp_llm.selection.effective import effective_mass_bound as effective_mass_bound
from emp_llm.selection.effective import effective_number as effective_number
from emp_llm.selection.effective import loss_change_bound as loss_change_bound
from emp_llm.update.update import Admm as Admm
from emp_llm.update.update import Refit as Refit
from emp_llm.update.update import SparseGPT as SparseGPT

COMMANDS: dict[str, str]
__version__: str

def bench(
    model: str | Path,
    *,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    device: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    baseline: str | Path | None = ...,
    prompt_tokens: int = ...,
    new_tokens: int = ...,
    batch_sizes: str = ...,
    repeats: int = ...,
    output: Path | str | None = ...,
    overwrite: bool = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Bench:
    """Measure load time, memory, prefill and decoding of a pruned model, and of the dense model, in
    turn. Zeros run from packed weights; a model with fewer units runs as it is.

    Both models are in one process, and each round runs one after the other, so that a machine that
    is busy slows both. The prompts are text where the model has a tokenizer. The figures are
    medians, and ranges of the rounds; they are saved as JSON, and emp-llm report and emp-llm push
    --results read the file.

    Returns the content of the file.

    Raises:
        UserError: options are wrong, a model cannot be loaded, no layer is packed and no baseline
            is named, or the output exists.

    Args:
        model: Model folder or Hub id.
        revision: Branch, tag or commit of a Hub model.
        trust_remote_code: Run code from the model repository.
        device: Device that runs the model: auto, cpu, cuda or cuda:N.
        dtype: Dtype of forward passes.
        baseline: Dense model to compare with; default: the same model, run dense.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens to decode after it.
        batch_sizes: Numbers of sequences at a time, separated by commas.
        repeats: Rounds; both models run in each, and medians are reported.
        output: File for the figures, which report and push read; default: MODEL-bench.json.
        overwrite: Replace an existing file.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def calibrate(
    model: str | Path,
    *,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    calibration: str | Path | None = ...,
    samples: int | None = ...,
    seqlen: int | None = ...,
    batch_size: int = ...,
    execution: Literal["auto", "model", "blocks"] = ...,
    hidden_states: Literal["auto", "device", "cpu", "disk"] = ...,
    resumable_calibration: bool = ...,
    seed: int = ...,
    ignore: str | list[str] | None = ...,
    tower: Literal["language", "vision", "all"] = ...,
    blocks: str | None = ...,
    allow_partial: bool = ...,
    device_map: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    load_in_8bit: bool = ...,
    load_in_4bit: bool = ...,
    targets: str | list[str] = ...,
    statistics: str | None = ...,
    output: Path | str = ...,
    overwrite: bool = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Activations:
    """Run a text through a model and write the 2-norm of every input feature of its linear layers.

    The text passes through the model once; the file serves any number of prune runs
    (--activations). Under torchrun or accelerate launch, every process runs its share of the text,
    and the first writes the file.

    Returns the norms.

    Args:
        model: Model folder or Hub id.
        revision: Branch, tag or commit of a Hub model.
        trust_remote_code: Run code from the model repository.
        calibration: Calibration text: recipe, file, Hub id or self[:PROMPTS]; ,field=value; a mix:
            a:64,b:64; default: wikitext2.
        samples: Number of calibration sequences; default: the recipe's.
        seqlen: Tokens per sequence; default: the recipe's.
        batch_size: Sequences per calibration pass.
        execution: Run the whole model at once, or by blocks; auto: by blocks if offloaded.
        hidden_states: Where hidden states are kept between blocks.
        resumable_calibration: By blocks, save sums and hidden states to disk now and then, so that
            an interrupted run can resume.
        seed: Random seed of shuffled or generated texts, of training and of searches.
        ignore: Layers to leave out: as --targets.
        tower: Part of a multimodal model to prune: language, vision, or all.
        blocks: Name of the list of decoder blocks; detected by default.
        allow_partial: Continue if more than half of the weights in blocks cannot be pruned.
        device_map: Place of the weights: auto, balanced, cpu, cuda:N, disk, or a JSON map.
        dtype: Dtype of forward passes.
        load_in_8bit: Run forward passes in 8 bits (bitsandbytes, LLM.int8).
        load_in_4bit: Run forward passes in 4 bits (bitsandbytes, NF4).
        targets: Layers, as for prune; the default covers any later choice.
        statistics: Further statistics, for criteria of your own: mean, variance, maximum, separated
            by commas.
        output: Activations file to write.
        overwrite: Replace an existing output.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def env(
    *,
    verbose: bool = ...,
    quiet: bool = ...,
) -> dict[str, str]:
    """Show what emp-llm runs on: versions, processor, memory, GPUs, and the kernels that it chooses
    here.

    Add its output to a report of an error. It names no file and no model.

    Returns the lines by name.

    Args:
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def evaluate(
    model: str | Path,
    *,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    suite: str | Path | None = ...,
    tasks: str | list[str] | None = ...,
    num_fewshot: int | None = ...,
    apply_chat_template: bool = ...,
    limit: int | None = ...,
    device_map: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    load_in_8bit: bool = ...,
    load_in_4bit: bool = ...,
    output: Path | str | None = ...,
    overwrite: bool = ...,
    baseline: str | Path | None = ...,
    beside: list[Path] | None = ...,
    batch_size: str | int = ...,
    runtime: Literal["dense", "sparse"] = ...,
    form: Literal["terminal", "markdown"] = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Evaluated:
    """Evaluate a model on a suite, write the results to a file, and compare them with a baseline in
    a table.

    Results are written after every task, and the same command resumes after the last finished one.
    A baseline that is a model is measured too, and its results are written beside the output as
    OUTPUT-baseline.json. With --load-in-8bit or --load-in-4bit and such a baseline, both models are
    measured with and without quantisation.

    Returns the results and the table.

    Args:
        model: Model folder or Hub id.
        revision: Branch, tag or commit of --model on the Hub.
        trust_remote_code: Run code from the model repository.
        suite: Evaluation suite: a name from eval/, or your own .toml file; default: perplexity.
        tasks: lm-eval tasks a,b instead of a suite.
        num_fewshot: Examples before each question, for --tasks; default: each task's own number.
        apply_chat_template: Ask the questions of tasks through the tokenizer's chat template.
        limit: Use at most this many examples per task and blocks of text; results are partial.
        device_map: Place of the weights: auto, balanced, cpu, cuda:N, disk, or a JSON map.
        dtype: Dtype of forward passes.
        load_in_8bit: Run forward passes in 8 bits (bitsandbytes, LLM.int8).
        load_in_4bit: Run forward passes in 4 bits (bitsandbytes, NF4).
        output: Results file; default: MODEL-SUITE.json in the current folder.
        overwrite: Evaluate again if the output already holds results.
        baseline: Model to compare with (a Hub id may end in @REVISION), or its results file.
        beside: Results file of another model to add to the table; repeatable.
        batch_size: Examples per forward pass of a task, or auto.
        runtime: Run the model dense, or from packed weights (sparse); baselines run dense.
        form: Format of the table.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def fetch(
    model: str | Path | None = ...,
    *,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    suite: str | Path | None = ...,
    tasks: str | list[str] | None = ...,
    calibration: str | Path | None = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> list[str]:
    """Download a model, the data of a suite and a calibration text into the cache, so that later
    runs need no network (HF_HUB_OFFLINE=1).

    Returns what is in the cache: a line for each model, text and task.

    Args:
        model: Model folder or Hub id.
        revision: Branch, tag or commit of --model on the Hub.
        trust_remote_code: Run code from the model repository.
        suite: Evaluation suite: a name from eval/, or your own .toml file; default: perplexity.
        tasks: lm-eval tasks a,b instead of a suite.
        calibration: Calibration text, as for prune.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def generate(
    model: str | Path,
    *,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    device: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    prompt: str,
    runtime: Literal["dense", "sparse"] = ...,
    max_new_tokens: int = ...,
    temperature: float = ...,
    top_p: float = ...,
    seed: int = ...,
    chat: bool = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Generation:
    """Continue a text with a pruned model, and show the speed and the memory.

    The pruned layers compute from a bitmask and the weights that are not zero. The model is a
    pruned checkpoint, or a folder of emp-llm pack, whose files are mapped into memory.

    Returns the generation: iterate over its pieces, or take `text`; then `figures`.

    Raises:
        UserError: options are wrong, the model or its tokenizer cannot be loaded, or the prompt is
            empty or too long.

    Args:
        model: Model folder or Hub id.
        revision: Branch, tag or commit of a Hub model.
        trust_remote_code: Run code from the model repository.
        device: Device that runs the model: auto, cpu, cuda or cuda:N.
        dtype: Dtype of forward passes.
        prompt: Text to continue; - reads it from standard input.
        runtime: Compute from packed weights (sparse), or as transformers does (dense).
        max_new_tokens: Most tokens to generate.
        temperature: Randomness of the choice; 0: always the most probable token.
        top_p: Choose among the most probable tokens of this total probability.
        seed: Seed of the choice.
        chat: Give the prompt as a user's message, by the tokenizer's chat template.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def heal(
    folder: Path | str,
    *,
    heal_steps: int | None = ...,
    heal_weights: Literal["targets", "all"] | None = ...,
    heal_labels: float = ...,
    heal_tokens: float | None = ...,
    heal_minutes: float | None = ...,
    calibration: str | Path | None = ...,
    samples: int | None = ...,
    seqlen: int | None = ...,
    batch_size: int = ...,
    hidden_states: Literal["auto", "device", "cpu", "disk"] = ...,
    seed: int = ...,
    device_map: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    dense: str | Path,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    output: Path | str | None = ...,
    overwrite: bool = ...,
    report_to: Literal["none", "trackio", "tensorboard", "wandb"] = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> RunReport:
    """Train the kept weights of a pruned checkpoint on the dense model's next-token probabilities.
    Zeros stay zero.

    The text is that of a calibration; one sequence of sixteen is held out and chooses the step
    whose weights are kept. An interrupted run resumes. prune --heal does both in one run.

    Returns the report of the checkpoint, with the training as `healing`.

    Args:
        folder: Pruned checkpoint.
        heal_steps: Steps of the training, of four sequences (default 300).
        heal_weights: What heals: kept weights of the targets, or of all linear layers in blocks,
            and norms (default after --structure; else targets).
        heal_labels: Share of the text's own next tokens in what the training learns; the rest is
            the dense model's probabilities (default 0).
        heal_tokens: Tokens of the training, such as 2e6, in place of its steps.
        heal_minutes: Minutes of the training, in place of its steps; two steps are timed first.
        calibration: Calibration text: recipe, file, Hub id or self[:PROMPTS]; ,field=value; a mix:
            a:64,b:64; default: wikitext2.
        samples: Number of calibration sequences; default: the recipe's.
        seqlen: Tokens per sequence; default: the recipe's.
        batch_size: Sequences per calibration pass.
        hidden_states: Where hidden states are kept between blocks.
        seed: Random seed of shuffled or generated texts, of training and of searches.
        device_map: Place of the weights: auto, balanced, cpu, cuda:N, disk, or a JSON map.
        dtype: Dtype of forward passes.
        dense: Folder or Hub id of the dense model.
        revision: Branch, tag or commit of a dense model on the Hub.
        trust_remote_code: Run code from the model repository.
        output: Folder to write; default: PRUNED-healed.
        overwrite: Replace an existing checkpoint at the output.
        report_to: Send the numbers of the healing to this tracker while it runs.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def measure(
    model: str | Path,
    *,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    score: Literal["plain", "relative"] = ...,
    criterion: Any | None = ...,
    score_map: Literal["abs", "shift", "exp"] | None = ...,
    scores: Any | None = ...,
    count_by: Literal["own", "magnitude"] = ...,
    targets: str | list[str] = ...,
    ignore: str | list[str] | None = ...,
    tower: Literal["language", "vision", "all"] = ...,
    blocks: str | None = ...,
    min_expert_tokens: int = ...,
    allow_partial: bool = ...,
    calibration: str | Path | None = ...,
    samples: int | None = ...,
    seqlen: int | None = ...,
    batch_size: int = ...,
    execution: Literal["auto", "model", "blocks"] = ...,
    hidden_states: Literal["auto", "device", "cpu", "disk"] = ...,
    resumable_calibration: bool = ...,
    seed: int = ...,
    activations: Path | str | None = ...,
    device_map: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    output: Path | str | None = ...,
    overwrite: bool = ...,
    criteria: str | None = ...,
    orders: str = ...,
    betas: str = ...,
    loss: str | None = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Measure:
    """Measure the effective number N_eff of every row of every matrix, and the share s_eff of the
    N_eff largest scores.

    The table shows, for every criterion and order, N_eff/N with its distribution over the rows,
    s_eff, and for order 2 the lower bound on s_eff. Each matrix is read once. The weights that EMP
    keeps at beta 1 are reported as by prune. A warning says where rows would keep less than 5 % of
    their weights.

    With --loss, a table shows how much each criterion removes within each rise of the perplexity of
    held-out text, with uniform rows and with EMP's counts, as prune --loss finds it.

    Returns the content of the output.

    Args:
        model: Model folder or Hub id.
        revision: Branch, tag or commit of a Hub model.
        trust_remote_code: Run code from the model repository.
        score: Norms in the scores: plain, or relative to each token's output.
        criterion: A criterion of your own, MODULE:FUNCTION or FILE.py:FUNCTION; the file is run.
        score_map: Make your scores non-negative: abs, shift (s - min s), or exp.
        scores: Scores of your own: a safetensors file with a score for each weight.
        count_by: N_eff of the method's own scores, or of the weight magnitudes (emp methods).
        targets: Layers: mlp, attention, all-linear, name suffixes a,b, or a regex.
        ignore: Layers to leave out: as --targets.
        tower: Part of a multimodal model to prune: language, vision, or all.
        blocks: Name of the list of decoder blocks; detected by default.
        min_expert_tokens: Score experts by magnitude if they see fewer tokens.
        allow_partial: Continue if more than half of the weights in blocks cannot be pruned.
        calibration: Calibration text: recipe, file, Hub id or self[:PROMPTS]; ,field=value; a mix:
            a:64,b:64; default: wikitext2.
        samples: Number of calibration sequences; default: the recipe's.
        seqlen: Tokens per sequence; default: the recipe's.
        batch_size: Sequences per calibration pass.
        execution: Run the whole model at once, or by blocks; auto: by blocks if offloaded.
        hidden_states: Where hidden states are kept between blocks.
        resumable_calibration: By blocks, save sums and hidden states to disk now and then, so that
            an interrupted run can resume.
        seed: Random seed of shuffled or generated texts, of training and of searches.
        activations: Activations file; default: calibrate now.
        device_map: Place of the weights: auto, balanced, cpu, cuda:N, disk, or a JSON map.
        dtype: Dtype of forward passes.
        output: File to write; default: MODEL-measure.json in the current folder.
        overwrite: Replace an existing output.
        criteria: Criteria, separated by commas; default: magnitude,wanda and your own.
        orders: Hill orders of the effective number, separated by commas.
        betas: Betas at which to show the sparsity, separated by commas.
        loss: Budgets such as 1%,2%,5%: how much can go within each rise of the perplexity.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def pack(
    folder: Path | str,
    output: Path | str,
    *,
    zstd: bool = ...,
    mask_only: bool = ...,
    overwrite: bool = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Packed:
    """Pack a pruned checkpoint into safetensors with one bit for every weight and the weights that
    are not zero.

    Packing is lossless: emp-llm unpack restores every file bit for bit. To unpack a folder that was
    packed with --mask-only, it needs the dense model (--base). Hidden files are left out.

    Returns the sizes before and after, and the time taken.

    Raises:
        UserError: the folder is no checkpoint, the output exists or cannot be written, zstandard is
            missing, or there are no zeros to mask.

    Args:
        folder: Pruned checkpoint.
        output: Folder to write.
        zstd: Also compress values and masks (zstandard).
        mask_only: Pack the mask without weights, for users who have the dense model.
        overwrite: Replace an existing folder at the output.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def plan(
    table: Path | str | None = ...,
    *,
    methods: str | None = ...,
    betas: str | None = ...,
    orders: str | None = ...,
    sparsities: str | None = ...,
    emp_sparsities: str | None = ...,
    patterns: str | None = ...,
    output: Path | str = ...,
    overwrite: bool = ...,
    models: str | list[str] | None = ...,
    suite: str | Path | None = ...,
    limit: int | None = ...,
    calibration: str | Path | None = ...,
    samples: int | None = ...,
    seqlen: int | None = ...,
    targets: str | None = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = ...,
    discard: bool = ...,
    prune_options: str | None = ...,
    evaluate_options: str | None = ...,
    trust_remote_code: bool = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> PlanSummary:
    """Plan a study of models and methods as a folder for Snakemake: study.yaml names the models and
    the points, and a Snakefile has the jobs.

    Each model is evaluated dense and calibrated once; each recipe is pruned and evaluated. No
    weights are read or downloaded. The files may be edited. Paths are relative to the current
    folder.

    Returns the study.

    Args:
        table: TOML table with these options; those of the command line replace them.
        methods: Methods, separated by commas; default: emp-wanda,wanda,emp-magnitude,magnitude.
        betas: Betas of the emp methods; default: 1.
        orders: Hill orders of the emp methods; default: 2.
        sparsities: Sparsities of the other methods; default: 0.5.
        emp_sparsities: Sparsities of the emp methods, in place of betas; their beta is found.
        patterns: N:M patterns of the other methods.
        output: Folder of the study.
        overwrite: Replace another plan in the folder; finished outputs stay.
        models: Model folders or Hub ids, separated by commas.
        suite: Evaluation suite; default: paper.
        limit: Use at most this many examples per task and blocks of text.
        calibration: Calibration text, as for prune.
        samples: Number of calibration sequences.
        seqlen: Tokens per calibration sequence.
        targets: Layers to prune, as for prune.
        dtype: Dtype of forward passes; default: auto.
        discard: Delete each pruned checkpoint as soon as it is evaluated.
        prune_options: Further options of every prune, as one text.
        evaluate_options: Further options of every evaluate, as one text.
        trust_remote_code: Run code from the model repositories.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

@overload
def prune(
    model: str | Path,
    *,
    method: str | None = ...,
    score: Literal["plain", "relative"] = ...,
    criterion: Any | None = ...,
    score_map: Literal["abs", "shift", "exp"] | None = ...,
    scores: Any | None = ...,
    beta: float | None = ...,
    order: float = ...,
    neff_dtype: Literal["float64", "bfloat16"] = ...,
    count_by: Literal["own", "magnitude"] = ...,
    sparsity: float | None = ...,
    shares: Literal["uniform", "cost"] | None = ...,
    pattern: str | None = ...,
    match: str | Path = ...,
    match_by: Literal["total", "matrix"] = ...,
    group: Literal["row", "matrix", "all"] = ...,
    refit: bool = ...,
    refit_weighting: Literal["equal", "relative"] = ...,
    refit_target: Literal["block", "layer"] = ...,
    refit_damping: float | None = ...,
    damping: float = ...,
    columns: int = ...,
    penalty: float = ...,
    stages: int = ...,
    heal: bool = ...,
    heal_steps: int | None = ...,
    heal_weights: Literal["targets", "all"] | None = ...,
    heal_labels: float = ...,
    heal_tokens: float | None = ...,
    heal_minutes: float | None = ...,
    targets: str | list[str] = ...,
    ignore: str | list[str] | None = ...,
    tower: Literal["language", "vision", "all"] = ...,
    blocks: str | None = ...,
    min_expert_tokens: int = ...,
    allow_partial: bool = ...,
    structure: Literal["heads", "neurons", "both", "experts", "layers"] | None = ...,
    structure_group: Literal["layer", "all"] = ...,
    keep_shapes: bool = ...,
    width_multiple: int | None = ...,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    calibration: str | Path | None = ...,
    samples: int | None = ...,
    seqlen: int | None = ...,
    batch_size: int = ...,
    execution: Literal["auto", "model", "blocks"] = ...,
    hidden_states: Literal["auto", "device", "cpu", "disk"] = ...,
    resumable_calibration: bool = ...,
    seed: int = ...,
    activations: Path | str | None = ...,
    device_map: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    load_in_8bit: bool = ...,
    load_in_4bit: bool = ...,
    propagate: Literal["dense", "pruned"] = ...,
    mask_device: Literal["cpu", "cuda"] = ...,
    parameters: float | str | None = ...,
    memory: float | str | None = ...,
    loss: float | str | None = ...,
    check: bool = ...,
    evaluate: str | None = ...,
    baseline: Path | str | None = ...,
    output: Path | str | None = ...,
    overwrite: bool = ...,
    report_to: Literal["none", "trackio", "tensorboard", "wandb"] = ...,
    dry_run: Literal[False] = ...,
    push_to_hub: str | None = ...,
    private: bool = ...,
    push_revision: str | None = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> RunReport:
    """Prune a causal language model after training and write the pruned checkpoint.

    Under torchrun or accelerate launch, every process runs its share of the calibration and of the
    evaluation, and the first writes the checkpoint. --load-in-8bit and --load-in-4bit quantise the
    calibration pass alone; the original weights are pruned.

    Returns the report that is also written as emp_report.json, with the result of a push as `push`;
    for a dry run, the plan and its need of memory and disk.

    Args:
        method: admm, sparsegpt, wanda, relative, ria, magnitude or own; with emp-, N_eff says how
            many stay; best: emp-admm --refit --heal. Heads and neurons also taylor, fisher; experts
            reap, man, frequency, mass; layers perplexity, cosine. Default: emp-wanda (experts: emp-
            reap, layers: emp-perplexity).
        score: Norms in the scores: plain, or relative to each token's output.
        criterion: A criterion of your own, MODULE:FUNCTION or FILE.py:FUNCTION; the file is run.
        score_map: Make your scores non-negative: abs, shift (s - min s), or exp.
        scores: Scores of your own: a safetensors file with a score for each weight.
        beta: Keep beta x N_eff weights (emp methods); default: 1.
        order: Hill order of the effective number (emp methods).
        neff_dtype: float64, or bfloat16 for the paper's emp-magnitude arithmetic.
        count_by: N_eff of the method's own scores, or of the weight magnitudes (emp methods).
        sparsity: Fraction to remove, of each group (default 0.5); with an emp method, of all
            targets.
        shares: Sparsity of each block: uniform; cost: lower where a block costs more alone, on
            held-out text; default: uniform.
        pattern: N:M, keep N of every M inputs (not with emp methods).
        match: Output of an earlier run; remove as many weights as that run (other methods).
        match_by: Match the total of that run, or every matrix.
        group: Weights that compete with each other: of a row, a matrix, or all targets.
        refit: Move the kept weights so that each layer's outputs stay close to the dense model's.
        refit_weighting: Weight of each token: equal, or relative to its output.
        refit_target: What the last layer of a block restores: the outputs of the block, or of the
            layer.
        refit_damping: Pull towards the dense weights, as a share of the mean second moment;
            default: inputs / tokens, at least 0.01.
        damping: Damping of SparseGPT, as a share of the mean second moment.
        columns: Columns that SparseGPT gives their mask at a time.
        penalty: First penalty of ADMM, as a share of each second moment.
        stages: Stages in which the penalty of ADMM grows to 1.
        heal: Then train the kept weights on the dense model's probabilities for the text.
        heal_steps: Steps of the training, of four sequences (default 300).
        heal_weights: What heals: kept weights of the targets, or of all linear layers in blocks,
            and norms (default after --structure; else targets).
        heal_labels: Share of the text's own next tokens in what the training learns; the rest is
            the dense model's probabilities (default 0).
        heal_tokens: Tokens of the training, such as 2e6, in place of its steps.
        heal_minutes: Minutes of the training, in place of its steps; two steps are timed first.
        targets: Layers: mlp, attention, all-linear, name suffixes a,b, or a regex.
        ignore: Layers to leave out: as --targets.
        tower: Part of a multimodal model to prune: language, vision, or all.
        blocks: Name of the list of decoder blocks; detected by default.
        min_expert_tokens: Score experts by magnitude if they see fewer tokens.
        allow_partial: Continue if more than half of the weights in blocks cannot be pruned.
        structure: Remove whole attention heads, MLP neurons, both (the same share of each, which
            costs more than neurons alone), experts of a mixture, or decoder layers, in place of
            weights.
        structure_group: Units that compete: of a layer, or of all layers.
        keep_shapes: With --structure, set units to zero and keep every shape and the config.
        width_multiple: Round the width of the MLP up to a multiple of this; default: 64.
        model: Model folder or Hub id.
        revision: Branch, tag or commit of a Hub model.
        trust_remote_code: Run code from the model repository.
        calibration: Calibration text: recipe, file, Hub id or self[:PROMPTS]; ,field=value; a mix:
            a:64,b:64; default: wikitext2.
        samples: Number of calibration sequences; default: the recipe's.
        seqlen: Tokens per sequence; default: the recipe's.
        batch_size: Sequences per calibration pass.
        execution: Run the whole model at once, or by blocks; auto: by blocks if offloaded.
        hidden_states: Where hidden states are kept between blocks.
        resumable_calibration: By blocks, save sums and hidden states to disk now and then, so that
            an interrupted run can resume.
        seed: Random seed of shuffled or generated texts, of training and of searches.
        activations: Activations file; default: calibrate now.
        device_map: Place of the weights: auto, balanced, cpu, cuda:N, disk, or a JSON map.
        dtype: Dtype of forward passes.
        load_in_8bit: Run forward passes in 8 bits (bitsandbytes, LLM.int8).
        load_in_4bit: Run forward passes in 4 bits (bitsandbytes, NF4).
        propagate: Calibrate each block on the outputs of dense or of pruned blocks.
        mask_device: Device that computes the masks. They are the same on both.
        parameters: Remove weights until at most this many are left, such as 6e9.
        memory: Remove weights until the model, packed, takes at most this, such as 24GB.
        loss: Remove as many weights as possible while the rise in held-out perplexity plus its
            standard error stays below this, such as 2%.
        check: Measure held-out perplexity before and after; --evaluate replaces this.
        evaluate: Evaluate the dense and the pruned model with this suite (name or file); ,limit=N
            shortens it.
        baseline: Results file of the dense model, used instead of evaluating it.
        output: Folder to write; default: MODEL-METHOD in the current folder.
        overwrite: Replace an existing checkpoint at the output, and on the Hub.
        report_to: Send the numbers of the healing to this tracker while it runs.
        dry_run: Print the plan of the run, and write nothing.
        push_to_hub: Push the result to USER/NAME on the Hub, with a model card.
        private: Create that repository as private.
        push_revision: Branch to push to; created if missing. (--revision is the source's.)
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

@overload
def prune(
    model: str | Path,
    *,
    method: str | None = ...,
    score: Literal["plain", "relative"] = ...,
    criterion: Any | None = ...,
    score_map: Literal["abs", "shift", "exp"] | None = ...,
    scores: Any | None = ...,
    beta: float | None = ...,
    order: float = ...,
    neff_dtype: Literal["float64", "bfloat16"] = ...,
    count_by: Literal["own", "magnitude"] = ...,
    sparsity: float | None = ...,
    shares: Literal["uniform", "cost"] | None = ...,
    pattern: str | None = ...,
    match: str | Path = ...,
    match_by: Literal["total", "matrix"] = ...,
    group: Literal["row", "matrix", "all"] = ...,
    refit: bool = ...,
    refit_weighting: Literal["equal", "relative"] = ...,
    refit_target: Literal["block", "layer"] = ...,
    refit_damping: float | None = ...,
    damping: float = ...,
    columns: int = ...,
    penalty: float = ...,
    stages: int = ...,
    heal: bool = ...,
    heal_steps: int | None = ...,
    heal_weights: Literal["targets", "all"] | None = ...,
    heal_labels: float = ...,
    heal_tokens: float | None = ...,
    heal_minutes: float | None = ...,
    targets: str | list[str] = ...,
    ignore: str | list[str] | None = ...,
    tower: Literal["language", "vision", "all"] = ...,
    blocks: str | None = ...,
    min_expert_tokens: int = ...,
    allow_partial: bool = ...,
    structure: Literal["heads", "neurons", "both", "experts", "layers"] | None = ...,
    structure_group: Literal["layer", "all"] = ...,
    keep_shapes: bool = ...,
    width_multiple: int | None = ...,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    calibration: str | Path | None = ...,
    samples: int | None = ...,
    seqlen: int | None = ...,
    batch_size: int = ...,
    execution: Literal["auto", "model", "blocks"] = ...,
    hidden_states: Literal["auto", "device", "cpu", "disk"] = ...,
    resumable_calibration: bool = ...,
    seed: int = ...,
    activations: Path | str | None = ...,
    device_map: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    load_in_8bit: bool = ...,
    load_in_4bit: bool = ...,
    propagate: Literal["dense", "pruned"] = ...,
    mask_device: Literal["cpu", "cuda"] = ...,
    parameters: float | str | None = ...,
    memory: float | str | None = ...,
    loss: float | str | None = ...,
    check: bool = ...,
    evaluate: str | None = ...,
    baseline: Path | str | None = ...,
    output: Path | str | None = ...,
    overwrite: bool = ...,
    report_to: Literal["none", "trackio", "tensorboard", "wandb"] = ...,
    dry_run: Literal[True],
    push_to_hub: str | None = ...,
    private: bool = ...,
    push_revision: str | None = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> DryRun: ...
def push(
    folder: Path | str,
    repository: str,
    *,
    private: bool = ...,
    revision: str | None = ...,
    results: list[Path] | None = ...,
    base_model: str | None = ...,
    overwrite: bool = ...,
    dry_run: bool = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Pushed:
    """Push a pruned checkpoint to the Hub, with a model card that is also written to its folder as
    README.md.

    The push is a single commit, so nobody loads half a model. An interrupted push resumes after the
    last finished large file. The commit holds the files of the manifest, the manifest itself,
    report, card, results and the PNG files of the folder's emp_llm, and nothing else from it. They
    name models and files, not folders of this machine.

    Returns the files and the commit; for a dry run, the files that would be pushed.

    Raises:
        UserError: the folder is no finished checkpoint or differs from its manifest, the Hub
            refuses, or the branch holds other weights.

    Args:
        folder: Output folder of a finished prune.
        repository: USER/NAME on the Hub; created if missing.
        private: Create the repository as private.
        revision: Branch to push to; created from main if missing.
        results: Results of evaluate or bench for the card: of this checkpoint, or its baseline;
            repeatable.
        base_model: Hub id of the dense model, if it was pruned from a folder.
        overwrite: Replace other weights on the branch.
        dry_run: Print the card and the files, and push nothing.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def report(
    runs: list[Path],
    *,
    output: Path | str | None = ...,
    against: str | None = ...,
    overwrite: bool = ...,
    title: str = ...,
    no_plots: bool = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> ReportSummary:
    """Report on finished runs: what each point cost, and how methods differ at the same sparsity.

    Each model and choice of targets has its own section; they never share a table or a curve. The
    output folder holds report.md with figures/*.svg and *.png, and points.csv with all digits. The
    same input gives the same bytes.

    Of a study, tables.md is added: all its results so far, with the published values below.

    Returns the names of the files, and the tables.

    Args:
        runs: Outputs of prune, sweep, bench and evaluate; or the folder of a study.
        output: Folder to write; default: report, and of a study its tables.
        against: Method or point that the others are compared with; default: the first.
        overwrite: Replace an existing report at the output.
        title: Heading of the page.
        no_plots: Write tables only, without matplotlib.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

@overload
def sweep(
    model: str | Path,
    *,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    score: Literal["plain", "relative"] = ...,
    criterion: Any | None = ...,
    score_map: Literal["abs", "shift", "exp"] | None = ...,
    scores: Any | None = ...,
    count_by: Literal["own", "magnitude"] = ...,
    group: Literal["row", "matrix", "all"] = ...,
    refit: bool = ...,
    refit_weighting: Literal["equal", "relative"] = ...,
    refit_target: Literal["block", "layer"] = ...,
    refit_damping: float | None = ...,
    damping: float = ...,
    columns: int = ...,
    penalty: float = ...,
    stages: int = ...,
    targets: str | list[str] = ...,
    ignore: str | list[str] | None = ...,
    tower: Literal["language", "vision", "all"] = ...,
    blocks: str | None = ...,
    min_expert_tokens: int = ...,
    allow_partial: bool = ...,
    calibration: str | Path | None = ...,
    samples: int | None = ...,
    seqlen: int | None = ...,
    batch_size: int = ...,
    execution: Literal["auto", "model", "blocks"] = ...,
    hidden_states: Literal["auto", "device", "cpu", "disk"] = ...,
    resumable_calibration: bool = ...,
    seed: int = ...,
    activations: Path | str | None = ...,
    device_map: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    suite: str | Path | None = ...,
    tasks: str | list[str] | None = ...,
    num_fewshot: int | None = ...,
    apply_chat_template: bool = ...,
    limit: int | None = ...,
    methods: str | None = ...,
    betas: str | None = ...,
    orders: str | None = ...,
    sparsities: str | None = ...,
    emp_sparsities: str | None = ...,
    patterns: str | None = ...,
    matched_baselines: bool = ...,
    against: str | None = ...,
    mask_device: Literal["cpu", "cuda"] = ...,
    output: Path | str | None = ...,
    overwrite: bool = ...,
    keep: bool = ...,
    dry_run: Literal[False] = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Sweep:
    """Prune a model by many recipes and measure each: curves over beta and sparsity, with the dense
    model.

    The model is loaded and calibrated once. For each point the weights are masked in memory, the
    model is measured, and the weights are restored. Finished points are not measured again: the
    same command resumes an interrupted sweep, and more betas or methods add points to it.

    Returns the content of sweep.jsonl; for a dry run, the plan.

    Args:
        model: Model folder or Hub id.
        revision: Branch, tag or commit of a Hub model.
        trust_remote_code: Run code from the model repository.
        score: Norms in the scores: plain, or relative to each token's output.
        criterion: A criterion of your own, MODULE:FUNCTION or FILE.py:FUNCTION; the file is run.
        score_map: Make your scores non-negative: abs, shift (s - min s), or exp.
        scores: Scores of your own: a safetensors file with a score for each weight.
        count_by: N_eff of the method's own scores, or of the weight magnitudes (emp methods).
        group: Weights that compete with each other: of a row, a matrix, or all targets.
        refit: Move the kept weights so that each layer's outputs stay close to the dense model's.
        refit_weighting: Weight of each token: equal, or relative to its output.
        refit_target: What the last layer of a block restores: the outputs of the block, or of the
            layer.
        refit_damping: Pull towards the dense weights, as a share of the mean second moment;
            default: inputs / tokens, at least 0.01.
        damping: Damping of SparseGPT, as a share of the mean second moment.
        columns: Columns that SparseGPT gives their mask at a time.
        penalty: First penalty of ADMM, as a share of each second moment.
        stages: Stages in which the penalty of ADMM grows to 1.
        targets: Layers: mlp, attention, all-linear, name suffixes a,b, or a regex.
        ignore: Layers to leave out: as --targets.
        tower: Part of a multimodal model to prune: language, vision, or all.
        blocks: Name of the list of decoder blocks; detected by default.
        min_expert_tokens: Score experts by magnitude if they see fewer tokens.
        allow_partial: Continue if more than half of the weights in blocks cannot be pruned.
        calibration: Calibration text: recipe, file, Hub id or self[:PROMPTS]; ,field=value; a mix:
            a:64,b:64; default: wikitext2.
        samples: Number of calibration sequences; default: the recipe's.
        seqlen: Tokens per sequence; default: the recipe's.
        batch_size: Sequences per calibration pass.
        execution: Run the whole model at once, or by blocks; auto: by blocks if offloaded.
        hidden_states: Where hidden states are kept between blocks.
        resumable_calibration: By blocks, save sums and hidden states to disk now and then, so that
            an interrupted run can resume.
        seed: Random seed of shuffled or generated texts, of training and of searches.
        activations: Activations file; default: calibrate now.
        device_map: Place of the weights: auto, balanced, cpu, cuda:N, disk, or a JSON map.
        dtype: Dtype of forward passes.
        suite: Evaluation suite: a name from eval/, or your own .toml file; default: perplexity.
        tasks: lm-eval tasks a,b instead of a suite.
        num_fewshot: Examples before each question, for --tasks; default: each task's own number.
        apply_chat_template: Ask the questions of tasks through the tokenizer's chat template.
        limit: Use at most this many examples per task and blocks of text; results are partial.
        methods: Methods, separated by commas; default: emp-wanda,wanda,emp-magnitude,magnitude and
            those of your criterion.
        betas: Betas of the emp methods; default: 0.5,0.75,1,1.25,1.5,2.
        orders: Hill orders of the emp methods; default: 2.
        sparsities: Sparsities of the other methods; default: 0.5.
        emp_sparsities: Sparsities of the emp methods, in place of betas; their beta is found.
        patterns: N:M patterns of the other methods.
        matched_baselines: Add two uniform baselines to each emp point: the same total, and the same
            count in every matrix.
        against: Method that the others are compared with in the table; default: the first.
        mask_device: Device that computes the masks. They are the same on both.
        output: Folder of the sweep; default: MODEL-sweep in the current folder.
        overwrite: Discard a sweep with other options at the output.
        keep: Also write the checkpoint of every point.
        dry_run: Print the plan of the sweep, and write nothing.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

@overload
def sweep(
    model: str | Path,
    *,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    score: Literal["plain", "relative"] = ...,
    criterion: Any | None = ...,
    score_map: Literal["abs", "shift", "exp"] | None = ...,
    scores: Any | None = ...,
    count_by: Literal["own", "magnitude"] = ...,
    group: Literal["row", "matrix", "all"] = ...,
    refit: bool = ...,
    refit_weighting: Literal["equal", "relative"] = ...,
    refit_target: Literal["block", "layer"] = ...,
    refit_damping: float | None = ...,
    damping: float = ...,
    columns: int = ...,
    penalty: float = ...,
    stages: int = ...,
    targets: str | list[str] = ...,
    ignore: str | list[str] | None = ...,
    tower: Literal["language", "vision", "all"] = ...,
    blocks: str | None = ...,
    min_expert_tokens: int = ...,
    allow_partial: bool = ...,
    calibration: str | Path | None = ...,
    samples: int | None = ...,
    seqlen: int | None = ...,
    batch_size: int = ...,
    execution: Literal["auto", "model", "blocks"] = ...,
    hidden_states: Literal["auto", "device", "cpu", "disk"] = ...,
    resumable_calibration: bool = ...,
    seed: int = ...,
    activations: Path | str | None = ...,
    device_map: str = ...,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = ...,
    suite: str | Path | None = ...,
    tasks: str | list[str] | None = ...,
    num_fewshot: int | None = ...,
    apply_chat_template: bool = ...,
    limit: int | None = ...,
    methods: str | None = ...,
    betas: str | None = ...,
    orders: str | None = ...,
    sparsities: str | None = ...,
    emp_sparsities: str | None = ...,
    patterns: str | None = ...,
    matched_baselines: bool = ...,
    against: str | None = ...,
    mask_device: Literal["cpu", "cuda"] = ...,
    output: Path | str | None = ...,
    overwrite: bool = ...,
    keep: bool = ...,
    dry_run: Literal[True],
    verbose: bool = ...,
    quiet: bool = ...,
) -> SweepDryRun: ...
def unpack(
    packed: Path | str,
    folder: Path | str,
    *,
    base: str | None = ...,
    revision: str | None = ...,
    overwrite: bool = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Unpacked:
    """Restore a packed checkpoint: every file bit for bit, checked by its hash.

    Returns the folder, its size, and the time taken.

    Raises:
        UserError: a packed file is damaged, the base of a mask is missing or is another model, the
            output exists or cannot be written, or zstandard is missing.

    Args:
        packed: Folder written by emp-llm pack.
        folder: Model folder to write.
        base: For a mask: folder or Hub id of the dense model.
        revision: Branch, tag or commit of a dense model from the Hub.
        overwrite: Replace an existing model folder at the output.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """

def verify(
    folder: Path | str,
    *,
    criterion: Any | None = ...,
    scores: Any | None = ...,
    masks: Path | str | None = ...,
    source: str | Path | None = ...,
    activations: Path | str | None = ...,
    blocks: str | None = ...,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
    all_rows: bool = ...,
    verbose: bool = ...,
    quiet: bool = ...,
) -> Findings:
    """Check a pruned checkpoint: sizes and hashes of all files, and with --source every byte and
    every mask. It only reads.

    Of a checkpoint that was trained after it was pruned, --source compares the masks alone; --masks
    does so without the dense model.

    The exit code is 1 if anything differs.

    Returns the differences, one sentence each, and the number of checked things.

    Raises:
        UserError: the folder is no finished output, or source or activations are not those of its
            run.

    Args:
        folder: Output folder of a finished prune.
        criterion: Your criterion that decided the masks, MODULE:FUNCTION or FILE.py:FUNCTION.
        scores: Your scores that decided the masks: a safetensors file.
        masks: Pruned folder, whose zeros this one must have; then it needs no manifest.
        source: Folder or Hub id of the dense model, to compare bytes and masks as well.
        activations: Activations file of the run; default: the one in the folder.
        blocks: Name of the list of decoder blocks; default: the run's.
        revision: Branch, tag or commit of a Hub model.
        trust_remote_code: Run code from the model repository.
        all_rows: Decide the masks of all rows by the slow reference; default: of one row in
            sixteen, and the others by the compiled kernel.
        verbose: Also log each step with its size, time and memory.
        quiet: No progress and no log: only result, warnings and errors.
    """
