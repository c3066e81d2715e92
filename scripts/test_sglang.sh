#!/usr/bin/env bash
# Another version of SGLang: what changed of what we rely on, then its tests: scripts/test_sglang.sh VERSION [OPERATIONS]
# The version lies in a cache folder, before the packages of .venv, which stay as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?name a version of SGLang, as in: make test-sglang VERSION=0.5.24}
operations=${2:-20000}
folder="${XDG_CACHE_HOME:-$HOME/.cache}/sgl-kvevict/sglang/$version"
if [ ! -d "$folder/sglang" ]; then
    echo "test-sglang: installing SGLang $version into $folder"
    .venv/bin/python -m pip install --quiet --no-deps --target "$folder" "sglang==$version"
fi
export PYTHONPATH="$folder:$PWD:$PWD/kernels"
export SGLANG_PLATFORM=kvevict_cpu
echo "test-sglang: functions that we hook or override and that differ in SGLang $version from the newest supported one:"
.venv/bin/python -W ignore -c "
from sgl_kvevict.sglang_adapter.compat import changes
broken, off, harmless = changes()
for name, found in {'do not fit': broken, **off, 'are called in another way': harmless}.items():
    print(f'  {name}:', *(found or ['none']), sep='\n    ')"
.venv/bin/python -m pytest tests/sglang_adapter/test_contract.py tests/sglang_adapter/test_fences.py
.venv/bin/python -W ignore tools/run_machines.py "$operations"
files=(tests/e2e/test_store.py tests/e2e/test_identity.py)
drafts="not drafts" # SGLang 0.5.22 asks no platform for its workers of drafts, and its own need compiled kernels
if grep -q "def get_speculative_worker_cls" "$folder/sglang/srt/platforms/interface.py"; then
    files+=(tests/e2e/test_speculation.py)
    drafts=""
else
    echo "test-sglang: no tests of drafts: SGLang $version asks no platform for its workers of drafts"
fi
exec .venv/bin/python -m pytest "${files[@]}" -k "$drafts"
