"""`emp-llm generate`: text from a pruned model that computes from its packed weights."""

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError, count_of, format_bytes, quotable, repair_text, visible
from emp_llm.common.paths import PACK_NAME
from emp_llm.common.progress import load_packages
from emp_llm.options.shared import DeviceOptions, ModelOptions, Runtime

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(DeviceOptions, ModelOptions):
    """Options of `generate`."""

    prompt: Annotated[str, Flag("Text to continue; - reads it from standard input.")]
    runtime: Annotated[
        Runtime, Flag("Compute from packed weights (sparse), or as transformers does (dense).")
    ] = "sparse"
    max_new_tokens: Annotated[int, Flag("Most tokens to generate.", minimum=1)] = 128
    temperature: Annotated[
        float, Flag("Randomness of the choice; 0: always the most probable token.", minimum=0)
    ] = 0.0
    top_p: Annotated[
        float, Flag("Choose among the most probable tokens of this total probability.")
    ] = 1.0
    seed: Annotated[int, Flag("Seed of the choice.")] = 0
    chat: Annotated[
        bool, Flag("Give the prompt as a user's message, by the tokenizer's chat template.")
    ] = False


@dataclass(frozen=True)
class GenerationFigures:
    """What a generation cost.

    Attributes:
        prompt_tokens, new_tokens: their numbers.
        first_seconds, seconds: until the first new token, and in all.
        memory_bytes: the peak memory of the process, or of the GPU.
    """

    prompt_tokens: int
    new_tokens: int
    first_seconds: float
    seconds: float
    memory_bytes: int


class Generation:
    """A text that is generated while it is read: iterate over its pieces, or take `text`.

    Args:
        model: in evaluation mode.
        tokenizer: of the model.
        arguments: for the model's `generate`, with `input_ids`, the prompt.

    Attributes:
        figures: what the generation cost; None until the last piece.
    """

    def __init__(self, model: "PreTrainedModel", tokenizer: Any, arguments: dict[str, Any]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._pieces: list[str] = []
        self.figures: GenerationFigures | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self)

    def __iter__(self) -> Iterator[str]:
        """The pieces of the text, as soon as they are whole words or characters."""
        import torch
        from transformers import TextIteratorStreamer

        from emp_llm.common.machine import peak_memory, release_team
        from emp_llm.models.modules import finite_logits

        if self.figures is not None:
            yield from self._pieces
            return
        streamer: Any = TextIteratorStreamer(
            self._tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        stop = Event()
        pieces = []
        times = []
        errors = []

        def after_token(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """Note the time of a new token. Returns whether to stop, bool, shape (sequences,)."""
            times.append(time.perf_counter())
            return torch.full((ids.shape[0],), stop.is_set(), device=ids.device)

        def work() -> None:
            try:
                with torch.inference_mode():
                    self._model.generate(
                        **self._arguments,
                        streamer=streamer,
                        logits_processor=[finite_logits],
                        stopping_criteria=[after_token],
                    )
            except BaseException as error:  # raised in the thread that reads
                errors.append(error)
                streamer.end()

        start = time.perf_counter()
        release_team()
        thread = Thread(target=work, name="emp-llm-generate")
        thread.start()
        try:
            for piece in streamer:
                if piece:
                    pieces.append(piece)
                    yield piece
        finally:  # the reader may have stopped, by Ctrl-C for one
            stop.set()
            thread.join()
        if errors:
            raise errors[0]
        device = self._model.device
        on_gpu = device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(device) if on_gpu else peak_memory()
        self._pieces = pieces
        self.figures = GenerationFigures(
            prompt_tokens=self._arguments["input_ids"].shape[1],
            new_tokens=len(times),
            first_seconds=times[0] - start if times else 0.0,
            seconds=time.perf_counter() - start,
            memory_bytes=memory,
        )


@command
def generate(options: GenerateOptions) -> Generation:
    """Continue a text with a pruned model, and show the speed and the memory.

    The pruned layers compute from a bitmask and the weights that are not zero. The model is a
    pruned checkpoint, or a folder of emp-llm pack, whose files are mapped into memory.

    Returns the generation: iterate over its pieces, or take `text`; then `figures`.

    Raises:
        UserError: options are wrong, the model or its tokenizer cannot be loaded, or the prompt is
            empty or too long.
    """
    load_packages()
    import torch

    from emp_llm.models.loading import check_head, load_model, load_tokenizer
    from emp_llm.models.local_model import find_model
    from emp_llm.models.placement import check_ids, max_context
    from emp_llm.runtime.loader import LEAST_ZEROS, NEVER, load, run_device

    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, got {options.top_p}.")
    if options.top_p < 1 and options.temperature == 0:
        raise UserError("--top-p has no effect at temperature 0; add --temperature, such as 0.8.")
    trust = options.trust_remote_code
    folder = find_model(options.model, options.revision, trust).folder
    check_head(folder)
    tokenizer = load_tokenizer(folder, trust)
    ids = _prompt(tokenizer, options)
    device = run_device(options.device)
    if options.runtime == "dense" and not (folder / PACK_NAME).is_file():
        model = load_model(folder, device, options.dtype, trust)
    else:
        least = LEAST_ZEROS if options.runtime == "sparse" else NEVER
        model = load(
            folder, device=device, dtype=options.dtype, trust_remote_code=trust, least_zeros=least
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(model.generation_config, name)
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, int | None) for number in numbers):
            raise UserError(
                f"{folder / 'generation_config.json'}: {name} is {quotable(repr(value))}, but must "
                "be the number of a token. Correct it."
            )
    check_ids(ids, model.config, f"--prompt, by the tokenizer of {options.model}")
    longest = max_context(model.config)
    if longest is not None and ids.shape[1] + options.max_new_tokens > longest:
        raise UserError(
            f"The prompt has {count_of(ids.shape[1], 'token')}; with {options.max_new_tokens} new "
            f"ones that is more than the model's {longest} positions. Lower --max-new-tokens, or "
            "shorten the prompt."
        )
    padding = tokenizer.pad_token_id
    ids = ids.to(model.device)
    arguments = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": options.max_new_tokens,
        "pad_token_id": tokenizer.eos_token_id if padding is None else padding,
        "do_sample": options.temperature > 0,
        "temperature": None,
        "top_p": None,
        "top_k": None,
    }
    if options.temperature > 0:
        torch.manual_seed(options.seed)
        arguments |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    return Generation(model, tokenizer, arguments)


def _prompt(tokenizer: Any, options: GenerateOptions) -> Any:
    """The token ids of the prompt, int64, shape (1, tokens)."""
    from emp_llm.calibration.chat import Chat, chat_text

    try:
        text = repair_text(sys.stdin.read() if options.prompt == "-" else options.prompt)
    except UnicodeDecodeError as error:
        raise UserError(
            "--prompt -: the standard input is not UTF-8. Convert it with iconv."
        ) from error
    if not text:
        raise UserError("--prompt is empty; give a text to continue.")
    if not options.chat:
        return tokenizer(text, return_tensors="pt").input_ids
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"--chat needs a chat template, and the tokenizer of {options.model} has "
            "none. Leave it out."
        )
    chat = Chat([{"role": "user", "content": text}], f"--chat {options.model}")
    shown = chat_text(chat, tokenizer, answer=True)
    return tokenizer(shown, return_tensors="pt", add_special_tokens=False).input_ids


def show(generation: Generation) -> None:
    """Print the text while it is generated, and log its figures."""
    for piece in generation:
        print(visible(piece), end="", flush=True)
    print()
    figures = generation.figures
    assert figures is not None
    speed = 0.0
    if figures.new_tokens > 1:
        speed = (figures.new_tokens - 1) / (figures.seconds - figures.first_seconds)
    logger.info(
        "%s, first new token after %.2f s; %s, %.1f tokens/s; peak memory %s",
        count_of(figures.prompt_tokens, "prompt token"),
        figures.first_seconds,
        count_of(figures.new_tokens, "new token"),
        speed,
        format_bytes(figures.memory_bytes),
    )
