#!/usr/bin/env bash
# What MPI needs to be built, and a Vulkan device in software, on Debian.
set -euo pipefail
apt-get update
apt-get install -y --no-install-recommends libopenmpi-dev openmpi-bin libclang-dev \
    mesa-vulkan-drivers libvulkan1
