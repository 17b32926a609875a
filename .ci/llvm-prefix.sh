#!/usr/bin/env bash
# For machines that cannot download CubeCL's own build of LLVM: makes one of Debian's packages, and
# prints the XDG_DATA_HOME to build with. Where the download works, don't use this.
# Usage: export XDG_DATA_HOME=$(.ci/llvm-prefix.sh)
set -euo pipefail

root=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/burn-fsdp-llvm}
# The version that the crate tracel-llvm-bundler looks for.
prefix=$root/tracel/tracel-llvm-23.1.0-4
config=/usr/lib/llvm-22/bin/llvm-config

if [ ! -x "$config" ]; then
    apt-get update >&2
    apt-get install -y --no-install-recommends llvm-22-dev libpolly-22-dev libzstd-dev >&2
fi
installed=$prefix/.tracel-llvm-installed
# Left alone once made: what is newer than the last build makes cargo build all of CubeCL again.
if [ -e "$installed" ]; then
    echo "$root"
    exit
fi
mkdir -p "$prefix/bin"
# Debian's llvm-config names a z3 by its path where the linker wants a flag.
cat >"$prefix/bin/llvm-config" <<WRAPPER
#!/bin/sh
out=\$($config "\$@") || exit \$?
case "\$*" in *--system-libs*) out=\$(echo "\$out" | sed -E 's#/usr/lib/[^ ]*/lib(z3)\.so#-lz3#g') ;; esac
echo "\$out"
WRAPPER
chmod +x "$prefix/bin/llvm-config"
touch "$installed"
echo "$root"
