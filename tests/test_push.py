"""Pruned checkpoints on the Hub: pushed to a loopback server and loaded from it, by the unmodified client."""

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_client import Client, card_of, environment, expected, held, shards
from hub_server import CUT, TOKEN, Hub, hub_server
from hub_store import Commit, Repository, User, sha256
from tiny import make_model

from emp_llm.evaluate import evaluate
from emp_llm.models.checkpoint import Checkpoint
from emp_llm.prune import prune
from emp_llm.verify import verify

READER, STRANGER = "hf_markedtokenofareader", "hf_markedtokenofastranger"
SOURCE_CARD = "---\nlicense: llama3.2\nlicense_link: LICENSE\nlanguage: [en]\ntags: [facebook]\n---\n# Dense\n"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(60)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    path = tmp_path_factory.mktemp("suite") / "lamps.toml"
    path.write_text(f'[perplexity]\nfile = "{text}"\njoin = " "\nseqlen = 128\n')
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("dense") / "dense", max_shard_size="25KB")
    (folder / "README.md").write_text(SOURCE_CARD)
    (folder / "LICENSE").write_text("Do what the licence says.\n")
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, dense: Path, suite: Path) -> Path:
    folder = tmp_path_factory.mktemp("pruned") / "pruned"
    prune(str(dense), method="emp-magnitude", output=folder, evaluate=str(suite), device_map="cpu")
    return folder


@pytest.fixture
def pruned(tmp_path: Path, original: Path) -> Path:
    """A pruned checkpoint in four shards, with an evaluation in its report."""
    return Path(shutil.copytree(original, tmp_path / "pruned"))


@pytest.fixture(scope="module")
def hub(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    data = tmp_path_factory.mktemp("data")
    (data / "train.jsonl").write_text("".join(json.dumps({"text": f"Lamp {i} is lit at {i % 24}."}) + "\n" for i in range(300)))
    users = {TOKEN: User("user", organizations=("team",)), READER: User("user", "read"), STRANGER: User("stranger")}
    with hub_server({"user/dense": dense, "user/data": data}, users=users) as server:
        yield server


@pytest.fixture(scope="module")
def client(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    one = Client(hub.endpoint, tmp_path_factory.mktemp("home"), TOKEN)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _nothing_left_over(hub: Hub) -> None:
    hub.put.clear()
    hub.faults.clear()
    hub.part_size, hub.ignored = None, ()


def command(hub: Hub, home: Path, *arguments: object, token: str = TOKEN) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(
        line,
        cwd=home.parent,
        env=environment(hub.endpoint, home, token),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert token not in done.stdout + done.stderr
    return done


def test_pushed_from_the_shell_and_loaded_by_its_name(hub: Hub, client: Client, pruned: Path, tmp_path: Path) -> None:
    (pruned / "notes.txt").write_text("mine")
    (pruned / "extra.safetensors").write_bytes(b"not of this model")
    done = command(hub, tmp_path / "home", "emp_llm.push", pruned, "user/lamps")
    assert done.returncode == 0, done.stderr
    assert "/user/lamps holds " in done.stdout
    (pruned / "notes.txt").unlink()
    (pruned / "extra.safetensors").unlink()
    files = expected(pruned)  # with the card, and without anything that the upload left behind
    assert held(hub, "user/lamps") == files
    assert {path.split("/")[0] for path in files} >= {
        "README.md",
        "LICENSE",
        "config.json",
        "tokenizer.json",
        "emp_report.json",
    }
    assert len(hub.repositories["user/lamps"].branches["main"]) == 2  # one commit on top of the Hub's own
    assert sorted(hub.put) == sorted(sha256(path.read_bytes()) for path in shards(pruned))
    assert verify(pruned)["differences"] == []
    assert not any(TOKEN.encode() in content for content in (*files.values(), *hub.seen))
    loaded = client.call("weights", name="user/lamps")["result"]
    assert loaded == client.call("weights", name=str(pruned))["result"]
    assert len(loaded) == 21


def test_the_card(hub: Hub, client: Client, pruned: Path, dense: Path, suite: Path, tmp_path: Path) -> None:
    (pruned / "emp_llm").mkdir()
    (pruned / "emp_llm" / "kept_fractions.png").write_bytes(PNG)
    (tmp_path / "beta.png").write_bytes(PNG + b"2")
    results = tmp_path / "pruned-lamps.json"
    measured = evaluate(str(pruned), suite=f"{suite},seqlen=64", baseline=str(dense), output=results, device_map="cpu")
    both = [results, results.with_name("pruned-lamps-baseline.json")]
    for path, accuracy in zip(both, (0.5, 0.625), strict=True):
        record = json.loads(path.read_text())
        answers = {"acc,none": accuracy, "acc_stderr,none": 0.25, "alias": "lamps"}
        counts = {"lamps": {"original": 8, "effective": 8}}
        record["tasks"] = {"lamps": {"results": {"lamps": answers}, "n-samples": counts, "n-shot": {"lamps": 0}, "groups": []}}
        path.write_text(json.dumps(record))
    record = json.loads(results.read_text())
    record["made_by"]["quantization"] = {"bits": "4bit"}
    (tmp_path / "pruned-4bit.json").write_text(json.dumps(record))
    both.append(tmp_path / "pruned-4bit.json")
    done = client.call(
        "push", folder=pruned, repository="user/card", results=both, plot=[tmp_path / "beta.png"], base_model="user/dense"
    )
    assert "result" in done, done
    assert hub.repositories["user/card"].head().title == "dense pruned by emp-magnitude with emp-llm", "of no machine's folder"
    metadata, body = card_of(hub, "user/card")
    assert metadata["license"] == "llama3.2"
    assert metadata["language"] == ["en"]
    assert metadata["base_model"] == "user/dense"
    assert metadata["base_model_relation"] == "finetune"
    assert (metadata["library_name"], metadata["pipeline_tag"]) == ("transformers", "text-generation")
    assert {"emp-llm", "emp-magnitude", "pruning", "facebook"} <= set(metadata["tags"])
    report = json.loads((pruned / "emp_report.json").read_text())
    (index,) = metadata["model-index"]
    assert index["name"] == "card"
    values = {metric["name"]: metric["value"] for entry in index["results"] for metric in entry["metrics"]}
    assert values == {
        "perplexity per token, blocks of 128": report["evaluation"]["pruned"]["perplexity"]["perplexity"],
        "perplexity per token, blocks of 64": measured["perplexity"]["perplexity"],
        "acc by lm-eval, 0-shot": 0.5,
    }
    dense_perplexity = report["evaluation"]["dense"]["perplexity"]["perplexity"]
    for words in (
        report["command"],
        f"{100 * report['targets']['sparsity_of_targets']:.2f} % of the targets",
        f"| perplexity, blocks of 128 | {dense_perplexity:.3f} |",
        "| perplexity, blocks of 64 |",
        "| lamps acc | 62.50 ±25.00 | 50.00 ±25.00 | -12.50 |",
        "neither smaller nor faster",
        'from_pretrained("user/card"',
        "![kept fractions](emp_llm/kept_fractions.png)",
        "![beta](emp_llm/beta.png)",
        "[LICENSE](LICENSE)",
        "| beta | `1.0` |",
    ):
        assert words in body, words
    assert held(hub, "user/card")["emp_llm/pruned-lamps.json"] == results.read_bytes()
    assert verify(pruned)["differences"] == []


def test_a_card_of_ones_own_is_kept(hub: Hub, client: Client, pruned: Path) -> None:
    (pruned / "README.md").write_text("---\nlicense: mit\n---\nMy own words.\n")
    done = client.call("push", folder=pruned, repository="user/own")
    assert "pushed as it is" in done["log"]
    assert held(hub, "user/own")["README.md"] == b"---\nlicense: mit\n---\nMy own words.\n"


def test_a_second_push_sends_only_what_changed(hub: Hub, client: Client, pruned: Path) -> None:
    assert len(client.call("push", folder=pruned, repository="team/twice")["result"]["uploaded"]) == len(expected(pruned))
    hub.put.clear()
    again = client.call("push", folder=pruned, repository="team/twice")["result"]
    assert (again["uploaded"], again["deleted"], hub.put) == ([], [], [])
    (pruned / "README.md").write_text("---\nlicense: mit\n---\nOther words.\n")
    assert client.call("push", folder=pruned, repository="team/twice")["result"]["uploaded"] == ["README.md"]
    assert len(hub.repositories["team/twice"].branches["main"]) == 3
    assert hub.put == []


def test_large_files_in_parts(hub: Hub, client: Client, pruned: Path) -> None:
    hub.part_size = 20_000
    client.call("push", folder=pruned, repository="user/parts")
    assert held(hub, "user/parts") == expected(pruned)
    assert len(hub.put) == sum(-(-path.stat().st_size // 20_000) for path in shards(pruned))


def test_a_dry_run_touches_nothing(hub: Hub, client: Client, pruned: Path) -> None:
    before = expected(pruned)
    done = client.call("push", folder=pruned, repository="user/dry", dry_run=True)["result"]
    assert done["dry_run"]
    assert {path: len(content) for path, content in before.items()}.items() <= done["files"].items()
    assert done["bytes"] == sum(done["files"].values())
    assert expected(pruned) == before
    assert "user/dry" not in hub.repositories


def test_an_interrupted_push_goes_on_behind_the_last_finished_file(
    hub: Hub, client: Client, pruned: Path, tmp_path: Path
) -> None:
    slow = sha256(shards(pruned)[2].read_bytes())
    fault = hub.fail("PUT", slow, hold=True)
    line = [sys.executable, "-m", "emp_llm.push", str(pruned), "user/cut"]
    with subprocess.Popen(line, env=environment(hub.endpoint, tmp_path / "home", TOKEN), stderr=subprocess.PIPE) as process:
        assert fault.reached.wait(60)
        while len(hub.put) < len(shards(pruned)) - 1:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert held(hub, "user/cut") == {}
    finished = set(hub.put)
    hub.put.clear()
    client.call("push", folder=pruned, repository="user/cut")
    assert hub.put == [slow]
    assert slow not in finished
    assert held(hub, "user/cut") == expected(pruned)


@pytest.mark.parametrize(
    ("method", "pattern", "more"),
    [
        ("POST", "repos/create", {"status": 429, "headers": {"Retry-After": "0"}, "times": 3}),
        ("POST", "preupload", {"status": 503, "headers": {"Retry-After": "0"}}),
        ("PUT", "/lfs/", {"status": 500}),
        ("PUT", "/lfs/", {"status": CUT}),
        ("POST", "objects/batch", {"status": 502, "body": b"<html>"}),
        ("POST", "validate-yaml", {"status": 502, "body": b"<html>", "headers": {"Retry-After": "0"}}),
        ("POST", "/commit/", {"status": 500, "headers": {"Retry-After": "0"}}),
        ("POST", "/commit/", {"status": 500, "headers": {"Retry-After": "0"}, "done": True}),
        ("POST", "/commit/", {"status": CUT, "done": True}),
        ("POST", "/commit/", {"status": 409, "headers": {"Retry-After": "0"}}),
    ],
)
def test_what_passes_is_tried_again(
    hub: Hub, client: Client, pruned: Path, method: str, pattern: str, more: dict[str, Any]
) -> None:
    name = f"user/again-{len(hub.repositories)}"
    fault = hub.fail(method, pattern, **more)
    done = client.call("push", folder=pruned, repository=name)
    assert "result" in done, done
    assert fault.reached.is_set()
    assert held(hub, name) == expected(pruned)
    assert len(hub.repositories[name].branches["main"]) == 2  # also where the commit was made and its answer was lost
    assert "signature" not in done["log"]


def test_a_commit_of_someone_else_in_between_stays(hub: Hub, client: Client, pruned: Path) -> None:
    client.call("push", folder=pruned, repository="user/shared")
    (pruned / "README.md").write_text("---\nlicense: mit\n---\nNew words.\n")
    repository = hub.repositories["user/shared"]
    real = Repository.commit

    def meddle(*arguments: Any) -> Commit:
        Repository.commit = real  # type: ignore[method-assign]
        repository.branches["main"].append(Commit("f" * 40, "theirs", repository.head().files | {"theirs.md": b"theirs"}))
        return real(*arguments)

    Repository.commit = meddle  # type: ignore[method-assign]
    done = client.call("push", folder=pruned, repository="user/shared")
    assert done["result"]["uploaded"] == ["README.md"]
    assert held(hub, "user/shared") == expected(pruned) | {"theirs.md": b"theirs"}


@pytest.mark.parametrize(
    ("repository", "token", "fault", "sentence"),
    [
        ("user/no", None, None, "you are not logged in to the Hub. Run hf auth login"),
        ("user/no", "hf_markedtokenofnobody", None, "the Hub does not accept your token."),
        ("user/no", READER, None, "your token may not write there (You don't have the rights to write to user/no)."),
        ("user/data", STRANGER, None, "your token may not write there"),
        ("name", "", None, "Give USER/NAME"),
        ("user/no name", "", None, "is not a name on the Hub"),
        ("user/no", "", ("POST", "repos/create", {"status": 503, "headers": {"Retry-After": "0"}, "times": 9}), "answers 503,"),
        (
            "user/no",
            "",
            ("POST", "repos/create", {"status": 402, "body": b'{"error": "Pay first."}'}),
            "the Hub answered 402 (Pay first).",
        ),
        (
            "user/some-conflict",
            "",
            ("POST", "/commit/", {"status": 409, "headers": {"Retry-After": "0"}, "times": 9}),
            "while it is being",
        ),
        ("user/some-refused", "", ("PUT", "/lfs/", {"status": 403, "times": 9}), "your token may not write there"),
    ],
)
def test_what_does_not_pass_is_said_in_a_sentence(
    hub: Hub, client: Client, pruned: Path, repository: str, token: str | None, fault: Any, sentence: str
) -> None:
    if fault is not None:
        hub.fail(fault[0], fault[1], **fault[2])
    done = client.call("push", token, folder=pruned, repository=repository)
    assert sentence in done["error"], done
    assert "\n" not in done["error"]
    assert "signature" not in done["error"]
    assert "user/no" not in hub.repositories


def test_other_weights_are_not_replaced_unasked(hub: Hub, client: Client, pruned: Path, dense: Path, tmp_path: Path) -> None:
    refused = client.call("push", folder=pruned, repository="user/dense")
    assert "is of other weights" in refused["error"]
    assert len(hub.repositories["user/dense"].branches["main"]) == 1
    prune(str(dense), method="magnitude", output=tmp_path / "other", device_map="cpu")
    client.call("push", folder=tmp_path / "other", repository="user/mine")
    repository = hub.repositories["user/mine"]
    files = repository.head().files | {"model.safetensors": b"older", "pytorch_model.bin": b"older", "picture.svg": b"<svg>"}
    repository.branches["main"].append(Commit("e" * 40, "more", files))
    assert "add --overwrite" in client.call("push", folder=pruned, repository="user/mine")["error"]
    done = client.call("push", folder=pruned, repository="user/mine", overwrite=True)["result"]
    assert sorted(done["deleted"]) == ["model.safetensors", "pytorch_model.bin"]
    assert held(hub, "user/mine") == expected(pruned) | {"picture.svg": b"<svg>"}


def test_branches_of_one_repository(hub: Hub, client: Client, pruned: Path, dense: Path, tmp_path: Path) -> None:
    prune(str(dense), method="emp-magnitude", beta=1.5, output=tmp_path / "gentle", device_map="cpu")
    client.call("push", folder=pruned, repository="user/sweep")
    for _ in range(2):
        done = client.call("push", folder=tmp_path / "gentle", repository="user/sweep", revision="beta/1.5")["result"]
    assert done["url"].endswith("/user/sweep/tree/beta/1.5")
    assert held(hub, "user/sweep", "beta/1.5") == expected(tmp_path / "gentle")
    assert held(hub, "user/sweep") == expected(pruned)
    loaded = client.call("weights", name="user/sweep", revision="beta/1.5")["result"]
    assert loaded == client.call("weights", name=str(tmp_path / "gentle"))["result"]
    assert "add --overwrite" in client.call("push", folder=pruned, repository="user/sweep", revision="beta/1.5")["error"]
    assert "no such branch" in client.call("push", folder=pruned, repository="user/sweep", revision="refs/pr/7")["error"]


def test_private_means_private(hub: Hub, client: Client, pruned: Path) -> None:
    client.call("push", folder=pruned, repository="user/secret", private=True)
    assert hub.repositories["user/secret"].private
    assert "result" in client.call("push", folder=pruned, repository="user/secret", private=True)
    assert "no such repository" in client.call("find_model", STRANGER, name="user/secret")["error"]
    client.call("push", folder=pruned, repository="user/open")
    assert "it is there and public" in client.call("push", folder=pruned, repository="user/open", private=True)["error"]


def test_what_is_not_the_checkpoint_is_not_published(hub: Hub, client: Client, pruned: Path, tmp_path: Path) -> None:
    def error(folder: Path = pruned, **more: Any) -> str:
        return str(client.call("push", folder=folder, repository="user/wrong", **more)["error"])

    assert "give the --output folder of a finished prune" in error(tmp_path)
    (tmp_path / "r.json").write_text("[]")
    assert "is not a name on the Hub" in client.call("push", folder=pruned, repository="user/a b", dry_run=True)["error"]
    (tmp_path / "again").mkdir()
    for folder in (tmp_path, tmp_path / "again"):
        (folder / "plot.png").write_bytes(PNG)
    assert "two files of this name" in error(plot=[tmp_path / "plot.png", tmp_path / "again" / "plot.png"])
    assert "not a results file" in error(results=[tmp_path / "r.json"])
    assert "no such PNG file" in error(plot=[tmp_path / "r.json"])
    record = {"made_by": {"model": {"sha256_of_samples": "other"}}, "model": "m", "complete": True, "pruned": None}
    (tmp_path / "r.json").write_text(json.dumps(record))
    assert "it is of other weights than those in" in error(results=[tmp_path / "r.json"])
    ours = {"model": Checkpoint(pruned).fingerprint, "text": {"file": "of another suite"}}
    (tmp_path / "ours.json").write_text(json.dumps(record | {"made_by": ours}))
    assert "r.json: it is of other weights" in error(results=[tmp_path / "ours.json", tmp_path / "r.json"])
    (pruned / "README.md").write_text(f"log in with {TOKEN}")
    assert "your access token stands in it" in error()
    (pruned / "README.md").unlink()
    assert "user/wrong" not in hub.repositories
    hub.ignored = ("config.json",)
    assert "config.json is not in the commit" in error()
    commits = len(hub.repositories["user/wrong"].branches["main"])
    hub.ignored = ()
    shard = shards(pruned)[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert "it has another size than emp_manifest.json" in error()
    shard.unlink()
    assert "it is missing, but named by emp_manifest.json" in error()
    assert len(hub.repositories["user/wrong"].branches["main"]) == commits


def test_a_damaged_file_is_seen_before_the_commit(hub: Hub, client: Client, pruned: Path) -> None:
    shard = shards(pruned)[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused = client.call("push", folder=pruned, repository="user/damaged")["error"]
    assert "it is not the file that was written" in refused
    assert "python -m emp_llm.verify" in refused
    assert held(hub, "user/damaged") == {}


def test_prune_pushes_and_everything_comes_by_its_name(hub: Hub, client: Client, suite: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    line = ["emp_llm.prune", "--model", "user/dense", "--calibration", "user/data,join= ", "--samples", 8, "--seqlen", 64]
    done = command(hub, home, *line, "--push-to-hub", "team/lamps", "--private", "--push-revision", "emp", "--evaluate", suite)
    assert done.returncode == 0, done.stderr
    assert "team/lamps/tree/emp holds" in done.stdout
    folder = tmp_path / "dense-emp-wanda"
    assert held(hub, "team/lamps", "emp") == expected(folder)
    assert hub.repositories["team/lamps"].private
    card = (folder / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert (metadata["base_model"], metadata["license"]) == ("user/dense", "llama3.2")
    assert "--push-to-hub team/lamps" in card
    assert verify(folder)["differences"] == []
    asked = {"model": "team/lamps", "revision": "emp", "suite": str(suite), "output": tmp_path / "r.json"}
    measured = client.call("evaluate", **asked, device_map="cpu")["result"]
    report = json.loads((folder / "emp_report.json").read_text())
    assert measured["perplexity"]["perplexity"] == report["evaluation"]["pruned"]["perplexity"]["perplexity"]
    assert measured["pruned"]["of"] == "user/dense"


@pytest.mark.skipif(importlib.util.find_spec("hf_xet") is None, reason="the client has no xet")
def test_a_hub_without_xet_is_told_apart(hub: Hub, client: Client, pruned: Path) -> None:
    refused = client.call("push_by_xet", folder=pruned, repository="user/xet")
    assert "has no xet storage" in refused["error"]
    assert "Set HF_HUB_DISABLE_XET=1" in refused["error"]


def test_a_failed_push_does_not_lose_the_prune(hub: Hub, client: Client, tmp_path: Path) -> None:
    def failing(token: str | None = "", **more: Any) -> str:
        asked = {"model": "user/dense", "method": "magnitude", "output": tmp_path / "out", "push_to_hub": "user/late"} | more
        return str(client.call("prune", token, **asked)["error"])

    assert "not logged in" in failing(None)
    assert "your token is for reading only" in failing(READER)
    assert "does not accept your token" in failing("hf_markedtokenofnobody")
    assert "add --push-to-hub" in failing(push_to_hub=None, private=True)
    assert not (tmp_path / "out").exists()
    hub.fail("POST", "/commit/", 403, times=9)
    told = failing(push_revision="b", private=True)
    assert "your token may not write there" in told
    again = told.partition("push it again: ")[2]
    assert again == f"python -m emp_llm.push {tmp_path / 'out'} user/late --private --revision b"
    hub.faults.clear()
    client.call("push", folder=tmp_path / "out", repository="user/late", private=True, revision="b")
    assert held(hub, "user/late", "b") == expected(tmp_path / "out")
