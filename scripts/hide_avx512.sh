#!/usr/bin/env bash
# hide_avx512.sh COMMAND...: run a command as on a processor with AVX2 alone: PyTorch, oneDNN, MKL, numba and whoever
# reads /proc/cpuinfo see no AVX-512 and no AMX. Needs the right to mount: root, or user namespaces.
set -euo pipefail

export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
export NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt

cpuinfo=$(mktemp)
trap 'rm -f "$cpuinfo"' EXIT
sed -E '/^flags/ s/ (avx512|amx)[a-z0-9_]*//g' /proc/cpuinfo >"$cpuinfo"
# shellcheck disable=SC2016  # expanded by the inner shell
unshare --mount $( ((EUID == 0)) || echo --map-root-user ) \
    sh -c 'mount --bind "$0" /proc/cpuinfo && exec "$@"' "$cpuinfo" "$@"
