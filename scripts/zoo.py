"""A zoo of tiny models, and what each command answers for each of them.

    python scripts/zoo.py [--only NAME ...] [--output FILE]

The models are built here: families of transformers with random weights, several towers,
encoder-decoder models, quantised checkpoints, and broken ones. A cell holds the share of the
targets that was removed, a perplexity, "ok", or the number of a message below the table. A
traceback instead of a message is a defect; then the exit code is 1.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from emp_llm import evaluate, measure, pack, prune, prune_model, recipe_of, verify
from emp_llm.common.errors import UserError
from emp_llm.common.tables import markdown_table
from emp_llm.models.loading import load_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
multimodal, test_fp8, tiny = (import_module(name) for name in ("multimodal", "test_fp8", "tiny"))

TEXT = "".join(
    f"The {i}th lamp on {('quiet', 'loud', 'narrow')[i % 3]} street is lit at {i % 24}.\n"
    for i in range(450)
)
Build = Callable[[Path], object]


def _changed(change: Callable[[Path], object]) -> Build:
    """The tiny Llama, changed."""

    def build(folder: Path) -> None:
        tiny.make_model(folder, max_shard_size="5GB")
        change(folder)

    return build


def _config(**values: Any) -> Build:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return _changed(change)


def _weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Build:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, {"format": "pt"})

    return _changed(change)


def _as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _as_gguf(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(64))


def _as_adapter(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"})
    )
    save_file(
        {"base_model.model.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors"
    )


def _without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _fp8(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        dense = tiny.make_model(Path(scratch) / "dense")
        test_fp8.make_fp8(dense, folder)


def _four_bits(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        dense = tiny.make_model(Path(scratch) / "dense")
        how = transformers.BitsAndBytesConfig(load_in_4bit=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            dense, quantization_config=how, device_map="cpu"
        )
        model.save_pretrained(folder)
        tiny.make_tokenizer().save_pretrained(folder)


UP = "model.layers.0.mlp.up_proj.weight"
ZOO: dict[str, Build] = {
    **{name: lambda folder, name=name: tiny.make_model(folder, name) for name in tiny.FAMILIES},  # type: ignore[misc]
    **{
        name: lambda folder, name=name: multimodal.make_multimodal(folder, name)  # type: ignore[misc]
        for name in multimodal.FAMILIES
    },
    "FP8 with block scales": _fp8,
    "GPTQ": _config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "AWQ": _config(quantization_config={"quant_method": "awq", "bits": 4}),
    "bitsandbytes, 4 bits": _four_bits,
    "GGUF": _changed(_as_gguf),
    "pickles only": _changed(_as_pickle),
    "a LoRA adapter": _changed(_as_adapter),
    "an unknown architecture": _config(model_type="dreamer", architectures=["DreamerForCausalLM"]),
    "no config.json": _changed(lambda folder: (folder / "config.json").unlink()),
    "no tokenizer": _changed(_without_tokenizer),
    "a truncated shard": _changed(_truncated),
    "a missing weight": _weights(lambda tensors: tensors.pop(UP)),
    "a weight of another shape": _weights(
        lambda tensors: tensors.update({UP: tensors[UP][:8].clone()})
    ),
    "NaN in a weight": _weights(lambda tensors: tensors[UP][3].fill_(torch.nan)),
    "a row of zeros": _weights(lambda tensors: tensors[UP][3].fill_(0)),
    "an empty folder": lambda folder: folder.mkdir(),
}
COMMANDS = (
    "prune, emp-magnitude",
    "prune, emp-wanda",
    "measure",
    "verify",
    "pack",
    "evaluate",
    "prune_model",
)


def main(line: list[str] | None = None) -> None:
    """Build the models, run the commands, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=list(ZOO),
        default=list(ZOO),
        help="models; default: all",
    )
    parser.add_argument("--output", type=Path, help="Markdown file to write as well")
    arguments = parser.parse_args(line)
    messages: dict[str, int] = {}
    rows = [["model", *COMMANDS]]
    with _silence():
        for name in arguments.only:
            with tempfile.TemporaryDirectory() as scratch:
                rows.append([name, *answers(name, Path(scratch), messages)])
                print(f"{name}: {', '.join(rows[-1][1:])}", file=sys.stderr)
    notes = [f"{number}. {message}" for message, number in messages.items()]
    table = "\n".join([markdown_table(rows, as_markdown=True), "", *notes])
    print(table)
    if arguments.output is not None:
        command = "python scripts/zoo.py --output scripts/results/zoo.md"
        head = "# What each command answers for each kind of model\n\n"
        head += f"Written by `{command}`. Numbers in brackets are messages, below; exit code 2.\n\n"
        arguments.output.write_text(head + table + "\n", encoding="utf-8")
    sys.exit(1 if any("DEFECT" in cell for row in rows for cell in row) else 0)


@contextmanager
def _silence() -> Iterator[None]:
    """Inside this context, neither warnings nor progress are shown."""
    verbosity = transformers.logging.get_verbosity()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()


def answers(name: str, scratch: Path, messages: dict[str, int]) -> list[str]:
    """The cells of a model's row. New messages are added to `messages`, with their numbers."""
    model = scratch / "model"
    text = scratch / "text.txt"
    out = scratch / "out"
    ZOO[name](model)
    text.write_text(TEXT)
    (scratch / "suite.toml").write_text(
        '[perplexity]\nfile = "text.txt"\nseqlen = 64\nsamples = 20\n'
    )
    given: dict[str, Any] = {
        "calibration": str(text),
        "samples": 4,
        "seqlen": 64,
        "device_map": "cpu",
    }

    def cell(work: Callable[[], str]) -> str:
        try:
            return work()
        except UserError as error:
            message = str(error).replace(f"{scratch}/", "").replace(str(scratch), "")
            return f"[{messages.setdefault(message, len(messages) + 1)}]"
        except Exception as error:
            return (
                f"DEFECT {type(error).__name__}: "
                f"{str(error).splitlines()[0][:80] if str(error) else ''}"
            )

    def pruned(method: str) -> str:
        report = prune(model=str(model), method=method, output=out / method, **given)
        return f"{100 * report.targets.sparsity_of_targets:.1f} %"

    def in_memory() -> str:
        try:
            loaded = load_model(model, "cpu")
        except Exception:  # said in the column before, or by transformers alone
            return "not loadable"
        done = prune_model(loaded, recipe_of(method="emp-magnitude"))
        return f"{100 * done.targets.sparsity_of_targets:.1f} %"

    def measured() -> str:
        record = measure(str(model), criteria="magnitude", output=scratch / "measure.json")
        return f"{100 * record.measures[0].targets.sparsity_of_targets:.1f} %"

    def verified() -> str:
        differences = verify(out / "emp-magnitude", source=str(model)).differences
        return "ok" if not differences else f"DEFECT {differences[0]}"

    def evaluated() -> str:
        folder = out / "emp-magnitude" if (out / "emp-magnitude").is_dir() else model
        found: Any = evaluate(
            str(folder),
            suite=str(scratch / "suite.toml"),
            output=scratch / "results.json",
            device_map="cpu",
        )
        return f"perplexity {found.results.perplexity.perplexity:.0f}"

    work = [lambda: pruned("emp-magnitude"), lambda: pruned("emp-wanda"), measured]
    cells = [cell(each) for each in work]
    if (out / "emp-magnitude").is_dir():
        cells += [
            cell(verified),
            cell(lambda: "ok" if pack(out / "emp-magnitude", scratch / "packed") else ""),
        ]
    else:
        cells += ["", ""]
    cells += [cell(evaluated), cell(in_memory)]
    shutil.rmtree(out, ignore_errors=True)
    return cells


if __name__ == "__main__":
    main()
