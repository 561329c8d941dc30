"""A client of the loopback Hub in a process of its own, as the Hub's address is read when its library is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from hub_server import Hub

_PROGRAM = """
import io, json, logging, os, sys, traceback
from pathlib import Path
from hashlib import sha256
answers, sys.stdout = sys.stdout, sys.stderr
logging.basicConfig(level=logging.INFO, format="%(message)s")
from emp_llm.cli import _NOISY
for noisy in _NOISY:
    logging.getLogger(noisy).setLevel(logging.WARNING)
from emp_llm.models.errors import UserError
from emp_llm.evaluate import evaluate
from emp_llm.prune import prune
from emp_llm.push import push
from emp_llm.services.hub import find_model
from huggingface_hub.utils import logging as hub_logging

def push_by_xet(**arguments):
    from huggingface_hub import constants
    constants.HF_HUB_DISABLE_XET = False
    try:
        return push(**arguments)
    finally:
        constants.HF_HUB_DISABLE_XET = True

def weights(name, revision=None):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    AutoTokenizer.from_pretrained(name, revision=revision)
    state = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype="auto").state_dict()
    return {key: sha256(value.contiguous().flatten().view(__import__("torch").uint8).numpy().tobytes()).hexdigest()
            for key, value in state.items()}

for line in sys.stdin:
    name, arguments, environment = json.loads(line)
    for key, value in environment.items():
        os.environ.pop(key, None) if value is None else os.environ.update({key: value})
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    loggers = [logging.getLogger(), hub_logging.get_logger()]
    theirs = loggers[1].handlers[0].setStream(log)
    loggers[0].addHandler(handler)
    answer = {}
    try:
        for key in ("folder", "output"):
            if key in arguments:
                arguments[key] = Path(arguments[key])
        for key in ("results", "plot"):
            if key in arguments:
                arguments[key] = [Path(each) for each in arguments[key]]
        answer["result"] = globals()[name](**arguments)
    except UserError as error:
        answer["error"] = str(error)
        answer["traceback"] = traceback.format_exc()
    except BaseException:
        answer["broken"] = traceback.format_exc()
    loggers[0].removeHandler(handler)
    loggers[1].handlers[0].setStream(theirs)
    answer["log"] = log.getvalue()
    print(json.dumps(answer), file=answers, flush=True)
"""


def environment(endpoint: str, home: Path, token: str | None) -> dict[str, str]:
    """Of a process that uses a loopback Hub and nothing of the user's."""
    clean = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_DATASETS_CACHE")}
    clean |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "COLUMNS": "200"}
    return clean | ({"HF_TOKEN": token} if token else {})


class Client:
    """Functions of emp_llm, called by name in one process that lives as long as this does."""

    def __init__(self, endpoint: str, home: Path, token: str) -> None:
        self._token = token
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env=environment(endpoint, home, token),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def call(self, function: str, token: str | None = "", /, **arguments: Any) -> dict[str, Any]:
        """What a function returns ("result"), or the sentence of its UserError ("error"), and what it logged ("log")."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        changes = {"HF_TOKEN": self._token if token == "" else token}
        print(json.dumps([function, arguments, changes], default=str), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        for secret in (self._token, token):
            assert not secret or secret not in line, "a token was shown"
        answer: dict[str, Any] = json.loads(line)
        assert "broken" not in answer, answer["broken"]
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=30)  # closes both ends


def expected(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def held(hub: Hub, name: str, branch: str = "main") -> dict[str, bytes]:
    files = dict(hub.repositories[name].head(branch).files)
    del files[".gitattributes"]
    return files


def card_of(hub: Hub, name: str) -> tuple[dict[str, Any], str]:
    _, metadata, body = hub.repositories[name].head().files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), body


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
