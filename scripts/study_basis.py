"""In which basis should one prune? A Llama whose residual stream and heads are turned computes the
same and prunes otherwise.

    python scripts/study_basis.py MODEL --calibration demo --text eval/demo/heldout.txt --output
    docs/basis/demo.jsonl python scripts/study_basis.py --write docs/basis docs/basis/*.jsonl

The first command adds one line of JSON for each basis and each point to its output and skips what
it holds already, so that it can be stopped and started again. The second writes the tables and the
figure.

The weights of the RMSNorms are folded into the layers that read them, and the head is untied. Then
the residual stream may be turned by any orthogonal Q: embeddings and readers become W Q, writers
Q^T W. The values of each head may be turned by an orthogonal R: R^T W_v and W_o R. The turned model
is an ordinary checkpoint of the same shapes and dtype.

A basis is "asis", "folded" (no turn), "random", "moments" (eigenvectors of the inputs' second
moments), or the loss for which Q and R were found, from there, by Adam on the parameters of Cayley
transforms: "neff" (N_eff/N), "half" (the energy of the lower half), "entropy", "2:4" (the energy of
the two smaller of four), all as means over rows. After a plus: the order of the columns, which is
else random: "dealt" (the large columns are spread over the fours) or "swapped" (pairs of columns
swap while that helps 2:4).

A point is BASIS/BUDGET/METHOD. A budget is a sparsity, "2:4" or "beta1". A method is that of
`prune`, then after pluses "refit", "matrix" (group), "magnitude" (counts), "owl" (shares), "heal".
"""

import argparse
import copy
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emp_llm.options.recipe_options import recipe_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
LOSSES = ("neff", "half", "entropy", "2:4")
BASES = "asis,neff,half"
BUDGETS = "0.5,0.6,2:4,beta1"
METHODS = "wanda,emp-admm+refit"
SWAPS = 300  # rounds of swaps; in each, every four tries one swap
Entry = dict[str, Any]
# Q; R of each block; the order of the neurons of each block.
Turn = tuple[Tensor, list[Tensor], list[Tensor]]


# The turn.


class Folded:
    """A Llama without weights in its norms, in float32, and the second moments of its layers'
    inputs.

    Attributes:
        model: folded, with a head of its own.
        moments: of each block: "attention" and "mlp" of shape (width, width), "heads" (heads, dim,
            dim), "neurons" (neurons,).
    """

    def __init__(self, model: Any, tokens: Tensor) -> None:
        self.model = model = copy.deepcopy(model).float()
        config = model.config
        norm = model.model.norm
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * norm.weight)
        config.tie_word_embeddings = False
        norms = [norm]
        for block in model.model.layers:
            attention = block.self_attn
            mlp = block.mlp
            readers = (
                [attention.q_proj, attention.k_proj, attention.v_proj],
                [mlp.gate_proj, mlp.up_proj],
            )
            for norm, layers in zip(
                [block.input_layernorm, block.post_attention_layernorm], readers, strict=True
            ):
                norms.append(norm)
                for layer in layers:
                    layer.weight.data *= norm.weight
        for norm in norms:
            norm.weight.data.fill_(1)
        self.heads = config.num_attention_heads
        self.values = config.num_key_value_heads
        self.moments = self._moments(tokens)

    def _moments(self, tokens: Tensor) -> list[dict[str, Tensor]]:
        moments: list[dict[str, Tensor]] = [{} for _ in self.model.model.layers]
        hooks = []

        def watch(layer: Any, own: dict[str, Tensor], name: str) -> None:
            def add(_: Any, given: tuple[Tensor], __: Tensor) -> None:
                x = given[0].flatten(0, -2)
                if name == "neurons":
                    found = x.square().sum(0)
                elif name == "heads":
                    by_head = x.view(len(x), self.heads, -1).transpose(0, 1)
                    found = by_head.mT @ by_head
                else:
                    found = x.T @ x
                own[name] = own.get(name, 0) + found

            hooks.append(layer.register_forward_hook(add))

        for own, block in zip(moments, self.model.model.layers, strict=True):
            watch(block.self_attn.q_proj, own, "attention")
            watch(block.self_attn.o_proj, own, "heads")
            watch(block.mlp.gate_proj, own, "mlp")
            watch(block.mlp.down_proj, own, "neurons")
        with torch.no_grad():
            for batch in torch.split(tokens, 4):
                self.model(batch, use_cache=False)
        for hook in hooks:
            hook.remove()
        return moments

    def start(self, basis: str) -> Turn:
        """No turn, a random one, or the eigenvectors of the second moments in a random order."""
        width = self.model.config.hidden_size
        dim = self.moments[0]["heads"].shape[-1]
        neurons = [torch.arange(len(own["neurons"])) for own in self.moments]
        made = torch.Generator().manual_seed(0)
        if basis in ("asis", "folded"):
            return (
                torch.eye(width),
                [torch.eye(dim).repeat(self.values, 1, 1) for _ in self.moments],
                neurons,
            )
        if basis == "random":
            shape = len(self.moments), self.values, dim, dim
            turns = torch.linalg.qr(torch.randn(shape, generator=made))[0]
            return (
                torch.linalg.qr(torch.randn(width, width, generator=made))[0],
                list(turns),
                neurons,
            )
        every = [
            own[name] / own[name].trace() for own in self.moments for name in ("attention", "mlp")
        ]
        heads = [own["heads"].view(self.values, -1, dim, dim).sum(1) for own in self.moments]
        q, *turns = [
            torch.linalg.eigh(each).eigenvectors for each in (torch.stack(every).sum(0), *heads)
        ]
        order = torch.randperm(width, generator=made)
        inner = torch.randperm(dim, generator=made)
        return q[:, order], [each[..., inner] for each in turns], neurons

    def turned(self, turn: Turn) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """Of each block, by layer: the turned weights, and the squared norms of the turned
        inputs.
        """
        q, turns, orders = turn
        for block, own, r, order in zip(
            self.model.model.layers, self.moments, turns, orders, strict=True
        ):
            attention = block.self_attn
            mlp = block.mlp
            first = (q * (own["attention"] @ q)).sum(0)
            second = (q * (own["mlp"] @ q)).sum(0)
            by_head = r.repeat_interleave(self.heads // self.values, 0)
            values = r.mT @ (attention.v_proj.weight @ q).view(self.values, -1, len(q))
            outputs = (q.T @ attention.o_proj.weight).view(len(q), self.heads, -1).transpose(
                0, 1
            ) @ by_head
            yield {
                "self_attn.q_proj": (attention.q_proj.weight @ q, first),
                "self_attn.k_proj": (attention.k_proj.weight @ q, first),
                "self_attn.v_proj": (values.flatten(0, 1), first),
                "self_attn.o_proj": (
                    outputs.transpose(0, 1).flatten(1),
                    (by_head * (own["heads"] @ by_head)).sum(1).flatten(),
                ),
                "mlp.gate_proj": (mlp.gate_proj.weight[order] @ q, second),
                "mlp.up_proj": (mlp.up_proj.weight[order] @ q, second),
                "mlp.down_proj": (q.T @ mlp.down_proj.weight[:, order], own["neurons"][order]),
            }

    def scores(self, turn: Turn) -> Iterator[tuple[str, Tensor]]:
        """The squared Wanda scores of every layer: shape (outputs, inputs)."""
        for number, layers in enumerate(self.turned(turn)):
            for name, (weight, norms) in layers.items():
                yield f"{number}.{name}", weight.square() * norms

    def loss(self, turn: Turn, name: str) -> Tensor:
        """The mean of a measure over all rows."""
        return torch.cat([measure(scores, name) for _, scores in self.scores(turn)]).mean()

    def search(self, name: str, steps: int, rate: float) -> Turn:
        """The turn of least loss that Adam finds, from the eigenvectors of the second moments."""
        q, turns, orders = self.start("moments")
        free = torch.zeros_like(q), torch.zeros_like(torch.stack(turns))
        adam = torch.optim.Adam([each.requires_grad_() for each in free], lr=rate)
        rates = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1, 2 * (1 - step / steps)))

        def found() -> Turn:
            return q @ cayley(free[0]), list(torch.stack(turns) @ cayley(free[1])), orders

        for _ in range(steps):
            adam.zero_grad()
            self.loss(found(), name).backward()  # type: ignore[no-untyped-call]
            adam.step()
            rates.step()
        with torch.no_grad():
            return found()

    def control(self, noise: bool, even: bool) -> "Folded":
        """The same shapes with weights of noise, or with inputs of second moment one."""
        other = copy.copy(self)
        made = torch.Generator().manual_seed(1)
        other.model = copy.deepcopy(self.model)
        if noise:
            for layer in other.model.model.layers.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.data.normal_(generator=made)
        if even:
            ones: dict[str, Any] = {"attention": torch.eye, "mlp": torch.eye, "neurons": torch.ones}
            heads = torch.eye(self.moments[0]["heads"].shape[-1]).repeat(self.heads, 1, 1)
            other.moments = [
                {
                    name: heads if name == "heads" else ones[name](len(value))
                    for name, value in own.items()
                }
                for own in self.moments
            ]
        return other

    def ordered(self, turn: Turn, how: str) -> Turn:
        """A turn whose columns are dealt or swapped for 2:4: of the stream, of each head's
        values, and of the neurons.
        """
        q, turns, orders = turn
        rows: list[Tensor] = []
        turns = list(turns)
        orders = list(orders)
        for number, layers in enumerate(list(self.turned(turn))):
            shares = {name: (weight.square() * norms) for name, (weight, norms) in layers.items()}
            shares = {name: each / each.sum(1, keepdim=True) for name, each in shares.items()}
            orders[number] = orders[number][order_of(shares.pop("mlp.down_proj"), how)]
            outputs = shares.pop("self_attn.o_proj").view(
                len(q), self.values, self.heads // self.values, -1
            )
            found = [order_of(outputs[:, value].flatten(0, 1), how) for value in range(self.values)]
            turns[number] = torch.stack(
                [r[:, order] for r, order in zip(turns[number], found, strict=True)]
            )
            rows += shares.values()
        return q[:, order_of(torch.cat(rows), how)], turns, orders

    def model_of(self, turn: Turn) -> Any:
        """The turned model, in float32."""
        model = copy.deepcopy(self.model)
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight.data = weight.data @ turn[0]
        for block, layers in zip(model.model.layers, self.turned(turn), strict=True):
            for name, (weight, _) in layers.items():
                block.get_submodule(name).weight.data = weight.contiguous()
        return model


def cayley(free: Tensor) -> Tensor:
    """An orthogonal matrix (I + A)^-1 (I - A) with A = (F - F^T) / 2, or one of each matrix of a
    stack.
    """
    skew = (free - free.mT) / 2
    one = torch.eye(free.shape[-1])
    turned: Tensor = torch.linalg.solve(one + skew, one - skew)
    return turned


def measure(scores: Tensor, name: str) -> Tensor:
    """A number of each row, from its squared scores, shape (rows, columns); small: pruning does
    little harm.
    """
    total = scores.sum(1)
    if name == "neff":
        return (scores + 1e-12 * total[:, None]).sqrt().sum(1).square() / total / scores.shape[1]
    if name == "half":
        return (scores * (scores <= scores.median(1, keepdim=True).values)).sum(1) / total
    if name == "2:4":
        return least_two(*scores.view(len(scores), -1, 4).unbind(2)).sum(1) / total
    shares = scores / total[:, None]
    return -torch.xlogy(shares, shares.clamp(min=1e-30)).sum(1) / math.log(scores.shape[1])


def least_two(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The sum of the two smallest of four."""
    low = torch.minimum(a, b)
    high = torch.maximum(a, b)
    low2 = torch.minimum(c, d)
    high2 = torch.maximum(c, d)
    return torch.minimum(low, low2) + torch.minimum(
        torch.maximum(low, low2), torch.minimum(high, high2)
    )


def order_of(shares: Tensor, how: str) -> Tensor:
    """An order of the columns, for 2:4.

    Dealt: each four gets one column of each quarter by energy. Swapped: from there, random pairs of
    columns of two fours swap if the two smaller of each four have less energy then.
    """
    columns = shares.shape[1]
    order = shares.sum(0).argsort(descending=True).view(4, -1).T.contiguous()  # (fours, 4)
    if how == "dealt" or columns < 8:
        return order.flatten()
    made = torch.Generator().manual_seed(0)
    fours = columns // 4
    columns_first = shares.T.contiguous()

    def losses(some: Tensor) -> Tensor:
        return least_two(*(columns_first[some[:, place]] for place in range(4))).sum(1)

    lost = losses(order)
    for _ in range(SWAPS):
        pairs = torch.randperm(fours, generator=made)[: fours // 2 * 2].view(2, -1)
        at = torch.randint(4, pairs.shape, generator=made)
        new = order.clone()
        new[pairs[0], at[0]], new[pairs[1], at[1]] = order[pairs[1], at[1]], order[pairs[0], at[0]]
        after = losses(new[pairs.flatten()]).view(2, -1)
        better = (after.sum(0) < lost[pairs].sum(0)).nonzero().flatten()
        chosen = pairs[:, better].flatten()
        order[chosen], lost[chosen] = new[chosen], after[:, better].flatten()
    return order.flatten()


# The points.


class Study:
    """The dense model of a study, its calibration and its text.

    A basis and a pruned model are checkpoints in the folder `work`, made when they are missing.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        from emp_llm.calibration.data import read_text
        from emp_llm.calibration.texts import find_corpus
        from emp_llm.evaluation.perplexity import text_tokens
        from emp_llm.models.loading import load_model, load_tokenizer
        from emp_llm.options.calibration import CalibrationOptions

        self.options = options
        self.work = work
        self.folder = Path(options.model)
        self.tokenizer = load_tokenizer(self.folder)
        self.model = load_model(self.folder)
        wanted = CalibrationOptions(
            calibration=options.calibration, samples=options.samples, seqlen=options.seqlen
        )
        config = self.model.config
        self.tokens = read_text(wanted, self.tokenizer, config).tokens
        self.more_tokens = self.tokens
        if options.heal_samples:
            self.more_tokens = read_text(
                replace(wanted, samples=options.heal_samples), self.tokenizer, config
            ).tokens
        self.text = text_tokens(find_corpus(options.text), self.tokenizer)
        with torch.no_grad():
            self.folded = Folded(self.model, self.tokens)
        self.turns: dict[str, Turn] = {}
        self.norms: dict[str, Any] = {}

    def losses(self, model: Any, limit: int | None = None) -> list[float]:
        """The mean loss of each block of the text."""
        from emp_llm.evaluation.perplexity import perplexity

        o = self.options
        return list(perplexity(model, self.text, o.block, limit=limit or o.limit).block_losses)

    def turn(self, basis: str) -> Turn:
        """The turn of a basis."""
        if basis not in self.turns:
            name, _, how = basis.partition("+")
            if how:
                turn = self.turn(name)
                with torch.no_grad():
                    self.turns[basis] = self.folded.ordered(turn, how)
            elif name in LOSSES:
                self.turns[basis] = self.folded.search(name, self.options.steps, self.options.rate)
            else:
                self.turns[basis] = self.folded.start(name)
        return self.turns[basis]

    def dense(self, basis: str) -> Path:
        """The checkpoint of a basis."""
        folder = self.work / basis
        if basis == "asis":
            return self.folder
        if not folder.exists():
            turn = self.turn(basis)
            with torch.no_grad():
                model = self.folded.model_of(turn).to(self.model.dtype)
            self._save(model, folder)
        return folder

    def _save(self, model: Any, folder: Path) -> None:
        part = folder.with_name(f"{folder.name}.part")
        model.save_pretrained(part)
        self.tokenizer.save_pretrained(part)
        part.rename(folder)

    def run_basis(self, basis: str) -> Entry:
        """What a basis is worth, and that the function is the same."""
        from emp_llm.models.loading import load_model

        turn = self.turn(basis)
        with torch.no_grad():
            measures = {name: self.folded.loss(turn, name).item() for name in LOSSES}
            by_layer = {
                name: measure(scores, "neff").mean().item()
                for name, scores in self.folded.scores(turn)
            }
            entry: Entry = {"measures": measures, "by_layer": by_layer}
            if basis != "asis":
                turned = self.folded.model_of(turn)
                tokens = self.text[: self.options.block][None]
                dense = copy.deepcopy(self.model).float()
                before = dense(tokens).logits
                after = turned(tokens).logits
                one, other = (
                    math.exp(mean(self.losses(each, limit=16))) for each in (dense, turned)
                )
                entry |= {"logits": (after - before).abs().max().item(), "perplexity": [one, other]}
                assert abs(other / one - 1) < 5e-5, entry["perplexity"]
                assert entry["logits"] < 1e-3 * before.abs().max(), entry["logits"]
        return entry | {"losses": self.losses(load_model(self.dense(basis)))}

    def run_picture(self, basis: str) -> Entry:
        """The scores of one layer: 96 of its rows, and the energy of the smallest weights of a
        row, a mean over all rows.
        """
        turn = self.turn(basis)
        with torch.no_grad():
            scores = dict(self.folded.scores(turn))[self.options.picture]
            shares = scores / scores.sum(1, keepdim=True)
            image = shares[:96, shares.sum(0).argsort(descending=True)].sqrt()
            image = (image / image.amax(1, keepdim=True).median() * 255).clamp(max=255).byte()
            lowest = torch.cat([torch.zeros(1), shares.sort(1).values.cumsum(1).mean(0)])
            shown = {"shape": list(image.shape), "image": bytes(image.flatten().tolist()).hex()}
            return shown | {
                "neff": measure(scores, "neff").mean().item(),
                "lowest": [round(x, 5) for x in lowest.tolist()],
            }

    def run_control(self, name: str) -> Entry:
        """The least N_eff/N that a turn finds where weights, second moments of inputs, or both
        say nothing.
        """
        noise = name != "even"
        even = name != "noise"
        control = self.folded.control(noise, even)
        with torch.no_grad():
            found = {
                start: control.loss(control.start(start), "neff").item()
                for start in ("random", "moments")
            }
        turn = control.search("neff", self.options.steps, self.options.rate)
        with torch.no_grad():
            return {"measures": found | {"neff": control.loss(turn, "neff").item()}}

    def run_point(self, basis: str, budget: str, method: str) -> Entry:
        """A pruned model, healed if its method says so."""
        from emp_llm.in_memory.prune_model import prune_model
        from emp_llm.models.loading import load_model

        name, *words = method.split("+")
        how: Entry = (
            {}
            if budget == "beta1"
            else {"pattern": budget}
            if ":" in budget
            else {"sparsity": float(budget)}
        )
        settings: Entry = {
            "refit": {"refit": True},
            "matrix": {"group": "matrix"},
            "all": {"group": "all"},
        }
        settings |= {"magnitude": {"count_by": "magnitude"}, "owl": {"shares": "owl"}, "heal": {}}
        for word in words:
            how |= settings[word]
        recipe = recipe_of(method=name, targets="all-linear", **how)
        folder = self.work / f"{basis} {budget} {method}".removesuffix("+heal")
        entry = Entry()
        if not folder.exists():
            model = load_model(self.dense(basis))
            data = self.tokens if recipe.update is not None or basis not in self.norms else None
            report = prune_model(model, recipe, data, activations=self.norms.get(basis))
            if report.activations is not None:
                self.norms[basis] = report.activations
            self._save(model, folder)
            about = {
                "sparsity": report.targets.sparsity_of_targets,
                "beta": report.record.recipe.beta,
            }
            (folder / "about.json").write_text(json.dumps(about))
        model = load_model(folder)
        entry |= json.loads((folder / "about.json").read_text())
        if "heal" in words:
            entry |= self.heal(model, basis)
        return entry | {"losses": self.losses(model)}

    def heal(self, model: Any, basis: str) -> Entry:
        """Heal a pruned model in place."""
        from emp_llm.healing.training import heal_model
        from emp_llm.models.loading import load_model

        start = time.perf_counter()
        layers = model.model.layers.named_modules(prefix="model.layers")
        masks = {
            f"{name}.weight": layer.weight != 0
            for name, layer in layers
            if isinstance(layer, torch.nn.Linear)
        }
        dense = load_model(self.dense(basis))
        steps = self.options.heal_steps
        tokens = self.more_tokens
        record = heal_model(model, dense, tokens, masks=masks, steps=steps, samples=len(tokens))
        return {
            "heal_steps": steps,
            "heal_samples": len(tokens),
            "curve": record.curve,
            "heal_seconds": round(time.perf_counter() - start, 1),
        }


def runs(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Bases, controls and points, in the order in which they run."""
    bases = options.bases.split(",")
    yield from [("basis", basis) for basis in dict.fromkeys(["asis", *bases])]
    yield from [("picture", basis) for basis in ("asis", "neff") if options.picture]
    yield from [("control", name) for name in options.controls.split(",") if name]
    for budget in options.budgets.split(","):
        for method in options.methods.split(","):
            # EMP's counts do not go with N:M, and uniform rows have no beta.
            of_rows = ":" in budget
            if budget == "beta1" and not method.startswith("emp-"):
                method = f"emp-{method}"
            yield from [
                ("point", basis, budget, method.removeprefix("emp-") if of_rows else method)
                for basis in bases
            ]


def main(line: list[str] | None = None) -> None:
    """Run the study, or write its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model folder; with --write, the first results file")
    parser.add_argument("results", nargs="*", type=Path, help="further results files, with --write")
    parser.add_argument("--write", type=Path, help="folder for the tables and the figure")
    parser.add_argument("--name", help="of the model in the tables")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--calibration-name")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument(
        "--text", default="eval/demo/heldout.txt", help="text file or recipe to judge on"
    )
    parser.add_argument("--text-name")
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--limit", type=int, help="blocks of the text")
    parser.add_argument("--steps", type=int, default=120, help="of the search for a turn")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--heal-steps", type=int, default=300)
    parser.add_argument(
        "--heal-samples", type=int, help="sequences to heal on; default: those of the calibration"
    )
    parser.add_argument("--bases", default=BASES)
    parser.add_argument("--controls", default="", help="noise, even, both")
    parser.add_argument("--picture", help="the layer of the figure, such as 2.mlp.up_proj")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument(
        "--work", type=Path, help="folder for the checkpoints; default: a temporary one"
    )
    parser.add_argument("--output", type=Path, default=Path("basis.jsonl"))
    options = parser.parse_args(line)
    if options.write is not None:
        write_tables(options.write, [Path(options.model), *options.results])
        return
    with tempfile.TemporaryDirectory() as folder:
        run_study(options, options.work or Path(folder))


def run_study(options: argparse.Namespace, work: Path) -> None:
    """Run what the output does not hold yet."""
    work.mkdir(parents=True, exist_ok=True)
    done = (
        {tuple(entry["run"]) for entry in read(options.output)}
        if options.output.exists()
        else set()
    )
    wanted = [run for run in dict.fromkeys(runs(options)) if run not in done]
    study = Study(options, work) if wanted else None
    for number, run in enumerate(wanted, 1):
        assert study is not None
        start, (kind, *rest) = time.perf_counter(), run
        found = getattr(study, f"run_{kind}")(*rest)
        entry = {"model": options.name or study.folder.name, "run": run} | found
        if run == ("basis", "asis"):
            text = options.text_name or Path(options.text).name
            source = options.calibration_name or options.calibration
            entry |= {
                "text": text,
                "block": options.block,
                "calibration": source,
                "samples": len(study.tokens),
            }
        entry["seconds"] = round(time.perf_counter() - start, 1)
        with options.output.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        said = f"{math.exp(mean(entry['losses'])):.3f}, " if "losses" in entry else ""
        print(f"{number}/{len(wanted)} {'/'.join(run)}: {said}{entry['seconds']} s", flush=True)


def read(path: Path) -> list[Entry]:
    """The lines of a results file."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def write_tables(folder: Path, results: list[Path]) -> None:
    """Write `tables.md` and `scores.svg` into a folder."""
    from emp_llm.common.tables import Rows, markdown_table

    folder.mkdir(parents=True, exist_ok=True)
    about = (
        "asis: the checkpoint. folded: without weights in its norms. random: turned by chance. "
        "moments: by the eigenvectors of the inputs' second moments. neff, half, entropy, 2:4: "
        "from there for the least N_eff, energy of the lower half of a row, entropy, or energy of "
        "the two smaller of four. dealt, swapped: columns put in an order for 2:4. Cells of "
        "points: the increase of the perplexity over the dense model; in brackets, the change from "
        "asis; both with paired errors."
    )
    parts = ["# Bases: all points", about]
    rows = Rows()
    for path in results:
        entries = read(path)
        runs = {tuple(entry["run"]): entry for entry in entries}
        dense = runs["basis", "asis"]
        parts.append(
            f"## {dense['model']}\n\nCalibrated on {dense['samples']} sequences of "
            f"{dense['calibration']}, judged on {dense['text']}, {len(dense['losses'])} blocks of "
            f"{dense['block']} tokens: perplexity {math.exp(mean(dense['losses'])):.3f}. Measures "
            "are means over the rows of all linear layers. The last columns are the dense model: "
            "perplexity of 16 blocks in float32, and the increase of all in the checkpoint's dtype."
        )
        rows = [
            ["basis", "N_eff/N", "lower half", "entropy", "two of four", "float32", "as written"]
        ]
        for run, entry in runs.items():
            if run[0] == "basis":
                cells = [f"{entry['measures'][name]:.3f}" for name in LOSSES]
                exact = " → ".join(f"{each:.4f}" for each in entry.get("perplexity", []))
                rows.append([run[1], *cells, exact, "" if entry is dense else change(entry, dense)])
        parts.append(markdown_table(rows, as_markdown=True))
        layers = list(dict.fromkeys(name.partition(".")[2] for name in dense["by_layer"]))
        rows = [["N_eff/N by layer", *(name.rpartition(".")[2] for name in layers)]]
        for run, entry in runs.items():
            if run[0] == "basis" and "+" not in run[1]:
                by_layer = entry["by_layer"].items()
                rows.append(
                    [
                        run[1],
                        *(
                            f"{mean([v for k, v in by_layer if k.endswith(name)]):.3f}"
                            for name in layers
                        ),
                    ]
                )
        parts.append(markdown_table(rows, as_markdown=True))
        controls = {run[1]: entry["measures"] for run, entry in runs.items() if run[0] == "control"}
        if controls:
            words = {"noise": "weights of noise", "even": "even inputs", "both": "both"}
            rows = [["N_eff/N, controls", "random turn", "eigenvectors", "least found"]]
            rows += [
                [words[name], *(f"{value:.3f}" for value in found.values())]
                for name, found in controls.items()
            ]
            parts.append(markdown_table(rows, as_markdown=True))
        points = {run[1:]: entry for run, entry in runs.items() if run[0] == "point"}
        bases = [
            run[1]
            for run in runs
            if run[0] == "basis" and any(point[0] == run[1] for point in points)
        ]
        for budget in sorted(
            {point[1] for point in points},
            key=lambda budget: (not budget[0].isdigit(), ":" in budget, budget),
        ):
            of_budget = {point: entry for point, entry in points.items() if point[1] == budget}
            shown = [basis for basis in bases if any(point[0] == basis for point in of_budget)]
            rows = [
                [
                    budget if ":" in budget or budget == "beta1" else f"{100 * float(budget):g} %",
                    *shown,
                ]
            ]
            for method in dict.fromkeys(point[2] for point in of_budget):
                rows.append(
                    [method, *(cell(of_budget, (basis, budget, method), dense) for basis in shown)]
                )
            parts.append(markdown_table(rows, as_markdown=True))
        healed = sorted(
            {
                (entry["heal_steps"], entry["heal_samples"])
                for entry in entries
                if "heal_steps" in entry
            }
        )
        if healed:
            parts.append(
                "Healed: "
                + "; ".join(f"{steps} steps on {samples} sequences" for steps, samples in healed)
                + "."
            )
        pictures = {run[1]: entry for run, entry in runs.items() if run[0] == "picture"}
        if len(pictures) == 2:
            draw(folder / "scores.svg", pictures)
    (folder / "tables.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def cell(points: dict[Any, Entry], point: tuple[str, str, str], dense: Entry) -> str:
    """The increase over the dense model; and the difference from the model as it is, in percent
    of its perplexity.
    """
    if point not in points:
        return ""
    entry = points[point]
    base = points.get(("asis", *point[1:]))
    said = change(points[point], dense)
    if point[1] == "beta1":
        return f"{100 * entry['sparsity']:.1f} % removed: {said}"
    return said if base in (None, entry) else f"{said} ({change(entry, base)})"


def change(entry: Entry, base: Entry) -> str:
    """The change of the perplexity in percent, with its paired standard error."""
    from emp_llm.evaluation.comparison import Value, change_of, change_text

    pair = [
        Value(math.exp(mean(each["losses"])), losses=tuple((loss, 1) for loss in each["losses"]))
        for each in (entry, base)
    ]
    return change_text("perplexity", change_of("perplexity", *pair))


def mean(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


def draw(path: Path, pictures: dict[str, Entry]) -> None:
    """The scores of one layer in two bases, and the energy of their smallest weights."""
    import numpy as np

    from emp_llm.reporting.figures import COLOURS, new_figure

    names = {"asis": "as it is", "neff": "turned"}
    with new_figure(3.1) as figure:
        panels = figure.subplots(1, 3, width_ratios=[1, 1, 0.9])
        for axes, (basis, words), colour in zip(panels, names.items(), COLOURS, strict=False):
            entry = pictures[basis]
            image = np.frombuffer(bytes.fromhex(entry["image"]), np.uint8).reshape(entry["shape"])
            axes.imshow(
                image, cmap="magma", vmin=0, vmax=255, interpolation="nearest", aspect="auto"
            )
            axes.set_title(f"{words}: N_eff/N = {entry['neff']:.2f}", loc="left")
            axes.set(xticks=[], yticks=[], xlabel="inputs, the largest first", ylabel="outputs")
            energy = 100 * np.array(entry["lowest"])
            panels[2].plot(np.linspace(0, 100, len(energy)), energy, color=colour, label=words)
        panels[2].axvline(50, color="#666666", linewidth=0.8)
        panels[2].set(xlabel="smallest weights of a row, %", ylabel="their energy, %", ylim=(0, 30))
        panels[2].set_title("what pruning takes away", loc="left")
        panels[2].legend(loc="upper left")
        import matplotlib

        with matplotlib.rc_context({"svg.hashsalt": "basis"}):
            figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
