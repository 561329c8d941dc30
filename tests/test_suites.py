"""Suite files: those of the package, those of a user, and wrong ones."""

import json
from importlib import import_module
from pathlib import Path

import pytest
from conftest import SHARED
from suites import few_task_files

from emp_llm.common.errors import UserError
from emp_llm.common.paths import data_folder
from emp_llm.evaluation.results import Task, find_suite, suite_of
from emp_llm.options.shared import SuiteOptions

SEVEN = ["boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa"]


def test_suites_of_the_package() -> None:
    perplexity, paper, demo = (find_suite(name) for name in ("perplexity", "paper", "demo"))
    assert paper.corpus == perplexity.corpus
    assert (perplexity.corpus.seqlen, perplexity.tasks) == (2048, ())
    assert [task.name for task in paper.tasks] == SEVEN
    assert {task.num_fewshot for task in paper.tasks} == {0}
    assert find_suite("harness-wikitext").tasks == (Task("wikitext"),)
    assert find_suite("harness-wikitext").corpus is None
    assert [task.name for task in demo.tasks] == ["demo_facts", "demo_inference", "demo_stories"]
    changed = find_suite("perplexity,seqlen=512").corpus
    assert changed.seqlen == 512


def test_a_suite_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "mine.toml").write_text(
        '[[tasks]]\nnames = ["a", "b"]\nnum_fewshot = 5\nlimit = 100\nfolder = '
        '"tasks"\n[[tasks]]\nnames = ["c"]\n'
    )
    suite = find_suite(str(tmp_path / "mine.toml"))
    folder = tmp_path / "tasks"
    assert suite.tasks == (Task("a", 5, 100, folder), Task("b", 5, 100, folder), Task("c"))
    assert [task.limit for task in suite.limited(200).tasks] == [100, 100, 200]
    before = json.dumps(suite.record().as_dict())
    # In another folder it is the same suite.
    assert str(tmp_path) not in before.replace(suite.name, "")
    (folder / "a.yaml").write_text("task: a")
    assert json.dumps(suite.record().as_dict()) != before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty; a suite has"),
        ("[task]\n", r"unknown field task"),
        ('tasks = "boolq"\n', r"tasks: expected array, got str"),
        ('[[tasks]]\nnames = "boolq"\n', r"tasks\[0\]\.names: expected array, got str"),
        ("[[tasks]]\nlimit = 3\n", r"tasks\[0\]: missing field names"),
        ('[[tasks]]\nnames = ["a"]\nlimit = 0\n', r"limit: expected int >= 1"),
        ("[[tasks]]\nnames = []\n", r"names: expected array of length >= 1"),
        ('[[tasks]]\nnames = ["a"]\nfolder = "none"\n', r"'none'.* is not a folder"),
        (
            '[[tasks]]\nnames = ["a"]\n[[tasks]]\nnames = ["a"]\nnum_fewshot = 2\n',
            r"'a' is named twice",
        ),
    ],
)
def test_wrong_suite_files(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        find_suite(str(path))
    assert str(path) in str(caught.value)


def test_wrong_suite_names() -> None:
    with pytest.raises(UserError, match=r"'papers' is neither a suite .*Did you mean paper\?"):
        find_suite("papers")
    with pytest.raises(UserError, match=r"the suite has no text.*leave out 'seqlen=5'"):
        find_suite("harness-wikitext,seqlen=5")
    for wrong in ("samples=2", "generate=true"):
        with pytest.raises(UserError, match=rf"{wrong.partition('=')[0]} has no effect.*limit=N"):
            find_suite(f"demo,{wrong}")
    for wrong in ("demo,limit=0", "demo,limit=many", "demo,limit", "demo,limit=²"):
        with pytest.raises(UserError, match="limit"):
            find_suite(wrong)
    with pytest.raises(UserError, match="--limit must be at least 1"):
        find_suite("demo").limited(0)


def test_tasks_without_a_suite() -> None:
    assert suite_of(SuiteOptions()) == find_suite("perplexity")
    assert (
        suite_of(SuiteOptions(suite="demo", limit=3))
        == find_suite("demo,limit=3")
        == find_suite("demo").limited(3)
    )
    suite = suite_of(SuiteOptions(tasks=" hellaswag,arc_easy ", num_fewshot=5, limit=9))
    assert suite.tasks == (Task("hellaswag", 5, 9), Task("arc_easy", 5, 9))
    assert (suite.name, suite.corpus) == ("hellaswag,arc_easy,num_fewshot=5", None)
    assert suite_of(SuiteOptions(tasks=["rte"])).tasks == (Task("rte"),)
    (chat,) = suite_of(SuiteOptions(tasks=["rte"], apply_chat_template=True)).tasks
    assert chat == Task("rte", chat_template=True)
    assert chat.record() != Task("rte").record(), (
        "results with and without the template are not compared"
    )


def test_the_names_of_knowledge_are_those_of_lm_eval(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few_task_files(monkeypatch, tmp_path, "mmlu", "gsm8k", "ifeval")
    names = [task.name for task in find_suite("knowledge").tasks]
    assert names == ["mmlu", "gsm8k", "ifeval"]
    assert set(names) <= set(import_module("lm_eval.tasks").TaskManager().all_tasks)


def test_published_values_are_those_of_the_paper() -> None:
    if not SHARED.is_dir():
        pytest.skip("the folder with the paper is not beside this checkout")
    ours = json.loads((data_folder("eval") / "published" / "llama.json").read_text())
    assert (
        ours["results"]
        == json.loads((SHARED / "paper" / "published_llm_results.json").read_text())["results"]
    )
