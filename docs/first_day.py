"""The first day with emp-llm, cell by cell: measure, prune a model in memory, use a score of your
own.

Run it (`python docs/first_day.py`), or open it as a notebook: every `# %%` begins a cell. It uses
the model and the text that the repository carries, needs no network, deletes what it writes, and
takes under a minute.
"""

# %% A model and its tokenizer, as you load them anyway
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from emp_llm import (
    Given,
    Masks,
    Own,
    Recipe,
    Targets,
    Wanda,
    masks_of,
    measure,
    prune_model,
    reapply_mask,
    verify,
)

here = Path(__file__).resolve() if "__file__" in globals() else Path.cwd() / "notebook"
root = next(each for each in here.parents if (each / "scripts" / "demo" / "model").is_dir())
MODEL = str(root / "scripts" / "demo" / "model")
folder = TemporaryDirectory()
work = Path(folder.name)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")

# %% How much would EMP remove, at which beta? Nothing is written but this measure.
measured = measure(MODEL, output=work / "measure.json", criteria="magnitude", betas="0.8,1,1.2")
for point in measured.measures[0].curve:
    print(f"beta {point.beta:g}: {point.sparsity_of_targets:.1%} of the targets")

# %% Prune the model in memory
recipe = Recipe(score=Wanda(), targets=Targets("mlp"))
text = (root / "calibration" / "demo.txt").read_text(encoding="utf-8")
report = prune_model(model, recipe, [text], tokenizer, samples=8, seqlen=256)
print(f"{report.targets.sparsity_of_targets:.1%} of {report.targets.weights:,} weights removed")
widest = max(report.matrices, key=lambda name: report.matrices[name].kept_fraction_mean)
print(f"most is kept of {widest}: {report.matrices[widest].kept_fraction_mean:.1%}")

# %% Save it as you save any model. The report makes the folder a finished checkpoint.
model.save_pretrained(work / "pruned")
tokenizer.save_pretrained(work / "pruned")
report.save(work / "pruned")
print("differences:", verify(work / "pruned").differences)

# %% A criterion of your own, in three lines: the weight's share of its column, times the norm of
# its input


def column_share(weight, inputs):  # type: ignore[no-untyped-def]
    size = weight.float().abs()
    return size / size.sum(0) * inputs.norms


dense = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
# The norms are those of before.
masks = masks_of(dense, Recipe(score=Own(column_share)), activations=report.activations)
kept = sum(int(mask.sum()) for mask in masks.values()) / sum(
    mask.numel() for mask in masks.values()
)
print(f"emp-column_share keeps {kept:.1%}")

# %% Or scores that you have already: here, of a signed kind
scores = {name: parameter.detach().float() for name, parameter in dense.named_parameters()}
signed = masks_of(dense, Recipe(score=Given(scores, score_map="shift")))
kept = sum(int(mask.sum()) for mask in signed.values())
print(f"shifted scores keep {kept / sum(mask.numel() for mask in signed.values()):.1%}")

# %% Masks are tensors: save them, load them, apply them, and again after every change of the
# weights
masks.save(work / "masks.safetensors")
removed = reapply_mask(dense, Masks.load(work / "masks.safetensors"))
with torch.no_grad():
    for parameter in dense.parameters():
        parameter.add_(0.01)
print(f"{removed:,} weights removed; {reapply_mask(dense, masks):,} again after they were changed")
folder.cleanup()
