#!/usr/bin/env bash
# Create or update .venv-cache-pressure: PyPI's cache-pressure, for `make bench-judges`. Needs .venv (its Python is
# used). Returns at once when nothing that it installs from has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-cache-pressure
stamp="$venv/.setup-stamp"

fingerprint() { # of everything the environment is made from, and of its place: a venv cannot be moved
    { pwd; cat requirements/cache-pressure.txt scripts/setup_cache_pressure.sh; } | sha256sum | cut -d' ' -f1
}

if [[ -f $stamp && "$(<"$stamp")" == "$(fingerprint)" ]]; then exit 0; fi
mkdir -p .setup
exec 9>.setup/cache-pressure-lock
if command -v flock >/dev/null; then flock 9; fi
echo "cache-pressure: virtual environment"
.venv/bin/python -m venv --clear "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-input -r requirements/cache-pressure.txt
fingerprint >"$stamp"
