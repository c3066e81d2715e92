#!/usr/bin/env bash
# Create or update .venv-compile: the Triton that CUDA servers have, for `make test-compile`. Needs .venv (its Python is
# used). Returns at once when nothing that it installs from has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-compile
python="$venv/bin/python"
stamp="$venv/.setup-stamp"
log=.setup/compile-log

fingerprint() { # of everything the environment is made from, and of its place: a venv cannot be moved
    { pwd; cat requirements/compile.txt scripts/setup_compile.sh; } | sha256sum | cut -d' ' -f1
}

pip() { "$python" -m pip --disable-pip-version-check install --no-input --progress-bar off "$@"; }

if [[ -x $python && -f $stamp && "$(<"$stamp")" == "$(fingerprint)" ]]; then exit 0; fi
mkdir -p .setup
exec 9>.setup/compile-lock
if command -v flock >/dev/null; then flock 9; fi
rm -f "$stamp"
echo "compile: an environment with $(grep '^triton==' requirements/compile.txt)"
if ! {
    .venv/bin/python -m venv --clear "$venv"
    pip "$(grep '^torch==' requirements/compile.txt)" "$(grep '^numpy==' requirements/compile.txt)" # kernels import numpy
    pip --no-deps "$(grep '^triton==' requirements/compile.txt)" # torch would want another one, or none
} >"$log" 2>&1; then
    echo "compile: failed (whole log: $log)" >&2
    tail -n 30 "$log" >&2
    exit 1
fi
fingerprint >"$stamp"
