"""The run of `generate`: text from a pruned model, piece by piece."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, TextIteratorStreamer

from emp_llm.common.errors import UserError
from emp_llm.common.file_names import PACK_NAME
from emp_llm.common.timing import peak_memory
from emp_llm.common.wording import count_of, format_bytes
from emp_llm.hub.local_model import find_model
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.models.placement import max_context
from emp_llm.options.runtime import GenerateOptions
from emp_llm.runtime.loader import LEAST_ZEROS, NEVER, load, run_device


@dataclass(frozen=True)
class GenerationFigures:
    """What a generation cost.

    Attributes:
        prompt_tokens, new_tokens: their numbers.
        first_seconds: until the first new token; seconds: in all.
        memory_bytes: the most that the process used, or of the GPU's memory.
    """

    prompt_tokens: int
    new_tokens: int
    first_seconds: float
    seconds: float
    memory_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens after the first one, by the time that they took; 0 without such tokens."""
        rest = self.seconds - self.first_seconds
        return (self.new_tokens - 1) / rest if self.new_tokens > 1 and rest > 0 else 0.0

    def words(self) -> str:
        """One line."""
        return (
            f"{count_of(self.prompt_tokens, 'prompt token')}, first new token after {self.first_seconds:.2f} s; "
            f"{count_of(self.new_tokens, 'new token')}, {self.tokens_per_second:.1f} tokens/s; "
            f"peak memory {format_bytes(self.memory_bytes)}"
        )


class Generation:
    """A text that is generated while it is read: iterate over its pieces, or take `text`.

    Attributes:
        figures: what it cost; None until the last piece.
        quiet: the figures are not wanted.

    Raises:
        UserError: options are wrong, the model or its tokenizer cannot be loaded, or the prompt is empty or too long.
    """

    def __init__(self, options: GenerateOptions) -> None:
        options.check()
        source = find_model(options.model, options.revision, options.trust_remote_code)
        self._tokenizer = load_tokenizer(source.folder, options.trust_remote_code)
        self._ids = self._prompt(options)
        self._options, self.quiet = options, options.quiet
        self._model = self._load(source.folder, options)
        longest, wanted = max_context(self._model.config), self._ids.shape[1] + options.max_new_tokens
        if longest is not None and wanted > longest:
            raise UserError(
                f"The prompt has {count_of(self._ids.shape[1], 'token')}; with {options.max_new_tokens} new ones that is more "
                f"than the model's {longest} positions. Lower --max-new-tokens, or shorten the prompt."
            )
        self._pieces: list[str] = []
        self.figures: GenerationFigures | None = None

    @property
    def text(self) -> str:
        """The whole text, generated now if it is not yet."""
        if self.figures is None:
            for _ in self:
                pass
        return "".join(self._pieces)

    def __iter__(self) -> Iterator[str]:
        """The pieces of the text, as soon as they are whole words or characters."""
        if self.figures is not None:
            yield from self._pieces
            return
        streamer, problem = _Streamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True), []
        stop = _Stop()

        def work() -> None:
            try:
                with torch.inference_mode():
                    self._model.generate(**self._arguments(), streamer=streamer, stopping_criteria=[stop])
            except BaseException as error:  # raised in the thread that reads
                problem.append(error)
                streamer.end()

        start = time.perf_counter()
        thread = Thread(target=work, name="emp-llm-generate")
        thread.start()
        try:
            for piece in streamer:
                if piece:
                    self._pieces.append(piece)
                    yield piece
        finally:  # the reader may have stopped, by Ctrl-C for one
            stop.now.set()
            thread.join()
        device = self._model.device
        if problem:
            raise problem[0]
        self.figures = GenerationFigures(
            prompt_tokens=self._ids.shape[1],
            new_tokens=len(streamer.times),
            first_seconds=streamer.times[0] - start if streamer.times else 0.0,
            seconds=time.perf_counter() - start,
            memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory(),
        )

    def _prompt(self, options: GenerateOptions) -> Any:
        text = sys.stdin.read() if options.prompt == "-" else options.prompt
        if not text:
            raise UserError("--prompt is empty; give a text to continue.")
        if not options.chat:
            return self._tokenizer(text, return_tensors="pt").input_ids
        if not getattr(self._tokenizer, "chat_template", None):
            raise UserError(f"--chat needs a chat template, and the tokenizer of {options.model} has none. Leave it out.")
        message = [{"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]

    @staticmethod
    def _load(folder: Any, options: GenerateOptions) -> PreTrainedModel:
        device, trust = run_device(options.device), options.trust_remote_code
        if options.runtime == "dense" and not (folder / PACK_NAME).is_file():
            return load_model(folder, device, options.dtype, trust)
        least = LEAST_ZEROS if options.runtime == "sparse" else NEVER
        return load(folder, device=device, dtype=options.dtype, trust_remote_code=trust, least_zeros=least)

    def _arguments(self) -> dict[str, Any]:
        options, ids = self._options, self._ids.to(self._model.device)
        choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if options.temperature > 0:
            torch.manual_seed(options.seed)
            choice = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
        pad = self._tokenizer.pad_token_id
        return choice | {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": options.max_new_tokens,
            "pad_token_id": self._tokenizer.eos_token_id if pad is None else pad,
        }


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends a generation after its current token, once `now` is set."""

    def __init__(self) -> None:
        self.now = Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Whether each sequence ends, bool, shape (sequences,)."""
        return torch.full((input_ids.shape[0],), self.now.is_set(), device=input_ids.device)


class _Streamer(TextIteratorStreamer):  # type: ignore[misc]
    """Notes the time of each new token."""

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """A new token, or at first the prompt."""
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)
