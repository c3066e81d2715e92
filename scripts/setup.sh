#!/usr/bin/env bash
# Create or update an environment: scripts/setup.sh [PROFILE]. Returns at once when nothing that it installs from changed.
#   server (or none)   .venv: stock SGLang that runs without a GPU, this package (editable), tests, linters
#   docs, peers, ..    .venv-PROFILE, from requirements/PROFILE.txt
# Lock files name every package, so uv installs all of them at once. PYTHON=<interpreter> chooses the Python 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

profile=${1:-server}
case $profile in
    server) venv=.venv locks=(requirements/torch.txt requirements/cpu.txt requirements/dev.txt) ;;
    *) venv=.venv-$profile locks=("requirements/$profile.txt") ;;
esac
python="$venv/bin/python"
stamp="$venv/.setup-stamp"
log=.setup/$profile-log

fingerprint() { # of everything the environment is made from, and of its place: a venv cannot be moved
    { pwd; cat "${locks[@]}" pyproject.toml scripts/setup.sh; } | sha256sum | cut -d' ' -f1
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
    echo "setup: need Python 3.11 (requirements/torch.txt says why), not found as: ${PYTHON:-python3.11 python3 python}" >&2
    return 1
}

step() { # step LABEL COMMAND...: run quietly, say every five seconds how far it is, the end of the log on failure
    local label=$1 started=$SECONDS told=0 pid
    shift
    echo "setup: $label"
    "$@" >>"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - started >= told + 5)); then
            told=$((SECONDS - started))
            echo "setup:   $told s: $(tail -n 1 "$log" | cut -c 1-90)"
        fi
    done
    if ! wait "$pid"; then
        echo "setup: failed: $label (whole log: $log)" >&2
        tail -n 30 "$log" >&2
        exit 1
    fi
}

follow_pip() { # uv does not read pip's configuration: tell it from where this machine gets its packages
    local key value
    while IFS== read -r key value; do
        value=$(sed "s/^'//; s/'$//; s/\\\\n/ /g; s/^ *//" <<<"$value")
        case ${key##*.} in # the environment comes first, and what the user set for uv before that
            index-url) : "${UV_DEFAULT_INDEX:=$value}" ;;
            extra-index-url) : "${UV_INDEX:=$value}" "${UV_INDEX_STRATEGY:=unsafe-best-match}" ;; # as pip: the best of all
            find-links) : "${UV_FIND_LINKS:=${value// /,}}" ;;
            trusted-host) : "${UV_INSECURE_HOST:=$value}" ;;
            cert) : "${SSL_CERT_FILE:=$value}" ;;
            proxy) : "${HTTPS_PROXY:=$value}" ;;
        esac
    done < <("$python" -m pip config list)
    for key in UV_DEFAULT_INDEX UV_INDEX UV_INDEX_STRATEGY UV_FIND_LINKS UV_INSECURE_HOST SSL_CERT_FILE HTTPS_PROXY; do
        if [[ -n ${!key-} ]]; then export "${key?}"; fi
    done
}

uv() { "$venv/bin/uv" pip install --python "$python" "$@"; }

cache_of_uv() { # uv stops where it cannot write its cache: a user without a home has it here
    local cache
    if ! cache=$("$venv/bin/uv" cache dir 2>/dev/null) || ! mkdir -p "$cache" 2>/dev/null || [[ ! -w $cache ]]; then
        export UV_CACHE_DIR="$PWD/.setup/uv"
    fi
}

if is_current; then exit 0; fi
mkdir -p .setup
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
exec 9>".setup/$profile-lock"
if command -v flock >/dev/null && ! flock --nonblock 9; then
    echo "setup: waiting for another setup of $venv"
    flock 9
fi
if is_current; then exit 0; fi

interpreter=$(find_python)
: >"$log"
rm -f "$stamp"
if ! is_python_311 "$python"; then
    step "$venv, a virtual environment of $interpreter" "$interpreter" -m venv --clear "$venv"
fi
step "uv" "$python" -m pip --disable-pip-version-check install "$(grep -h '^uv==' requirements/dev.txt)"
follow_pip
cache_of_uv
# The one package with dependencies of its own: a CUDA build, where there is no CPU build, needs libraries beside it.
if torch=$(grep -h '^torch==' "${locks[@]}"); then step "$torch (a CPU build where one is found)" uv "$torch"; fi
step "$(cat "${locks[@]}" | grep -c ==) packages of ${locks[*]}" uv --no-deps $(printf -- '-r %s ' "${locks[@]}")
if [[ $profile == server ]]; then
    step "sgl-kvevict, editable" uv --no-deps --no-build-isolation -e .
    # Packages of a checkout that the wheel lacks (tools/kvevict_tools).
    echo "$PWD/tools" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvevict_checkout.pth"
    compile='from kvevict_kernels.span_attention import prepare_on_cpu
for module in ("span_attention.call", "recode_rows.numba_impl", "numba_products"): prepare_on_cpu(module)'
    step "attention for this CPU, compiled: the first server need not wait for it" "$python" -W ignore -c "$compile"
fi
fingerprint >"$stamp"
echo "setup: ready after $SECONDS s"
