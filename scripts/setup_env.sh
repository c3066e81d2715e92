#!/usr/bin/env bash
# Create or update .venv: stock SGLang that runs without a GPU, this package (editable), tests and linters.
# Returns at once when nothing that it installs from has changed. PYTHON=<interpreter> chooses the Python 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
python="$venv/bin/python"
stamp="$venv/.setup-stamp"
log=.setup/log

fingerprint() { # of everything the environment is made from, and of its place: a venv cannot be moved
    { pwd; cat requirements/*.txt pyproject.toml scripts/setup_env.sh; } | sha256sum | cut -d' ' -f1
}

is_current() { [[ -x $python && -f $stamp && "$(<"$stamp")" == "$(fingerprint)" ]]; }

is_python_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python}; do
        if is_python_311 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: need Python 3.11 (requirements/sglang.txt says why), not found as: ${PYTHON:-python3.11 python3 python}" >&2
    return 1
}

pip_progress() { # pip_progress LINE: how far pip has come since that line of the log, in packages
    local output names found
    output=$(tail -n "+$1" "$log")
    if names=$(grep -m 1 '^Installing collected packages: ' <<<"$output"); then
        echo "installed $(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' -newer "$log.step" | wc -l)" \
            "of $(tr -cd , <<<"$names," | wc -c) packages"
    elif found=$(grep -cE '^(Collecting|Processing) ' <<<"$output"); then
        echo "found $found packages" \
            "$(sed -nE 's/^ +Downloading ([^-]+-[^-]+)-.*(\([^)]*\))$/(last: \1 \2)/p' <<<"$output" | tail -n 1)"
    fi
}

step() { # step LABEL COMMAND...: run quietly, say every five seconds how far it is, the end of the log on failure
    local label=$1 started=$SECONDS shown="" now pid begin
    shift
    echo "setup: $label"
    touch "$log.step"
    begin=$(($(wc -l <"$log") + 1))
    "$@" >>"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.5
        if ((SECONDS - started >= 5 && (SECONDS - started) % 5 == 0)); then
            now=$(pip_progress "$begin") || true
            if [[ $now != "$shown" ]]; then
                shown=$now
                echo "setup:   $((SECONDS - started)) s: $now"
            fi
        fi
    done
    if ! wait "$pid"; then
        echo "setup: failed: $label (whole log: $log)" >&2
        tail -n 30 "$log" >&2
        exit 1
    fi
}

pip() { "$python" -m pip --disable-pip-version-check install --no-input --progress-bar off "$@"; }

if is_current; then exit 0; fi
mkdir -p .setup
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
exec 9>.setup/lock
if command -v flock >/dev/null && ! flock --nonblock 9; then
    echo "setup: waiting for another setup of this folder"
    flock 9
fi
if is_current; then exit 0; fi

interpreter=$(find_python)
: >"$log"
rm -f "$stamp"
if ! is_python_311 "$python"; then
    step "1/8 virtual environment of $interpreter" "$interpreter" -m venv --clear "$venv"
fi
step "2/8 torch (CPU build where pip finds one)" pip -r requirements/torch.txt -c requirements/cpu.txt
step "3/8 stock SGLang, without the CUDA packages it names" pip --no-deps -r requirements/sglang.txt
step "4/8 what SGLang needs to run on a CPU (about 120 packages)" pip -r requirements/cpu.txt
step "5/8 tests, linters, plots" pip -r requirements/dev.txt
step "6/8 FlashInfer's Python part, for tests of the GPU path" pip --no-deps -r requirements/flashinfer.txt
step "7/8 sgl-kvevict, editable" pip --no-deps --no-build-isolation -e .
# Packages of a checkout that the wheel lacks (tools/kvevict_tools).
echo "$PWD/tools" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvevict_checkout.pth"
compile='from kvevict_kernels import recode_rows, stored_rows, span_attention as s
s.prepare_on_cpu(); recode_rows.prepare_on_cpu(64); stored_rows.prepare_on_cpu(64)'
step "8/8 attention for this CPU, compiled: the first server need not wait for it" "$python" -W ignore -c "$compile"
fingerprint >"$stamp"
echo "setup: ready after $SECONDS s"
