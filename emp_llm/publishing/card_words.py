"""The words of a model card: methods, and the meaning of its columns."""

from emp_llm.options.recipe import Recipe

METHOD_WORDS = {
    "emp-wanda": "Effective Model Pruning (EMP) with Wanda scores (weight magnitude times input norm)",
    "emp-magnitude": "Effective Model Pruning (EMP) with weight magnitudes as scores",
    "emp-relative": "Effective Model Pruning (EMP) with relative scores (weight magnitude times relative input norm)",
    "emp-ria": "Effective Model Pruning (EMP) with RIA scores (relative importance and activations)",
    "wanda": "Wanda (weight magnitude times input norm)",
    "relative": "relative scores (weight magnitude times input norm relative to each token's output)",
    "ria": "RIA (relative importance and activations)",
    "magnitude": "weight magnitude",
    "sparsegpt": "SparseGPT",
    "admm": "masks and weights searched for together (ADMM)",
    "emp-admm": "Effective Model Pruning (EMP) with counts by magnitudes, masks and weights searched for together (ADMM)",
}
UNIT_SCORES = {
    "magnitude": "the norms of their weights",
    "wanda": "the norms of their weights and activations",
    "taylor": "their first-order effect on the loss (Taylor)",
}
UNIT_GLOSSARY = (
    "*units*: whole heads (or groups of heads that share keys and values) or MLP neurons; *by the rule*: how many the rule "
    "keeps before all layers get one width; *N_eff/N*: the effective number of the units' scores in a layer, divided by their "
    "number; *s_eff*: the share of the total score that the N_eff largest scores hold, and *bound* its lower bound."
)
GLOSSARY = (
    "*kept*: the share of weights that were kept, overall and by row; *N_eff/N*: the effective number of weights in a row, "
    "divided by the row's length; *s_eff*: the share of the total score that the N_eff largest scores hold, and *bound* its "
    "lower bound; *kept mass*: the share of the total score that was kept."
)


def method_words(recipe: Recipe) -> str:
    """The method of a run in words."""
    how = METHOD_WORDS.get(recipe.method, recipe.method)
    if recipe.structure is not None:
        kinds = {"both": "attention heads and MLP neurons", "heads": "attention heads", "neurons": "MLP neurons"}
        how = f"{'EMP' if recipe.method.startswith('emp-') else 'a fixed share'} of whole {kinds[recipe.structure.structure]}"
        how += f" scored by {UNIT_SCORES[recipe.method.removeprefix('emp-')]},"
    if recipe.score == "relative" and recipe.method.removeprefix("emp-") != "relative":
        how += ", with input norms relative to the output"
    if recipe.shares == "owl":
        how += ", with a sparsity for each block by its outliers (OWL)"
    if recipe.count_by == "magnitude":
        how += ", and as many weights in each group as its magnitudes are worth"
    if recipe.refit:
        how += ", with a refit of the kept weights"
    return how
