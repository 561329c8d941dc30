"""The pages that users read: their commands parse, their options and links exist, and README.md is
short.

`make docs` also runs every command and compares its output.
"""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from run_docs import blocks_of, commands_of, pages, tolerated

import emp_llm
from emp_llm.cli import COMMANDS, parse

ROOT = Path(__file__).parents[1]
OTHER_FLAGS = (  # of other programs
    "--patch --mean --gpus-per-node --gres --mem --nv --extra-index-url --force --nproc-per-node "
    "--update --help --completion --write --device --version --data --draws --cores --jobs "
    "--executor --resources --unlock --summary --workflow-profile --slurm-no-account "
    "--slurm-status-command"
)


def arguments_of(line: str) -> list[list[str]]:
    """The arguments of each emp-llm command in a line of shell, without redirections."""
    found = []
    for part in re.split(r"\|+|&&|;", line):
        words = shlex.split(re.sub(r"\d?>+ *\S+|2>&1|\\$", "", part), comments=True)
        # Settings of the environment.
        while words and "=" in words[0] and not words[0].startswith("-"):
            words = words[1:]
        if words and words[0].rpartition("/")[2] == "emp-llm":
            found.append(words[1:])
        elif "-m" in words and words[words.index("-m") + 1].startswith("emp_llm."):
            found.append(
                [
                    words[words.index("-m") + 1].removeprefix("emp_llm."),
                    *words[words.index("-m") + 2 :],
                ]
            )
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.kind == "python":
            compile(block.text, page.name, "exec")
            continue
        for command in commands_of(block):
            for name, *arguments in arguments_of(command.line):
                if name == "--version":
                    continue
                assert name in COMMANDS, command.line
                if "--help" not in arguments:
                    parse(getattr(emp_llm, name), arguments, name)


def test_commands_are_found() -> None:
    """Guards the test above: what it parses is what the pages show."""
    assert arguments_of(
        "A=1 emp-llm prune --model m > /dev/null && python -m emp_llm.evaluate out | cat"
    ) == [
        ["prune", "--model", "m"],
        ["evaluate", "out"],
    ]
    shown = [
        line
        for page in pages()
        for block in blocks_of(page.read_text())
        for line in commands_of(block)
    ]
    assert {each[0] for line in shown if line.line for each in arguments_of(line.line)} >= set(
        COMMANDS
    )


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_options_and_links_exist(page: Path) -> None:
    flags = set(OTHER_FLAGS.split())
    for name in COMMANDS:
        for option in getattr(emp_llm, name).options().values():
            flags.update(option.flag.split("/"))
    text = page.read_text(encoding="utf-8")
    for code in re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    ):
        for flag in re.findall(r"(?<![\w-])--[a-z0-9-]+", code):
            assert flag in flags, f"{page.name}: {code}"
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


def test_names_in_the_design_exist() -> None:
    """Of functions, classes, fields and files, each in some file of the package or the tests."""
    files = [path for part in ("emp_llm", "tests", "scripts") for path in (ROOT / part).rglob("*")]
    source = "\n".join(
        [path.name for path in files]
        + [path.read_text(encoding="utf-8") for path in files if path.suffix == ".py"]
    )
    known = set(re.findall(r"\w+", source))
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = {name for code in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"\w+", code)}
    assert len(named) > 100
    assert named - known == set()


def test_readme_is_a_front_door() -> None:
    """At most 1,100 words, and one spelling of the commands but for one sentence."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1100
    assert text.count("python -m emp_llm.") == 1
    for page in pages():
        assert page.name in (
            "README.md",
            "design.md",
        ) or "python -m emp_llm." not in page.read_text(encoding="utf-8").replace(
            "-m emp_llm.evaluate", ""
        )


TABLE = """
                      of all %  perplexity          change  mean acc of 3        change
--------------------  --------  ----------  --------------  -------------  ------------
dense                     0.00       2.801                          81.67
emp-wanda-beta-1.25      21.20       2.896  +3.38 ± 0.24 %          84.17  +2.50 ± 1.43
demo_facts acc 84.17, 2,730 weights in 1.6 s
""".strip("\n").splitlines()


@pytest.mark.parametrize(
    ("old", "new", "different"),
    [
        ("2,730 weights in 1.6 s", "2,730 weights in 9.9 s", []),
        ("      2.896  +3.38", "      2.899  +3.41", ["2.899 for 2.896", "+3.41 for +3.38"]),
        (
            "84.17  +2.50 ± 1.43",
            "82.92  +1.25 ± 1.10",
            ["82.92 for 84.17", "+1.25 for +2.50", "1.10 for 1.43"],
        ),
        ("acc 84.17", "acc 82.92", ["82.92 for 84.17"]),
        ("21.20", "19.95", None),  # as far as an accuracy may go
        ("84.17  +2.50", "81.66  +2.50", None),
        ("2.896", "2.926", None),
        ("+3.38", "+3.49", None),
        ("2,730", "2,731", None),
        ("beta-1.25", "beta-1.26", None),
        ("dense", "dance", None),
    ],
)
def test_outputs_are_compared_within_tolerances(
    old: str, new: str, different: list[str] | None
) -> None:
    output = "\n".join(TABLE).replace(old, new).splitlines()
    question = 100 / 80
    assert tolerated(TABLE, output, question) == different
    assert tolerated(
        [*TABLE[:2], "...", *TABLE[3:]], output[:2] + ["more"] * 2 + output[2:], question
    ) == (different if old != "dense" else [])


def test_wider_columns_are_no_difference() -> None:
    expected = ["     change", "-----------", "9.97 ± 0.23"]
    assert tolerated(expected, ["      change", "------------", "10.02 ± 0.23"]) == [
        "10.02 for 9.97"
    ]
    assert tolerated(expected, [*expected, "more"]) is None
    assert tolerated(["..."], ["more"]) == []


def test_commands_of_the_demo_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it runs, and those that it recommends."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "demo"))
    run_demo = import_module("run_demo")
    lines = run_demo.commands("MODEL", "demo", "demo", "FOLDER")
    lines += run_demo.what_next("MODEL", "demo", "FOLDER")
    parsed = [words for line in lines for words in arguments_of(line)]
    assert len(parsed) == len(lines) == 9
    for name, *arguments in parsed:
        parse(getattr(emp_llm, name), arguments, name)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_two_examples_that_parse(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = getattr(emp_llm, name)
    with pytest.raises(SystemExit):
        parse(command, ["--help"], name)
    shown = capsys.readouterr().out.partition("\nExamples:\n")[2].replace("\\\n", "")
    lines = shown.strip().splitlines()
    assert [words[0] for line in lines for words in arguments_of(line)] == [name, name]
    for line in lines:
        parse(command, arguments_of(line.partition(" < ")[0])[0][1:], name)
