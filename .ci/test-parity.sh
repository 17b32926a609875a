#!/usr/bin/env bash
# Some of the parity tests on CubeCL's CPU runtime, which is slow on few cores. All of them:
# BURN_FSDP_TEST_DEVICE=cpu cargo test -p burn-fsdp-tests --features cpu --test parity
set -euo pipefail
export BURN_FSDP_TEST_DEVICE=cpu
exec cargo test --locked "$@" --test parity -- --test-threads 1 \
    an_mlp_of_uneven_sizes_trains_as_dense_at_world_1 \
    an_mlp_of_uneven_sizes_trains_as_dense_at_world_2 \
    an_mlp_of_uneven_sizes_trains_as_dense_at_world_3 \
    an_mlp_with_its_shards_on_the_cpu_trains_as_dense \
    an_embedding_tied_to_the_head_trains_as_dense
