"""A kind of unit that the package does not know: one class, in place of the neurons, and it goes
through the commands.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from runs import check_verified
from safetensors.torch import load_file
from tiny import weights_of
from transformers import AutoConfig

from emp_llm import prune
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import Structure
from emp_llm.structure.choice import unit_scores
from emp_llm.structure.parts import Neurons
from emp_llm.structure.prune_structure import KINDS, unit_model
from emp_llm.structure.units import UnitModel

UP = "model.layers.1.mlp.up_proj.weight"


@dataclass(frozen=True, eq=False)
class Pairs(Neurons):
    """Neurons 2i and 2i + 1, which stay or go together."""

    kind = "pairs"

    @classmethod
    def _of_layers(cls, targets: list[Target], model: UnitModel) -> Self | None:
        single = super()._of_layers(targets, model)
        if single is None:
            return None
        rows = {target: outputs.reshape(-1, 2) for target, outputs in single.rows.items()}
        return cls.of(single.output, single.columns.reshape(-1, 2), rows)

    def fields(self, config: Any, stays: Mapping[int, int]) -> dict[str, Any]:
        return {"intermediate_size": 2 * stays[self.block]}


def test_what_a_kind_does_not_have(tiny_llama: Path) -> None:
    """The options refuse it; a kind that is not in their table meets a sentence."""
    (layers,) = unit_model(tiny_llama, Structure(units="layers")).units
    with pytest.raises(UserError, match="layers have no score by their weights"):
        unit_scores([layers], "magnitude")


@pytest.mark.parametrize(
    "options",
    [
        {"method": "emp-magnitude", "beta": 1},
        {"method": "wanda", "sparsity": 0.5, "refit": True},
        {"method": "taylor", "sparsity": 0.5, "keep_shapes": True, "width_multiple": None},
    ],
    ids=["weights", "norms and a refit", "gradients, shapes kept"],
)
def test_it_goes_through_the_commands(
    options: dict[str, Any],
    tiny_llama: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KINDS, "neurons", Pairs)
    source = tiny_llama
    out = tmp_path / "out"
    texts = {} if "magnitude" in options["method"] else {"calibration": str(text), "samples": 4}
    given = {"width_multiple": 1, "device_map": "cpu"} | texts | options
    report = prune(model=str(source), structure="neurons", seqlen=64, output=out, **given)
    check_verified(out, source)
    assert {units.kind for units in report.structure.layers.values()} == {"pairs"}

    numbers = load_file(out / "emp_llm" / "structure.safetensors")
    pairs = numbers["model.layers.1.mlp.down_proj.kept"]
    rows = torch.stack([2 * pairs, 2 * pairs + 1], 1).flatten()
    dense = weights_of(source)[UP]
    assert 0 < len(rows) < len(dense)
    small = weights_of(out)[UP]
    if "keep_shapes" in options:
        assert torch.equal(small.any(1).nonzero()[:, 0], rows)
        small = small[rows]
    else:
        assert AutoConfig.from_pretrained(out).intermediate_size == len(rows)
    assert torch.equal(small, dense[rows])
