"""`emp-llm prune` and `prune(...)` as users call them: dry runs, Python's forms of the arguments,
and the package's front door.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import Run
from transformers import AutoModelForCausalLM, LlamaConfig

import emp_llm
from emp_llm import prune
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.cli import help_groups, options_from, parse
from emp_llm.common.errors import UserError
from emp_llm.common.machine import versions
from emp_llm.options.prune import check_recipe
from emp_llm.options.shared import parse_numbers
from emp_llm.pruning.dry_run import DryRun
from emp_llm.records.run_report import read_report

Models = Callable[[str], Path]
ROOT = Path(__file__).parents[1]


def test_a_dry_run_beside_an_existing_output(
    tiny_llama: Path, tmp_path: Path, command: Run
) -> None:
    """The default output of an earlier run is no obstacle, and stays; other files are refused."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    line = "prune --model model --method magnitude"
    command(line)
    before = (tmp_path / "model-magnitude" / "emp_report.json").stat().st_mtime_ns
    done = command(line, "--dry-run")
    assert (
        "at model-magnitude (it exists: name another --output, or add --overwrite)" in done.stdout
    )
    assert "it exists" not in command(line, "--dry-run", "--overwrite").stdout
    assert "it exists" in command(line, code=2).stderr
    assert (tmp_path / "model-magnitude" / "emp_report.json").stat().st_mtime_ns == before
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("all of it")
    assert "not a model folder" in command(line, "--dry-run", "--output", "out", code=2).stderr


@pytest.fixture
def llama_8b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The headers of LLaMA-3-8B over a file of holes; the disk has room for it."""
    folder = tmp_path / "8B"
    folder.mkdir()
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    header = {}
    end = 0
    for name, weight in weights.items():
        places = [end, end + 2 * weight.numel()]
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": places}
        end = places[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
    room = SimpleNamespace(free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    return folder


def test_a_dry_run_applies_the_options(
    llama_8b: Path, tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of docs/gpu.md, and no weight is read."""
    monkeypatch.setattr("emp_llm.pruning.dry_run.operations_a_second", lambda device: 3e14)
    monkeypatch.setattr("emp_llm.pruning.dry_run.has_bfloat16", lambda device: True)  # as a GPU
    monkeypatch.setattr(Matrix, "read", None)
    monkeypatch.setattr(Checkpoint, "open_files", None)
    how = {"samples": 128, "seqlen": 2048, "targets": "all-linear"}
    how |= {"sparsity": 0.5, "dry_run": True, "output": tmp_path / "out", "calibration": "demo"}

    def planned(method: str, **more: Any) -> DryRun:
        plan = prune(llama_8b, method=method, **how | more)
        assert isinstance(plan, DryRun)
        assert plan.needs is not None
        return plan

    def gigabytes(plan: DryRun) -> float:
        return (sum(plan.needs.parts.values()) + plan.needs.hidden) / 1e9

    on_disk = {"device_map": "disk"}
    admm = planned("emp-admm", refit=True, **on_disk)
    assert admm.curve == []
    # The update's part is a bound, of which 80 % are used.
    unused = 0.2 * admm.needs.parts["update, at most"] / 1e9
    page = (ROOT / "docs" / "gpu.md").read_text()
    for name, found in {
        "Wanda, whole model": gigabytes(planned("wanda")),
        "Wanda, `--device-map disk`": gigabytes(planned("wanda", execution="blocks", **on_disk)),
        "`emp-admm --refit`, `--device-map disk`": gigabytes(admm) - unused,
    }.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert float(row.split("|")[3]) == pytest.approx(found, abs=0.7)
    assert admm.minutes is not None
    wanda = planned("wanda", **on_disk).minutes
    assert wanda is not None
    assert 5 * wanda < admm.minutes
    line = [item for key, value in how.items() for item in (f"--{key.replace('_', '-')}", value)]
    line = [word for word in line if word is not True]
    shown = command("prune", llama_8b, *line, "--method", "emp-admm", "--refit").stdout
    assert "time: about " in shown
    assert "weights 16.1 GB" in shown
    assert "hidden states" in shown
    shown = command("prune", llama_8b, *line, "--method", "emp-admm", "--device-map", "disk").stdout
    assert "weights 469.1 MB" in shown
    assert "less with --device-map disk" not in shown


def test_a_dry_run_shows_the_sparsity_at_each_beta(
    tiny_llama: Path, llama_norms: Path, tmp_path: Path, command: Run
) -> None:
    """For methods without activations at once; for the others with an activations file, and a
    sentence without one.
    """
    line = f"prune --dry-run --output out --model {tiny_llama} --method"
    head = "emp-magnitude, order 2, group row: removed % at beta    0.5    0.6    0.7"
    done = command(line, "emp-magnitude")
    assert head in done.stdout
    assert "reading the targets (30.7 kB)" in done.stderr
    assert (
        "emp-wanda, order 1, group all: removed % at beta"
        in command(
            line, "emp-wanda", "--activations", llama_norms, "--order", 1, "--group", "all"
        ).stdout
    )
    done = command(line, "emp-wanda")
    assert "sparsity against beta: needs activations" in done.stdout
    assert "add --activations FILE" in done.stdout
    assert "removed %" not in done.stdout
    assert "reading" not in done.stderr
    assert "known only at the end" in command(line, "emp-wanda", "--propagate", "pruned").stdout
    assert "beta" not in command(line, "magnitude").stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        (
            "magnitude",
            {"calibration": "c4", "samples": 9, "resumable_calibration": False},
            "warning: --no-resumable-calibration has no effect: method magnitude needs no "
            "activations.",
        ),
        (
            "magnitude",
            {"calibration": "c4", "samples": 9, "check": False},
            "--calibration, --samples have no effect: method magnitude needs no activations.",
        ),
        (
            "emp-magnitude",
            {"activations": "norms"},
            "--activations has no effect: method emp-magnitude needs no activations.",
        ),
        ("magnitude", {}, None),
    ],
)
def test_options_without_effect_are_named(
    tiny_llama: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    method: Any,
    options: dict[str, Any],
    named: str | None,
) -> None:
    prune(model=tiny_llama, output=tmp_path / "out", dry_run=True, method=method, **options)
    assert "no effect" not in caplog.text if named is None else named in caplog.text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "--method magnitude --sparsity 0.5 --parameters 6e9",
            "set the sparsity; leave out --sparsity",
        ),
        ("--method emp-magnitude --beta 1 --memory 24GB", "set the sparsity; leave out --beta"),
        ("--neff-dtype float64 --memory 24GB", "set the sparsity; leave out --neff-dtype"),
        (
            "--structure heads --group row",
            "--group does not go with --structure. Use --structure-group",
        ),
        (
            "--structure heads --targets mlp",
            "--targets does not go with --structure. Use --structure heads, neurons",
        ),
        (
            "--structure heads --tower language",
            "--tower does not go with --structure. Leave it out",
        ),
        (
            "--structure heads --propagate dense",
            "--propagate does not go with --structure. Leave it out",
        ),
        (
            "--structure heads --mask-device cpu",
            "--mask-device does not go with --structure. Leave it out",
        ),
        ("--structure-group layer", "--structure-group has no effect without --structure"),
        (
            "--refit --execution model",
            "--refit runs the model block by block; leave out --execution model",
        ),
        (
            "--method sparsegpt --execution model",
            "--method sparsegpt runs the model block by block",
        ),
        ("--structure neurons --refit --execution model", "--refit runs the model block by block"),
        ("--method magnitude --sparsity 0.5 --group row", ""),
    ],
)
def test_an_option_with_its_default_is_given(line: str, says: str) -> None:
    """What conflicts with other values conflicts with the default too, if it is written."""
    groups = options_from("prune", ["llama", *line.split()]).groups
    with pytest.raises(UserError, match=re.escape(says)) if says else nullcontext():
        check_recipe(**groups)


def test_a_pruned_model_is_noticed(
    pruned_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = pruned_llama
    assert "already pruned" not in caplog.text
    prune(model=source, output=tmp_path / "twice", method="emp-magnitude", dry_run=True)
    assert "llama is already pruned. Its zeros count as weights" in caplog.text


def test_the_package_is_its_front_door(tiny_llama: Path, tmp_path: Path) -> None:
    parameters = inspect.signature(prune).parameters
    assert all(
        parameter.annotation is not inspect.Parameter.empty for parameter in parameters.values()
    )
    report = prune(model=tiny_llama, output=str(tmp_path / "out"), method="magnitude")
    assert report.source.model == str(tiny_llama)
    assert json.loads((tmp_path / "out" / "emp_report.json").read_text()) == report.as_dict()
    with pytest.raises(
        UserError, match=r"--model must be text, .*LlamaForCausalLM.*save_pretrained"
    ):
        prune(model=AutoModelForCausalLM.from_pretrained(tiny_llama), output=tmp_path / "x")
    with pytest.raises(TypeError, match="methd"):
        prune(model="x", methd="magnitude")  # type: ignore[call-arg]
    public = [name for name in dir(emp_llm) if not name.startswith("_")]
    assert {"prune", "calibrate", "evaluate", "effective_mask", "effective_number"} <= set(public)
    for name in public:
        assert callable(getattr(emp_llm, name)) or inspect.ismodule(getattr(emp_llm, name)), name


def test_a_data_free_prune_by_the_kernel_needs_no_torch(models: Models, tmp_path: Path) -> None:
    """Small models, which the reference prunes, do."""
    pytest.importorskip("numba")
    program = (
        "import sys\nfrom emp_llm.cli import main\nfrom emp_llm.pruning import masks\n"
        "masks._SMALL = 0\n"
        f"main(['prune', '--model', {str(models('llama'))!r}, '--method', 'emp-magnitude', "
        "'--output', 'out'])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "out" / "emp_manifest.json").is_file()


@pytest.mark.parametrize("moment", ["options", "command"])
def test_an_early_interrupt_leaves_no_traceback(tmp_path: Path, moment: str) -> None:
    """Ctrl-C before the first progress bar: while options are parsed, or libraries imported."""
    program = (
        "import signal, os, sys\nfrom importlib.abc import MetaPathFinder\n"
        # Background jobs of a shell ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupt(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {'click' if moment == 'options' else 'emp_llm.checkpoint.output'!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from emp_llm.cli import main\nmain(['prune', '--model', 'x', '--method', 'magnitude'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "interrupted" in done.stderr


def test_help_fits_on_a_screen_and_help_all_has_the_rest(
    command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = command("prune --help")
    everything = command("prune --help all")
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = command("prune -h").stdout
        assert len(shown.splitlines()) <= 60
        assert max(map(len, shown.splitlines())) <= columns
    for name in (
        "model",
        "output",
        "calibration",
        "method",
        "sparsity",
        "beta",
        "pattern",
        "targets",
        "refit",
        "evaluate",
        "loss",
        "memory",
        "parameters",
        "check",
        "structure",
    ):
        assert f"--{name} " in short.stdout
    for flag in (
        "--dry-run",
        "--overwrite",
        "-o, ",
        "-m, ",
        "emp-llm prune --help all",
    ):
        assert flag in short.stdout
    assert "--heal-weights" not in short.stdout
    for option in prune.options().values():  # type: ignore[attr-defined]
        assert option.flag.partition("/")[0] in everything.stdout
    titles = [
        line
        for line in everything.stdout.splitlines()
        if line.endswith(":") and not line.startswith((" ", "Usage"))
    ]
    assert titles[0] == "Arguments:"
    assert titles[-1] == "Examples:"
    number = everything.stdout.partition("Method and number of weights:")[2].partition("\n\n")[0]
    assert "--loss" in number
    assert "--memory" in number
    assert 6 <= len(titles) <= 15
    assert "[default: ]" not in everything.stdout
    assert "[default: 0]" in everything.stdout


def test_every_option_of_a_long_help_has_a_group() -> None:
    for name in emp_llm.COMMANDS:
        options = getattr(emp_llm, name).options()
        groups = help_groups(options, everything=True)
        assert sorted(option for names in groups.values() for option in names) == sorted(options)
        assert len(help_groups(options, everything=False)["Options"]) <= 30, name
        assert all(len(names) <= 30 for names in groups.values()), name


def test_short_flags(tiny_llama: Path, tmp_path: Path, command: Run) -> None:
    command(f"prune --method magnitude -o short -q -m {tiny_llama}")
    assert (tmp_path / "short" / "emp_report.json").is_file()


@pytest.mark.parametrize(
    "name",
    [
        "prune",
        "calibrate",
        "measure",
        "sweep",
        "evaluate",
        "generate",
        "bench",
        "verify",
        "push",
        "pack",
        "unpack",
    ],
)
def test_a_model_stands_first_or_after_its_flag(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = getattr(emp_llm, name)
    more = {
        "generate": ["--prompt", "text"],
        "push": ["a/b"],
        "pack": ["out"],
        "unpack": ["out"],
    }.get(name, [])
    known = [
        parse(command, [*line, *more], name)
        for line in (["llama"], ["--model", "llama"], ["-m", "llama"])
    ]
    assert known[0] == known[1] == known[2]
    assert "llama" in map(str, known[0].values())
    assert parse(command, [*more, "-v", "--model", "llama"], name) == known[0] | {"verbose": True}
    with pytest.raises(UserError, match="unexpected 'two'"):
        parse(command, ["one", *more, "two"], name)
    with pytest.raises(UserError, match="unexpected 'one'"):
        parse(command, [*more, "one", "--model", "llama"], name)
    with pytest.raises(UserError, match="is missing"):
        parse(command, more, name)
    with pytest.raises(SystemExit):
        parse(command, ["--help"], name)
    assert re.search(r"(?m)^  MODEL, -m, --model ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("emp-llm pr", ["prune"]),
        ("emp-llm prune --shar", ["--shares"]),
        ("emp-llm prune --shares c", ["cost"]),
        ("emp-llm prune model --no-res", ["--no-resumable-calibration"]),
        ("emp-llm prune --method emp-mag", ["emp-magnitude"]),
        ("emp-llm prune mod", []),  # the shell knows the files
        ("emp-llm nonsense --", []),
    ],
)
def test_shells_complete_commands_flags_and_choices(line: str, words: list[str]) -> None:
    program = "import sys\nfrom emp_llm.cli import main\nmain(['--complete', 'emp-llm', '', ''])\n"
    program += "print({'torch', 'click', 'numpy'} & set(sys.modules), file=sys.stderr)"
    environment = os.environ | {"COMP_LINE": f"{line} more", "COMP_POINT": str(len(line))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr.strip()) == (words, "set()")


def test_bash_completes(command: Run, tmp_path: Path) -> None:
    """By the line that it is given."""
    (tmp_path / "emp-llm").write_text(f'#!/bin/sh\nexec {sys.executable} -m emp_llm "$@"\n')
    (tmp_path / "emp-llm").chmod(0o755)
    program = (
        f"PATH={tmp_path}:$PATH\n"
        + command("--completion", "bash").stdout
        + "\ncomplete -p emp-llm"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert "--complete" in done.stdout
    wrong = command("--completion", "tcsh", code=2)
    assert "bash (or zsh, fish)" in wrong.stderr


def test_misspelt_names_are_answered_with_the_nearest(tiny_llama: Path, command: Run) -> None:
    assert "Did you mean prune?" in command("prnue", code=2).stderr
    assert "Did you mean" not in command("xyzzy", code=2).stderr
    unknown = command(f"prune --methd wanda {tiny_llama}", code=2).stderr
    assert unknown.startswith("error: No such option")
    assert "--methd" in unknown
    assert "--method" in unknown
    assert "emp-llm prune --help" in unknown
    assert (
        "Did you mean emp-wanda?"
        in command(f"prune --method emp-wnada -m {tiny_llama}", code=2).stderr
    )
    assert "Did you mean demo?" in command(f"prune --calibration dmo {tiny_llama}", code=2).stderr
    assert (
        "Did you mean magnitude?"
        in command(f"sweep --methods wanda,magnitud -m {tiny_llama}", code=2).stderr
    )
    assert (
        "Did you mean magnitude?"
        in command(f"measure --criteria magnitud -m {tiny_llama}", code=2).stderr
    )


@pytest.mark.parametrize(
    "line", ["['-h']", "['verify', 'out']", "['prune', '--help']", "['--version']"]
)
def test_output_into_a_closed_pipe_ends_quietly(
    tiny_llama: Path, tmp_path: Path, line: str
) -> None:
    prune(model=tiny_llama, output=tmp_path / "out", method="magnitude")
    program = f"import time; from emp_llm.cli import main; time.sleep(0.3); main({line})"
    writer = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    writer.stdout.close()
    said = writer.stderr.read()
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
    writer.wait()


def test_env_names_versions_processor_and_kernels(command: Run) -> None:
    done = command("env")
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert {
        "emp-llm",
        "python",
        "torch",
        "transformers",
        "huggingface-hub",
        "numpy",
        "numba",
    } <= set(told)
    assert {"processor", "instructions", "cores", "memory", "GPUs", "masks", "runtime"} <= set(told)
    assert told["masks"] in ("compiled", "torch")
    assert any(word in told["runtime"] for word in ("AVX-512", "AVX2", "torch"))


def test_versions_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run names them several times, and each look-up parses all metadata of a package."""
    known = versions()
    assert "torch" in known
    monkeypatch.setattr("importlib.metadata.distribution", Mock(side_effect=PackageNotFoundError))
    assert versions() == known


def test_shares_in_percent(tiny_llama: Path, tmp_path: Path, command: Run) -> None:
    """In every option that takes a number, and in lists of numbers."""
    line = f"prune --method magnitude {tiny_llama} --output {tmp_path}/out"
    command(line, "--sparsity", "28.7%")
    assert read_report(tmp_path / "out").recipe.counts.sparsity == 0.287
    assert parse_numbers("50%, 0.5,7 %", "--sparsities") == [0.5, 0.5, 0.07]
    for wrong in ("half", "%", "5%%"):
        done = command(line, "--sparsity", wrong, code=2)
        assert done.stderr == f"error: --sparsity must be a number, got {wrong!r}.\n"
    for flag, wrong, told in (
        ("--samples", "1.5", "--samples must be a whole number, got '1.5'."),
        ("--samples", "0", "--samples must be at least 1, got 0."),
        ("--group", "rows", "--group 'rows' is not one of row, matrix, all. Did you mean row?"),
    ):
        assert command(line, flag, wrong, code=2).stderr == f"error: {told}\n"


def test_a_sparsity_in_percent_and_a_sparsity_of_nothing(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=r"below 1, got 50\. It is a fraction: did you mean 0\.5\?"):
        prune(model=tiny_llama, method="magnitude", sparsity=50)
    for wrong in (-1, 1.5):  # which may be 0.15 as well as 0.5
        with pytest.raises(UserError, match=rf"below 1, got {wrong}\.$"):
            prune(model=tiny_llama, method="magnitude", sparsity=wrong)
    prune(model=tiny_llama, method="magnitude", sparsity=0, output=tmp_path / "out")
    warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warnings == ["warning: --sparsity 0: nothing is removed."]


def test_an_interrupt_does_not_contradict_what_is_kept(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom emp_llm import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "cli._with_exit_codes(lambda rank: os.kill(os.getpid(), signal.SIGINT))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "interrupted.\n")


def test_signatures_show_plain_types() -> None:
    import pydoc

    told = pydoc.render_doc(emp_llm.prune, renderer=pydoc.plaintext)
    assert "Annotated" not in told
    assert "Flag(" not in told
    assert "sparsity: float | None = None" in told


def test_a_report_prints_as_a_short_table(tiny_llama: Path, tmp_path: Path) -> None:
    report = prune(model=tiny_llama, output=tmp_path / "out", method="emp-magnitude")
    assert len(str(report).splitlines()) <= 8
    assert repr(report) == str(report)
    assert "down_proj x " in str(report)
    assert "emp-magnitude" in str(report)
    record = emp_llm.measure(
        tiny_llama, output=tmp_path / "measure.json", criteria="magnitude", orders="1,2"
    )
    assert len(str(record).splitlines()) == 4
    assert repr(record) == str(record)
