"""Experts removed from a mixture at the same number of parameters: scores, counts, a refit, and
what else has that size.

    python scripts/study_experts.py MODEL --calibration TEXT --text TEXT --output
    docs/experts/study.jsonl python scripts/study_experts.py MODEL --output docs/experts/study.jsonl
    --write docs/experts

The first command adds one line of JSON for each point to its output and skips the points that it
holds already, so it can be stopped and started again. The second writes the page of tables and its
figure.

Experts are removed in memory: their routers are closed. The written checkpoint computes the same;
two points are also written by `prune`, and compared. So layers can keep numbers of their own
("own"), which only a router with a bias can be told, and experts can be removed at random. Neurons,
layers and weights are pruned by `prune`, at equal parameters or bytes.
"""

import argparse
import dataclasses
import json
import math
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from emp_llm.options.flat import recipe_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SCORES = ("reap", "man", "frequency", "mass")
# Of 32: experts of a layer that stay, for every score, without a refit.
CURVE = (30, 28, 24, 20, 16, 12, 8)
SEEDS = 3  # of random choices
Entry = dict[str, Any]
Name = tuple[str, ...]


class Study:
    """The dense mixture, what its experts did on the calibration text, and the text to judge on."""

    def __init__(self, options: argparse.Namespace) -> None:
        from emp_llm.calibration.data import read_text
        from emp_llm.calibration.texts import find_corpus
        from emp_llm.evaluation.perplexity import text_tokens
        from emp_llm.models.blockwise import BlockwiseModel
        from emp_llm.models.loading import load_model, load_tokenizer
        from emp_llm.options.calibration import CalibrationOptions
        from emp_llm.options.recipe import Structure
        from emp_llm.structure.unit_model import unit_model

        self.options = options
        self.folder = Path(options.model)
        tokenizer = load_tokenizer(self.folder)
        self.model = load_model(self.folder, "cpu")
        wanted = CalibrationOptions(
            calibration=options.calibration, samples=options.samples, seqlen=options.seqlen
        )
        self.tokens = read_text(wanted, tokenizer, self.model.config).tokens
        self.tokenizer = tokenizer
        self.wanted = wanted
        self.texts = [text_tokens(find_corpus(text), tokenizer) for text in options.text]
        self.plan = unit_model(self.folder, Structure(units="experts"))
        self.sums = self.plan.units[0].sums(
            BlockwiseModel(self.model, None, "auto"), self.plan.units, self.tokens, 8
        )
        self.experts = len(self.plan.units[0])

    def on_own_text(self) -> tuple[Any, dict[str, Any]]:
        """The text that the dense mixture writes, continuing prompts, and what its experts did
        on it.
        """
        from emp_llm.calibration.data import TextWriter, read_text
        from emp_llm.models.blockwise import BlockwiseModel
        from emp_llm.models.one_model import OneModel

        wanted = dataclasses.replace(self.wanted, calibration=f"self:{self.options.prompts}")
        writer = TextWriter(self.plan.checkpoint, OneModel("cpu"), None, wanted.batch_size)
        tokens = read_text(wanted, self.tokenizer, self.model.config, writer).tokens
        return tokens, self.plan.units[0].sums(
            BlockwiseModel(self.model, None, "auto"), self.plan.units, tokens, 8
        )

    def losses(self, model: Any) -> list[list[float]]:
        """The mean loss of each block of each text."""
        from emp_llm.evaluation.perplexity import perplexity

        o = self.options
        return [
            list(perplexity(model, text, o.block, limit=o.limit).block_losses)
            for text in self.texts
        ]

    def chosen(
        self, score: str, kept: int | None, own: bool, seed: int = 0
    ) -> tuple[Any, float | None]:
        """The choice of experts and its beta. `kept`: of a layer, in the mean; None: EMP's
        number at beta = 1.
        """
        from emp_llm.structure.choice import choose_units
        from emp_llm.structure.scores import unit_scores

        units = self.plan.units
        random = np.random.default_rng(seed)
        if score == "random":
            scores = [random.permutation(len(each)).astype(np.float64) + 1 for each in units]
        else:
            scores = unit_scores(units, score, self.sums.get)
        name = "mass" if score == "random" else score
        method = f"emp-{name}" if own or kept is None else name
        sparsity = None if kept is None else 1 - kept / self.experts
        recipe = recipe_of(method, structure="experts", keep_shapes=own, sparsity=sparsity)
        return choose_units(units, scores, recipe)

    def experts_removed(
        self, score: str, kept: int | None, own: bool, refit: bool, seed: int = 0
    ) -> Entry:
        """A point of experts."""
        from emp_llm.models.modules import weight_of
        from emp_llm.structure.experts import closed_router, refit_experts
        from emp_llm.structure.writing import size_of
        from emp_llm.update.update import Refit
        from emp_llm.walk.moved import MovedWeights

        choices, beta = self.chosen(score, kept, own, seed)
        stays = {choice.units: choice.kept for choice in choices}
        moved = MovedWeights()
        if refit:
            refit_experts(self.model, stays, self.tokens, Refit(), moved, min_expert_tokens=32)
        before = {}
        new = moved.weights()
        for units in stays:
            for target in units.outputs:
                if target.name in new:
                    weight = weight_of(self.model, target.layer)
                    before[target.name] = weight, weight.clone()
                    weight.copy_(new[target.name])
        with ExitStack() as closed:
            for experts, numbers in stays.items():
                closed.enter_context(closed_router(self.model, experts, numbers))
            losses = self.losses(self.model)
        for weight, values in before.values():
            weight.copy_(values)
        parameters, size = size_of(self.plan, choices)
        lost = [
            (
                self.sums[each.units.name][:2, each.units.gone(each.kept)].sum(1)
                / self.sums[each.units.name][:2].sum(1)
            ).tolist()
            for each in choices
        ]
        about = {"counts": [len(each.kept) for each in choices]}
        fits = [each for each in moved.records().values() if each.error_before]
        errors = [[each.error_before, each.error_after] for each in fits]
        return about | {
            "beta": beta,
            "lost": lost,
            "parameters": parameters,
            "bytes": size,
            "errors": errors,
            "losses": losses,
        }

    def pruned(self, structure: str | None, method: str, **how: Any) -> Entry:
        """A point of `prune`, written and loaded again."""
        from emp_llm import prune
        from emp_llm.checkpoint.matrices import packed_bytes
        from emp_llm.models.loading import load_model

        o = self.options
        how |= {
            "structure": structure,
            "calibration": o.calibration,
            "samples": o.samples,
            "seqlen": o.seqlen,
            "quiet": True,
        }
        if structure == "neurons":
            how["width_multiple"] = 8  # bfloat16 on a CPU: rows of whole 16 bytes
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            report: Any = prune(str(self.folder), output=out, method=method, **how)
            losses = self.losses(load_model(out, "cpu"))
        dense = sum(self.plan.checkpoint.sizes.values())
        if report.structure is not None:
            cost = report.structure.pruned
            return {
                "beta": report.recipe.counts.in_force,
                "parameters": cost.parameters,
                "bytes": cost.bytes,
                "losses": losses,
            }
        weights = report.targets.weights
        zeros = report.targets.zeros
        size = dense - 2 * weights + packed_bytes(weights, 2, zeros)
        parameters = _parameters(self) - zeros
        return {
            "beta": report.recipe.counts.in_force,
            "parameters": parameters,
            "bytes": size,
            "losses": losses,
        }


def points(study: Study, at_one: dict[str, int]) -> list[Name]:
    """All points: ("experts", score, number that stays, counts, refit) or (structure, method,
    size, refit).
    """
    half = study.experts // 2
    quarter = study.experts * 3 // 4
    randoms = [f"random{seed}" for seed in range(SEEDS)]
    names = list[Name]()
    grid = sorted({quarter, half, *at_one.values()})
    curve = sorted({*grid, *(number * study.experts // 32 for number in CURVE)})
    names += [("experts", score, str(number), "one", "") for number in curve for score in SCORES]
    for number in grid:
        names += [
            ("experts", score, str(number), "own", "")
            for score in SCORES
            if number in (quarter, half, at_one[score])
        ]
    for size in (str(half), str(quarter), "beta1"):
        names += [
            ("layers", "cosine", size, ""),
            *(("neurons", "wanda", size, refit) for refit in ("", "refit")),
        ]
    for size in (f"bytes{half}", f"bytes{quarter}", "0.5", "2:4"):
        names += [
            ("weights", "wanda", size, ""),
            ("weights", "admm" if size == "2:4" else "emp-admm", size, "refit"),
        ]
    names += [("experts", score, str(number), "one", "") for number in curve for score in randoms]
    names += [("written", "reap", str(half), refit) for refit in ("", "refit")]
    for number in grid:
        names += [
            ("experts", score, str(number), "one", "refit")
            for score in SCORES
            if number in (quarter, half, at_one[score])
        ]
    names += [("experts", randoms[0], str(number), "one", "refit") for number in (quarter, half)]
    if study.options.prompts is not None:
        names += [
            ("experts", "reap self", str(number), "one", refit)
            for number in (quarter, half)
            for refit in ("", "refit")
        ]
    names += [
        ("experts", score, str(number), "own", "refit")
        for number in (quarter, half)
        for score in SCORES
    ]
    return list(dict.fromkeys(names))


def run(study: Study, name: Name, done: dict[Name, Entry]) -> Entry:
    """The result of a point."""
    kind, *rest = name
    size: Any
    if kind == "dense":
        size = sum(study.plan.checkpoint.sizes.values())
        every = {score: study.chosen(score, None, False)[0] for score in SCORES}
        at_one = {score: choices[0].record.kept for score, choices in every.items()}
        shares = {
            score: [each.record.n_eff / study.experts for each in choices]
            for score, choices in every.items()
        }
        mass = {
            score: [[each.record.s_eff, each.record.s_eff_bound] for each in choices]
            for score, choices in every.items()
        }
        about = {"at_one": at_one, "n_eff": shares, "s_eff": mass, "experts": study.experts}
        return about | {
            "parameters": _parameters(study),
            "bytes": size,
            "losses": study.losses(study.model),
        }
    if kind == "experts":
        score, number, counts, refit = rest
        if score.endswith(" self"):
            text = study.tokens, study.sums
            study.tokens, study.sums = study.on_own_text()
            try:
                return study.experts_removed(
                    score.removesuffix(" self"), int(number), counts == "own", bool(refit)
                )
            finally:
                study.tokens, study.sums = text
        seed = int(score[6:]) if score.startswith("random") else 0
        return study.experts_removed(
            score.rstrip("012"), int(number), counts == "own", bool(refit), seed
        )
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


def _parameters(study: Study) -> int:
    return sum(math.prod(tensor.shape) for tensor in study.plan.checkpoint.tensors.values())


def main(line: list[str] | None = None) -> None:
    """Run the study, or write its page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a mixture")
    parser.add_argument("--name", help="of the model on the page")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--calibration-name")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument(
        "--prompts",
        type=Path,
        help="prompts for a text of the mixture's own, a JSON object with text in a line",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=["eval/demo/heldout.txt"],
        help="text files or recipes to judge on",
    )
    parser.add_argument("--text-name", nargs="+")
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--limit", type=int, default=100, help="blocks of each text")
    parser.add_argument("--output", type=Path, default=Path("study.jsonl"))
    parser.add_argument("--write", type=Path, help="folder for the page and the figure")
    options = parser.parse_args(line)
    known = (
        [json.loads(text) for text in options.output.read_text().splitlines()]
        if options.output.exists()
        else []
    )
    done = {tuple(entry["point"]): entry for entry in known}
    if options.write is not None:
        write_page(options.write, done)
        return
    study = Study(options)
    names: list[Name] = [("dense",)]
    number = 0
    while number < len(names):
        name = names[number]
        number += 1
        if name not in done:
            start = time.perf_counter()
            entry: Entry = {"point": name} | _result(study, name, done)
            if name == ("dense",):
                entry |= {
                    "model": options.name or study.folder.name,
                    "block": options.block,
                    "blocks": options.limit,
                }
                entry["texts"] = options.text_name or [Path(text).name for text in options.text]
                tokens = f"{options.samples} sequences of {options.seqlen} tokens"
                entry["calibration"] = (
                    f"{tokens} of {options.calibration_name or Path(options.calibration).name}"
                )
            entry["seconds"] = round(time.perf_counter() - start, 1)
            done[name] = entry
            with options.output.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            said = entry.get("why") or " ".join(
                f"{math.exp(sum(each) / len(each)):.2f}" for each in entry["losses"]
            )
            print(
                f"{number}/{len(names)} {' '.join(name)}: {said}, {entry['seconds']} s", flush=True
            )
        if name == ("dense",):
            names += points(study, done[name]["at_one"])


def _result(study: Study, name: Name, done: dict[Name, Entry]) -> Entry:
    """The result of a point, or the sentence of the error that says why there is none."""
    from emp_llm.common.errors import UserError

    try:
        return run(study, name, done)
    except UserError as error:
        return {"why": str(error)}


def write_page(folder: Path, done: dict[Name, Entry]) -> None:
    """Write `study.md` and `curve.svg` into a folder."""
    from emp_llm.common.tables import Rows, markdown_table

    name: Name
    rows: Rows
    folder.mkdir(parents=True, exist_ok=True)
    dense = done["dense",]
    experts = dense["experts"]
    at_one = dense["at_one"]
    texts = dense["texts"]
    quarter = experts * 3 // 4
    half = experts // 2
    perplexities = [
        f"{math.exp(sum(each) / len(each)):.2f} on {text}"
        for text, each in zip(texts, dense["losses"], strict=True)
    ]
    parts = [
        f"# Experts of {dense['model']}",
        f"{dense['parameters']:,} parameters, {experts} experts in a layer. Calibrated on "
        f"{dense['calibration']}. Perplexity of the dense model: {'; '.join(perplexities)} "
        f"({dense['blocks']} blocks of {dense['block']}). Cells are increases over it, with paired "
        "standard errors over the blocks; a random choice is the mean of three.",
        "## How many experts can go",
        f"One number for all layers, no refit, {texts[0]}. Bold: the number at which EMP stops "
        "with β = 1 by this score.",
    ]
    numbers = sorted({int(name[2]) for name in done if name[0] == "experts"}, reverse=True)
    rows = [["experts", "parameters", *SCORES, "random"]]
    for number in numbers:
        cells = [_cell(done, dense, ("experts", score, str(number), "one", "")) for score in SCORES]
        cells = [
            f"**{cell}**" if at_one[score] == number else cell
            for score, cell in zip(SCORES, cells, strict=True)
        ]
        size = next(
            each["parameters"]
            for name, each in done.items()
            if name[0] == "experts" and name[2:4] == (str(number), "one")
        )
        rows.append(
            [
                str(number),
                f"{100 * size / dense['parameters']:.1f} %",
                *cells,
                _random(done, dense, number, ""),
            ]
        )
    parts += [
        markdown_table(rows, as_markdown=True),
        "![Damage by the number of experts](curve.svg)",
        "What β = 1 keeps:",
    ]
    rows = [
        [
            "score",
            "experts",
            "N_eff/E by layer",
            "s_eff by layer",
            "bound of s_eff",
            *(f"increase, {text}" for text in texts),
        ]
    ]
    for score in SCORES:
        mass = [
            " ".join(f"{pair[place]:.2f}" for pair in dense["s_eff"][score]) for place in (0, 1)
        ]
        shares = " ".join(f"{share:.2f}" for share in dense["n_eff"][score])
        name = "experts", score, str(at_one[score]), "one", ""
        rows.append(
            [
                score,
                str(at_one[score]),
                shares,
                *mass,
                *(_cell(done, dense, name, place) for place in range(len(texts))),
            ]
        )
    parts += [markdown_table(rows, as_markdown=True), "## Scores, counts, refit"]
    parts.append(
        "Equal parameters. Own: EMP's counts for each layer, with the same sum. This router has no "
        "bias, so they were measured with routers closed in memory and cannot be written. The last "
        "column is the difference of own counts from one number, both refitted."
    )
    for number in sorted({quarter, half, *at_one.values()}, reverse=True):
        for place, text in enumerate(texts if number in (quarter, half) else texts[:1]):
            rows = [
                [
                    "score",
                    "own counts",
                    "one number",
                    "own",
                    "one number, refit",
                    "own, refit",
                    "own − one, refit",
                ]
            ]
            for score in SCORES:
                names: list[Name] = [
                    ("experts", score, str(number), counts, refit)
                    for refit in ("", "refit")
                    for counts in ("one", "own")
                ]
                if names[1] in done:
                    counts = " ".join(map(str, done[names[1]]["counts"]))
                    cells = [_cell(done, dense, name, place) for name in names]
                    gain = _cell(done, done[names[2]], names[3], place) if names[2] in done else ""
                    rows.append([score, counts, *cells, gain])
            random = [_random(done, dense, number, refit, place) for refit in ("", "refit")]
            rows.append(["random", "", random[0], "", random[1], "", ""])
            parts += [
                f"{number} of {experts} experts, {text}:",
                markdown_table(rows, as_markdown=True),
            ]
    parts.append("## Calibrated on the mixture's own text")
    parts.append(
        "`--calibration self:PROMPTS`: the dense mixture continues the first words of articles of "
        "the calibration text, and its experts are scored and refitted on what it writes, as many "
        "tokens. Experts by reap:"
    )
    rows = [
        [
            "experts",
            "refit",
            *(f"{text}, {how}" for text in texts for how in ("given text", "own text")),
        ]
    ]
    for number in (quarter, half):
        for refit in ("", "refit"):
            of = [("experts", score, str(number), "one", refit) for score in ("reap", "reap self")]
            cells = [_cell(done, dense, name, place) for place in range(len(texts)) for name in of]
            rows.append([str(number), refit, *cells])
    parts.append(markdown_table(rows, as_markdown=True))
    parts.append("## Neurons, layers, weights")
    wanted: list[Name] = [
        ("experts", "reap", str(number), "one", refit)
        for number in (quarter, half)
        for refit in ("", "refit")
    ]
    wanted += [name for name in done if name[0] in ("neurons", "layers", "weights")]
    rows = [["removed", "parameters", "bytes", *texts]]
    for name in sorted(wanted, key=lambda name: (done[name].get("bytes", 0), name), reverse=True):
        entry = done[name]
        if "why" in entry:
            rows.append([_words(name), "", "", entry["why"], *[""] * (len(texts) - 1)])
            continue
        sizes = [f"{100 * entry[size] / dense[size]:.1f} %" for size in ("parameters", "bytes")]
        rows.append(
            [
                _words(name),
                *sizes,
                *(_cell(done, dense, name, place) for place in range(len(texts))),
            ]
        )
    parts.append(
        "By size in bytes. Parameters and bytes are shares of the dense model's. Weights that were "
        "set to zero are no parameters; their bytes are those of the packed format: a bitmask and "
        "the other weights."
    )
    parts.append(markdown_table(rows, as_markdown=True))
    checked = []
    for refit in ("", "refit"):
        one = done["written", "reap", str(half), refit]
        other = done["experts", "reap", str(half), "one", refit]
        checked.append(float(np.abs(np.subtract(one["losses"], other["losses"])).max()))
    minutes = sum(each["seconds"] for each in done.values()) / 60
    parts.append(
        f"Checked: `prune` wrote the checkpoints with {half} experts by reap, without and with a "
        "refit. No block's loss differs from that of the model in memory by more than "
        f"{checked[0]:.4f} and {checked[1]:.4f} (bfloat16)."
    )
    parts.append(
        f"Written by `scripts/study_experts.py`; {minutes:.0f} minutes on one core of a "
        "busy machine."
    )
    (folder / "study.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    _draw(folder / "curve.svg", done, dense)


def increase(entry: Entry, base: Entry, place: int) -> tuple[float, float]:
    """The increase of the perplexity in percent, and its paired standard error."""
    changes = np.subtract(entry["losses"][place], base["losses"][place])
    mean = float(changes.mean())
    return 100 * math.expm1(mean), 100 * math.exp(mean) * float(changes.std(ddof=1)) / math.sqrt(
        len(changes)
    )


def _cell(done: dict[Name, Entry], base: Entry, name: Name, place: int = 0) -> str:
    if name not in done or "why" in done[name]:
        return ""
    return "{:+.1f} ± {:.1f} %".format(*increase(done[name], base, place))


def _random(done: dict[Name, Entry], dense: Entry, number: int, refit: str, place: int = 0) -> str:
    """The mean of the random choices, and their range."""
    names = [("experts", f"random{seed}", str(number), "one", refit) for seed in range(SEEDS)]
    found = [increase(done[name], dense, place)[0] for name in names if name in done]
    spread = f"{min(found):.1f} to {max(found):.1f}" if len(found) > 1 else "one choice"
    return f"{sum(found) / len(found):+.1f} % ({spread})" if found else ""


def _words(name: Name) -> str:
    """A point in words."""
    kind, method, size, *_, refit = name
    if kind == "experts":
        said = f"experts, {method}, {size} stay"
    elif size.startswith("bytes"):
        said = f"weights, {method}, in the bytes of {size[5:]} experts"
    elif size == "beta1":
        said = f"{kind}, emp-{method}, β = 1"
    else:
        said = f"{kind}, {method}, {size if kind == 'weights' else f'as many as in {size} experts'}"
    return said + (", refit" if refit else "")


def _draw(path: Path, done: dict[Name, Entry], dense: Entry) -> None:
    """The increase of the perplexity by the number of experts, for each score; a ring is EMP's
    beta = 1.
    """
    from emp_llm.reporting.figures import COLOURS, GREY, MARKERS, drawn, new_figure

    with new_figure(3.9) as figure:
        panels = figure.subplots(1, len(dense["texts"]), squeeze=False)[0]
        for place, (axes, text) in enumerate(zip(panels, dense["texts"], strict=True)):
            for number, score in enumerate((*SCORES, "random")):
                names = [
                    name
                    for name in done
                    if name[0] == "experts"
                    and name[1].rstrip("012") == score
                    and name[3:] == ("one", "")
                ]
                by_number: dict[int, list[float]] = {dense["experts"]: [0.0]}
                for name in names:
                    by_number.setdefault(int(name[2]), []).append(
                        increase(done[name], dense, place)[0]
                    )
                at = sorted(by_number)
                style = {
                    "color": GREY if score == "random" else COLOURS[number],
                    "marker": MARKERS[number],
                    "label": score,
                }
                axes.plot(at, [sum(by_number[each]) / len(by_number[each]) for each in at], **style)
                kept = dense["at_one"].get(score)
                if kept in by_number:
                    ring = {"markersize": 13, "markerfacecolor": "none", "color": style["color"]}
                    axes.plot([kept], [by_number[kept][0]], marker="o", linestyle="none", **ring)
            axes.set_yscale("symlog", linthresh=1)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.invert_xaxis()
            axes.set_title(text, loc="left")
            axes.set_xlabel("experts of a layer that stay")
        panels[0].set_ylabel("increase of the perplexity, %")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
        path.write_bytes(
            drawn(figure, "curve", f"{dense['model']}: experts removed; ring: EMP's β = 1", "").svg
        )


if __name__ == "__main__":
    main()
