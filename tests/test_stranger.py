"""Records of a stranger: nothing that their recipes name is found, imported, run or copied."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import report_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from write_schemas import FORMATS

from emp_llm import Recipe, UserError, masks_of, prune, prune_model, reapply_mask
from emp_llm.calibration.activations import METADATA_KEY, Activations
from emp_llm.checkpoint.files import file_hash, own_line
from emp_llm.pruning.scores import GivenScores
from emp_llm.records.base import FileRecord, read_record
from emp_llm.records.run_report import read_report, read_sweep
from emp_llm.study.plan import Study, StudyModel, StudyPoint, study_text

# In the folder of the checkpoint, where a record may lead, and in the current folder.
TRAPS = ("st/emp_llm/criterion.py", "trap.py")
TRAP = """
from pathlib import Path

Path({trace!r}).touch()


def f(weight):
    return weight.abs()


class Score:
    pass
"""
HASH = "0" * 64
_OPENED: list[str] = []  # Python files that the process reads as code, by its own loaders


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook, which stays for the life of the process."""
    if event == "exec":
        _OPENED.append(str(getattr(arguments[0], "co_filename", "")))


sys.addaudithook(_note)


def own(**fields: Any) -> dict[str, Any]:
    return {"score": {"own": fields}}


def things(folder: Path) -> dict[str, dict[str, Any]]:
    """Recipes with what is somebody's own, by a name for each."""
    named = {
        "file": "st/emp_llm/criterion.py:f",
        "module": "trap:f",
        "path": f"{folder / 'trap.py'}:f",
        "folder as a module": "st.emp_llm.criterion:f",
    }
    found = {f"{how}, no hash": own(function=name) for how, name in named.items()}
    found |= {f"{how}, a hash": own(function=name, source=HASH) for how, name in named.items()}
    scores = str(folder / "trap.safetensors")
    return found | {
        "file alone": own(function="trap.py", named="f"),
        "file alone, a hash": own(function="trap.py", named="f", source=HASH),
        "a hash of null": own(function="trap:f", source=None),
        "no file": own(function="trap:f", source=""),
        "a map": own(function="trap:f", norms="relative", score_map="abs"),
        "scores": {"score": {"scores": {"scores": scores}}},
        "scores, null": {"score": {"scores": {"scores": scores, "digest": None}}},
        "scores, a hash": {"score": {"scores": {"scores": scores, "digest": HASH}}},
        "a class": {"score": {"trap:Score": {}}},
        "units": {"score": {"unit": {"unit_criterion": "trap.py:f"}}},
        "a search": {"update": {"st/emp_llm/criterion.py:Score": {}}},
        "a search, a path": {"update": {f"{folder / 'trap.py'}:Score": {"refit": {}}}},
        "flat": {"method": "emp-f", "criterion": "trap.py:f"},
    }


JOBS = {
    "prune": "emp-llm prune --model M --output st",
    "evaluate": "emp-llm evaluate --model st --output results.json",
    "sweep": "emp-llm sweep --model M --output sweep",
}
KINDS = list(things(Path()))
# Those that a command takes as far as it can; the others fail where a record is read.
READABLE = [kind for kind in KINDS if "a hash" in kind and "null" not in kind] + ["no file"]


@pytest.fixture(scope="module")
def stranger(evaluable_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned checkpoint, as it was written."""
    folder = tmp_path_factory.mktemp("stranger") / "st"
    prune(evaluable_llama, output=folder, method="emp-magnitude")
    return folder


@pytest.fixture
def place(
    stranger: Path,
    llama_norms: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """The current folder, with the checkpoint and the traps; at the end, none was touched."""
    trace = tmp_path / "trace"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(stranger, "st")
    Path("st/emp_llm").mkdir(exist_ok=True)
    for trap in TRAPS:
        Path(trap).write_text(TRAP.format(trace=str(trace)))
    for name in ("norms.safetensors", "trap.safetensors"):
        shutil.copy(llama_norms, name)
    read = GivenScores.__init__

    def noted(scores: GivenScores, given: Any, targets: Any) -> None:
        trace.touch()
        read(scores, given, targets)

    monkeypatch.setattr(GivenScores, "__init__", noted)
    _OPENED.clear()
    yield tmp_path
    names = {"trap", "st", "st.emp_llm", "st.emp_llm.criterion"}
    assert not trace.exists()
    assert not names & sys.modules.keys()
    assert not [file for file in _OPENED if file.startswith(str(tmp_path)) or "trap" in file]


def with_recipe(recipe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Records that hold a recipe, by the name of their file."""
    report = report_of(Path("st")) | {"recipe": recipe, "command": JOBS["prune"]}
    source = report["source"]
    manifest = json.loads(Path("st/emp_manifest.json").read_text())
    trap = Path("st/emp_llm/criterion.py")
    manifest["files"] |= {
        "emp_llm/criterion.py": {"bytes": trap.stat().st_size, "blake3": file_hash(trap)}
    }
    point = {"name": "p", "recipe": recipe}
    with safe_open("norms.safetensors", framework="pt") as file:
        activations = json.loads(file.metadata()[METADATA_KEY])
    activations["about"]["pruned_by"] = recipe
    return {
        "st/emp_report.json": report,
        "st/emp_manifest.json": manifest | {"recipe": recipe},
        "sweep/sweep.jsonl": report | {"point": point, "masks": "", "evaluation": {}},
        "results.json": {
            "format": "emp-llm results 4",
            "model": "st",
            "made_by": {"model": {}},
            "command": JOBS["evaluate"],
            "complete": True,
            "pruned": {"of": source["model"], "recipe": recipe},
        },
        "measure.json": {
            "format": "emp-llm measure 3",
            "source": source,
            "recipe": recipe,
            "measures": [],
        },
        "activations.json": activations,
    }


def put(recipe: dict[str, Any]) -> None:
    """Write the records."""
    for name, values in with_recipe(recipe).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps(values))
    head = {
        "format": "emp-llm sweep 4",
        "source": {"model": "M", "revision": None},
        "made_by": {"model": {}},
    }
    line = own_line(json.loads(Path("sweep/sweep.jsonl").read_text()))
    Path("sweep/sweep.jsonl").write_bytes(own_line(head) + line)
    study = Study([StudyModel("st", "M")], [StudyPoint("p", "")], "", "", "")
    Path("study.yaml").write_text(study_text(study))
    for name, target in (("runs", "st"), ("results", "results.json")):
        path = Path(name, "st.p.json" if name == "results" else "st.p")
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(Path("..", target))
    save_file(
        load_file("norms.safetensors"),
        "norms.safetensors",
        {METADATA_KEY: Path("activations.json").read_text()},
    )


def refused(call: Callable[[], object]) -> str:
    """The message of a refusal; empty if there was none. Another error fails."""
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_readers_of_records(place: Path, kind: str) -> None:
    """Those without a hash, and flat ones, are refused."""
    recipe = things(place)[kind]
    put(recipe)
    kinds = {kind.KIND: kind for kind, _ in FORMATS.values() if issubclass(kind, FileRecord)}
    said = [refused(lambda: Recipe.of_dict(recipe)), refused(lambda: read_report(place / "st"))]
    for name in with_recipe(recipe):
        path = place / name
        if path.suffix == ".jsonl":
            said.append(refused(lambda path=path: read_sweep(path)))  # type: ignore[misc]
            continue
        of = json.loads(path.read_text())["format"].split()[1]
        said.append(refused(lambda path=path, of=of: read_record(path, kinds[of])))  # type: ignore[misc]
    said.append(refused(lambda: Activations.load(place / "norms.safetensors")))
    if kind in READABLE:
        assert not any(said)
    else:
        assert all("recipe" in each or "pruned_by" in each for each in said), said


DOORS = {
    "verify": "verify st",
    "verify with the source": "verify st --source M",
    "heal": "heal st --dense M --calibration T --samples 16 --seqlen 32 --heal-steps 1 "
    "--device-map cpu --output healed",
    "report": "report st sweep results.json --no-plots --output page",
    "prune --match": "prune --model M --method magnitude --match st --output matched",
    "prune --activations": "prune --model M --activations norms.safetensors --output by-norms",
    "prune again": "prune --model st --method emp-magnitude --output again",
    "sweep": "sweep --model M --methods magnitude --suite S --output sweep --device-map cpu",
    "evaluate --output": "evaluate --model st --suite S --output results.json --device-map cpu",
    "evaluate": "evaluate --model st --baseline st --suite S --output new.json --device-map cpu",
    "push": "push st me/st --dry-run",
    "push --results": "push st me/st --dry-run --results results.json",
    "pack": "pack st packed",
    "unpack": "unpack packed unpacked",
    "generate": "generate st --prompt The --max-new-tokens 1",
    "measure": "measure --model st --criteria magnitude --orders 2 --output new-measure.json",
    "report a study": "report . --no-plots",
}
READ_NONE = {"prune again", "evaluate", "pack", "unpack", "generate", "measure"}
READ_ALL = {"heal", "report", "prune --match", "prune --activations", "push", "report a study"}
READ_ALL |= {"verify"}


@pytest.mark.parametrize(
    "kind", ["file, no hash", "path, a hash", "scores", "scores, a hash", "a search, a path"]
)
def test_commands(
    place: Path, command: Run, evaluable_llama: Path, text: Path, task_suite: Path, kind: str
) -> None:
    put(things(place)[kind])
    words = {
        "M": evaluable_llama,
        "T": text,
        "S": task_suite.with_name("short.toml"),
    }
    ended = {}
    for name, door in DOORS.items():
        done = command(*(words.get(word, word) for word in door.split()), code=None)
        ended[name] = done.returncode, done.stderr
    ran = {name for name, (code, _) in ended.items() if code == 0}
    assert ran == READ_NONE | (READ_ALL if kind in READABLE else set()), ended
    if "heal" in ran:
        ((name, given),) = things(place)[kind]["score"].items()
        kept = report_of(place / "healed")["recipe"]["score"][name]
        assert kept.items() >= given.items()
        assert not list(Path("healed").rglob("*.py"))


@pytest.mark.parametrize("kind", ["module, a hash", "scores, a hash"])
def test_functions(place: Path, evaluable_llama: Path, kind: str) -> None:
    """A recipe of a record restores masks, and cannot score."""
    put(things(place)[kind])
    model = AutoModelForCausalLM.from_pretrained(evaluable_llama)
    reapply_mask(model, "st")
    recipe = read_report(Path("st")).recipe
    for call in (
        lambda: prune_model(model, recipe),
        lambda: masks_of(model, recipe),
    ):
        assert "decided the masks" in refused(call)
