"""Several ranks of a command, started as torchrun starts them, but in forks of this process, which
has imported everything.

A process of its own costs ten seconds of imports for each rank; a fork costs none.
"""

import importlib
import io
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

IMPORTS = [
    "accelerate",
    "lm_eval",
    "lm_eval.models.huggingface",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.opt.modeling_opt",
    "emp_llm.calibration.passes",
    "emp_llm.evaluation.evaluate",
    "emp_llm.models.hub",
    "emp_llm.evaluation.evaluate",
    "emp_llm.pruning.writing",
]
Prepare = Callable[[], Callable[[], None] | None]


@dataclass(frozen=True)
class Launched:
    """Exit codes, standard outputs and standard errors of the ranks, in their order."""

    codes: list[int | None]
    outputs: list[str]
    errors: list[str]

    @property
    def output(self) -> str:
        return "".join(self.outputs)

    @property
    def error(self) -> str:
        return "".join(self.errors)


def words_of(first: object = "", *rest: object) -> list[str]:
    """A command line: its first argument may hold several words, the others are one each."""
    return [*str(first).split(), *map(str, rest)]


def run_here(line: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command line within this process: exit code, output and messages are those of one of
    its own.
    """
    from emp_llm.cli import main

    out = io.StringIO()
    err = io.StringIO()
    ended = 0
    root = logging.getLogger()
    level, handlers, root.handlers = root.level, root.handlers, []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main(line)
    except SystemExit as end:
        ended = int(end.code or 0)
    finally:
        root.handlers = handlers
        root.setLevel(level)
        signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(line, ended, out.getvalue(), err.getvalue())


def launch(
    count: int,
    folder: Path,
    logs: Path,
    *line: object,
    prepare: Prepare | None = None,
    work: Callable[[int], None] | None = None,
) -> Launched:
    """Run a command line by several ranks.

    Args:
        count: of the ranks.
        folder: where they run.
        logs: an empty folder elsewhere, for what they print.
        line: of emp-llm.
        prepare: called by each rank first, and what it returns last.
        work: called with the number of a rank, in place of a command.
    """
    for name in IMPORTS:
        importlib.import_module(name)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]

    def run(index: int) -> None:
        """One rank: torchrun's environment, its own log, then the command."""
        # Torch makes a new pool in a fork; if several threads ask for it at once, one finds none.
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(index),
            LOCAL_RANK=str(index),
            WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(count),
        )
        os.environ.update(
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
            COLUMNS="200",
            TOKENIZERS_PARALLELISM="false",
        )
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{logs}/{index}.{kind}", os.O_WRONLY | os.O_CREAT), number)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        _forget()
        from emp_llm.cli import _with_exit_codes, main

        finish = None if prepare is None else prepare()
        try:
            main(words_of(*line)) if work is None else _with_exit_codes(work)
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            if finish is not None:
                finish()
            sys.stdout.flush()
            sys.stderr.flush()

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(index,)) for index in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        if rank.is_alive():
            rank.kill()
            rank.join()
    texts = [
        [(logs / f"{index}.{kind}").read_text() for index in range(count)]
        for kind in ("out", "err")
    ]
    return Launched([rank.exitcode for rank in ranks], *texts)


def _forget() -> None:
    """Forget what this fork inherits and a new process would not have: the rank of its parent,
    and pytest's log handlers.
    """
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    logging.getLogger().handlers = []
