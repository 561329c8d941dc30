"""Files of the version before the redesign are still read: SHA-256 manifests, records without a format."""

import shutil
from pathlib import Path

import pytest

from emp_llm.calibration.activations import Activations
from emp_llm.common.errors import UserError
from emp_llm.evaluation.results import read_results
from emp_llm.pruning.counts import read_report
from emp_llm.pruning.writing import read_manifest
from emp_llm.push import push
from emp_llm.records.base import read_record
from emp_llm.records.measure import Measure
from emp_llm.records.sweep import Sweep
from emp_llm.verify import verify

OLD = Path(__file__).parent / "data" / "old"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
