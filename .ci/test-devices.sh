#!/usr/bin/env bash
# The unit tests of burn-fsdp (kernels, engines, wires) and the runs under mpirun, built as told.
set -euo pipefail
if cargo nextest --version >/dev/null 2>&1; then
    exec cargo nextest run --locked "$@" --lib --test launchers \
        -E 'package(burn-fsdp) | binary(launchers)'
fi
exec cargo test --locked "$@" --lib --test launchers
