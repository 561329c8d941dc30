"""Recipes of records up to version 0.2 and of the weeks after it, which hold flat options."""

from typing import Any

from emp_llm.options.flat import RecipeWords
from emp_llm.options.recipe import Recipe

# Their names of fields that are no options.
_FIELDS = {"criterion_source": "source", "scores_digest": "digest"}
_OF_POINTS = ("method", "beta", "order", "sparsity", "pattern")
_GONE = {"shares": "owl", "head_unit": "query"}


def recipe_of_flat(values: dict[str, Any]) -> Recipe:
    """The recipe of an old record; ValueError if it is none, or asks for what was removed."""
    structure = dict(values.get("structure") or {})
    for path, fields in (("", values), (".structure", structure)):
        for name, gone in _GONE.items():
            if fields.get(name) == gone:
                raise ValueError(f"{path}.{name}: unknown value '{gone}'")
    structure.pop("head_unit", None)
    if "group" in structure:
        structure["structure_group"] = structure.pop("group")
    words = RecipeWords(values | {"structure": None} | structure)
    for old, new in _FIELDS.items():
        if old in words:
            words[new] = words.pop(old)
    if words.get("score") == "wanda":  # plain norms
        del words["score"]
    if words.get("sparsity") is not None and words.get("beta") is not None:
        words["found"] = words.pop("beta")
    return words.recipe


def with_trees(values: dict[str, Any]) -> dict[str, Any]:
    """The JSON of an old run or sweep, whose points have options in place of a recipe."""
    for point in [*(values.get("points") or []), values.get("point")]:
        if not isinstance(point, dict) or "method" not in point:
            continue
        words = {name: point.pop(name, None) for name in _OF_POINTS}
        by = point.pop("match", None)
        if by is not None:
            words |= {"match": point.get("baseline_of"), "match_by": by}
        point["recipe"] = words
    return values
