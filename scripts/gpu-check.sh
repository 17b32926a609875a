#!/usr/bin/env bash
# Whether burn-fsdp works on an NVIDIA GPU, and how fast: build where Rust is, run where the GPU is.
# README.md beside this says what it needs and what it tells.
set -euo pipefail

usage() {
    cat <<USAGE
Usage: scripts/gpu-check.sh build [DIR]    builds into DIR [default: target/gpu-check]; needs Rust
       DIR/gpu-check.sh run [--rehearse]   runs what was built, on one GPU; needs no Rust and no network

--rehearse  run on CubeCL's CPU runtime instead, with small sizes, to try the script itself
            (built with GPU_CHECK_FEATURES=cpu)

Environment of build:
  GPU_CHECK_PROFILE   cargo's profile [default: release]
  GPU_CHECK_FEATURES  more features, of cpu, mpi and fusion [default: fusion]
USAGE
}

# ---- build

build() {
    local dir=${1:-target/gpu-check} profile=${GPU_CHECK_PROFILE:-release} feature
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    local features=(--features burn-fsdp-dcp/object-store)
    for feature in cuda ${GPU_CHECK_FEATURES-fusion}; do
        features+=(--features "burn-fsdp/$feature,burn-fsdp-examples/$feature")
        [ "$feature" = mpi ] || features+=(--features "burn-fsdp-tests/$feature")
    done
    # The launchers' tests are what builds train_gpt with the features of the tests.
    local built
    built=$(cargo test --no-run --locked --profile "$profile" --workspace "${features[@]}" \
        --lib --test launchers --message-format=json-render-diagnostics)
    rm -rf "$dir"
    mkdir -p "$dir/lib"
    take "$dir/train_gpt" "$(executable "$built" train_gpt bin)"
    take "$dir/unit-tests" "$(executable "$built" burn_fsdp lib)"
    cp "${BASH_SOURCE[0]}" "$dir/gpu-check.sh"
    echo "$(du -sh "$dir" | cut -f1) in $dir: carry it to the machine with the GPU, and there run"
    echo "    $(basename "$dir")/gpu-check.sh run"
}

# executable MESSAGES TARGET KIND: the path in cargo's messages.
executable() {
    echo "$1" | grep "\"name\":\"$2\"" | grep "\"kind\":\[\"$3\"\]" |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1
}

# take TO FROM: a stripped copy, and the libraries that not every system has.
take() {
    cp "$2" "$1"
    strip "$1"
    ldd "$1" | awk '/=> \// { print $3 }' |
        grep -Ev '/(libc|libm|libdl|librt|libpthread|libgcc_s|ld-linux.*)\.so' |
        xargs -r cp -Lnt "$(dirname "$1")/lib"
}

# ---- run

failures=0

# row CHECK RESULT FIGURES: one line of the report.
row() {
    printf '| %-44s | %-4s | %s |\n' "$1" "$2" "$3" | tee -a "$report"
    if [ "$2" = FAIL ]; then failures=$((failures + 1)); fi
}

head_row() {
    printf '\n| %-44s | %-4s | %s |\n|---|---|---|\n' "$1" '' "$2" | tee -a "$report"
}

# A library or file, by its name, where it is usually found and in what Python packages bring.
find_file() {
    local python
    python=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null || true)
    # shellcheck disable=SC2086 # Several folders, some of which may not exist.
    find ${CUDA_PATH:-/usr/local/cuda} /usr/local/cuda* /opt/cuda $python /usr/lib /usr/local/lib /opt \
        -name "$1" 2>/dev/null | head -1 || true
}

# Lets programs find NCCL under the name they look for, and what CUDA's compiler of kernels links.
find_cuda() {
    local nccl libdevice
    nccl=$(find_file 'libnccl.so.2')
    if [ -n "$nccl" ]; then ln -sf "$nccl" "$dir/lib/libnccl.so"; fi
    libdevice=$(find_file 'libdevice.10.bc')
    if [ -n "$libdevice" ]; then
        mkdir -p "$dir/cuda/nvvm/libdevice"
        ln -sf "$libdevice" "$dir/cuda/nvvm/libdevice/libdevice.10.bc"
        export CUDA_PATH=$dir/cuda
    fi
    echo "NCCL: ${nccl:-not found}; libdevice: ${libdevice:-not found}"
}

# units NAME SECONDS FLAGS...: runs unit tests; whether they passed.
units() {
    local log=$dir/logs/$1 seconds=$2
    shift 2
    timeout "$seconds" "$dir/unit-tests" --test-threads 1 --nocapture "$@" >"$log" 2>&1
}

passed() {
    sed -n 's/^test result: .* \([0-9]*\) passed.*/\1 tests passed/p' "$dir/logs/$1"
}

why() {
    grep -m1 -hE 'panicked at|error:|Timeout' -A1 "$dir/logs/$1" | tr '\n' ' ' | cut -c1-160 ||
        echo "see logs/$1"
}

# check NAME TITLE SECONDS FLAGS...: a row for unit tests.
check() {
    local name=$1 title=$2
    shift 2
    if units "$name" "$@"; then
        row "$title" PASS "$(passed "$name")"
    else
        row "$title" FAIL "$(why "$name")"
    fi
}

kernels() {
    head_row 'kernels' 'figures'
    check reference 'each kernel against its reference' 120 kernels::
    if ! units speed 60 kernels::speed --ignored; then
        row 'speed of the kernels' FAIL "$(why speed)"
        return
    fi
    local name speed ratio result
    while IFS='|' read -r name speed ratio; do
        ratio=${ratio# }
        result=$(awk -v ratio="${ratio%% *}" -v least="$least" \
            'BEGIN { print (ratio >= least) ? "PASS" : "FAIL" }')
        speed=${speed# }
        row "${name% }" "$result" "${speed% }, $ratio"
    done < <(sed -n 's/.*SPEED //p' "$dir/logs/speed")
}

nccl() {
    head_row 'NCCL, a group of one' 'figures'
    if [ "$device" != cuda ]; then
        row 'NCCL' SKIP 'needs a GPU'
        return
    fi
    check nccl 'collectives, overlap, training' 60 nccl::tests::gpu --ignored
}

# train NAME FLAGS...: runs train_gpt; its report goes to logs/NAME.
train() {
    local name=$1
    shift
    timeout 100 "$dir/train_gpt" --device "$device" "${model[@]}" --quiet --out "$dir/out/$name" "$@" \
        >"$dir/logs/$name" 2>&1
}

# The median time of a step, in milliseconds, of the second half: kernels are compiled in the first.
step_time() {
    awk -F, 'NR > 1 { times[++n] = $4 } END { for (i = int(n / 2) + 1; i <= n; i++) print 1000 * (times[i] - times[i - 1]) }' \
        "$dir/out/$1/losses.csv" | sort -n | awk '{ t[NR] = $1 } END { printf "%.1f", t[int((NR + 1) / 2)] }'
}

last_loss() {
    tail -1 "$dir/out/$1/losses.csv" | awk -F, '{ printf "%.5f", $2 }'
}

device_memory() {
    sed -n 's/^device memory *\(.*\)   taken.*/\1/p' "$dir/logs/$1"
}

# training NAME TITLE BOUND FLAGS...: a row; the last loss may differ from the dense one's by BOUND.
training() {
    local name=$1 title=$2 bound=$3 figures difference
    shift 3
    if ! train "$name" "$@"; then
        row "$title" FAIL "$(why "$name")"
        return
    fi
    figures="$(step_time "$name") ms a step, $(device_memory "$name") on the device, loss $(last_loss "$name")"
    if [ ! -e "$dir/out/dense/losses.csv" ]; then
        row "$title" FAIL "$figures, and no dense run to compare with"
        return
    fi
    difference=$(awk -v a="$(last_loss "$name")" -v b="$(last_loss dense)" \
        'BEGIN { d = (a - b) / b; print (d < 0) ? -d : d }')
    if awk -v d="$difference" -v bound="$bound" 'BEGIN { exit !(d <= bound) }'; then
        row "$title" PASS "$figures"
    else
        row "$title" FAIL "$figures: off by $difference"
    fi
}

# On the same batches: of one rank, or shared by its ranks.
all_training() {
    head_row 'train_gpt' 'figures'
    training dense 'dense Burn, f32' 0 --single --world-size 1 --batch-size "$batch"
    if [ "$device" = cuda ]; then
        training nccl-f32 'sharded, 1 rank over NCCL, f32' 0.01 --world-size 1 --batch-size "$batch"
        training nccl-bf16 'sharded, 1 rank over NCCL, bf16' 0.03 --world-size 1 --batch-size "$batch" \
            --precision bf16
    fi
    training two-f32 'sharded, 2 ranks on one device, f32' 0.01 --world-size 2 --batch-size $((batch / 2))
    training two-bf16 'sharded, 2 ranks on one device, bf16' 0.03 --world-size 2 \
        --batch-size $((batch / 2)) --precision bf16
    training four-bf16 'sharded, 4 ranks on one device, bf16' 0.03 --world-size 4 \
        --batch-size $((batch / 4)) --precision bf16
}

run() {
    device=cuda
    # A kernel that takes more than twice as long as a copy has something wrong with it.
    least=0.5
    batch=16
    # 100 million parameters.
    model=(--layers 8 --d-model 1024 --heads 16 --seq 256 --steps 20 --lr 3e-4)
    if [ "${1:-}" = --rehearse ]; then
        device=cpu least=0 batch=4
        model=(--layers 1 --d-model 16 --heads 2 --seq 8 --steps 4)
    elif [ $# -gt 0 ]; then
        usage >&2
        exit 2
    fi
    dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    report=$dir/report.md
    mkdir -p "$dir/logs" "$dir/out" "$dir/lib"
    : >"$report"
    if [ ! -x "$dir/unit-tests" ] || [ ! -x "$dir/train_gpt" ]; then
        echo "error: $dir has no programs: build them first (scripts/gpu-check.sh build)" >&2
        exit 2
    fi
    export LD_LIBRARY_PATH=$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} BURN_FSDP_TEST_DEVICE=$device
    if [ "$device" = cuda ]; then
        if ! command -v nvidia-smi >/dev/null; then
            echo "error: there is no nvidia-smi: this needs an NVIDIA GPU and its driver (or --rehearse)" >&2
            exit 2
        fi
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee -a "$report"
        find_cuda
    fi
    kernels
    nccl
    all_training
    printf '\n' | tee -a "$report"
    if [ "$failures" -gt 0 ]; then
        echo "FAIL: $failures checks; logs are in $dir/logs" | tee -a "$report"
        exit 1
    fi
    echo "PASS ($SECONDS s)" | tee -a "$report"
}

case ${1:-} in
build | run) "$@" ;;
-h | --help) usage ;;
*)
    usage >&2
    exit 2
    ;;
esac
