#!/usr/bin/env bash
# Create or update .venv-peers: kvpress and the transformers it needs, for `make test-peers`. Needs .venv (its Python
# is used). Returns at once when nothing that it installs from has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-peers
python="$venv/bin/python"
stamp="$venv/.setup-stamp"
log=.setup/peers-log

fingerprint() { # of everything the environment is made from, and of its place: a venv cannot be moved
    { pwd; cat requirements/peers.txt scripts/setup_peers.sh; } | sha256sum | cut -d' ' -f1
}

step() { # step LABEL COMMAND...: run quietly, show a sign of life every ten seconds, the end of the log on failure
    local label=$1 started=$SECONDS pid sign=0
    shift
    echo "peers: $label"
    "$@" >>"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.5
        if ((SECONDS - started >= sign + 10)); then
            sign=$((SECONDS - started))
            echo "peers:   $sign s: $(grep -v '^WARNING' "$log" | tail -n 1 | cut -c 1-90)"
        fi
    done
    if ! wait "$pid"; then
        echo "peers: failed: $label (whole log: $log)" >&2
        tail -n 30 "$log" >&2
        exit 1
    fi
}

pip() { "$python" -m pip --disable-pip-version-check install --no-input --progress-bar off "$@"; }

if [[ -x $python && -f $stamp && "$(<"$stamp")" == "$(fingerprint)" ]]; then exit 0; fi
mkdir -p .setup
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
exec 9>.setup/peers-lock
if command -v flock >/dev/null; then flock 9; fi
: >"$log"
rm -f "$stamp"
step "1/3 virtual environment" .venv/bin/python -m venv --clear "$venv"
step "2/3 torch (CPU build where pip finds one)" pip "$(grep '^torch==' requirements/peers.txt)"
step "3/3 kvpress and what it needs" pip -r requirements/peers.txt
fingerprint >"$stamp"
echo "peers: ready after $SECONDS s"
