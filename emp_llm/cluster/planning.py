"""The plan of a study: options and their TOML table -> models x recipes -> jobs, each with its
needs.

The needs (GPUs, memory, disk and hours) are estimated from the counts of the model's config, for a
first plan. The plan can be edited, and the numbers of a site file replace them.
"""

import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple, get_type_hints

from emp_llm.calibration.texts import read_toml
from emp_llm.cluster.jobs import Job, JobKind, Needs
from emp_llm.common.errors import UserError, quotable
from emp_llm.evaluation.suites import Suite
from emp_llm.hub.local_model import find_config
from emp_llm.models.architecture import in_scope
from emp_llm.options.base import check_values, parse_words
from emp_llm.options.jobs import DEFAULT_SUITE, PlanOptions
from emp_llm.options.prune import check_options
from emp_llm.options.sweep import METHODS, PointOptions, SweepOptions, SweepPoint, plan_points
from emp_llm.options.words import RecipeOptions
from emp_llm.records.base import converted
from emp_llm.walk.checks import HEALING_BYTES, check_apart

# Memory of a process beside weights and passes, measured by scripts/measure_needs.py:
# scripts/results/needs.md.
BASE = 0.35e9  # Python with torch, transformers and the tokenizer
BASE_OF_TASKS = 0.12e9  # lm-eval, beside it
BASE_OF_PRUNE = 0.42e9  # a prune that runs no model: torch, the compiled kernels, and rows
# With the model on a GPU: CUDA's libraries, and buffers of loading; not measured.
BASE_WITH_GPU = 4.0e9
GPU_CONTEXT = 1.0e9  # of a GPU, for CUDA and its libraries; not measured
GPU_SHARE = 0.9  # of a GPU's memory that weights may take: accelerate's rule
MOST_GPUS = 64  # for one model

GPU_FLOPS = 1.0e14  # operations a second: a third of the peak of a GPU with 3.1e14 in bfloat16
CPU_FLOPS = 0.5e11  # of one process; see scripts/results/needs.md and calibration_by_blocks.md
DISK = 0.4e9  # bytes a second, read and written at once: scripts/results/bench_prune.md
START = 30.0  # seconds to import the packages and to load the data
FACTOR = 2.0  # a job is given twice the estimated time
LEAST_HOURS = 0.1
PASSES_OF_REFIT = 12  # forward passes that take as long as a refit

TEXT_BYTES = 1_300_000  # of an evaluation text of unknown size: that of WikiText-2's test split
BYTES_PER_TOKEN = 3
# of a task; tokens of a question with one answer
EXAMPLES = 2500
ANSWERS = 4
TASK_TOKENS = 100
EXAMPLE_BYTES = 10_000  # of a question with one answer, held with its result
LOGITS = 1 << 28  # computed at a time: evaluation.perplexity
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The counts of a model.

    Attributes:
        name: of the model, as the user gave it.
        parameters: number of all parameters; tied ones count once.
        active: of those that a token passes through; fewer in a mixture of experts.
        in_blocks, largest_block: parameters of all decoder blocks, and of the largest.
        inputs: number of input features of all matrices in blocks together.
        widest: largest dimension of a matrix in a block. hidden_size: width of the hidden states.
        vocabulary: number of tokens. context: longest sequence in tokens; None if the config does
            not say.
        dtype: of the checkpoint.
    """

    name: str
    parameters: int
    active: int
    in_blocks: int
    largest_block: int
    inputs: int
    widest: int
    hidden_size: int
    vocabulary: int
    context: int | None
    dtype: str

    def itemsize(self, dtype: str = "auto") -> int:
        """Bytes of a number; "auto" is the checkpoint's dtype."""
        return _BYTES.get(self.dtype if dtype == "auto" else dtype, 4)

    @property
    def file_bytes(self) -> int:
        """Bytes of the checkpoint."""
        return self.parameters * self.itemsize()


def model_size(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    targets: str = "mlp",
    moves_by: str | None = None,
) -> ModelSize:
    """The counts of a model, of the weightless model that transformers builds from its config.json;
    no weights are downloaded.

    Args:
        name: folder or Hub id.
        revision: branch, tag or commit of a Hub model.
        trust_remote_code: run code from the model repository.
        targets: that jobs will prune.
        moves_by: the option of a job by which weights move, block by block.

    Raises:
        UserError: there is no such model, its config.json is missing or cannot be fetched, or
            transformers cannot build it; or a job would refuse it.
    """
    folder = find_config(name, revision, trust_remote_code)
    from emp_llm.models.loading import build_skeleton
    from emp_llm.models.modules import block_lists, find_stacks, model_layers

    model = build_skeleton(folder, trust_remote_code)
    try:
        blocks = [block for each in block_lists(model).lists for block in each.modules]
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    raw: Any = model.config
    if moves_by is not None:
        check_apart(raw.to_dict(), moves_by, "Leave it out, or plan this model by itself")
    if not find_stacks(model) and not any(
        in_scope(layer, targets) for layer in model_layers(model)
    ):
        raise UserError(f"{name}: --targets {targets!r} match none of its layers.")
    config = raw.get_text_config()
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    matrices = [
        parameter for block in blocks for parameter in block.parameters() if parameter.ndim > 1
    ]
    stacks = [parameter for parameter in matrices if parameter.ndim == 3]  # of experts
    chosen = getattr(config, "num_experts_per_tok", None) or max(
        (len(stack) for stack in stacks), default=0
    )
    idle = sum(max(0, len(stack) - chosen) * stack[0].numel() for stack in stacks)
    dtypes = [
        str(getattr(part, "dtype", None)).removeprefix("torch.") for part in (model.config, config)
    ]
    return ModelSize(
        name=name,
        parameters=model.num_parameters(),
        active=model.num_parameters() - idle,
        in_blocks=sum(sizes),
        largest_block=max(sizes),
        inputs=sum(matrix.numel() // matrix.shape[-2] for matrix in matrices),
        widest=max((max(matrix.shape[-2:]) for matrix in matrices), default=0),
        hidden_size=int(getattr(config, "hidden_size", 0) or 0),
        vocabulary=int(getattr(config, "vocab_size", 0) or 0),
        context=getattr(config, "max_position_embeddings", None),
        # As transformers assumes.
        dtype=next((dtype for dtype in dtypes if dtype in _BYTES), "float32"),
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a job does, as far as its needs depend on it.

    Attributes:
        gpu_gb: memory of a GPU, 1e9 bytes; 0: it computes on the CPU.
        processes: ranks, each with a whole model.
        dtype: of forward passes; "auto" is the checkpoint's.
        calibrates: it collects norms; false if it is given an activations file, or needs none.
        samples, seqlen, batch_size: of the calibration text.
        updates: it moves the kept weights (--refit, SparseGPT or ADMM).
        heals: the steps of --heal.
        propagates: --propagate pruned.
        suite: that is evaluated.
        limit: of --limit.
        points: of a sweep, without the dense model.
    """

    gpu_gb: float = 0.0
    processes: int = 1
    dtype: str = "auto"
    calibrates: bool = False
    samples: int = 128
    seqlen: int = 2048
    batch_size: int = 4
    updates: bool = False
    heals: int = 0
    propagates: bool = False
    suite: Suite | None = None
    limit: int | None = None
    points: int = 0


def estimated_needs(kind: JobKind, size: ModelSize, work: Work) -> Needs:
    """The needs of a job.

    Args:
        kind: the command.
        size: of its model.
        work: what it does.

    Raises:
        UserError: the model does not fit on one GPU, and each of several processes needs it whole.
    """
    reads_text = work.calibrates or work.updates or work.heals > 0
    suite = work.suite if kind in ("evaluate", "sweep") else None
    runs_model = reads_text or kind != "prune"
    tokens = work.samples * work.seqlen if reads_text else 0
    judged = 0.0 if suite is None else judged_tokens(size, suite, work.limit)
    item = size.itemsize(work.dtype)
    # healing: float32 weights, gradients, states of Adam.
    weights = size.parameters * (item + (14 if work.heals else 0))

    # A pass over so many tokens: what a block holds at its widest, inputs and outputs in float32,
    # and the logits.
    width = item * (4 * size.widest + 6 * size.hidden_size) + 8 * (size.widest + size.hidden_size)
    at_once = min(judged, LOGITS / max(1, size.vocabulary), 16 * 2048)
    calibrating = work.batch_size * work.seqlen * width if reads_text else 0
    passes = max(calibrating, at_once * (width + item * size.vocabulary))

    # Hidden states between blocks, and the work of an update: a block dense and pruned, and the
    # moments of a layer.
    states = tokens * size.hidden_size * item
    held = 0
    if work.updates:
        held = 5 * states + 24 * size.widest**2 + size.largest_block * (2 * item + 5)
    elif work.propagates and reads_text:
        held = states + size.largest_block * (1 + item)
    on_gpu = runs_model and work.gpu_gb > 0
    memory = BASE_OF_PRUNE
    if runs_model:
        memory = max(memory, (BASE_WITH_GPU if on_gpu else BASE + weights + passes) + held)
    if suite is not None and suite.tasks:
        memory += BASE_OF_TASKS + EXAMPLE_BYTES * ANSWERS * min(EXAMPLES, work.limit or EXAMPLES)

    norms = 8 * size.inputs
    disk = {
        "calibrate": norms,
        "prune": norms
        + size.file_bytes
        + size.in_blocks * (work.updates * size.itemsize() + (work.heals > 0) * HEALING_BYTES),
        "evaluate": 1e7,
        "sweep": norms + work.points * 1e7,
    }[kind]

    times = 1 + work.points  # an evaluation of the dense model, and of each point
    forward = tokens * (1 + work.propagates + PASSES_OF_REFIT * work.updates) + judged * times
    # Steps of four sequences, as long as four forward passes.
    forward += 4 * work.heals * 4 * work.seqlen
    if kind == "prune":
        passes_over_files = 2
    else:
        passes_over_files = 0 if suite is None else times
    moved = size.file_bytes * (reads_text + passes_over_files)
    rate = work.processes * (GPU_FLOPS if work.gpu_gb else CPU_FLOPS)
    seconds = START + 2 * size.active * forward / rate + moved / DISK
    return Needs(
        processes=work.processes,
        gpus=work.processes * _gpus(size, work, weights, passes) if on_gpu else 0,
        gpu_gb=work.gpu_gb if on_gpu else 0.0,
        memory_gb=_rounded(work.processes * memory / 1e9),
        disk_gb=_rounded(disk / 1e9),
        hours=_rounded(max(LEAST_HOURS, FACTOR * seconds / 3600)),
    )


def judged_tokens(size: ModelSize, suite: Suite, limit: int | None) -> float:
    """Number of tokens of one evaluation of a suite with a limit: of its text, and of the
    answers to its tasks.
    """
    text = 0.0
    corpus = suite.corpus
    if corpus is not None:
        file = Path(corpus.file or "")
        text = (file.stat().st_size if file.is_file() else TEXT_BYTES) / BYTES_PER_TOKEN
        if limit is not None:
            text = min(text, limit * min(corpus.seqlen or 2048, size.context or 2048))
    limits = [min(EXAMPLES, limit or EXAMPLES, task.limit or EXAMPLES) for task in suite.tasks]
    return text + ANSWERS * TASK_TOKENS * sum(limits)


def _gpus(size: ModelSize, work: Work, weights: int, passes: float) -> int:
    """The GPUs that one process needs: for whole blocks, and for the passes on each of them."""
    free = work.gpu_gb * 1e9 - GPU_CONTEXT
    block = size.largest_block * size.itemsize(work.dtype)
    room = min(GPU_SHARE * free, free - passes)
    if weights <= room:
        return 1
    number = math.ceil(weights / (room - block)) if room > block else MOST_GPUS + 1
    if number > MOST_GPUS:
        raise UserError(
            f"{size.name}: it takes {weights / 1e9:.0f} GB, with blocks of {block / 1e9:.1f} GB "
            f"and {passes / 1e9:.1f} GB for forward passes, more than {MOST_GPUS} GPUs of "
            f"{work.gpu_gb:g} GB hold. Name larger GPUs, or use the CPU."
        )
    if work.processes > 1:
        raise UserError(
            f"{size.name}: its weights take {weights / 1e9:.0f} GB, and each of {work.processes} "
            f"processes holds them on one GPU of {work.gpu_gb:g} GB. Use one process: the model is "
            "spread over several GPUs."
        )
    return number


def assumptions(size: ModelSize, work: Work) -> list[str]:
    """The assumptions of an estimate, as sentences."""
    rate, device = (GPU_FLOPS, "GPU") if work.gpu_gb else (CPU_FLOPS, "process on the CPU")
    said = [
        f"{size.name}: {size.parameters:,} parameters by its config, in "
        f"{size.dtype if work.dtype == 'auto' else work.dtype}.",
        f"Hours: {FACTOR:g} times the operations at {rate / 1e12:g} TFLOP/s a {device}, and the "
        f"bytes at {DISK / 1e9:g} GB/s.",
    ]
    if work.gpu_gb:
        said.append(
            f"Weights take at most {100 * GPU_SHARE:g} % of a GPU of {work.gpu_gb:g} GB; a "
            "larger model takes several."
        )
    else:
        said.append(
            "Memory: weights lie in the memory of the node; pages of other files do not count."
        )
    if work.suite is not None and work.suite.tasks:
        said.append(
            f"A task: {EXAMPLES:,} examples of {ANSWERS} answers, {TASK_TOKENS} tokens "
            "each, or as many as the limit."
        )
    return said


def _rounded(value: float) -> float:
    """Three significant digits, and not less."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


_NUMBERS = ("betas", "orders", "sparsities", "emp_sparsities")  # a table may give them as numbers
_OF_COMMAND = ("table", "output", "overwrite")  # options that a table does not hold


def with_table(options: PlanOptions) -> PlanOptions:
    """The options, with those of the table where the command line has none, the defaults of a
    study, and absolute paths.

    Raises:
        UserError: the table cannot be read or has an unknown key; an option is wrong, or no models
            are named.
    """
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    kinds = get_type_hints(PlanOptions)
    for name, value in ({} if options.table is None else read_toml(options.table)).items():
        if name not in values or name in _OF_COMMAND:
            raise UserError(f"{options.table}: unknown field {quotable(name)}.")
        if isinstance(value, list) and name != "models":
            value = ",".join(map(str, value))
        found = converted(
            str(value) if name in _NUMBERS else value, kinds[name], f"{options.table}: {name}"
        )
        if values[name] in (None, False):
            values[name] = found
    merged = PlanOptions(**values)
    check_values(merged)
    if merged.models is None:
        raise UserError("--models is missing; name model folders or Hub ids, separated by commas.")
    methods = merged.methods or METHODS
    adaptive = any(method.strip().startswith("emp-") for method in methods.split(","))
    return replace(
        merged,
        methods=methods,
        betas=merged.betas or ("1" if adaptive and merged.emp_sparsities is None else None),
        suite=absolute(merged.suite or DEFAULT_SUITE),
        calibration=None if merged.calibration is None else absolute(merged.calibration),
    )


def absolute(name: str) -> str:
    """A path that exists as an absolute path, because jobs run in the study's folder; other
    names as they are.
    """
    if name.startswith("self:"):
        return f"self:{absolute(name[5:])}"
    path, comma, rest = name.partition(",")
    found = Path(path).expanduser()
    return f"{found.resolve()}{comma}{rest}" if path and found.exists() else name


def named_models(models: str | list[str]) -> dict[str, str]:
    """name -> slug of the models in an option; folders become absolute.

    Raises:
        UserError: a name is empty, or given twice.
    """
    given = (
        parse_words(models, "--models")
        if isinstance(models, str)
        else [str(model) for model in models]
    )
    names = [absolute(name) for name in given]
    if len(set(names)) < len(names):
        raise UserError(
            f"--models names {next(n for n in names if names.count(n) > 1)} twice; leave one out."
        )
    slugs: dict[str, str] = {}
    for name in names:
        parts = [part for part in PurePath(name).parts if part != "/"]
        short = parts[-2:] if parts[-1:] == ["model"] else parts[-1:]
        slug = re.sub(r"[^a-z0-9._]+", "-", "-".join(short).lower()).strip("-.")[:60] or "model"
        number = 2
        while slug in slugs.values():
            slug = f"{slug.rstrip('0123456789').rstrip('-')}-{number}"
            number = number + 1
        slugs[name] = slug
    return slugs


class Norms(NamedTuple):
    """Where a recipe gets its norms, and what else it does with the text.

    Attributes:
        shared: from the model's calibration job.
        reads_text: it reads the calibration text itself.
        updates: the option by which it moves the kept weights; None: they stay. heals: the steps of
            --heal.
        propagates: --propagate pruned.
    """

    shared: bool
    reads_text: bool
    updates: str | None
    heals: int
    propagates: bool


def study_recipes(
    options: PlanOptions, parsed: Callable[[str, list[str]], Any]
) -> dict[SweepPoint, Norms]:
    """The recipes of a study, checked as their commands would check them.

    Args:
        options: with their table.
        parsed: the options of a command, given its name and its words.

    Raises:
        UserError: a method or number is wrong, or the options of a command conflict.
    """
    further = shlex.split(options.prune_options or "")
    sweeps = options.per == "model"
    points = plan_points(SweepOptions(**_point_options(options)), RecipeOptions())
    if sweeps and (options.processes or 1) * (options.nodes or 1) > 1:
        raise UserError(
            "--per model plans sweeps, and a sweep runs in one process. Leave out "
            "--processes and --nodes."
        )
    recipes: dict[SweepPoint, Norms] = {}
    for point in points:
        words = [*_recipe_words(point), *_given(targets=options.targets, dtype=options.dtype)]
        words += [*_given(calibration=options.calibration), *([] if sweeps else further)]
        command = parsed("prune", ["--model", "model", *words])
        check_options(**command.groups)
        recipe = command.groups["recipe"].tree
        reads = recipe.moves or (recipe.needs_activations and command.activations is None)
        shared = reads and not recipe.moves and command.propagate == "dense"
        heals = 0 if recipe.heal is None else recipe.heal.steps
        updates = None if recipe.update is None else recipe.update_flag
        recipes[point] = Norms(
            shared, reads and not shared, updates, heals, command.propagate == "pruned"
        )
    if sweeps:
        parsed("sweep", ["--model", "model", *further])
    parsed("evaluate", ["--model", "model", *shlex.split(options.evaluate_options or "")])
    return recipes


def model_jobs(
    options: PlanOptions,
    model: str,
    slug: str,
    recipes: dict[SweepPoint, Norms],
    size: ModelSize,
    work: Work,
) -> list[Job]:
    """The jobs of a model: its dense evaluation, its calibration, and those of each recipe; or one
    sweep.

    Args:
        options: with their table.
        model: Hub id, or absolute path of a folder.
        slug: short and unique, for ids and names of files.
        recipes: of the study.
        size: of the model.
        work: what a job of the study does that leaves nothing out.
    """
    jobs: list[Job] = []
    start = ["--model", model] + (["--trust-remote-code"] if options.trust_remote_code else [])
    of_prune, of_evaluate = (
        shlex.split(each or "") for each in (options.prune_options, options.evaluate_options)
    )
    further = {"calibrate": [], "prune": of_prune, "sweep": of_prune, "evaluate": of_evaluate}
    # So that every process gets a batch.
    batch = work.samples // (work.processes * (options.nodes or 1))
    text = _given(calibration=options.calibration, samples=options.samples, seqlen=options.seqlen)
    text += _given(batch_size=max(1, batch) if batch < work.batch_size else None)
    evaluation = _given(suite=options.suite, limit=options.limit)
    targets = _given(targets=options.targets)

    def add(
        name: str,
        kind: JobKind,
        words: list[str],
        after: list[str],
        output: str,
        of_job: Work = work,
    ) -> None:
        needs = estimated_needs(kind, size, of_job)
        if kind != "prune" or of_job.calibrates:  # else it reads files, on one node
            needs.nodes = options.nodes or 1
            needs.hours = max(LEAST_HOURS, needs.hours / needs.nodes)
        command = shlex.join(
            ["emp-llm", kind, *words, *_given(dtype=options.dtype, output=output), *further[kind]]
        )
        jobs.append(
            Job(
                id=f"{slug}.{name}",
                kind=kind,
                command=command,
                after=after,
                output=output,
                needs=needs,
            )
        )

    if options.per == "model":
        calibrates = any(norms.shared or norms.reads_text for norms in recipes.values())
        words = [
            *_given(**_point_options(options)),
            *evaluation,
            *targets,
            *(text if calibrates else []),
        ]
        whole = replace(work, calibrates=calibrates, points=len(recipes))
        add("sweep", "sweep", [*start, *words], [], f"runs/{slug}", whole)
        return jobs
    add("dense.evaluate", "evaluate", [*start, *evaluation], [], f"results/{slug}.dense.json")
    activations = f"activations/{slug}.safetensors"
    if any(norms.shared for norms in recipes.values()):
        add(
            "calibrate",
            "calibrate",
            [*start, *text],
            [],
            activations,
            replace(work, calibrates=True),
        )
    for point, norms in recipes.items():
        output = f"runs/{slug}.{point.name}"
        words = [*start, *_recipe_words(point), *targets]
        if norms.shared:
            words += ["--activations", activations]
        elif norms.reads_text:
            words += text
        own = replace(
            work,
            calibrates=norms.reads_text,
            updates=norms.updates is not None,
            heals=norms.heals,
            propagates=norms.propagates,
        )
        own = own if norms.reads_text else replace(own, processes=1)
        add(
            f"{point.name}.prune",
            "prune",
            words,
            [f"{slug}.calibrate"] if norms.shared else [],
            output,
            own,
        )
        judged = ["--model", output, *start[2:], *evaluation]
        result = f"results/{slug}.{point.name}.json"
        add(f"{point.name}.evaluate", "evaluate", judged, [f"{slug}.{point.name}.prune"], result)
    return jobs


def _point_options(options: PlanOptions) -> dict[str, Any]:
    """The options that `plan` and `sweep` share, in the order of their declaration."""
    return {each.name: getattr(options, each.name) for each in fields(PointOptions)}


def _recipe_words(point: SweepPoint) -> list[str]:
    """The options of a recipe."""
    recipe = point.recipe
    order = None if recipe.order == 2 else recipe.order
    return _given(
        method=recipe.method,
        beta=recipe.beta,
        order=order,
        sparsity=recipe.sparsity,
        pattern=recipe.pattern,
    )


def _given(**options: Any) -> list[str]:
    """Options with their values; nothing for None."""
    words = []
    for name, value in options.items():
        if value is not None:
            words += [
                f"--{name.replace('_', '-')}",
                f"{value:.12g}" if isinstance(value, float) else str(value),
            ]
    return words
