"""Fine-tuning of a pruned model by `transformers.Trainer`, with and without `SparsityCallback`,
which keeps it sparse.

    python scripts/finetune_sparse.py [--model DIR] [--text FILE] [--beta 0.6] [--steps 40]
    [--output DIR]

The script prunes the model (emp-magnitude, beta times N_eff weights kept) and trains it on the text
twice, with and without the callback. It prints the loss on the last tenth of the text, which is
held out, and the number of removed weights that are no longer zero. --output writes the model that
was trained with the callback, in the dtype of the pruned model, with its tokenizer and records, for
`emp-llm verify` and `push`. By default model and text are the demo's, and no network is needed.

With LoRA, train as usual and call `reapply_mask(model.merge_and_unload(), "pruned")` at the end.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.utils import logging

from emp_llm import ModelReport, SparsityCallback, prune
from emp_llm.models.masks import masks_in
from emp_llm.records.run_report import RunReport

ROOT = Path(__file__).parents[1]
_LENGTH = 128  # tokens of an example


def main(line: list[str] | None = None) -> None:
    """Prune, train twice, print the table, and write the model if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "scripts" / "demo" / "model",
        help="folder; default: the demo model",
    )
    parser.add_argument(
        "--text",
        type=Path,
        default=ROOT / "calibration" / "demo.txt",
        help="file; default: the demo's text",
    )
    parser.add_argument(
        "--beta", type=float, default=0.6, help="multiple of N_eff to keep; default: 0.6"
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps; default: 40")
    parser.add_argument("--output", type=Path, help="write the tuned model to this folder")
    arguments = parser.parse_args(line)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        pruned = Path(scratch) / "pruned"
        report = prune(
            model=arguments.model, output=pruned, method="emp-magnitude", beta=arguments.beta
        )
        assert isinstance(report, RunReport)
        tokenizer = AutoTokenizer.from_pretrained(pruned)
        examples = chunks(
            tokenizer(arguments.text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][
                0
            ]
        )
        held = max(1, len(examples) // 10)
        train = examples[:-held]
        test = examples[-held:]
        before = load(pruned)
        masks = masks_in(pruned, before)
        rows = [("pruned", loss(before, test), masks.broken(before))]
        for name, callbacks in (
            ("tuned, with the callback", [SparsityCallback(pruned)]),
            ("tuned, without", []),
        ):
            model = load(pruned)
            tune(model, train, arguments.steps, Path(scratch), callbacks)
            rows.append((name, loss(model, test), masks.broken(model)))
            if callbacks and arguments.output is not None:
                model.to(AutoConfig.from_pretrained(pruned).dtype).save_pretrained(arguments.output)
                tokenizer.save_pretrained(arguments.output)
                ModelReport.load(pruned).save(arguments.output)
    print(f"{100 * report.targets.sparsity_of_targets:.1f} % of the targets removed")
    print(f"{'':26} {'loss':>6}  removed weights that are not zero")
    for name, value, broken in rows:
        print(f"{name:26} {value:6.3f}  {broken:,}")


def load(folder: Path) -> PreTrainedModel:
    """The model in float32, for the optimizer."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def chunks(tokens: Tensor) -> list[dict[str, Tensor]]:
    """Examples of equal length; the remainder at the end is left out."""
    whole = tokens[: len(tokens) // _LENGTH * _LENGTH].view(-1, _LENGTH)
    return [{"input_ids": chunk, "labels": chunk} for chunk in whole]


def loss(model: PreTrainedModel, examples: list[dict[str, Tensor]]) -> float:
    """Mean loss per token, in nats."""
    batch = torch.stack([example["input_ids"] for example in examples]).to(model.device)
    model.eval()
    with torch.inference_mode():
        parts = [batch[first : first + 16] for first in range(0, len(batch), 16)]
        losses = [float(model(input_ids=part, labels=part).loss) * len(part) for part in parts]
    return sum(losses) / len(batch)


def tune(
    model: PreTrainedModel,
    examples: list[dict[str, Tensor]],
    steps: int,
    scratch: Path,
    callbacks: list[Any],
) -> None:
    """Train a model in place by AdamW."""
    how = TrainingArguments(
        output_dir=str(scratch / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=5e-4,
        warmup_steps=steps // 10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        seed=0,
    )
    trainer = Trainer(
        model, how, train_dataset=examples, data_collator=default_data_collator, callbacks=callbacks
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
