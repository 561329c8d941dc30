"""`scripts/paper/attention_edges.py`: the query-key scores that stay before the softmax."""

from pathlib import Path

import attention_edges
import oracle
import pytest
import torch
from attention_edges import Edges, kept_edges, main

ALLOWED = torch.ones(6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize("rule", attention_edges.GROUPS)
def test_edges_of_a_group(rule: str, beta: float) -> None:
    """Algorithm 1 in float64, on the scores of a head or of all heads, shifted by their minimum."""
    scores = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    kept = kept_edges(scores, ALLOWED, Edges(rule, beta))
    assert not bool(kept[..., ~ALLOWED].any())
    for sequence in range(2):
        values = scores[sequence][:, ALLOWED]
        for group, mask in zip(
            values if rule == "per head" else [values.flatten()],
            kept[sequence][:, ALLOWED]
            if rule == "per head"
            else [kept[sequence][:, ALLOWED].flatten()],
            strict=True,
        ):
            row = (group - group.min()).double().numpy()
            assert mask.tolist() == oracle.keep(row, oracle.count(row, beta)).tolist()


def test_baselines_keep_a_share_of_each_query() -> None:
    scores = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    for rule in attention_edges.BASELINES:
        kept = kept_edges(scores, ALLOWED, Edges(rule, share=0.5))
        assert kept.sum(-1).tolist() == [[[1, 1, 2, 2, 3, 3]] * 2]
        assert not bool(kept[..., ~ALLOWED].any())
    assert bool(
        kept_edges(scores, ALLOWED, Edges("largest of each query", share=0.5))[..., 0, 0].all()
    )


def test_the_table(tiny_llama: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dense row is the model's own perplexity, and a large beta changes nothing."""
    from emp_llm.calibration.texts import find_corpus
    from emp_llm.evaluation.evaluate import perplexity, text_tokens
    from emp_llm.models.loading import load_model, load_tokenizer

    main(
        [
            "--model",
            str(tiny_llama),
            "--text",
            str(text),
            "--block",
            "64",
            "--limit",
            "3",
            "--betas",
            "0.5",
            "100",
        ]
    )
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()[2:]
    ]
    corpus = find_corpus(str(text))
    assert corpus is not None
    model = load_model(tiny_llama, "cpu", "float32")
    own = perplexity(model, text_tokens(corpus, load_tokenizer(tiny_llama)), 64, limit=3).value
    assert [row[1:3] for row in rows[:3]] == [
        ["dense", ""],
        ["per head", "0.5"],
        ["per head", "100"],
    ]
    assert (
        float(rows[0][3])
        == pytest.approx(own, rel=1e-4)
        == pytest.approx(float(rows[2][3]), rel=1e-4)
    )
    assert (rows[2][5], rows[2][6]) == ("100.0", "0.00")
    assert float(rows[1][5]) < 60
    assert [row[1] for row in rows[5:]] == ["largest of each query", "random"]
