"""Models by their Hub id, through the unmodified client, from a loopback server and from the cache."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hub_server import COMMIT, TOKEN, hub_server


def command(name: str, endpoint: str, home: Path, *arguments: object, **more: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", f"emp_llm.{name}", *map(str, arguments)]
    environment = (
        os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"} | more
    )
    environment.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in more else None
    done = subprocess.run(line, cwd=home.parent, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert TOKEN not in done.stdout + done.stderr
    return done


def prune(endpoint: str, home: Path, *arguments: object, **more: str) -> "subprocess.CompletedProcess[str]":
    return command("prune", endpoint, home, "--method", "magnitude", *arguments, **more)


def test_download_prune_and_prune_again_offline(models: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(models("llama"), tmp_path / "repository")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"pickle")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    home = tmp_path / "home"
    with hub_server({"someone/tiny": folder}) as hub:
        done = prune(hub.endpoint, home, "--model", "someone/tiny")
        assert done.returncode == 0, done.stderr
        wrong = prune(hub.endpoint, home, "--model", "someone/tiny", "--revision", "v9", "--output", "b")
        assert (wrong.returncode, "no revision 'v9'" in wrong.stderr) == (2, True), wrong.stderr
    assert not any(path.endswith((".bin", ".pth")) for path in hub.asked)
    output = tmp_path / "tiny-magnitude"  # named after the repository, in the current folder
    report = (output / "emp_report.json").read_text()
    assert COMMIT in report
    assert TOKEN not in report
    again = prune("http://127.0.0.1:9", home, "--model", "someone/tiny", "--output", "again", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    for shard in output.glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "again" / shard.name).read_bytes()


REFUSALS = """
import sys
from emp_llm.models.errors import UserError
from emp_llm.services.hub import find_model
for name in sys.argv[1:]:
    try:
        find_model(name)
    except UserError as error:
        print(error)
"""


def test_what_the_hub_refuses_is_said_in_a_sentence(tmp_path: Path) -> None:
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    (pickles / "config.json").write_text("{}")
    (pickles / "pytorch_model.bin").write_bytes(b"pickle")

    def refusals(endpoint: str, *names: str) -> list[str]:
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
        environment.pop("HF_HUB_OFFLINE", None)
        line = [sys.executable, "-c", REFUSALS, *names]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=True)
        assert TOKEN not in done.stdout + done.stderr
        return done.stdout.splitlines()

    with hub_server({"someone/pickles": pickles}, gated=("someone/gated",)) as hub:
        nothing, gated, pickled = refusals(hub.endpoint, "someone/nothing", "someone/gated", "someone/pickles")
    assert nothing == "someone/nothing: no such folder here, and no such repository on the Hub (or it is private)."
    assert gated.startswith("someone/gated: access to it must be granted first.")
    assert "pickles are not loaded here" in pickled
    assert "convert it once" in pickled
    (unreachable,) = refusals("http://127.0.0.1:9", "someone/other")
    assert "not in the Hub cache, and the Hub cannot be reached" in unreachable


QUESTIONS = """
task: questions
dataset_path: someone/questions
output_type: multiple_choice
test_split: train
doc_to_text: question
doc_to_target: answer
doc_to_choice: options
metric_list: [{metric: acc}]
metadata: {version: 1.0}
"""
SUITE = """
[perplexity]
dataset = "someone/text"
column = "question"
join = " "
seqlen = 64

[[tasks]]
names = ["questions"]
folder = "tasks"
"""


def test_a_suite_prepared_with_a_network_runs_without(tmp_path: Path) -> None:
    model = Path(__file__).parents[1] / "scripts" / "demo" / "model"
    home, data = tmp_path / "home", tmp_path / "data"
    data.mkdir()
    rows = [{"question": f"{i} and {i} is", "options": ["a", "b"], "answer": i % 2} for i in range(8)]
    (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "questions.yaml").write_text(QUESTIONS)
    (tmp_path / "mine.toml").write_text(SUITE)
    nowhere = "http://127.0.0.1:9"
    lost = command("evaluate", nowhere, home, "--suite", "mine.toml", "--model", model, HF_HUB_OFFLINE="1")
    assert lost.returncode == 2
    assert "task questions: its data set someone/questions cannot be loaded" in lost.stderr
    assert "fetch them on a node with a network, with --prepare" in lost.stderr
    with hub_server({"someone/questions": data, "someone/text": data}) as hub:
        ready = command("evaluate", hub.endpoint, home, "--suite", "mine.toml", "--prepare")
    assert ready.returncode == 0, ready.stderr
    assert ready.stdout == "in the cache:\n  text someone/text/train: 8 rows\n  task questions: 8 examples\n"
    assert ready.stderr == ""
    done = command("evaluate", nowhere, home, "--suite", "mine.toml", "--model", model, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "8 examples by lm-eval" in done.stdout
