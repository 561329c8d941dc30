"""What a stored number depends on: every file of the model that can change it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from emp_llm import UserError, calibrate, evaluate, prune
from emp_llm.calibration import data
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.writing import run_signature

SIZE: dict[str, Any] = {"samples": 4, "seqlen": 48, "device_map": "cpu"}


def set_field(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file, which need not be there."""
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(held | changes))


def other_rotation(folder: Path) -> None:
    """The same weights, with another rotation of the positions."""
    config = json.loads((folder / "config.json").read_text())
    rotation = config.get("rope_parameters") or {}
    set_field(folder / "config.json", rope_parameters=rotation | {"rope_theta": 77.0})


EDITS: dict[str, Callable[[Path], Any]] = {
    "config.json": other_rotation,
    "generation_config.json": lambda folder: set_field(
        folder / "generation_config.json", repetition_penalty=1.5
    ),
    "code": lambda folder: (folder / "modeling_mine.py").write_text("FACTOR = 2\n"),
    "tokenizer_config.json": lambda folder: set_field(
        folder / "tokenizer_config.json", add_bos_token=True
    ),
    "chat_template.jinja": lambda folder: (folder / "chat_template.jinja").write_text("{{ 1 }}"),
    "a named template": lambda folder: (
        (folder / "additional_chat_templates").mkdir(),
        (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ 1 }}"),
    ),
}


@pytest.fixture
def copy(evaluable_llama: Path, tmp_path: Path) -> Path:
    """A model that a test may edit."""
    return Path(shutil.copytree(evaluable_llama, tmp_path / "model"))


@pytest.mark.parametrize("edited", [*EDITS, "the text"])
def test_stored_results_are_of_the_files_as_they_are(
    copy: Path, task_suite: Path, tmp_path: Path, edited: str
) -> None:
    suite = Path(shutil.copytree(task_suite.parent, tmp_path / "suite")) / "short.toml"
    how = {"suite": suite, "output": tmp_path / "r.json", "device_map": "cpu"}
    evaluate(copy, **how)
    evaluate(copy, **how)  # shows the stored results
    if edited == "the text":
        (text,) = suite.parent.glob("*.txt")
        text.write_text("A lamp. " * 99)
    else:
        EDITS[edited](copy)
    with pytest.raises(UserError, match="it holds other results"):
        evaluate(copy, **how)


def test_a_report_says_of_which_tokenizer_its_dense_results_are(
    copy: Path, task_suite: Path, tmp_path: Path
) -> None:
    how = {"method": "magnitude", "evaluate": task_suite.parent / "short.toml"}
    how["device_map"] = "cpu"
    prune(copy, output=tmp_path / "first", **how)
    again = how | {"baseline": tmp_path / "first"}
    prune(copy, output=tmp_path / "again", **again)
    EDITS["chat_template.jinja"](copy)
    with pytest.raises(UserError, match="another tokenizer than that of --model"):
        prune(copy, output=tmp_path / "other", **again)


def test_activations_of_another_config_are_noticed(
    copy: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    norms = tmp_path / "norms.safetensors"
    calibrate(copy, calibration=str(text), output=norms, **SIZE)
    warning = "come from another config than that of"
    for edit, warned in ((EDITS["chat_template.jinja"], False), (other_rotation, True)):
        edit(copy)
        caplog.clear()
        prune(copy, activations=norms, output=tmp_path / "out", overwrite=True)
        assert any(warning in message for message in caplog.messages) == warned


def test_a_models_own_text_is_written_again_for_another_config(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMP_LLM_CACHE", str(tmp_path / "cache"))
    written = []
    continued = data._continue

    def note(*arguments: Any) -> list[list[int]]:
        written.append(1)
        return continued(*arguments)

    monkeypatch.setattr(data, "_continue", note)
    for edit, writes in (
        (None, True),
        (None, False),
        (EDITS["chat_template.jinja"], False),
        (other_rotation, True),
        (EDITS["generation_config.json"], True),
    ):
        if edit is not None:
            edit(copy)
        written.clear()
        calibrate(copy, calibration="self", output=tmp_path / "n", overwrite=True, **SIZE)
        assert bool(written) == writes, edit


@pytest.mark.parametrize("edited", ["config.json", "code"])
def test_the_work_of_a_run_is_of_the_config(copy: Path, edited: str) -> None:
    before = run_signature(Checkpoint(copy), Recipe(), None)
    EDITS["chat_template.jinja"](copy)
    assert run_signature(Checkpoint(copy), Recipe(), None) == before
    EDITS[edited](copy)
    assert run_signature(Checkpoint(copy), Recipe(), None) != before


def test_the_work_of_a_run_is_of_the_text_that_decides(
    copy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out sequences say how much each block loses, and they follow those of the norms."""

    def stop(*_: Any) -> None:
        raise UserError("enough")

    monkeypatch.setattr("emp_llm.runs.prune_run._remove_by_cost", stop)
    file = tmp_path / "text.txt"
    words = text.read_text().split(" ")
    tokens = len(AutoTokenizer.from_pretrained(copy)(text.read_text())["input_ids"])
    place = 2 * SIZE["samples"] * SIZE["seqlen"] * len(words) // tokens
    how = {"calibration": str(file), "output": tmp_path / "out", **SIZE}
    for later, said in (
        (words[place:], "enough"),
        (words[place:], "enough"),
        ([*reversed(words[place:])], r"unfinished run with activations\.held out"),
    ):
        file.write_text(" ".join([*words[:place], *later]))
        with pytest.raises(UserError, match=said):
            prune(copy, method="wanda", shares="cost", **how)
