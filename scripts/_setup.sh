# Shared by the bash scripts beside it: source it. environment.py makes and fills .venv.
# ACCEL_TORCH  what to install as torch, for example ACCEL_TORCH="torch==2.13.0"
# PYTHON       the interpreter to make the environment with

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '== %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '  what to do: %s\n' "$2" >&2
    exit 1
}

# step TITLE WHAT_TO_DO command...: one line of progress, the time it took, advice on failure
step() {
    local title="$1" advice="$2" begin=$SECONDS
    shift 2
    say "$title"
    "$@" || fail "failed: $title" "$advice"
    say "$title: done in $((SECONDS - begin)) s"
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

# Prints the first interpreter that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if is_new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

# Runs a script with the first interpreter that is new enough; it replaces this shell.
run_python() {
    local python
    python="$(find_python)" || no_python
    exec "$python" "$@"
}

no_python() {
    fail "no Python 3.10 or newer found (tried ${PYTHON:-python3, python3.10 to python3.13})" \
        "install one, or name it: PYTHON=/path/to/python3 $0"
}

# Makes a virtual environment at $1; one that does not run any more is replaced.
make_venv() {
    local python
    if is_new_enough "$1/bin/python" && "$1/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python="$(find_python)" || no_python
    step "make the environment $1 with $("$python" --version)" \
        "on Debian and Ubuntu, install the package python3-venv; then run this again" \
        "$python" -m venv --clear "$1"
}

# Makes an environment at $1 that has the packages of .venv below its own.
make_layer() {
    PYTHON="$VENV/bin/python" make_venv "$1"
    "$VENV/bin/python" - "$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PYTHON'
import pathlib
import sys
import sysconfig

below = sysconfig.get_path("purelib")
line = f"import site; site.addsitedir({below!r})\n"
pathlib.Path(sys.argv[1], "below.pth").write_text(line, encoding="utf-8")
PYTHON
}

# Changes when an installed environment no longer fits: requirements, place, interpreter, torch.
fingerprint() {
    "$VENV/bin/python" - "$ROOT" "${ACCEL_TORCH:-}" <<'PYTHON'
import hashlib
import pathlib
import sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256("\0".join([sys.version, *sys.argv[1:]]).encode())
for name in ("setup.cfg", "pyproject.toml"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# set_up EXTRA...: .venv with torch, the project (editable) and the packages of these extras.
set_up() {
    local python
    python="$(find_python)" || no_python
    "$python" "$ROOT/scripts/environment.py" "$@"
}
