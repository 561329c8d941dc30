"""A client of the loopback Hub, in a process of its own, because huggingface_hub reads the Hub's
address when it is imported; and the fixtures of the tests that download and push.

This file is also the program of that process: it reads calls as lines of JSON, makes them, and
answers each with a line.
"""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hub_server import TOKEN, Hub, User, hub_server
from huggingface_hub.utils import logging as hub_logging
from launch import run_here, words_of
from tiny import make_model

from emp_llm import cli, evaluate, pack, prune, push
from emp_llm.common.errors import UserError
from emp_llm.models.local_model import find_config, find_model


def environment(endpoint: str, home: Path, token: str | None, **more: str) -> dict[str, str]:
    """The environment of a process that uses a loopback Hub and nothing of the user's."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_DATASETS_CACHE")
    }
    clean |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "COLUMNS": "200",
    }
    return clean | ({"HF_TOKEN": token} if token else {}) | more


class Client:
    """Functions of emp_llm, called by name in one process that lives as long as this object.

    Args:
        endpoint: address of the Hub.
        home: its cache.
        token: of the user.
        more: further environment variables.
    """

    def __init__(self, endpoint: str, home: Path, token: str, **more: str) -> None:
        self._token = token
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(endpoint, home, token, **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def call(self, function: str, token: str | None = "", /, **arguments: Any) -> dict[str, Any]:
        """The "result" of a function, or the sentence of its UserError ("error"), and the
        messages that it logged ("log").
        """
        assert self._process.stdin is not None
        changes = {"HF_TOKEN": self._token if token == "" else token}
        print(
            json.dumps([function, arguments, changes], default=str),
            file=self._process.stdin,
            flush=True,
        )
        line = self._process.stdout.readline()
        for secret in (self._token, token):
            assert not secret or secret not in line, "a token was shown"
        answer = json.loads(line)
        assert "broken" not in answer, answer["broken"]
        return answer

    def command(self, folder: Path, *line: object) -> tuple[int, str, str]:
        """Exit code, output and messages of a command line that runs in a folder."""
        done = self.call("command", line=words_of(*line), folder=folder)["result"]
        return done["code"], done["out"], done["err"]

    def succeed(self, folder: Path, *line: object) -> str:
        """The output of a command line that ends well."""
        code, out, err = self.command(folder, *line)
        assert code == 0, err
        return out

    def close(self) -> None:
        self._process.communicate(timeout=30)  # closes both ends


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def held(hub: Hub, name: str, branch: str = "main") -> dict[str, bytes]:
    """Every file of a repository but the Hub's own."""
    files = dict(hub.repositories[name].head(branch).files)
    del files[".gitattributes"]
    return files


def card_of(hub: Hub, name: str) -> tuple[dict[str, Any], str]:
    """Metadata and text of a repository's model card."""
    _, metadata, body = hub.repositories[name].head().files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), body


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


READER = "hf_markedtokenofareader"
STRANGER = "hf_markedtokenofastranger"
SOURCE_CARD = (
    "---\nlicense: llama3.2\nlicense_link: LICENSE\nlanguage: [en]\ntags: "
    "[facebook]\n---\n# Dense\n"
)


@pytest.fixture(scope="session")
def hub_suite(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A suite with a text only."""
    path = tmp_path_factory.mktemp("suite") / "lamps.toml"
    path.write_text(f'[perplexity]\nfile = "{text}"\njoin = " "\nseqlen = 128\n')
    return path


@pytest.fixture(scope="session")
def hub_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in several shards, with a card and a licence."""
    folder = make_model(tmp_path_factory.mktemp("dense") / "dense", max_shard_size="25KB")
    (folder / "README.md").write_text(SOURCE_CARD)
    (folder / "LICENSE").write_text("Do what the licence says.\n")
    return folder


@pytest.fixture(scope="session")
def _hub_pruned(tmp_path_factory: pytest.TempPathFactory, hub_dense: Path, hub_suite: Path) -> Path:
    folder = tmp_path_factory.mktemp("pruned") / "pruned"
    prune(
        model=hub_dense,
        method="emp-magnitude",
        output=folder,
        evaluate=str(hub_suite),
        device_map="cpu",
    )
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path, _hub_pruned: Path) -> Path:
    """A copy of a pruned checkpoint in several shards, with an evaluation in its report."""
    return Path(shutil.copytree(_hub_pruned, tmp_path / "pruned"))


@pytest.fixture(scope="session")
def _repositories(
    hub_dense: Path,
    _hub_pruned: Path,
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("repositories")
    tiny, pickles, lamps, questions, gguf = (
        folder / name for name in ("tiny", "pickles", "lamps", "questions", "gguf")
    )
    shutil.copytree(tiny_llama, tiny)
    (tiny / "original").mkdir()
    (tiny / "original" / "consolidated.00.pth").write_bytes(b"pickle")
    for repository in (pickles, lamps, questions, gguf):
        repository.mkdir()
    (pickles / "config.json").write_text("{}")
    (gguf / "tiny-Q4_K_M.gguf").write_bytes(b"GGUF")
    for repository in (tiny, pickles):
        (repository / "pytorch_model.bin").write_bytes(b"pickle")
    rows = [{"text": f"Lamp {i} is lit at {i % 24}."} for i in range(300)]
    (lamps / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = [
        {"question": f"{i} and {i} is", "options": ["a", "b"], "answer": i % 2} for i in range(8)
    ]
    (questions / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    pack(_hub_pruned, folder / "packed")
    return {
        "user/dense": hub_dense,
        "user/packed": folder / "packed",
        "user/data": lamps,
        "someone/tiny": tiny,
        "someone/fresh": tiny,
        "someone/pickles": pickles,
        "someone/gguf": gguf,
        "someone/questions": questions,
        "someone/text": questions,
    }


@pytest.fixture(scope="session")
def _hub(_repositories: dict[str, Path]) -> Iterator[Hub]:
    users = {
        TOKEN: User("user", organizations=("team",)),
        READER: User("user", "read"),
        STRANGER: User("stranger"),
    }
    with hub_server(_repositories, gated=("someone/gated",), users=users) as server:
        yield server


@pytest.fixture
def hub(_hub: Hub) -> Hub:
    """A Hub with models and data sets of user and someone, and whatever earlier tests pushed;
    without faults.
    """
    _hub.put.clear()
    _hub.faults.clear()
    _hub.seen.clear()
    _hub.ignored = ()
    return _hub


@pytest.fixture(scope="session")
def hub_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clients' cache."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def client(_hub: Hub, hub_home: Path) -> Iterator[Client]:
    """A client that is logged in as user."""
    one = Client(_hub.endpoint, hub_home, TOKEN)
    yield one
    one.close()


def command(line: list[str], folder: str) -> dict[str, Any]:
    """Exit code and output of a command line in a folder."""
    before = os.getcwd()
    os.chdir(folder)
    sys.argv = ["emp-llm", *line]
    try:
        done = run_here(line)
    finally:
        os.chdir(before)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


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
