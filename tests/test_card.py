"""What a model card says of where things lay."""

from emp_llm.services.card import _without_folders


def test_the_card_tells_of_no_folders() -> None:
    assert _without_folders({"file": "/home/somebody/texts/mine.txt", "seqlen": 512}) == {"file": "mine.txt", "seqlen": 512}
    assert _without_folders({"dataset": "allenai/c4", "file": None}) == {"dataset": "allenai/c4", "file": None}
    assert _without_folders(32768) == 32768
