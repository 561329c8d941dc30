"""The questions beside this file as a data set for lm-eval, found wherever the folder lies.

lm-eval would look for a relative `data_files` in the current folder; a function can tell where its
own file is.
"""

import json
from pathlib import Path
from typing import Any

import datasets


def load(questions: str, **metadata: Any) -> dict[str, datasets.Dataset]:
    """`questions`.jsonl as the split "test": context, choices (each beginning with a space) and
    label.
    """
    lines = (Path(__file__).parent / f"{questions}.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
