"""Files of the version before the redesign are still read: SHA-256 manifests, xxhash packs, records without a format."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from emp_llm import reapply_mask
from emp_llm.calibration.activations import Activations
from emp_llm.common.errors import UserError
from emp_llm.evaluation.results_file import read_results
from emp_llm.pruning.output.manifest import read_manifest
from emp_llm.pruning.recipe import read_report
from emp_llm.push import push
from emp_llm.records.base import read_record
from emp_llm.records.measure import Measure
from emp_llm.records.sweep import Sweep
from emp_llm.unpack import unpack
from emp_llm.verify import verify

OLD = Path(__file__).parent / "data" / "old"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def packed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A packed folder of format 2, by its name; raw by default."""
    name = getattr(request, "param", "packed")
    folder = Path(shutil.copytree(OLD / "packed", tmp_path / name))
    if name != "packed":
        for path in folder.glob("*.packed.safetensors"):
            path.unlink()
        shutil.copytree(OLD / name, folder, dirs_exist_ok=True)
    return folder


def test_verify_reads_a_manifest_with_sha256(tmp_path: Path) -> None:
    found = verify(OLD / "pruned", source=OLD / "dense")
    assert found.differences == []
    assert found.checked["targets"] == 6
    out = Path(shutil.copytree(OLD / "pruned", tmp_path / "out"))
    shard = sorted(out.glob("*.safetensors"))[0]
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    (difference,) = verify(out).differences
    assert difference.startswith(f"{shard.name}: its SHA-256 is ")
    other = Path(shutil.copytree(OLD / "dense", tmp_path / "other"))
    (other / shard.name).write_bytes(shard.read_bytes()[: len(raw) // 2] + raw[len(raw) // 2 :][::-1])
    with pytest.raises(UserError):
        verify(OLD / "pruned", source=other)


@pytest.mark.parametrize("packed", ["packed", "packed-zstd"], indirect=True)
def test_weights_of_format_2_are_unpacked(packed: Path, tmp_path: Path) -> None:
    unpack(packed, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(OLD / "pruned")


@pytest.mark.parametrize("packed", ["mask"], indirect=True)
def test_a_mask_of_format_2_is_applied_to_its_base(packed: Path, tmp_path: Path) -> None:
    unpack(packed, tmp_path / "back", base=OLD / "dense")
    assert contents(tmp_path / "back") == contents(OLD / "pruned")
    with pytest.raises(UserError, match="not those that were pruned"):
        unpack(packed, tmp_path / "other", base=OLD / "pruned")


def test_damage_of_format_2_is_refused(packed: Path, tmp_path: Path) -> None:
    index = json.loads((packed / "emp_pack.json").read_text())
    for part, name, field in (("shards", "model-00002-of-00002.safetensors", "xxh3_128"), ("files", "config.json", "sha256")):
        sound = index[part][name][field]
        index[part][name][field] = "0" * len(sound)
        (packed / "emp_pack.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="not a sound packed file"):
            unpack(packed, tmp_path / "back")
        index[part][name][field] = sound


def test_a_newer_format_is_refused_with_the_remedy(packed: Path, tmp_path: Path) -> None:
    index = json.loads((packed / "emp_pack.json").read_text()) | {"format": "emp-llm pack 4"}
    (packed / "emp_pack.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"a newer emp-llm wrote it.*pip install --upgrade emp-llm"):
        unpack(packed, tmp_path / "back")


def test_without_xxhash_the_package_is_named(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(UserError, match=r"older emp-llm packed it.*pip install xxhash"):
        unpack(packed, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("packed", ["packed", "mask"], indirect=True)
def test_masks_of_old_folders(packed: Path) -> None:
    zeros = read_report(OLD / "pruned").targets.zeros
    for folder in (OLD / "pruned", packed):
        model = AutoModelForCausalLM.from_pretrained(OLD / "dense", dtype=torch.bfloat16)
        assert reapply_mask(model, folder) == zeros


def test_records_without_a_format() -> None:
    report = read_report(OLD / "pruned")
    assert report.recipe.method == "emp-wanda"
    assert report.source.sha256_of_samples == read_manifest(OLD / "pruned").source.sha256_of_samples
    assert report.evaluation is not None
    results = read_results(OLD / "results.json", "--results")
    assert results.complete
    assert results.pruned is not None
    assert results.pruned.of == "dense"
    assert len(read_record(OLD / "sweep" / "sweep.json", Sweep).points) == 2
    assert [each.criterion for each in read_record(OLD / "measure.json", Measure).measures] == ["magnitude", "wanda"]
    norms = Activations.load(OLD / "pruned" / "emp_llm" / "activations.safetensors")
    assert norms.digest == "74b8a4a8de8e205a8a3834a58c87809e8d78d61228db9820b63cb8e673af7cee"


def test_an_old_checkpoint_and_its_results_can_be_pushed() -> None:
    files = contents(OLD / "pruned")
    pushed = push(OLD / "pruned", "user/old", dry_run=True, results=[OLD / "results.json", OLD / "results-baseline.json"])
    assert files.keys() | {"README.md", "emp_llm/results.json", "emp_llm/results-baseline.json"} == pushed.files.keys()
    assert contents(OLD / "pruned") == files
