"""Models by their Hub id, through the unmodified client, from a loopback server and from the
cache; retries and errors.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
from hub_client import Client
from hub_server import COMMIT, TOKEN, Commit, Hub, repository_of
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import http_backoff

from emp_llm.common.errors import UserError
from emp_llm.models import hub as hub_calls
from emp_llm.models.hub import HUB_ERRORS, explain_hub_errors, with_retries

NOT_CACHED = "not (or not all of it) in the Hub cache, and the Hub cannot be reached"
NOTHING = (
    "someone/nothing: no such folder here, and no such repository on the Hub (or it is private)."
)


@pytest.fixture(scope="module")
def offline(hub_home: Path) -> Iterator[Client]:
    """A client of the same cache without a network."""
    one = Client("http://127.0.0.1:9", hub_home, TOKEN, HF_HUB_OFFLINE="1")
    yield one
    one.close()


def test_download_prune_and_prune_again_offline(
    hub: Hub, client: Client, offline: Client, tmp_path: Path
) -> None:
    line = "prune --method magnitude --model someone/tiny"
    client.succeed(tmp_path, line)
    code, _, err = client.command(tmp_path, line, "--revision", "v9", "--output", "b")
    assert (code, "no such branch or revision" in err) == (2, True), err
    assert not any(path.endswith((".bin", ".pth")) for path in hub.asked)
    output = tmp_path / "tiny-magnitude"  # named after the repository, in the current folder
    report = (output / "emp_report.json").read_text()
    assert COMMIT in report
    assert TOKEN not in report
    offline.succeed(tmp_path, line, "--output", "again")
    assert oracle.shards(output) == oracle.shards(tmp_path / "again")


def test_a_dry_run_downloads_no_weights(client: Client, hub_home: Path, tmp_path: Path) -> None:
    line = "prune --model someone/fresh"
    known_by_weights = ("--method", "emp-magnitude", "--dry-run")
    wanda = client.succeed(tmp_path, line, "--dry-run")
    magnitude = client.succeed(tmp_path, line, *known_by_weights)
    neurons = client.succeed(
        tmp_path, line, "--structure", "neurons", "--method", "magnitude", "--dry-run"
    )
    assert not [*hub_home.rglob("models--someone--fresh/**/*.safetensors")]
    assert "a dry run downloads none" in magnitude
    assert "found: " in neurons
    client.succeed(tmp_path, line, "--method", "magnitude", "--output", "whole")
    assert (
        client.succeed(tmp_path, line, "--dry-run").partition("disk")[0]
        == wanda.partition("disk")[0]
    )
    curve = client.succeed(tmp_path, line, *known_by_weights)
    assert "beta" in curve
    assert "a dry run downloads none" not in curve


def test_a_packed_model_runs_by_its_name(client: Client, checkpoint: Path, tmp_path: Path) -> None:
    """Files that a model does not need, such as its card and its norms, are not downloaded."""
    line = ("--prompt", "The lamp", "--max-new-tokens", 4, "--device", "cpu")
    code, text, err = client.command(tmp_path, "generate --model user/packed", *line)
    assert (code, "linear layers packed" in err) == (0, True), err
    assert (
        client.succeed(tmp_path, f"generate --model {checkpoint}", *line, "--runtime", "dense")
        == text
    )


def test_a_revision_is_compared_with_its_main_branch(
    hub: Hub, client: Client, hub_dense: Path, hub_suite: Path, tmp_path: Path
) -> None:
    """Of the same repository; the baseline may name a revision of its own."""
    hub.repositories["user/two"] = repository = repository_of("user/two", hub_dense)
    other = hashlib.sha1(b"other").hexdigest()
    files = dict(repository.head().files)
    name = next(name for name in files if name.endswith(".safetensors"))
    files[name] = files[name][:-2] + b"\x40\x40"
    repository.branches["other"] = [Commit(other, "other weights", files)]
    line = (
        "evaluate --device-map cpu --model user/two --suite",
        f"{hub_suite},limit=1",
    )
    for revision, baseline, shown in (
        (("--revision", "other"), "user/two", (COMMIT, other)),
        ((), "user/two@other", (other, COMMIT)),
    ):
        out = client.succeed(
            tmp_path, *line, *revision, "--baseline", baseline, "--output", "a.json", "--overwrite"
        )
        assert out.split()[:3] == [f"user/two@{shown[0][:8]}", f"user/two@{shown[1][:8]}", "change"]
        records = [
            json.loads((tmp_path / each).read_text()) for each in ("a-baseline.json", "a.json")
        ]
        assert [record["revision"] for record in records] == list(shown)
        assert records[0]["perplexity"]["loss"] != records[1]["perplexity"]["loss"]
    found = client.call("find_model", name="user/two@other", revision="main")
    assert found["error"].endswith(
        "revision main and user/two@other both name a revision; give only one."
    )


def test_refusals_of_the_hub_are_sentences(client: Client, offline: Client, tmp_path: Path) -> None:
    def refusal(name: str, asked: Client = client, **more: str) -> str:
        return str(asked.call("find_model", name=name, **more)["error"])

    assert refusal("someone/nothing") == NOTHING
    assert refusal("someone/gated").startswith("someone/gated: you have no access to it yet.")
    assert re.search(r"pickles are not loaded here.*convert it once", refusal("someone/pickles"))
    gguf = (
        r"someone/gguf: it holds its weights as GGUF \(tiny-Q4_K_M\.gguf\).*safetensors "
        r"checkpoint"
    )
    assert re.search(gguf, refusal("someone/gguf"))
    assert "not a Hub id" in refusal("no such name")
    assert "is for Hub ids" in refusal(str(tmp_path), revision="main")
    assert "no such model folder" in refusal(str(tmp_path / "none"))
    assert NOT_CACHED in refusal("someone/other", offline)


def test_of_a_planned_model_only_the_config_is_downloaded(
    hub: Hub, client: Client, offline: Client
) -> None:
    assert NOT_CACHED in offline.call("find_config", name="user/dense")["error"]
    before = len(hub.asked)
    folder = client.call("find_config", name="user/dense")["result"]
    fetched = [path for path in hub.asked[before:] if "/resolve/" in path]
    assert fetched
    assert all(path.endswith("/config.json") for path in fetched), fetched
    assert offline.call("find_config", name="user/dense")["result"] == folder
    assert ("no config.json in this repository") in client.call("find_config", name="someone/gguf")[
        "error"
    ]
    assert client.call("find_config", name="someone/nothing")["error"] == NOTHING
    assert ("no such branch or revision") in client.call(
        "find_config", name="user/dense", revision="v9"
    )["error"]


def test_transient_errors_of_a_download_are_retried(hub: Hub, client: Client) -> None:
    for times, found in ((2, True), (9, False)):
        hub.faults.clear()
        hub.fail("GET", "/api/models/someone/tiny", 503, headers={"Retry-After": "0"}, times=times)
        done = client.call("find_model", name="someone/tiny")
        assert ("result" in done) == found, done
        assert done["log"].splitlines() == ["the Hub answered 503; next try in 0 s."] * 2
    assert "the Hub keeps answering 503. Try later." in done["error"]
    hub.faults.clear()


def test_without_a_network_the_cache_is_used(client: Client, hub_home: Path) -> None:
    cached = client.call("find_model", name="someone/tiny")["result"]
    lost = Client("http://127.0.0.1:9", hub_home, TOKEN)
    try:
        found = lost.call("find_model", name="someone/tiny")
        assert NOT_CACHED in lost.call("find_model", name="someone/other")["error"]
    finally:
        lost.close()
    assert found["result"] == cached
    assert "the Hub at http://127.0.0.1:9 cannot be reached (" in found["log"]


def answer(status: int, **headers: str) -> Exception:
    response = SimpleNamespace(status_code=status, headers=headers, request=None)
    return HfHubHTTPError(f"answer {status}", response=response)


NOT_TRANSIENT = [answer(404), answer(403), ValueError("ours"), OSError("disk")]


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        *(
            ([error] * 9, [1, 2, 4, 8, 16])
            for error in (HUB_ERRORS[0]("connection failed"), answer(503), answer(412))
        ),
        ([json.JSONDecodeError("a proxy's page", "<", 0)] * 9, [1, 2, 4, 8, 16]),
        (
            [
                answer(429, **{"Retry-After": "7"}),
                answer(429, **{"Retry-After": "99999"}),
                KeyError("last"),
            ],
            [7, 600],
        ),
        *(
            ([answer(429, **{"Retry-After": asked}), KeyError("last")], [1])
            for asked in ("²", "9" * 5000, "-1", "soon")
        ),
        *(([error], []) for error in NOT_TRANSIENT),
    ],
    ids=str,
)
def test_transient_errors_are_retried(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    errors: list[Exception],
    wanted: list[int],
) -> None:
    """Five times, after longer and longer waits, or those that the Hub asks for."""
    waits = []
    monkeypatch.setattr(hub_calls.time, "sleep", waits.append)
    left = iter(errors)

    def call() -> None:
        raise next(left)

    with pytest.raises(type(errors[len(wanted)])):
        with_retries(call)
    assert (waits, len(caplog.messages)) == (wanted, len(wanted))


class XetAuthenticationError(PermissionError):
    """As hf_xet raises it."""

    __module__ = "hf_xet"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ValueError("LFS batch API returned errors:\nEncountered error: `Storage is full`"),
            "Storage is full",
        ),
        (XetAuthenticationError("Authentication error"), "does not accept your token"),
        (
            ConnectionError("Network error: https://x/y?signature=secret"),
            "https://x/y). Check the network.",
        ),
        *(
            (error, None)
            for error in (
                RuntimeError("CUDA is broken"),
                ValueError("a defect"),
                FileNotFoundError(2, "no file"),
            )
        ),
    ],
)
def test_errors_that_the_user_can_mend_are_sentences(error: Exception, words: str | None) -> None:
    """Defects keep their traceback."""
    with (
        pytest.raises(type(error) if words is None else UserError) as caught,
        explain_hub_errors("user/name"),
    ):
        raise error
    if words is None:
        assert caught.value is error
    else:
        assert str(caught.value).startswith("user/name: ")
        assert words in str(caught.value)
        assert "secret" not in str(caught.value)


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


def write_suite(folder: Path) -> None:
    (folder / "tasks").mkdir()
    (folder / "tasks" / "questions.yaml").write_text(QUESTIONS)
    (folder / "mine.toml").write_text(SUITE)


def test_a_suite_prepared_with_a_network_runs_without(
    client: Client, offline: Client, tmp_path: Path
) -> None:
    model = Path(__file__).parents[1] / "scripts" / "demo" / "model"
    write_suite(tmp_path)
    line = f"evaluate --suite mine.toml --model {model}"
    code, _, err = offline.command(tmp_path, line)
    assert (
        code,
        "task questions: its data set someone/questions cannot be loaded" in err,
        "emp-llm fetch" in err,
    ) == (
        2,
        True,
        True,
    )
    code, out, err = client.command(tmp_path, "fetch", "--suite", "mine.toml")
    assert (code, err) == (0, "")
    assert out == "in the cache:\n  text someone/text/train: 8 rows\n  task questions: 8 examples\n"
    assert "8 examples by lm-eval" in offline.succeed(tmp_path, line)


def test_what_the_jobs_of_a_study_need_is_fetched(hub: Hub, client: Client, tmp_path: Path) -> None:
    write_suite(tmp_path)
    line = ["fetch", "someone/tiny", "--suite", "mine.toml", "--calibration"]
    out = client.succeed(tmp_path, *line, "user/data,column=text,demo")
    assert out.startswith("in the cache:\n  someone/tiny\n  text user/data/train: ")
    code, _, err = client.command(tmp_path, *line, "c4")
    assert (code, "allenai/c4/en/train is streamed from the Hub" in err) == (2, True)
    code, _, err = client.command(tmp_path, "fetch", "someone/nothing")
    assert (code, NOTHING in err) == (2, True)


def test_signatures_of_addresses_are_not_logged(
    hub: Hub, client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client logs the address of each upload that it repeats, and its query may be a
    signature.
    """
    shown = StringIO()
    for handler in logging.getLogger("huggingface_hub").handlers:
        monkeypatch.setattr(handler, "stream", shown)
    address = f"{hub.endpoint}/upload/part?X-Amz-Signature=secret&b=c"
    hub.fail("PUT", "/upload/part", 503, times=9)
    with suppress(HfHubHTTPError):
        http_backoff("PUT", address, max_retries=2, base_wait_time=0.01)
    logging.getLogger("huggingface_hub.another").error("no %s, (%s)", address, f"'{address}'")
    assert shown.getvalue().count(f"{hub.endpoint}/upload/part") >= 3
    assert "secret" not in shown.getvalue() + caplog.text
    assert "retry" in shown.getvalue().lower()
