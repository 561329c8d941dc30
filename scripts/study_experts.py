"""Experts removed from a mixture at the same number of parameters: scores, counts, a refit, and what else has that size.

    python scripts/study_experts.py MODEL --calibration TEXT --text TEXT --output docs/experts/study.jsonl
    python scripts/study_experts.py MODEL --output docs/experts/study.jsonl --write docs/experts

The first command adds one line of JSON for each point to its output and skips the points that it holds already, so it can be
stopped and started again. The second writes the page of tables and its figure.

Experts are removed in memory: their routers are closed. The written checkpoint computes the same; two points are also written by
`prune`, and compared. So layers can keep numbers of their own ("own"), which only a router with a bias can be told, and experts
can be removed at random. Neurons, layers and weights are pruned by `prune`, at the parameters or the bytes of the experts.
"""

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SCORES = ("reap", "man", "frequency", "mass")
CURVE = (31, 30, 28, 26, 24, 22, 20, 16, 12, 8)  # of 32: experts of a layer that stay, for every score, without a refit
Entry = dict[str, Any]


class Study:
    """The dense mixture, what its experts did on the calibration text, and the text to judge on."""

    def __init__(self, options: argparse.Namespace) -> None:
        from emp_llm.calibration.data import read_text
        from emp_llm.calibration.texts import find_corpus
        from emp_llm.evaluation.perplexity import text_tokens
        from emp_llm.models.blockwise import BlockwiseModel
        from emp_llm.models.loading import load_model, load_tokenizer
        from emp_llm.options.calibration import CalibrationOptions
        from emp_llm.options.recipe import StructureRecipe
        from emp_llm.structure.scores import unit_sums
        from emp_llm.structure.units import unit_model

        self.options, self.folder = options, Path(options.model)
        tokenizer = load_tokenizer(self.folder)
        self.model = load_model(self.folder, "cpu")
        wanted = CalibrationOptions(calibration=options.calibration, samples=options.samples, seqlen=options.seqlen)
        self.tokens = read_text(wanted, tokenizer, options.seqlen).tokens
        self.text = text_tokens(find_corpus(options.text), tokenizer)
        self.plan = unit_model(self.folder, StructureRecipe(structure="experts"))
        self.sums = unit_sums(BlockwiseModel(self.model, None, "auto"), self.plan.units, self.tokens, 8)
        self.experts = len(self.plan.units[0])

    def losses(self, model: Any) -> list[float]:
        """The mean loss of each block of the text."""
        from emp_llm.evaluation.perplexity import perplexity

        return list(perplexity(model, self.text, self.options.block, limit=self.options.limit).block_losses)

    def chosen(self, score: str, kept: int | None, own: bool, seed: int = 0) -> tuple[Any, float | None]:
        """The choice of experts and its beta. `kept`: of a layer, in the mean; None: EMP's number at beta = 1."""
        from emp_llm.options.recipe import Recipe, StructureRecipe
        from emp_llm.structure.choice import choose_units
        from emp_llm.structure.scores import unit_scores

        units, random = self.plan.units, np.random.default_rng(seed)
        if score == "random":
            scores = [1.0 + random.permutation(len(each)) for each in units]
        else:
            scores = unit_scores(units, score, self.sums.get)
        method = f"emp-{score}" if own or kept is None else "mass" if score == "random" else score
        share = {} if kept is None else {"sparsity": 1 - kept / self.experts}
        recipe = Recipe(method=method, structure=StructureRecipe(structure="experts", keep_shapes=own), **share)
        return choose_units(units, scores, recipe)

    def experts_removed(self, score: str, kept: int | None, own: bool, refit: bool, seed: int = 0) -> Entry:
        """A point of experts."""
        from emp_llm.models.modules import weight_of
        from emp_llm.options.recipe import Recipe, StructureRecipe
        from emp_llm.structure.experts import closed_routers, refit_experts
        from emp_llm.structure.writing import cut_of, size_of
        from emp_llm.update.moved import MovedWeights

        choices, beta = self.chosen(score, kept, own, seed)
        stays, moved = {choice.units: choice.kept for choice in choices}, MovedWeights()
        if refit:
            recipe = Recipe(
                method=score if score != "random" else "mass", structure=StructureRecipe(structure="experts"), refit=True
            )
            refit_experts(self.model, stays, self.tokens, recipe, moved)
        before, new = {}, moved.weights()
        for units in stays:
            for target in units.outputs:
                if target.name in new:
                    weight = weight_of(self.model, target.layer)
                    before[target.name] = weight, weight.clone()
                    weight.copy_(new[target.name])
        with closed_routers(self.model, stays):
            losses = self.losses(self.model)
        for weight, values in before.values():
            weight.copy_(values)
        parameters, size = size_of(self.plan.checkpoint, cut_of(self.plan, choices, True))
        lost = [
            (self.sums[each.units.name][:2, each.gone].sum(1) / self.sums[each.units.name][:2].sum(1)).tolist()
            for each in choices
        ]
        about = {"counts": [len(each.kept) for each in choices], "n_eff": [each.record.n_eff for each in choices]}
        about |= {"s_eff": [each.record.s_eff for each in choices], "bound": [each.record.s_eff_bound for each in choices]}
        fits = [each for each in moved.records().values() if each.error_before]
        errors = [[each.error_before, each.error_after] for each in fits]
        return about | {"beta": beta, "lost": lost, "parameters": parameters, "bytes": size, "errors": errors, "losses": losses}

    def pruned(self, structure: str | None, method: str, **how: Any) -> Entry:
        """A point of `prune`, written and loaded again."""
        from emp_llm.checkpoint.matrices import packed_bytes
        from emp_llm.models.loading import load_model
        from emp_llm.prune import prune

        o = self.options
        how |= {"calibration": o.calibration, "samples": o.samples, "seqlen": o.seqlen, "quiet": True}
        if structure == "neurons":
            how["width_multiple"] = 1
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            report = prune(str(self.folder), output=out, structure=structure, method=method, **how)
            losses = self.losses(load_model(out, "cpu"))
        dense = sum(size for size, _ in self.plan.checkpoint.states.values())
        if report.structure is not None:
            cost = report.structure.pruned
            return {"beta": report.recipe.beta, "parameters": cost.parameters, "bytes": cost.bytes, "losses": losses}
        weights, zeros = report.targets.weights, report.targets.zeros
        size = dense - 2 * weights + packed_bytes(weights, 2, zeros)
        parameters = self.model.num_parameters() - zeros
        return {"beta": report.recipe.beta, "parameters": parameters, "bytes": size, "losses": losses}


def points(study: Study) -> list[tuple[str, ...]]:
    """All points, by name: (experts, score, number that stays, counts, refit) or (structure, method, size, refit)."""
    half, quarter = study.experts // 2, study.experts * 3 // 4
    names: list[tuple[str, ...]] = [("dense",)]
    at_one = {score: study.chosen(score, None, False)[0][0].record.kept for score in SCORES}
    names += [("experts", score, "beta1", "one", "") for score in SCORES]
    numbers = sorted({quarter, half, *at_one.values()} - {study.experts}, reverse=True)
    for number in numbers:
        grid = number in (quarter, half)
        scores = SCORES if grid else [score for score in SCORES if at_one[score] == number]
        names += [
            ("experts", score, str(number), counts, refit)
            for score in scores
            for counts in ("one", "own")
            for refit in ("", "refit")
        ]
        names += [("experts", f"random{seed}", str(number), "one", refit) for seed in range(3) for refit in ("", "refit")]
    curve = [number * study.experts // 32 for number in CURVE]
    names += [
        ("experts", score, str(number), "one", "") for number in curve for score in (*SCORES, "random0", "random1", "random2")
    ]
    names += [("written", "reap", str(half), refit) for refit in ("", "refit")]
    names += [("layers", "cosine", size, "") for size in ("beta1", str(quarter), str(half))]
    for size in ("beta1", str(quarter), str(half)):
        names += [("neurons", method, size, refit) for method in ("magnitude", "wanda") for refit in ("", "refit")]
    for size in ("0.5", "2:4", f"bytes{quarter}", f"bytes{half}"):
        names += [("weights", "wanda", size, refit) for refit in ("", "refit")]
        names.append(("weights", "admm" if size == "2:4" else "emp-admm", size, "refit"))
    return list(dict.fromkeys(names))


def run(study: Study, name: tuple[str, ...], done: dict[tuple[str, ...], Entry]) -> Entry:
    """The result of a point."""
    kind, *rest = name
    if kind == "dense":
        size = sum(size for size, _ in study.plan.checkpoint.states.values())
        return {"parameters": study.model.num_parameters(), "bytes": size, "losses": study.losses(study.model)}
    if kind == "experts":
        score, number, counts, refit = rest
        seed = int(score[6:]) if score.startswith("random") else 0
        kept = None if number == "beta1" else int(number)
        return study.experts_removed(score.rstrip("012"), kept, counts == "own", bool(refit), seed)
    method, size, refit = rest
    how: dict[str, Any] = {"refit": True} if refit else {}
    if size == "beta1":
        method = f"emp-{method}"
    elif size == "2:4":
        how["pattern"] = size
    elif size.startswith("bytes"):
        how["memory"] = str(done["experts", "reap", size[5:], "one", ""]["bytes"])
    else:
        how["sparsity"] = float(size) if "." in size else 1 - int(size) / study.experts
    return study.pruned({"weights": None, "written": "experts"}.get(kind, kind), method, **how)


def main(line: list[str] | None = None) -> None:
    """Run the study, or write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a mixture")
    parser.add_argument("--name", help="of the model on the page")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--calibration-name")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--text", default="eval/demo/heldout.txt", help="text file or recipe to judge on")
    parser.add_argument("--text-name")
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--limit", type=int, default=100, help="blocks of the text")
    parser.add_argument("--output", type=Path, default=Path("study.jsonl"))
    parser.add_argument("--write", type=Path, help="folder for the page and the figure")
    options = parser.parse_args(line)
    known = [json.loads(text) for text in options.output.read_text().splitlines()] if options.output.exists() else []
    done = {tuple(entry["point"]): entry for entry in known}
    if options.write is not None:
        write(options.write, options, done)
        return
    study = Study(options)
    about = {"model": options.name or study.folder.name, "text": options.text_name or Path(options.text).name}
    about |= {"calibration": options.calibration_name or Path(options.calibration).name, "experts": study.experts}
    wanted = points(study)
    for number, name in enumerate(wanted, 1):
        if name in done:
            continue
        start = time.perf_counter()
        entry = {"point": name} | about | {"seed": 0} | run_or_why(study, name, done)
        entry["seconds"] = round(time.perf_counter() - start, 1)
        done[name] = entry
        with options.output.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        losses = entry.get("losses")
        said = entry.get("why") if losses is None else f"perplexity {math.exp(sum(losses) / len(losses)):.3f}"
        print(f"{number}/{len(wanted)} {' '.join(name)}: {said}, {entry['seconds']} s", flush=True)


def run_or_why(study: Study, name: tuple[str, ...], done: dict[tuple[str, ...], Entry]) -> Entry:
    """The result of a point, or the sentence of the error that says why there is none."""
    from emp_llm.common.errors import UserError

    try:
        return run(study, name, done)
    except UserError as error:
        return {"why": str(error)}


if __name__ == "__main__":
    main()
