"""The process behind `hub_client.Client`: it reads calls as lines of JSON, makes them, and
answers each with a line.
"""

import io
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from hashlib import sha256
from typing import Any

import msgspec
from huggingface_hub.utils import logging as hub_logging

from emp_llm import cli, evaluate, prune, push
from emp_llm.common.errors import UserError
from emp_llm.hub.local_model import find_config, find_model


def command(line: list[str], folder: str) -> dict[str, Any]:
    """Exit code and output of a command line in a folder."""
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    root = logging.getLogger()
    handlers = root.handlers
    root.handlers = []
    before = os.getcwd()
    os.chdir(folder)
    sys.argv = ["emp-llm", *line]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main(line)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os.chdir(before)
        root.handlers = handlers
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def weights(name: str, revision: str | None = None) -> dict[str, str]:
    """SHA-256 of every tensor of a model that transformers loads by its name."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(name, revision=revision)
    state = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype="auto").state_dict()
    raw = {
        key: value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for key, value in state.items()
    }
    return {key: sha256(content).hexdigest() for key, content in raw.items()}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "command": command,
    "evaluate": evaluate,
    "find_config": find_config,
    "find_model": find_model,
    "prune": prune,
    "push": push,
    "weights": weights,
}


def answer_to(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of a call, or its error, and what was logged meanwhile."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    root = logging.getLogger()
    hub = hub_logging.get_logger().handlers[0]
    assert isinstance(hub, logging.StreamHandler)
    stream = hub.setStream(log)
    root.addHandler(handler)
    try:
        answer = {"result": msgspec.to_builtins(FUNCTIONS[name](**arguments), enc_hook=str)}
    except UserError as error:
        answer = {"error": str(error), "traceback": traceback.format_exc()}
    except BaseException:
        answer = {"broken": traceback.format_exc()}
    root.removeHandler(handler)
    hub.setStream(stream)
    return answer | {"log": log.getvalue()}


def shorten_waits() -> None:
    """Let the client wait for less before it repeats a request. test_hub checks how long emp-llm
    waits.
    """
    whole = time.sleep
    time.sleep = lambda seconds: whole(min(seconds, 0.05))


def main() -> None:
    shorten_waits()
    UserError.in_shell = True  # as in the tests themselves
    answers = sys.stdout
    sys.stdout = sys.stderr
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    hub_logging.get_logger().propagate = False  # as for a command
    for noisy in cli._NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for line in sys.stdin:
        name, arguments, environment = json.loads(line)
        for key, value in environment.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
        print(json.dumps(answer_to(name, arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
