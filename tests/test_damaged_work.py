"""What an interrupted run left is checked before it is taken up. What is damaged is computed again,
with a warning, to the same bytes.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torture
import transformers
from blake3 import blake3
from safetensors.torch import load_file, save_file
from stops import save_each_block, stopped, stopped_in_call
from torch import Tensor, nn

from emp_llm import calibrate, heal, prune
from emp_llm.calibration import passes
from emp_llm.checkpoint.files import read_own, write_own
from emp_llm.common.errors import UserError
from emp_llm.healing import training
from emp_llm.healing.adam import Adam, Measure, Progress, UnfitError
from emp_llm.models.masks import Masks
from emp_llm.pruning import writing
from emp_llm.structure import prune_structure

Damage = Callable[[Path], object]


class Work:
    """A command, the files of its undisturbed run, and a killed run to damage.

    Args:
        run: the command, given an output.
        kill: within it, the command is killed.
        folder: empty.
    """

    def __init__(
        self,
        run: Callable[[Path], object],
        kill: AbstractContextManager[None],
        folder: Path,
    ) -> None:
        self._run = run
        self._killed = folder / "killed"
        whole = folder / "whole"
        whole.mkdir()
        run(whole / "out")
        self._bytes = torture.snapshot(whole)
        self._killed.mkdir()
        with kill:
            run(self._killed / "out")
        assert not (self._killed / "out").exists()

    def check(
        self,
        name: str,
        damage: Damage,
        folder: Path,
        log: pytest.LogCaptureFixture,
        warns: bool = True,
    ) -> None:
        """Damage the first file of a pattern, and run again: a warning, and the same bytes."""
        folder = Path(shutil.copytree(self._killed, folder / "again"))
        paths = sorted(folder.glob(name))
        assert paths, f"{name} is not among the work: {sorted(folder.rglob('*'))}"
        log.clear()
        damage(paths[0])
        self._run(folder / "out")
        assert ("damaged" in log.text) == warns
        assert torture.snapshot(folder) == self._bytes
        assert [path.name for path in folder.iterdir()] == ["out"]


NOTES = ("calibrated", "fitted", "refitted", "rows", "shards")


def flip(path: Path) -> None:
    """A bit in the last third of a file."""
    raw = bytearray(path.read_bytes())
    raw[-len(raw) // 3] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").touch()


@pytest.fixture(scope="module")
def sharded(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several shards."""
    folder = tmp_path_factory.mktemp("sharded")
    source = tiny_llama
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.save_pretrained(folder, max_shard_size="20KB")
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def given(text: Path) -> dict[str, Any]:
    return {"calibration": str(text), "samples": 8, "seqlen": 32, "device_map": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def _states_are_saved() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        save_each_block(patch)
        yield


# A refit that is killed while it writes.


@pytest.fixture(scope="module")
def refit(sharded: Path, given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Work:
    how = given | {"method": "wanda", "refit": True, "targets": "all-linear", "check": False}
    return Work(
        lambda output: prune(sharded, output=output, **how),
        stopped_in_call(writing._ShardFile, "put_rows", 10),
        tmp_path_factory.mktemp("refit"),
    )


@pytest.mark.parametrize("damage", [flip, put_folder])
@pytest.mark.parametrize(
    "name",
    [
        ".out.partial/manifest.json",
        ".out.partial/fitted/blocks.json",
        ".out.partial/fitted/block-00000.safetensors",
        ".out.partial/model-*.npy",
        ".out.partial/files/model-00001*.safetensors",
        ".out.partial/files/emp_llm/activations.safetensors",
    ],
)
def test_work_of_a_refit(
    refit: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Damage
) -> None:
    refit.check(name, damage, tmp_path, caplog)


@pytest.mark.parametrize("value", [None, "x", 10**400, [1], {"a": 1}, {"hash": 1, "stages": 2}])
def test_crafted_notes(
    refit: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    """Notes of other types, with the right hash: nothing is taken up."""

    def craft(path: Path) -> None:
        notes = read_own(path, dict[str, Any])
        assert notes.keys() == {"signature", "machine", *NOTES}
        write_own(path, notes | dict.fromkeys(NOTES, value))

    refit.check(".out.partial/manifest.json", craft, tmp_path, caplog, warns=False)


def renoted(part: str, name: str, change: Damage, work: Path) -> None:
    """Change a file of a work folder, and give it its new hash in the manifest."""
    change(work / name)
    notes = read_own(work / "manifest.json", dict[str, Any])
    assert notes is not None
    digest = blake3((work / name).read_bytes()).hexdigest()
    if "stages" in notes[part]:
        notes[part]["hash"] = digest
    else:
        notes[part][(work / name).name] = digest
    write_own(work / "manifest.json", notes)


def other_shape(tensor: Tensor) -> Tensor:
    return tensor[..., :-1]


OTHER_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "another shape": other_shape,
    "no dimension": lambda tensor: tensor.flatten()[0],
    "two dimensions": lambda tensor: tensor.reshape(2, -1),
    "integers": lambda tensor: tensor.to(torch.int8),
    "complex": lambda tensor: tensor.to(torch.complex64),
}


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_crafted_norms(
    refit: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    change = partial(changed, change=OTHER_TENSORS[name])
    file = "files/emp_llm/activations.safetensors"
    refit.check(".out.partial", partial(renoted, "calibrated", file, change), tmp_path, caplog)


@pytest.mark.parametrize(
    "name", ["another shape", "transposed", "integers", "no metadata", "another block", "nothing"]
)
def test_crafted_blocks_of_a_finished_refit(
    refit: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    def craft(path: Path) -> None:
        with_its_hash(CRAFTED[name], path / "block-00000.safetensors")

    file = "fitted/blocks.json"
    damage = partial(renoted, "refitted", file, lambda path: craft(path.parent))
    refit.check(".out.partial", damage, tmp_path, caplog)


@pytest.mark.parametrize("rows", [0, 1, 500])
def test_crafted_figures_of_rows(
    refit: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: int
) -> None:
    def craft(path: Path) -> None:
        file = max(path.glob("*.npy"), key=lambda file: file.stat().st_size)
        renoted("rows", file.name, lambda path: np.save(path, np.zeros((rows, rows))), path)

    refit.check(".out.partial", craft, tmp_path, caplog)


@pytest.mark.parametrize("stages", [{"x": {}}, {"x": {"y": 1.0}}, {"calibrate": {"seconds": "1"}}])
def test_crafted_times(
    refit: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, stages: dict[str, Any]
) -> None:
    def craft(path: Path) -> None:
        notes = read_own(path, dict[str, Any])
        assert notes is not None
        for part in ("calibrated", "refitted"):
            notes[part]["stages"] = stages
        write_own(path, notes)

    refit.check(".out.partial/manifest.json", craft, tmp_path, caplog, warns=False)


# A structure that is killed while it writes.


@pytest.fixture(scope="module")
def heads(
    tiny_llama: Path, given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Work:
    how = given | {"structure": "heads", "method": "taylor", "sparsity": 0.5}
    return Work(
        lambda output: prune(tiny_llama, output=output, **how),
        stopped(prune_structure, "compare_models"),
        tmp_path_factory.mktemp("heads"),
    )


@pytest.mark.parametrize("name", ["emp_llm/sums.safetensors", "model-00001-of-00002.safetensors"])
def test_work_of_a_structure(
    heads: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    heads.check(f".out.partial/files/{name}", flip, tmp_path, caplog)


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_crafted_sums_of_a_structure(
    heads: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    change = partial(changed, change=OTHER_TENSORS[name], metadata={})
    file = "files/emp_llm/sums.safetensors"
    heads.check(".out.partial", partial(renoted, "sums", file, change), tmp_path, caplog)


# A prune whose blocks lose shares by their cost, killed while it writes.


@pytest.fixture(scope="module")
def by_cost(
    tiny_llama: Path, given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Work:
    how = given | {"method": "magnitude", "sparsity": 0.5, "shares": "cost", "check": False}
    return Work(
        lambda output: prune(tiny_llama, output=output, **how),
        stopped_in_call(writing._ShardFile, "put_rows", 6),
        tmp_path_factory.mktemp("by_cost"),
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda shares: {},
        lambda shares: {"x": 1},
        lambda shares: dict.fromkeys(shares, -1),
        lambda shares: dict.fromkeys(shares, 2**62),
        lambda shares: dict.fromkeys(shares, "1"),
        lambda shares: list(shares),
    ],
)
def test_crafted_shares(
    by_cost: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[..., Any]
) -> None:
    def craft(path: Path) -> None:
        notes = read_own(path, dict[str, Any])
        assert notes is not None
        write_own(path, notes | {"shares": change(notes["shares"]), "shards": {}})

    by_cost.check(".out.partial/manifest.json", craft, tmp_path, caplog, warns=False)


# A calibration by blocks.


@pytest.fixture(scope="module")
def norms(
    tiny_llama: Path, given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Work:
    how = given | {"execution": "blocks"}
    return Work(
        lambda output: calibrate(tiny_llama, output=output, **how),
        stopped(passes, "_run_tail"),
        tmp_path_factory.mktemp("norms"),
    )


@pytest.mark.parametrize("damage", [flip, cut, put_folder])
@pytest.mark.parametrize("name", ["hidden-*", "sums-*", "state.json"])
def test_work_of_a_calibration(
    norms: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Damage
) -> None:
    norms.check(f".out.progress/{name}", damage, tmp_path, caplog)


def craft_state(folder: Path, **fields: Any) -> None:
    """Give the state of a calibration the hashes of its files, and some other fields."""
    state = read_own(folder / "state.json", dict[str, Any])
    assert state is not None
    files = {path.name: blake3(path.read_bytes()).hexdigest() for path in folder.glob("*-*")}
    write_own(folder / "state.json", state | {"files": files} | fields)


@pytest.mark.parametrize("name", [*OTHER_TENSORS, "no tensors", "other names", "nothing"])
@pytest.mark.parametrize("file", ["sums", "hidden"])
def test_crafted_files_of_a_calibration(
    norms: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, name: str
) -> None:
    def craft(folder: Path) -> None:
        path = next(folder.glob(f"{file}-*"))
        if name == "nothing":
            path.write_bytes(b"")
        elif name == "no tensors":
            save_file({}, path)
        elif name == "other names":
            save_file({f"x{key}": tensor for key, tensor in load_file(path).items()}, path)
        else:
            changed(path, OTHER_TENSORS[name], {})
        craft_state(folder)

    norms.check(".out.progress", craft, tmp_path, caplog)


@pytest.mark.parametrize(
    "fields",
    [
        {"input_of": {}},
        {"input_of": {"x": "y"}},
        {"tokens": {}},
        {"tokens": {"x": 1}},
        {"done": 0},
        {"done": -1},
        {"done": 10**9},
    ],
)
def test_crafted_states_of_a_calibration(
    norms: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    def craft(folder: Path) -> None:
        if "done" in fields:
            for path in list(folder.glob("*-*")):
                name = re.sub("-[0-9]+", f"-{fields['done']}", path.name, count=1)
                path.rename(folder / name)
        craft_state(folder, **fields)

    norms.check(".out.progress", craft, tmp_path, caplog)


# A healing by blocks that is killed in its second block.


@pytest.fixture(scope="module")
def healing(
    tiny_llama: Path, given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Work:
    model = tiny_llama
    folder = tmp_path_factory.mktemp("healing")
    prune(model, output=folder / "plain", method="wanda", **given)
    how = given | {"device_map": "disk", "heal_steps": 2, "dense": str(model)}
    return Work(
        lambda output: heal(folder / "plain", output=output, **how),
        stopped_in_call(training, "_overwrite", 2),
        folder,
    )


def with_its_hash(change: Callable[[Path], object], path: Path) -> None:
    """Change the file of a block, and give it its new hash."""
    change(path)
    record = path.with_name("blocks.json")
    hashes = read_own(record, dict[str, str])
    assert hashes is not None
    write_own(record, hashes | {path.name: blake3(path.read_bytes()).hexdigest()})


def changed(
    path: Path, change: Callable[[Tensor], Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write all weights of a block anew."""
    weights = load_file(path)
    if metadata is None:
        raw = path.read_bytes()
        metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    save_file({name: change(weight).clone() for name, weight in weights.items()}, path, metadata)


CRAFTED: dict[str, Damage] = {
    "nonzero at zeros": lambda path: changed(path, lambda weight: weight + 1),
    "another shape": lambda path: changed(path, lambda weight: weight[:1]),
    "transposed": lambda path: changed(path, lambda weight: weight.T.contiguous()),
    "integers": lambda path: changed(path, lambda weight: weight.to(torch.int8)),
    "no metadata": lambda path: changed(path, lambda weight: weight, {}),
    "other metadata": lambda path: changed(path, lambda weight: weight, {"emp_llm": "[1]"}),
    "another block": lambda path: shutil.copy(path.with_name("block-00001.safetensors"), path),
    "nothing": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: torch.save([1], path),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_blocks_of_a_healing(
    healing: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    damage = partial(with_its_hash, CRAFTED[name])
    healing.check(".out.partial/healing/block-00000*", damage, tmp_path, caplog)


@pytest.mark.parametrize(
    "fields",
    [{"at_once": 0}, {"at_once": 10**9}, {"by": "all"}, {"parts": {"a": "b"}}, {"device_map": 1}],
)
def test_a_crafted_plan_of_a_healing(
    healing: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    def craft(path: Path) -> None:
        notes = read_own(path, dict[str, Any])
        write_own(path, notes | {"healing_plan": notes["healing_plan"] | fields})

    healing.check(".out.partial/manifest.json", craft, tmp_path, caplog, warns=False)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"recipe": 1},
        {"recipe": {"heal": {"steps": "x"}}},
        {"recipe": {"heal": {"steps": -1}}, "text": {}},
        {"recipe": {"heal": {"steps": 10**400}}, "text": {}},
        {"recipe": {"heal": {"steps": 2}}, "text": 1},
        {"recipe": {"heal": {"steps": 2}}, "texts": {"a": 1}},
        {"recipe": {"heal": {"steps": 2}}, "text": {}, "source": []},
        {"activations": "x"},
        {"activations": [1]},
    ],
)
def test_a_crafted_signature_of_minutes(
    tiny_llama: Path,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
) -> None:
    """It is of other work, which is neither used nor discarded."""
    monkeypatch.setattr(training, "steps_of_minutes", lambda *_, **__: 2)
    work = tmp_path / ".out.partial"
    (work / "files").mkdir(parents=True)
    write_own(work / "manifest.json", {"signature": {"minutes": 5.0} | fields, "shards": {}})
    how = given | {"method": "wanda", "heal": True, "heal_minutes": 5.0}
    with pytest.raises(UserError, match="holds the work of an unfinished run with"):
        prune(tiny_llama, output=tmp_path / "out", **how)


@pytest.mark.parametrize("damage", [flip, put_folder, CRAFTED["another block"]])
def test_blocks_of_a_healing(
    healing: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Damage
) -> None:
    healing.check(".out.partial/healing/block-00000*", damage, tmp_path, caplog)


@pytest.mark.parametrize(
    "name", ["lock", "manifest.json", "healing/blocks.json", "healing/block-00000.safetensors"]
)
def test_a_pipe_among_the_work(
    healing: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """It is refused at once: a read of it would never end."""

    def put_pipe(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    with pytest.raises(UserError, match=r"is a pipe, socket or device\. .*; delete it"):
        healing.check(".out.partial", put_pipe, tmp_path, caplog)


# A training of the whole model, whose checkpoints have the right hashes.

STEPS = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a small training: the best one of step 4, and the last one of step 8."""
    folder = tmp_path_factory.mktemp("trained") / "healing"
    training = Progress(folder, STEPS)
    model, adam = layers()
    with training.writing(adam):
        for step in (0, 4, 8):
            training.step = step
            training.measured[step] = Measure(1.0 + (step - 4) ** 2, 9.0, 8.0)
            training.save()
            adam.begin()
            torch.stack([each.square().sum() for each in model.parameters()]).sum().backward()
            adam.end()
    assert {path.name for path in folder.iterdir()} == {"step-4", "step-8", "progress.json"}
    return folder


def layers() -> tuple[nn.ModuleDict, Adam]:
    """Two layers, one of them pruned, and what moves their weights."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(8, 4, bias=False) for name in "ab"})
    for layer in model.values():
        layer.weight.data = torch.randn(4, 8, generator=generator)
    masks = Masks({"a.weight": torch.rand(4, 8, generator=generator) < 0.5})
    masks.apply(model)
    return model, Adam(dict(model.named_parameters()), masks, 1e-2, halved=True)


def resumed(folder: Path) -> int:
    """The step from which a training resumes that begins again as often as it must."""
    while True:
        training = Progress(folder, STEPS)
        _, adam = layers()
        try:
            with training.writing(adam):
                if training.measured:
                    training.load(training.best, with_states=False)
                    training.load(training.step)
                return training.step
        except UnfitError:
            pass


def rehashed(folder: Path, **fields: Any) -> None:
    """Give the record of a training the hashes of its files, and some other fields."""
    path = folder / "progress.json"
    record = json.loads(path.read_text())
    del record["blake3"]
    record["files"] = {
        str(file.relative_to(folder)): blake3(file.read_bytes()).hexdigest()
        for file in sorted(folder.glob("step-*/*"))
    }
    write_own(path, {name: value for name, value in (record | fields).items() if value != "drop"})


MEASURED = [[0, 17.0, 9.0, 8.0], [4, 1.0, 9.0, 8.0], [8, 17.0, 9.0, 8.0]]
RECORDS: list[dict[str, Any]] = [
    *({"step": step} for step in (-1, 1e9, 10**9, 10**400, 1.5, "8", None, True, math.nan, 4, [])),
    *({"cut": cut} for cut in (0.5, 0, -1, math.nan, math.inf, 10**400, "1", None, [], {})),
    *(
        {"measured": measured}
        for measured in (
            [],
            {},
            None,
            "abc",
            [1, 2],
            [[0, 1.0, 9.0]],
            [["0", 1.0, 9.0, 8.0]],
            [[0, "1", 9.0, 8.0]],
            [*MEASURED[:2], [8, 10**400, 9.0, 8.0]],
            [*MEASURED[:2], [10**400, 1.0, 9.0, 8.0]],
            [*MEASURED[:2], [-8, 1.0, 9.0, 8.0]],
            MEASURED[:2],
            MEASURED[1:],
            [*MEASURED, MEASURED[-1]],
            MEASURED[::-1],
            [MEASURED[0], [4, 99.0, 9.0, 8.0], MEASURED[2]],
        )
    ),
    *(
        {"files": files}
        for files in (
            {},
            [],
            None,
            "step-8/00000.safetensors",
            {"step-8/00000.safetensors": 1},
            {"../../secret": "0"},
            {"/dev/zero": "0"},
            {"step-8/00000.safetensors\n": "0"},
        )
    ),
    *({name: "drop"} for name in ("step", "cut", "measured", "files")),
]


@pytest.mark.parametrize("fields", RECORDS, ids=lambda fields: repr(fields)[:40])
def test_crafted_records_of_a_training(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "healing"))
    assert resumed(folder) == STEPS
    assert not caplog.text
    rehashed(folder, **fields)
    assert resumed(folder) == 0
    assert "is damaged" in caplog.text
    assert not folder.exists() or not os.listdir(folder)


def crafted(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change({name: tensor.clone() for name, tensor in load_file(path).items()}), path)


def with_one(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """Change a tensor of a checkpoint."""
    return partial(crafted, change=lambda tensors: tensors | {name: change(tensors[name])})


def to_count(number: int) -> Damage:
    return with_one("a.weight/steps", lambda _: torch.tensor(number))


WEIGHTS: dict[str, Damage] = {
    "nothing": lambda path: path.write_bytes(b""),
    "no header": lambda path: path.write_bytes(bytes(8)),
    "a long header": lambda path: path.write_bytes(b"\xff" * 100),
    "a pickle": lambda path: torch.save({"a.weight": torch.ones(4)}, path),
    "text": lambda path: path.write_text("weights"),
    "no tensors": partial(crafted, change=lambda _: {}),
    "another name": partial(
        crafted, change=lambda tensors: {"c": tensors.pop("a.weight")} | tensors
    ),
    "one name more": partial(crafted, change=lambda tensors: tensors | {"c": torch.ones(4)}),
    "a name less": partial(
        crafted, change=lambda tensors: {key: tensors[key] for key in tensors if key[0] == "a"}
    ),
    "a moment less": partial(
        crafted, change=lambda tensors: {key: tensors[key] for key in tensors if "mean" not in key}
    ),
    "all weights": with_one("a.weight", lambda _: torch.ones(32)),
    "one weight": with_one("b.weight", lambda weight: weight[:1]),
    "two dimensions": with_one("b.weight", lambda weight: weight.reshape(4, 8)),
    "no dimension": with_one("b.weight", lambda weight: weight[0]),
    "int8": with_one("a.weight", lambda weight: weight.to(torch.int8)),
    "bool": with_one("a.weight/mean", lambda mean: mean != 0),
    "float64": with_one("a.weight/square", lambda square: square.double()),
    "several counts": with_one("a.weight/steps", lambda count: count.expand(3).clone()),
    "a count of floats": with_one("a.weight/steps", lambda _: torch.tensor(math.nan)),
    "a negative count": to_count(-1),
    "a count of none": to_count(0),
    "a count of more than all": to_count(STEPS + 1),
    "a huge count": to_count(2**62),
}


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("name", WEIGHTS)
def test_crafted_weights_of_a_training(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, step: int
) -> None:
    """Those of the best step and of the last one."""
    folder = Path(shutil.copytree(trained, tmp_path / "healing"))
    WEIGHTS[name](folder / f"step-{step}" / "00000.safetensors")
    rehashed(folder)
    assert resumed(folder) == 0
    assert "is damaged" in caplog.text
    assert not os.listdir(folder)


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.rename(path.with_name("there"))
    path.symlink_to("there")


def put_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


PLACES: list[tuple[str, Damage]] = [
    *(
        (name, put)
        for name in ("progress.json", "step-8/00000.safetensors", "step-4/00000.safetensors")
        for put in (flip, cut, put_folder, put_pipe, put_link, os.unlink)
    ),
    *((name, put) for name in ("step-4", "step-8", "") for put in (put_file, shutil.rmtree)),
]


@pytest.mark.parametrize(("name", "damage"), PLACES)
def test_what_is_no_file_of_a_training(
    trained: Path, tmp_path: Path, name: str, damage: Damage
) -> None:
    """The training begins again, and writes its checkpoints."""
    folder = Path(shutil.copytree(trained, tmp_path / "healing"))
    (folder / "step-of-another").mkdir()
    (folder / "step-12").touch()
    damage(folder / name)
    assert resumed(folder) == 0
    training = Progress(folder, STEPS)
    with training.writing(layers()[1]):
        training.measured = {0: Measure(1.0, 9.0, 8.0)}
        training.save()
    assert {path.name for path in folder.iterdir()} == {"step-0", "progress.json"}
