#!/usr/bin/env bash
# Everything that wants a GPU, in under ten minutes: the commands once in fresh processes, and beside them the tests of masks, calibration,
# refit and runtime; then measurements.
# Writes on_gpu.md, a row for each step as it ends; the tables of the measurements, gpu.md, refit_cuda.md and runtime_gpu.md; and the logs of
# all steps. A step that fails or runs out of time does not stop the others.
#
#     bash scripts/on_gpu.sh                 # from the root of the repository
#     DRY_RUN=1 bash scripts/on_gpu.sh       # prints the commands
#     DEVICE=cpu SIZE=tiny bash scripts/on_gpu.sh   # tries the script without a GPU
#
# PYTHON   the interpreter, with a CUDA build of torch; default: python3
# OUT      the folder for the tables and gpu_logs; default: scripts/results
# WHEELS   a folder of wheels, from which missing packages are installed in an environment of their own; torch is not touched
# SCRATCH  where to work (65 GB for SIZE=3B); default: a temporary folder, deleted at the end
# WITNESS  a folder of texts: instead of all this, train the model of train_witness.py on them, and write OUT/witness.md
# SIZE     of the measured model: 8B, 3B or 2B (32, 8 or 4 blocks of LLaMA-3-8B)
# SECONDS_IN_ALL  default: 570
set -uo pipefail

PYTHON=${PYTHON:-python3}
OUT=${OUT:-scripts/results}
DEVICE=${DEVICE:-cuda}
SIZE=${SIZE:-3B}
SECONDS_IN_ALL=${SECONDS_IN_ALL:-570}
DRY_RUN=${DRY_RUN:-}

[ -f scripts/on_gpu.sh ] || { echo "Run it from the root of the repository: bash scripts/on_gpu.sh" >&2; exit 2; }
ROOT=$PWD
mkdir -p "$OUT/gpu_logs"
LOGS=$(cd "$OUT/gpu_logs" && pwd)
if [ -z "${SCRATCH:-}" ]; then
    SCRATCH=$(mktemp -d)
    trap 'rm -rf "$SCRATCH"' EXIT
fi
mkdir -p "$SCRATCH"
TABLE=$OUT/on_gpu.md

unset TRITON_INTERPRET  # the real GPU, not the interpreter
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$ROOT:$ROOT/scripts EMP_LLM_CACHE=$SCRATCH/cache TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$SCRATCH/triton}

failed=0

# left LIMIT: the seconds that a step may take, at most LIMIT
left() {
    local rest=$((SECONDS_IN_ALL - SECONDS - 15))  # 15 to end a step that is out of time
    echo $((rest < $1 ? (rest > 1 ? rest : 1) : $1))
}

# step NAME LIMIT COMMAND...: run a command with a limit in seconds; its output goes to a log and to the terminal
step() {
    local name=$1 limit start=$SECONDS code how=passed
    limit=$(left "$2")
    shift 2
    echo "== $name (at most $limit s): $*"
    [ -n "$DRY_RUN" ] && return 0
    has_time "$name" "$limit" || return 0
    timeout -k 10 "$limit" "$@" 2>&1 | tee "$LOGS/${name//[: ]/_}.log"
    code=${PIPESTATUS[0]}
    [ "$code" -ne 0 ] && { how="failed: exit code $code"; failed=1; }
    [ "$code" -eq 124 ] && how="failed: out of time"
    row "$name" "$how" $((SECONDS - start))
}

# has_time NAME LIMIT: whether there is time for a step; else its row says that there is none
has_time() {
    [ "$2" -gt 5 ] && return 0
    row "$1" "not run: no time left" 0
    return 1
}

# row NAME RESULT SECONDS: write a row of the table, and say it
row() {
    echo "== $1: $2, $3 s"
    echo "| $1 | $2 | $3 |" >> "$TABLE"
}

# table: begin the table
table() {
    {
        echo "# What on_gpu.sh ran"
        echo
        echo "\`bash scripts/on_gpu.sh\` at $(git rev-parse --short HEAD 2> /dev/null || echo "an unknown commit"), $(date -u +%F): $(
            "$PYTHON" -c "import bench_helpers; print(bench_helpers.hardware('$DEVICE'))")."
        echo
        echo "| step | result | seconds |"
        echo "|---|---|---:|"
    } > "$TABLE"
}

# roads LIMIT: the commands, each in a fresh process, all together in this many seconds
roads() {
    local out=$SCRATCH/roads model=scripts/demo/model map=auto text end=$((SECONDS + $1))
    [ "$DEVICE" = cuda ] || map=$DEVICE
    text="--calibration demo --samples 8 --seqlen 256"
    mkdir -p "$out"
    printf '[perplexity]\nfile = "%s"\njoin = ""\nseqlen = 512\n' "$ROOT/eval/demo/heldout.txt" > "$out/suite.toml"
    # On the CPU, where it must start no CUDA.
    step "road: prune_model" $((end - SECONDS)) "$PYTHON" -c "
import torch, transformers, emp_llm
model = transformers.AutoModelForCausalLM.from_pretrained('$model')
emp_llm.prune_model(model, emp_llm.recipe_of('emp-magnitude'))
assert not torch.cuda.is_initialized()"
    # shellcheck disable=SC2086
    {
        road prune $model $text --device-map "$map" --output "$out/pruned"
        road verify "$out/pruned" --source $model
        road evaluate "$out/pruned" --suite "$out/suite.toml" --device-map "$map" --output "$out/results.json"
        road heal "$out/pruned" --dense $model $text --heal-steps 2 --device-map "$map" --output "$out/healed"
        road generate "$out/healed" --runtime dense --device "$DEVICE" --prompt "One day" --max-new-tokens 32
        road pack "$out/healed" "$out/packed"
        step "road: generate from packed weights" $((end - SECONDS)) "$PYTHON" -m emp_llm generate "$out/packed" --device "$DEVICE" --prompt "One day" \
            --max-new-tokens 32
    }
}

# road COMMAND OPTIONS...: one of them, before `end`
road() {
    step "road: $1" $((end - SECONDS)) "$PYTHON" -m emp_llm "$@"
}

# missing PACKAGE...: the packages that cannot be imported
missing() {
    "$PYTHON" - "$@" <<'END'
import importlib.util
import sys

print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
END
}

NEEDED="msgspec blake3 regex psutil numpy safetensors transformers accelerate tokenizers huggingface_hub typer tqdm"
USEFUL="numba datasets triton pytest hypothesis"

# install: missing packages from WHEELS, in an environment that also sees those of PYTHON
install() {
    local lacking here=$SCRATCH/environment site name
    "$PYTHON" -c "import torch" || { echo "$PYTHON has no torch. Set PYTHON to an interpreter that has it." >&2; return 2; }
    # shellcheck disable=SC2086
    lacking=$(missing $NEEDED $USEFUL)
    if [ -n "$lacking" ] && [ -n "${WHEELS:-}" ]; then
        echo "installing from $WHEELS: $lacking"
        "$PYTHON" -c "import torch; print('torch==' + torch.__version__)" > "$SCRATCH/constraints.txt"
        "$PYTHON" -m venv --system-site-packages --without-pip "$here" || return 2
        site=$("$here/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
        "$PYTHON" -c "import sys; print(*(path for path in sys.path if path.endswith('-packages')), sep='\n')" > "$site/outer.pth"
        for name in $lacking; do
            "$PYTHON" -m pip --python "$here/bin/python" install --quiet --disable-pip-version-check --no-index \
                --find-links "$WHEELS" --constraint "$SCRATCH/constraints.txt" "$name" || echo "no wheel for $name in $WHEELS"
        done
        PYTHON=$here/bin/python
    fi
    # shellcheck disable=SC2086
    lacking=$(missing $NEEDED)
    if [ -n "$lacking" ]; then
        echo "Missing packages: $lacking. Put their wheels in a folder and give it: WHEELS=DIR bash scripts/on_gpu.sh" >&2
        return 2
    fi
    # shellcheck disable=SC2086
    lacking=$(missing $USEFUL)
    [ -z "$lacking" ] || echo "without $lacking"
}

# shards: the tests in groups that run at the same time.
# NAME|FILES|EXPRESSION of pytest
shards() {
    echo "masks|tests/test_cuda.py|masks_of_rows"
    echo "norms|tests/test_cuda.py|norms or pruning"
    echo "checkpoints wanda|tests/test_cuda.py|checkpoints and wanda"
    echo "checkpoints magnitude|tests/test_cuda.py|checkpoints and not wanda"
    echo "refit|tests/test_cuda.py|refit or searches or healing"
    echo "effective masks, heads|tests/test_cuda.py|effective or heads_and_neurons"
    echo "runtime kernel|tests/test_runtime_cuda.py|products or any_mask"
    echo "runtime rows|tests/test_runtime_cuda.py|not products and not any_mask"
    echo "kernels of updates|tests/test_update_cuda.py|sparsegpt or block or cuts or moments or products"
    echo "runtime|tests/test_cuda.py|sparse_layer or sparse_model"
}

# tests LIMIT: all shards at once
tests() {
    local limit name files expression pids=() names=() code index
    limit=$(left "$1")
    echo "== tests (at most $limit s)"
    [ -n "$DRY_RUN" ] || has_time tests "$limit" || return 0
    while IFS='|' read -r name files expression; do
        set -- "$PYTHON" -m pytest -p no:cacheprovider --durations=3 "--basetemp=$SCRATCH/pytest/${name// /_}" "$files" -k "$expression"
        echo "   $name: $*"
        [ -n "$DRY_RUN" ] && continue
        mkdir -p "$SCRATCH/pytest"
        (
            began=$SECONDS
            OMP_NUM_THREADS=1 timeout -k 10 "$limit" "$@" > "$LOGS/test_${name// /_}.log" 2>&1
            code=$?
            echo $((SECONDS - began)) > "$SCRATCH/pytest/${name// /_}.seconds"
            exit $code
        ) &
        pids+=($!)
        names+=("$name")
    done < <(shards)
    [ -n "$DRY_RUN" ] && return 0
    for index in "${!pids[@]}"; do
        wait "${pids[$index]}"
        code=$?
        summarize "${names[$index]}" "$code"
    done
}

# summarize NAME CODE: print the result of a shard, and note it for the table
summarize() {
    local log="$LOGS/test_${1// /_}.log" result
    result=$(grep -oE '[0-9]+ (passed|failed|skipped|errors?)' "$log" | tail -4 | paste -sd, | sed 's/,/, /g')
    [ "$2" -eq 124 ] && result="failed: out of time${result:+ ($result)}"
    if [ "$2" -ne 0 ]; then
        failed=1
        [ "${result#failed}" = "$result" ] && result="failed: ${result:-exit code $2}"
        grep -E '^(FAILED|ERROR|E  )' "$log" | head -20
        tail -2 "$log"
    fi
    row "tests: $1" "$result" "$(cat "$SCRATCH/pytest/${1// /_}.seconds")"
}

# bench SECTION LIMIT RESERVE: one section of the table. No new round of it starts in the last RESERVE seconds.
bench() {
    local rounds=$(($(left "$2") - $3))
    step "timing: $1" "$2" "$PYTHON" scripts/bench_gpu.py --device "$DEVICE" --size "$SIZE" --only "$1" \
        --seconds $((rounds > 1 ? rounds : 1)) --folder "$SCRATCH/bench" --output "$OUT/gpu.md"
}

if [ -z "$DRY_RUN" ]; then
    install || exit 2
    if [ "$DEVICE" = cuda ]; then
        "$PYTHON" -c "import torch; raise SystemExit(not torch.cuda.is_available())" ||
            { echo "torch sees no GPU. Without one: DEVICE=cpu SIZE=tiny bash scripts/on_gpu.sh" >&2; exit 2; }
    fi
    "$PYTHON" -c "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
fi
echo "== environment: $SECONDS s"

if [ -n "${WITNESS:-}" ]; then
    TINY=$([ "$SIZE" = tiny ] && echo --tiny)
    step witness "$SECONDS_IN_ALL" "$PYTHON" scripts/train_witness.py --text "$WITNESS" --output "$SCRATCH/witness" \
        --table "$OUT/witness.md" --device "$DEVICE" --seconds "$(($(left "$SECONDS_IN_ALL") - 20))" $TINY
    exit $failed
fi
[ -n "$DRY_RUN" ] || table
if [ "$DEVICE" = cuda ] && [ -n "$DRY_RUN" ]; then
    roads 180
    tests 190
elif [ "$DEVICE" = cuda ]; then
    (tests 190; exit $failed) &
    roads 180
    wait $! || failed=1
else
    roads 120
    echo "== tests: not without a GPU; python -m pytest runs the kernels in Triton's interpreter"
fi
bench commands 250 0
bench masks 90 0
SHAPES=$([ "$SIZE" = tiny ] && echo 64x96 || echo 1024x2752 4096x4096 11008x4096 4096x11008)
# shellcheck disable=SC2086
step "timing: refit" 90 "$PYTHON" scripts/bench_refit.py --device "$DEVICE" --shapes $SHAPES --output "$OUT/refit_$DEVICE.md"
LAYERS=$([ "$SIZE" = tiny ] && echo 64x96 || echo 4096x11008 11008x4096 4096x4096)
# shellcheck disable=SC2086
step "timing: runtime" 60 "$PYTHON" scripts/bench_runtime_gpu.py --device "$DEVICE" --shapes $LAYERS --seconds "$(($(left 60) - 15))" \
    --output "$OUT/runtime_gpu.md"
bench calibration 130 70
bench prune 300 20  # the rest of the time

[ -z "$DRY_RUN" ] && echo "== all: $SECONDS s; tables: $TABLE, $OUT/gpu.md; logs: $OUT/gpu_logs"
exit $failed
