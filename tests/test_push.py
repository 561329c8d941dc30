"""Pruned checkpoints on the Hub: pushed to a loopback server and loaded from it, by the
unmodified client.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hub_client import READER, STRANGER, Client, card_of, contents, environment, held, shards
from hub_server import CUT, TOKEN, Commit, Hub, Repository, sha256

from emp_llm import bench, prune, verify
from emp_llm.checkpoint.files import file_hash

# Pushed in a form without folders of the machine, so not byte for byte.
PUBLIC = {"emp_report.json", "emp_manifest.json", "emp_llm/activations.safetensors"}


def check_pushed(hub: Hub, name: str, folder: Path, branch: str = "main", **others: bytes) -> None:
    """A branch holds the files of a folder, and some others, and is sound by its own manifest."""
    there = held(hub, name, branch)
    here = contents(folder)
    assert there.keys() == here.keys() | others.keys()
    for path, content in (here | others).items():
        assert path in PUBLIC or there[path] == content, path
    with TemporaryDirectory() as scratch:
        for path, content in there.items():
            (Path(scratch) / path).parent.mkdir(exist_ok=True)
            (Path(scratch) / path).write_bytes(content)
        assert verify(Path(scratch)).differences == []


def test_pushed_from_the_shell_and_loaded_by_its_name(
    hub: Hub, client: Client, checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "notes.txt").write_text("mine")
    code, out, err = client.command(tmp_path, f"push {checkpoint} user/lamps")
    assert code == 0, err
    assert "/user/lamps holds " in out
    (checkpoint / "notes.txt").unlink()
    # With the card, and without anything that the upload left behind.
    check_pushed(hub, "user/lamps", checkpoint)
    files = {path.split("/")[0] for path in contents(checkpoint)}
    assert files >= {"README.md", "LICENSE", "config.json", "tokenizer.json", "emp_report.json"}
    # One commit on top of the Hub's own.
    assert len(hub.repositories["user/lamps"].branches["main"]) == 2
    assert sorted(hub.put) == sorted(sha256(path.read_bytes()) for path in shards(checkpoint))
    assert verify(checkpoint).differences == []
    assert not any(
        TOKEN.encode() in content for content in (*held(hub, "user/lamps").values(), *hub.seen)
    )
    loaded = client.call("weights", name="user/lamps")["result"]
    assert loaded == client.call("weights", name=str(checkpoint))["result"]
    assert len(loaded) == 21


def test_a_dry_run_changes_nothing_and_a_second_push_sends_only_changes(
    hub: Hub, client: Client, checkpoint: Path, hub_dense: Path
) -> None:
    before = contents(checkpoint)
    where = {"folder": checkpoint, "repository": "team/twice"}
    done = client.call("push", **where, dry_run=True)["result"]
    assert done["commit"] is None
    assert contents(checkpoint) == before
    assert "team/twice" not in hub.repositories
    client.call("push", **where)
    assert done["files"] == {
        path: len(content) for path, content in held(hub, "team/twice").items()
    }
    hub.put.clear()
    again = client.call("push", **where)["result"]
    commits = hub.repositories["team/twice"].branches["main"]
    assert (len(commits), commits[-1].oid) == (2, again["commit"])
    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\nOther words.\n")
    real = Repository.commit

    def meddle(*arguments: Any) -> Commit:
        Repository.commit = real  # type: ignore[method-assign]
        commits.append(Commit("f" * 40, "theirs", commits[-1].files | {"theirs.md": b"theirs"}))
        return real(*arguments)

    Repository.commit = meddle  # type: ignore[method-assign]
    assert "result" in client.call("push", **where)
    # Of someone else, during the push.
    check_pushed(hub, "team/twice", checkpoint, **{"theirs.md": b"theirs"})
    assert len(commits) == 4
    first = commits[1].files
    last = commits[-1].files
    assert {path for path in last if first.get(path) != last[path]} == {"README.md", "theirs.md"}
    assert hub.put == []


def test_a_folder_that_verify_rejects_is_not_pushed(
    hub: Hub, client: Client, checkpoint: Path, tmp_path: Path
) -> None:
    """Neither is another folder, nor a token."""

    def error(folder: Path = checkpoint, repository: str = "user/unsound", **more: Any) -> str:
        return str(client.call("push", folder=folder, repository=repository, **more)["error"])

    shard = shards(checkpoint)[1]
    extra = checkpoint / "extra.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for dry_run in (True, False):
        told = error(dry_run=dry_run)
        assert f"{shard.name}: its BLAKE3 is" in told
        assert f"emp-llm verify {checkpoint}" in told
    shard.write_bytes(content[:-1])
    assert f"{shard.name}: it has {len(content) - 1:,} bytes" in error()
    shard.unlink()
    assert f"{shard.name}: it is missing" in error()
    shard.write_bytes(content)
    extra.write_bytes(b"not of this model")
    assert "extra.safetensors: weights that the manifest does not name" in error()
    extra.unlink()
    assert "give the --output folder of a finished prune" in error(tmp_path)
    assert "is not a name on the Hub" in error(repository="user/a b", dry_run=True)
    (checkpoint / "README.md").write_text(f"log in with {TOKEN}")
    assert "it holds your access token" in error()
    (checkpoint / "README.md").unlink()
    assert "user/unsound" not in hub.repositories
    hub.ignored = ("config.json",)
    assert "config.json is missing from the commit" in error()


def test_hidden_files_pickles_and_what_links_point_to_are_not_pushed(
    client: Client, checkpoint: Path, tmp_path: Path
) -> None:
    """A manifest of an older version, or one that someone made, can name them."""
    where = {"folder": checkpoint, "repository": "user/quiet", "dry_run": True}
    before = client.call("push", **where)["result"]["files"]
    path = checkpoint / "emp_manifest.json"
    manifest = json.loads(path.read_text())
    for name in (".git/config", "training_args.bin", "emp_llm/.notes.json"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text("secret")
        manifest["files"][name] = {"bytes": 6, "blake3": file_hash(checkpoint / name)}
    path.write_text(json.dumps(manifest))
    (tmp_path / "secret").write_text("secret")
    assert client.call("push", **where)["result"]["files"].keys() == before.keys()
    (checkpoint / "README.md").unlink(missing_ok=True)
    (checkpoint / "README.md").symlink_to(tmp_path / "secret")
    assert "README.md: a link to" in client.call("push", **where)["error"]


def test_an_interrupted_push_resumes_after_the_last_finished_file(
    hub: Hub, client: Client, checkpoint: Path, tmp_path: Path
) -> None:
    slow = sha256(shards(checkpoint)[2].read_bytes())
    fault = hub.fail("PUT", slow, hold=True)
    line = [sys.executable, "-m", "emp_llm", "push", str(checkpoint), "user/cut"]
    with subprocess.Popen(
        line, env=environment(hub.endpoint, tmp_path / "home", TOKEN), stderr=subprocess.PIPE
    ) as process:
        assert fault.reached.wait(60)
        while len(hub.put) < len(shards(checkpoint)) - 1:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert held(hub, "user/cut") == {}
    finished = set(hub.put)
    hub.put.clear()
    client.call("push", folder=checkpoint, repository="user/cut")
    assert hub.put == [slow]
    assert slow not in finished
    check_pushed(hub, "user/cut", checkpoint)


@pytest.mark.parametrize(
    ("method", "pattern", "more"),
    [
        ("POST", "repos/create", {"status": 429, "headers": {"Retry-After": "0"}, "times": 3}),
        ("PUT", "/lfs/", {"status": CUT}),
        ("POST", "objects/batch", {"status": 502, "body": b"<html>"}),
        ("POST", "/commit/", {"status": 500, "headers": {"Retry-After": "0"}, "done": True}),
        ("POST", "/commit/", {"status": CUT, "done": True}),
        ("POST", "/commit/", {"status": 409, "headers": {"Retry-After": "0"}}),
    ],
)
def test_transient_errors_are_retried(
    hub: Hub, client: Client, checkpoint: Path, method: str, pattern: str, more: dict[str, Any]
) -> None:
    name = f"user/again-{len(hub.repositories)}"
    fault = hub.fail(method, pattern, **more)
    done = client.call("push", folder=checkpoint, repository=name)
    assert "result" in done, done
    assert fault.reached.is_set()
    check_pushed(hub, name, checkpoint)
    # Also if the commit was made and its answer was lost.
    assert len(hub.repositories[name].branches["main"]) == 2


NOW = {"Retry-After": "0"}
FULL = {
    "objects": [
        {"oid": "0" * 64, "size": 1, "error": {"code": 507, "message": "Your storage is full."}}
    ]
}
LICENCE = {"errors": [{"message": "license must be one of"}]}


@pytest.mark.parametrize(
    ("repository", "token", "fault", "sentence"),
    [
        ("user/no", None, None, "you are not logged in to the Hub. Run hf auth login"),
        ("user/no", "hf_markedtokenofnobody", None, "the Hub does not accept your token."),
        (
            "user/no",
            READER,
            None,
            "your token may not write there (You don't have the rights to write to user/no).",
        ),
        ("user/data", STRANGER, None, "your token may not write there"),
        ("name", "", None, "give USER/NAME"),
        ("user/no name", "", None, "is not a name on the Hub"),
        ("user/no", "", ("POST", "repos/create", 503, b"", NOW), "keeps answering 503"),
        (
            "user/no",
            "",
            ("POST", "repos/create", 402, b'{"error": "Pay first."}'),
            "402 (Pay first).",
        ),
        (
            "user/some-conflict",
            "",
            ("POST", "/commit/", 409, b"", NOW),
            "it changed during the push",
        ),
        ("user/some-refused", "", ("PUT", "/lfs/", 403), "your token may not write there"),
        (
            "user/some-full",
            "",
            ("POST", "objects/batch", 200, json.dumps(FULL).encode()),
            "Your storage is full.",
        ),
        (
            "user/some-card",
            "",
            ("POST", "validate-yaml", 400, json.dumps(LICENCE).encode()),
            "license must be one of",
        ),
    ],
)
def test_lasting_errors_of_the_hub_are_sentences(
    hub: Hub,
    client: Client,
    checkpoint: Path,
    repository: str,
    token: str | None,
    fault: Any,
    sentence: str,
) -> None:
    if fault is not None:
        hub.fail(
            **dict(zip(("method", "pattern", "status", "body", "headers"), fault, strict=False)),
            times=9,
        )
    done = client.call("push", token, folder=checkpoint, repository=repository)
    assert sentence in done["error"], done
    assert "\n" not in done["error"]
    assert "signature" not in done["error"]
    assert "user/no" not in hub.repositories


def test_other_weights_are_replaced_only_on_request(
    hub: Hub, client: Client, checkpoint: Path, hub_dense: Path, tmp_path: Path
) -> None:
    """Neither in a repository nor in a branch; and what is private stays so."""
    refused = client.call("push", folder=checkpoint, repository="user/dense")
    assert "holds other weights" in refused["error"]
    assert len(hub.repositories["user/dense"].branches["main"]) == 1
    gentle = tmp_path / "gentle"
    mine = {"folder": checkpoint, "repository": "user/mine"}
    prune(model=hub_dense, method="emp-magnitude", beta=1.5, output=gentle, device_map="cpu")
    client.call("push", folder=gentle, repository="user/mine", private=True)
    repository = hub.repositories["user/mine"]
    assert repository.private
    assert "no such repository" in client.call("find_model", STRANGER, name="user/mine")["error"]
    files = repository.head().files | {
        "model.safetensors": b"older",
        "pytorch_model.bin": b"older",
        "picture.svg": b"<svg>",
    }
    repository.branches["main"].append(Commit("e" * 40, "more", files))
    assert "add --overwrite" in client.call("push", **mine)["error"]
    client.call("push", **mine, private=True, overwrite=True)
    check_pushed(hub, "user/mine", checkpoint, **{"picture.svg": b"<svg>"})
    for _ in range(2):
        done = client.call(
            "push", folder=gentle, repository="user/mine", revision="beta/1.5", overwrite=True
        )["result"]
    assert done["url"].endswith("/user/mine/tree/beta/1.5")
    check_pushed(hub, "user/mine", gentle, "beta/1.5", **{"picture.svg": b"<svg>"})
    check_pushed(hub, "user/mine", checkpoint, **{"picture.svg": b"<svg>"})
    loaded = client.call("weights", name="user/mine", revision="beta/1.5")["result"]
    assert loaded == client.call("weights", name=str(gentle))["result"]
    assert "add --overwrite" in client.call("push", **mine, revision="beta/1.5")["error"]
    assert "no such branch" in client.call("push", **mine, revision="refs/pr/7")["error"]
    public = client.call("push", folder=checkpoint, repository="user/data", private=True)
    assert "the repository is public" in public["error"]


def test_prune_pushes_and_everything_loads_by_its_name(
    hub: Hub, client: Client, hub_suite: Path, tmp_path: Path
) -> None:
    line = [
        "prune --model user/dense --samples 8 --seqlen 64 --calibration",
        "user/data,join= ",
    ]
    line += [
        "--push-to-hub",
        "team/lamps",
        "--private",
        "--push-revision",
        "emp",
        "--evaluate",
        hub_suite,
    ]
    code, out, err = client.command(tmp_path, *line)
    assert code == 0, err
    assert "team/lamps/tree/emp holds" in out
    folder = tmp_path / "dense-emp-wanda"
    check_pushed(hub, "team/lamps", folder, "emp")
    assert hub.repositories["team/lamps"].private
    card = (folder / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert (metadata["base_model"], metadata["license"]) == ("user/dense", "llama3.2")
    assert "--push-to-hub team/lamps" in card
    assert "--calibration 'user/data,join= '" in card
    assert verify(folder).differences == []
    asked = {
        "model": "team/lamps",
        "revision": "emp",
        "suite": str(hub_suite),
        "output": tmp_path / "r.json",
    }
    client.call("evaluate", **asked, device_map="cpu")
    measured = json.loads((tmp_path / "r.json").read_text())
    report = json.loads((folder / "emp_report.json").read_text())
    assert (
        measured["perplexity"]["perplexity"]
        == report["evaluation"]["pruned"]["perplexity"]["perplexity"]
    )
    assert measured["pruned"]["of"] == "user/dense"


def test_a_failed_push_does_not_lose_the_prune(hub: Hub, client: Client, tmp_path: Path) -> None:
    def failing(token: str | None = "", **more: Any) -> str:
        asked = {
            "model": "user/dense",
            "method": "magnitude",
            "output": tmp_path / "out",
            "push_to_hub": "user/late",
        } | more
        return str(client.call("prune", token, **asked)["error"])

    assert "not logged in" in failing(None)
    assert "your token can only read" in failing(READER)
    assert "does not accept your token" in failing("hf_markedtokenofnobody")
    assert "add --push-to-hub" in failing(push_to_hub=None, private=True)
    assert not (tmp_path / "out").exists()
    hub.fail("POST", "/commit/", 403, times=9)
    told = failing(push_revision="b", private=True)
    assert "your token may not write there" in told
    again = told.partition("repeat the push: ")[2]
    assert again == f"emp-llm push {tmp_path / 'out'} user/late --private --revision b"
    hub.faults.clear()
    code, _, err = client.command(tmp_path, *again.split()[1:])
    assert code == 0, err
    check_pushed(hub, "user/late", tmp_path / "out", "b")


def test_a_model_with_fewer_heads_and_neurons(
    hub: Hub, client: Client, checkpoint: Path, hub_dense: Path, tmp_path: Path
) -> None:
    """Pushed with a card that says what was removed, and what that buys; the smaller model loads
    by its name.
    """
    out = tmp_path / "narrow"
    options = {
        "structure": "both",
        "method": "magnitude",
        "sparsity": 0.5,
        "width_multiple": 8,
        "quiet": True,
    }
    prune(str(hub_dense), output=out, **options)
    how = {
        "prompt_tokens": 8,
        "new_tokens": 2,
        "repeats": 1,
        "device": "cpu",
        "quiet": True,
    }
    benched = bench(str(checkpoint), output=tmp_path / "bench.json", **how)
    client.call("push", folder=out, repository="user/narrow")
    client.call(
        "push", folder=checkpoint, repository="user/fast", results=[tmp_path / "bench.json"]
    )
    check_pushed(hub, "user/narrow", out)
    card = held(hub, "user/narrow")["README.md"].decode()
    assert (
        "a fixed share of whole attention heads and MLP neurons scored by the norms of their "
        "weights"
    ) in card
    assert "A smaller dense model" in card
    assert "structured-pruning" in card
    assert "unstructured" not in card
    assert str(tmp_path) not in card
    assert (
        client.call("weights", name="user/narrow")["result"]
        == client.call("weights", name=str(out))["result"]
    )
    speed = card_of(hub, "user/fast")[1].partition("## Speed")[2].partition("\n## ")[0]
    for words in (
        f"({benched.batches[0].decode.ratio:.2f} x,",
        f"{benched.sparsity:.1%}",
        f"| {checkpoint.name} |",
    ):
        assert words in speed
    assert str(checkpoint.parent) not in speed
