#!/usr/bin/env bash
# What we rely on, checked against another version of SGLang: scripts/test_sglang.sh VERSION [PYTEST ARGUMENTS]
# The version lies in a folder of its own (.venv-sglang-VERSION) before the packages of .venv, which stay as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?name a version of SGLang, as in: make test-sglang VERSION=0.5.24}
shift
folder=".venv-sglang-$version"
if [ ! -d "$folder/sglang" ]; then
    echo "test-sglang: installing SGLang $version into $folder"
    .venv/bin/python -m pip install --quiet --no-deps --target "$folder" "sglang==$version"
fi
export PYTHONPATH="$PWD/$folder:$PWD:$PWD/kernels"
export SGLANG_PLATFORM=kvevict_cpu
echo "test-sglang: functions that we hook or override and that differ in SGLang $version:"
.venv/bin/python -W ignore -c "
from sgl_kvevict.sglang_adapter.compat import misfits
print(*(f'  {each}' for each in misfits() or ['none']), sep='\\n')"
exec .venv/bin/python -m pytest tests/sglang_adapter/test_contract.py tests/sglang_adapter/test_fences.py "$@"
