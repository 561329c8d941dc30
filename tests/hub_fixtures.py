"""Fixtures of the tests that push: a loopback Hub, a client of it, and a pruned checkpoint; made
once, when first asked for.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_client import Client
from hub_server import TOKEN, Hub, hub_server
from hub_store import User
from tiny import make_model

from emp_llm import pack, prune

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
    models: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("repositories")
    tiny, pickles, lamps, questions, gguf = (
        folder / name for name in ("tiny", "pickles", "lamps", "questions", "gguf")
    )
    shutil.copytree(models("llama"), tiny)
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
