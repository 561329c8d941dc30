"""The model card and the other published records: their content, and that they name no folder of
a machine or a user.
"""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from hub_client import Client, card_of, contents, held
from hub_server import Hub

from emp_llm import prune, push, verify
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.common.errors import UserError
from emp_llm.options.words import recipe_of
from emp_llm.records.base import (
    CalibrationRecord,
    ModelIdentity,
    ModelSource,
    TextRecord,
    converted,
)
from emp_llm.records.run_report import RunReport, Sweep, SweepMadeBy
from emp_llm.reporting.push import Origin, _public, cached_repository, card_text, public


def add_task(path: Path, accuracy: float) -> None:
    """Add the numbers of a task to a results file."""
    record = json.loads(path.read_text())
    answers = {"acc,none": accuracy, "acc_stderr,none": 0.25, "alias": "lamps"}
    counts = {"lamps": {"original": 8, "effective": 8}}
    record["tasks"] = {
        "lamps": {
            "results": {"lamps": answers},
            "n-samples": counts,
            "n-shot": {"lamps": 0},
            "groups": [],
        }
    }
    path.write_text(json.dumps(record))


def test_the_card(
    hub: Hub, client: Client, checkpoint: Path, hub_dense: Path, hub_suite: Path, tmp_path: Path
) -> None:
    results = tmp_path / "pruned-lamps.json"
    asked = {
        "suite": f"{hub_suite},seqlen=64",
        "baseline": str(hub_dense),
        "output": results,
        "device_map": "cpu",
    }
    client.call("evaluate", model=checkpoint, **asked)
    measured = json.loads(results.read_text())["perplexity"]["perplexity"]
    both = [results, results.with_name("pruned-lamps-baseline.json")]
    for path, accuracy in zip(both, (0.5, 0.625), strict=True):
        add_task(path, accuracy)
    record = json.loads(results.read_text())
    record["made_by"]["quantization"] = {"bits": "4bit"}
    (tmp_path / "pruned-4bit.json").write_text(json.dumps(record))
    both.append(tmp_path / "pruned-4bit.json")
    evidence = {"results": both, "base_model": "user/dense"}
    done = client.call("push", folder=checkpoint, repository="user/card", **evidence)
    assert "result" in done, done
    assert hub.repositories["user/card"].head().title == (
        "dense pruned by emp-magnitude with emp-llm"
    )
    metadata, body = card_of(hub, "user/card")
    assert (metadata["license"], metadata["language"]) == ("llama3.2", ["en"])
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("user/dense", "finetune")
    assert (metadata["library_name"], metadata["pipeline_tag"]) == (
        "transformers",
        "text-generation",
    )
    assert {"emp-llm", "emp-magnitude", "pruning", "facebook"} <= set(metadata["tags"])
    report = json.loads((checkpoint / "emp_report.json").read_text())
    (index,) = metadata["model-index"]
    assert index["name"] == "card"
    values = {
        metric["name"]: metric["value"] for entry in index["results"] for metric in entry["metrics"]
    }
    assert values == {
        "perplexity per token, blocks of 128": report["evaluation"]["pruned"]["perplexity"][
            "perplexity"
        ],
        "perplexity per token, blocks of 64": measured,
        "acc by lm-eval, 0-shot": 0.5,
    }
    dense_perplexity = report["evaluation"]["dense"]["perplexity"]["perplexity"]
    for words in (
        json.loads(held(hub, "user/card")["emp_report.json"])["command"],
        f"{100 * report['targets']['sparsity_of_targets']:.2f} % of the targets",
        f"| perplexity, blocks of 128 | {dense_perplexity:.3f} |",
        "| perplexity, blocks of 64 |",
        "| lamps acc | 62.50 ± 25.00 | 50.00 ± 25.00 | -12.50 ± 35.36 ‡ |",
        "neither smaller nor faster",
        'from_pretrained("user/card"',
        "[LICENSE](LICENSE)",
        '| counts | `{"effective": {"beta": 1.0, "order": 2.0, "neff_dtype": "float64", ',
        '| targets | `{"layers": "mlp", "ignore": null, "tower": "language", ',
    ):
        assert words in body, words
    pushed = json.loads(held(hub, "user/card")["emp_llm/pruned-lamps.json"])
    assert pushed["model"] == "pruned"
    assert pushed["perplexity"]["perplexity"] == measured
    assert verify(checkpoint).differences == []


HOSTILE = [
    "[x](javascript:alert(1))",
    "\\[x](javascript:alert(1))",
    "<script>alert(1)</script>",
    "<javascript:alert(1)>",
    "![x](https://example.com/track.png)",
    "\n\n# A heading",
    "# A heading",
    "\n```\n# out of the fence",
    "`code` | cell | cell",
    "\x1b[31mred\x1b[0m\x07",
    "a\u202eb\u2028# c",
    "'; echo x; '",
]


@pytest.mark.parametrize("written", HOSTILE)
def test_a_card_shows_texts_of_records_as_they_are(checkpoint: Path, written: str) -> None:
    """Names, commands, warnings and versions come from files of others: no link, heading, HTML
    or code comes of them.
    """
    markdown = pytest.importorskip("markdown_it")

    def html(report: RunReport, name: str | None) -> str:
        card = card_text(
            "user/card",
            None,
            report,
            Origin(name, None, {"license": name}),
            [],
            None,
            [],
            ["LICENSE"],
        )
        assert all(letter.isprintable() or letter == "\n" for letter in card)
        return str(
            markdown.MarkdownIt("gfm-like", {"linkify": False}).render(card.partition("\n---\n")[2])
        )

    def tags(page: str) -> list[str]:
        return re.findall(r"</?(?!code|em>|strong>)\w+[^>]*>", page)

    values = json.loads((checkpoint / "emp_report.json").read_text())
    harmless = []
    hostile = []
    for found, word in ((harmless, "word"), (hostile, written)):
        changed = values | {"command": word, "warnings": [word], "versions": {word: word}}
        changed["source"] = values["source"] | {"model": word, "revision": None}
        changed["recipe"] = values["recipe"] | {
            "score": {"own": {"function": f"{word}:own", "source": ""}}
        }
        report = converted(changed, RunReport, "a report")
        found += [tags(html(report, None)), tags(html(report, word))]
    assert hostile == harmless


PERPLEXITY = {"perplexity": 10.0, "tokens": 64, "blocks": 2, "block_length": 32}
HEALING = {
    "steps": 30,
    "tokens": 9,
    "best": 30,
    "curve": [[0, 0.5], [30, 0.25]],
    "origin": {"text": {"file": "lamps.txt"}},
    "command": "emp-llm heal pruned",
}
FIT = {"model.layers.0.mlp.up_proj": {"tokens": 9, "error_after": 0.5}}
ADMM = {"admm": {"refit": {}, "penalty": 0.15, "stages": 6}}
STRUCTURE: dict[str, Any] = {
    "layers": {},
    "dense": {"parameters": 9, "bytes": 9},
    "pruned": {"parameters": 8, "bytes": 8},
    "difference": 0.0,
    "config": {"intermediate_size": 8},
}
# What a report holds, how its card begins, and what the card says of the other weights.
MADE: dict[str, tuple[dict[str, Any], str, str]] = {
    "pruned": ({}, "without retraining, by Effective", "zero. All other weights are those of"),
    "refitted": (
        {"fits": FIT, "update": {"refit": {}}},
        " by Effective .*, with a refit of the kept weights.",
        "The kept weights of 1 matrix were fitted .* All other weights are those of",
    ),
    "healed": (
        {"fits": FIT, "update": ADMM, "heal": {"steps": 30}, "healing": HEALING},
        "with a refit of the kept weights. Then it was trained: healed by self-distillation from "
        "the dense model, 30 steps on lamps.txt.",
        "The kept weights of the pruned matrices were trained by the healing. All other weights",
    ),
    "all healed": (
        {"heal": {"steps": 30, "weights": "all", "labels": 0.2}, "healing": HEALING},
        "Then it was trained: healed by self-distillation from the dense model, with labels of 0.2 "
        "from the text, 30 steps on lamps.txt.",
        "The kept weights of all linear layers in the blocks, and their norms, were trained",
    ),
    "healed in vain": (
        {"heal": {"steps": 30}, "healing": HEALING | {"best": 0}},
        "Then it was trained: .* so its weights are those before the healing",
        "zero. All other weights are those of",
    ),
    "fine-tuned": (
        {"trained": True},
        "Then it was fine-tuned. The removed weights are still zero.",
        "Its other weights may differ from those of the base model",
    ),
    "fine-tuned and healed": (
        {"trained": True, "heal": {"steps": 30}, "healing": HEALING},
        "Then it was trained: healed by .* It was also fine-tuned. The removed weights",
        "Its other weights may differ from those of the base model",
    ),
    "narrow": (
        {"structure": STRUCTURE, "structured": True},
        "without retraining, by EMP of whole MLP neurons",
        "All kept weights are those of the base model",
    ),
    "narrow and healed": (
        {
            "structure": STRUCTURE,
            "structured": True,
            "heal": {"steps": 30},
            "healing": HEALING,
        },
        "of whole MLP neurons .*Then it was trained",
        "were trained by the healing. All other weights",
    ),
}


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("case", MADE)
def test_a_card_says_how_the_weights_were_made(checkpoint: Path, case: str, checked: bool) -> None:
    """And what was measured of them."""
    changes, summary, others = MADE[case]
    values = json.loads((checkpoint / "emp_report.json").read_text()) | {"evaluation": None}
    nodes = ("update", "heal")
    recipe = values["recipe"]
    if "structured" in changes:
        recipe |= recipe_of("emp-magnitude", structure="neurons").as_dict()
    recipe |= {name: changes[name] for name in nodes if name in changes}
    both = {"text": "lamps.txt", "dense": PERPLEXITY, "pruned": PERPLEXITY | {"perplexity": 11.0}}
    values |= {name: value for name, value in changes.items() if name not in nodes}
    values.pop("structured", None)
    values |= {"recipe": recipe, "check": both if checked else None}
    report = converted(values, RunReport, "a report")
    card = card_text("me/name", None, report, Origin("me/dense", None, {}), [], None, [], [])
    card = card.replace("\\", "")
    assert re.search(rf"huggingface.co/me/dense\), pruned after training.*{summary}", card)
    assert re.search(others, card)
    assert ("without retraining" in card) == (case in ("pruned", "narrow"))
    assert ("emp-llm heal pruned" in card) == ("healing" in changes)
    since = " since it was fine-tuned" if changes.get("trained") else ""
    if checked:
        assert "Perplexity on text of lamps.txt that was held out, 2 x 32 tokens: 10 of" in card
        assert f"has not been evaluated on any other text or benchmark{since}." in card
    else:
        assert f"has not been evaluated on a text or benchmark{since}." in card
    if "structured" in changes:
        assert ("checked before it was trained: the logits" in card) == ("healing" in changes)


def test_a_command_with_an_open_quote() -> None:
    shown = _public("emp-llm prune 'open --output /home/me/out", "command", ())
    assert shlex.split(shown) == ["emp-llm", "prune", "'open", "--output", "out"]


def test_methods_in_words() -> None:
    wanda = recipe_of("wanda")
    admm = recipe_of("emp-admm")
    assert wanda.words.endswith("Wanda scores (weight magnitude times input norm)")
    assert admm.words.endswith(
        "(EMP) with counts by magnitudes, masks and weights searched for together (ADMM)"
    )
    neurons = recipe_of("emp-wanda", refit=True, structure="neurons")
    words = (
        "EMP of whole MLP neurons scored by the norms of their weights and activations, with a "
        "refit of the kept weights"
    )
    assert neurons.words.endswith(words)


def test_a_card_of_ones_own_is_kept(hub: Hub, client: Client, checkpoint: Path) -> None:
    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\nMy own words.\n")
    done = client.call("push", folder=checkpoint, repository="user/own")
    assert "pushed as it is" in done["log"]
    assert held(hub, "user/own")["README.md"] == b"---\nlicense: mit\n---\nMy own words.\n"


def test_evidence_of_something_else_is_refused(
    checkpoint: Path, hub_dense: Path, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    ours = tmp_path / "ours.json"

    def write(path: Path, **more: Any) -> None:
        path.write_text(
            json.dumps({"format": "emp-llm results 4", "model": "m", "complete": True} | more)
        )

    def made_by(identity: str | None, **more: Any) -> dict[str, Any]:
        return {"model": {"identity": identity}} | more

    def refused(says: str, *results: Path) -> None:
        with pytest.raises(UserError, match=says):
            push(checkpoint, "user/wrong", dry_run=True, results=list(results))

    file.write_text("[]")
    refused(f"--results {file}", file)
    write(file, made_by=made_by("other"), complete=False)
    refused("has not finished", file)
    write(
        ours,
        made_by=made_by(identity_of(Checkpoint(checkpoint)), text={"file": "of another suite"}),
    )
    push(checkpoint, "user/right", dry_run=True, results=[ours])
    refused("two files of this name", ours, ours)
    for identity, *others in (("other",), ("other", ours), (identity_of(Checkpoint(hub_dense)),)):
        write(file, made_by=made_by(identity))
        refused("r.json: it is of other weights than those of", *others, file)


def test_nothing_published_names_a_folder(
    hub: Hub, client: Client, hub_dense: Path, text: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home" / "somebody"
    shutil.copytree(hub_dense, home / "models" / "llama")
    for folder in ("texts", "suites"):
        (home / folder).mkdir()
        shutil.copy(text, home / folder / "lamps.txt")
    (home / "suites" / "lamps.toml").write_text(
        '[perplexity]\nfile = "lamps.txt"\njoin = " "\nseqlen = 128\n'
    )
    (home / "map.json").write_text('{"": "cpu"}')
    first = home / "runs" / "first"
    output = home / "runs" / "second"
    prune(model=home / "models" / "llama", method="emp-magnitude", output=first)
    line = [
        f"prune --model models/llama --method wanda --match ../somebody/runs/first "
        f"--output {output}",
    ]
    line += [
        "--calibration",
        home / "texts" / "lamps.txt",
        "--samples",
        4,
        "--seqlen",
        64,
        "--device-map",
        home / "map.json",
    ]
    code, _, err = client.command(home, *line, "--evaluate", "suites/lamps.toml")
    assert code == 0, err
    results = [home / "second.json", home / "second-baseline.json"]
    line = [
        "evaluate --model runs/second --baseline models/llama --suite",
        home / "suites" / "lamps.toml",
    ]
    code, _, err = client.command(home, *line, "--output", results[0])
    assert code == 0, err
    hub.seen.clear()
    done = client.call("push", folder=output, repository="user/public", results=results)
    assert "result" in done, done
    files = held(hub, "user/public")
    assert {
        "README.md",
        "emp_report.json",
        "emp_manifest.json",
        "emp_llm/second.json",
    } <= files.keys()
    assert "emp_llm/activations.safetensors" in files
    for name, content in (
        *files.items(),
        *((f"request {i}", body) for i, body in enumerate(hub.seen)),
    ):
        for trace in (
            b"somebody",
            str(tmp_path).encode(),
            b"models/llama",
            b"runs/",
            b"suites/",
            b"texts/",
        ):
            assert trace not in content, (name, trace)
    report = json.loads(files["emp_report.json"])
    assert report["command"] == (
        "emp-llm prune --model llama --method wanda --match first --output second --calibration "
        "lamps.txt --samples 4 --seqlen 64 --device-map map.json --evaluate lamps.toml"
    )
    assert report["source"]["model"] == "llama"
    assert (
        report["recipe"]["counts"]["match"]["run"]
        == json.loads(files["emp_manifest.json"])["recipe"]["counts"]["match"]["run"]
        == "first"
    )
    (tmp_path / "there" / "emp_llm").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / "there" / name).write_bytes(content)
    found = verify(tmp_path / "there", source=home / "models" / "llama")
    assert found.differences == []
    assert found.checked["targets"] == 6
    assert str(home) in (output / "emp_report.json").read_text(), (
        "the user's own files keep their paths"
    )
    assert contents(output)["README.md"] == files["README.md"]


CACHED = (
    "/home/somebody/.cache/huggingface/hub/models--meta-llama--Llama-2-7b-hf/snapshots/" + "0" * 40
)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/home/somebody/models/llama", "llama"),
        ("~/models/llama/", "llama"),
        ("../llama", "llama"),
        ("runs/first/model", "model"),
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        (CACHED, "meta-llama/Llama-2-7b-hf"),
    ],
)
def test_names_of_models(name: str, shown: str) -> None:
    assert public(CalibrationRecord(model=name)).model == shown
    assert public(TextRecord(dataset=name, join="/", file="/x/a.txt")) == TextRecord(
        dataset=shown, join="/", file="a.txt"
    )


def test_a_folder_that_looks_like_a_hub_id() -> None:
    assert (
        public(ModelSource(model="models/llama", revision=None), {"models/llama"}).model == "llama"
    )
    assert public(ModelSource(model="models/llama", revision="0" * 40)).model == "models/llama"
    assert cached_repository(CACHED) == ("meta-llama/Llama-2-7b-hf", "0" * 40)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("--model=/home/x/llama --output ~/out", "--model=llama --output out"),
        ("--calibration 'c4,file=/home/x/t.txt,join= '", "--calibration 'c4,file=t.txt,join= '"),
        ("--calibration /x/a.txt:9,b/c:8", "--calibration a.txt:9,b/c:8"),
        ("--suite my/a.toml,seqlen=64 --beside a/b", "--suite a.toml,seqlen=64 --beside b"),
        ("--targets q_proj,v_proj --push-to-hub a/b", "--targets q_proj,v_proj --push-to-hub a/b"),
        ("/home/x/jobs/run.py 'a b/c'", "run.py c"),
    ],
)
def test_commands(command: str, shown: str) -> None:
    source = ModelSource(model="models/llama", revision=None)
    made_by = SweepMadeBy(model=ModelIdentity())
    assert (
        public(Sweep(source=source, made_by=made_by, command=f"emp-llm prune {command}")).command
        == f"emp-llm prune {shown}"
    )
