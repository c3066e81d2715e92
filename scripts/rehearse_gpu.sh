#!/usr/bin/env bash
# The calls of tools/gpu_kit/run.py with tiny models on a faked H100 (tests/helpers/fake_gpu), for `make rehearse-gpu`.
#
#     scripts/rehearse_gpu.sh [CALL...]
#
# SGLang is the one of the interpreter PYTHON (default: .venv's), or that of a kit that was unpacked into KIT before
# (default: out/rehearsal/kit). Exit code 1: something is not as in tools/gpu_kit/expected.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
out=out/rehearsal
mkdir -p "$out/parts" "$out/tree/site"
# A part of a kit: Python runs this file first in every process. A process that becomes a server imports SGLang at once,
# and has it fork where it spawns, so that what is replaced in it stays replaced.
cat >"$out/tree/site/sitecustomize.py" <<END
import importlib
import os
import sys

sys.path.append("$PWD/tests")
from helpers.fake_gpu import setting_up

os.environ.update(setting_up.ENV)
setting_up.install()
# Tensors say that they are on the CPU: tests too have our kernels take it for the device.
sys.meta_path.insert(
    0, setting_up._After("kvevict_kernels.dispatch", lambda module: setattr(module, "TRITON_DEVICES", ("cuda", "cpu")))
)
if "sglang.launch_server" in sys.orig_argv:
    # Neither stock's graphs of prefills nor captured FA3 have a stand-in.
    sys.argv += ["--cuda-graph-backend-prefill", "disabled"]
    sys.argv += ["--cuda-graph-backend-decode", "disabled"] if "fa3" in sys.argv else []
    importlib.import_module("helpers.preloaded").prepare()
    importlib.import_module(setting_up.PARTS)
END
echo "- the GPU is faked" >"$out/tree/DIFFERENCES.txt"
tar -C "$out/tree" -cJf "$out/parts/fake.tar.xz" site DIFFERENCES.txt
(cd "$out/parts" && sha256sum fake.tar.xz >SHA256SUMS)
rm -rf "${KIT:=$out/kit}/results" "$KIT/smoke.json"
[[ $# -gt 0 ]] || set -- servers kernels rest
for call; do
    OMP_NUM_THREADS=1 "$python" tools/gpu_kit/run.py "$out/parts" "$call" --tiny --seconds 3000 --kit "$KIT" --out "$out/$call"
done
