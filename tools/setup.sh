#!/usr/bin/env bash
# Installs what building, testing and training need and this machine lacks:
#   1. system packages  (Debian names; as root, else one sentence says which are missing)
#   2. .venv            a Python environment of this checkout's own
#   3. torch            the one that PYTHON or the active environment already has (2.9 or newer), reached
#                       from .venv through a .pth file; else torch 2.11.0 into .venv
#   4. Python packages  tools/requirements.txt
# What is already there is left alone: with nothing missing it takes well under two seconds, and after a
# failure it goes on where it stopped. Environment: PYTHON, the interpreter to start from (python3).
source "$(dirname "$0")/common.sh"

TORCH_VERSION=2.11.0
TORCH_OLDEST=2.9
PYTHON_OLDEST=3.10
TORCH_FREE_GB=8 # 4.6 GB installed, and the downloads beside it while they unpack

# ---- 1. system packages ---------------------------------------------------------------------------

# Prints the Debian package of each thing that is missing. Looks for the thing and not for the package,
# so that a cmake or a compiler from elsewhere counts.
missing_system_packages() {
  local version headers pair
  version=$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  at_least "${version:-0}" 3.25 || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  headers='openblas_config.h=libopenblas-dev CLI/CLI.hpp=libcli11-dev nlohmann/json.hpp=nlohmann-json3-dev
    fmt/format.h=libfmt-dev gtest/gtest.h=libgtest-dev'
  if ! command -v "${CXX:-c++}" >/dev/null; then
    echo g++
    for pair in $headers; do echo "${pair#*=}"; done
  else
    # OpenBLAS's own header, in Debian's folders of its kinds: a cblas.h alone may be another BLAS's.
    for pair in $headers; do
      printf '#if !__has_include(<%s>)\nmissing:%s\n#endif\n' "${pair%=*}" "${pair#*=}"
    done | "${CXX:-c++}" -E -P $(printf -- '-I%s ' /usr/include/*/openblas*/) -x c++ - | sed -n 's/^missing://p' | tr -d ' '
  fi
  if [ -z "$PYTHON" ]; then
    echo python3-venv
  else
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
  fi
}

# Wanted, but nothing fails without them.
missing_optional_packages() {
  command -v ccache >/dev/null || echo ccache
}

at_least() { # VERSION OLDEST
  [ "$(printf '%s\n' "$2" "$1" | sort -V | head -n1)" = "$2" ]
}

apt_install() {
  local apt=(apt-get -y -q -o DPkg::Lock::Timeout=300)
  export DEBIAN_FRONTEND=noninteractive
  "${apt[@]}" install --no-install-recommends "$@" ||
    { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends "$@"; }
}

setup_system_packages() {
  local missing optional
  missing=$(missing_system_packages | tr '\n' ' ')
  missing=${missing% }
  if [ -n "$missing" ]; then
    local hint="install with: apt-get install $missing"
    command -v apt-get >/dev/null ||
      fail "missing (by their Debian names): $missing; install them with this system's package manager"
    [ "$(id -u)" -eq 0 ] || fail "missing system packages: $missing; as root, $hint"
    worked=1
    say "[1/4] system packages: installing $missing"
    quietly "system packages" apt_install $missing ||
      fail "could not install the system packages: $missing (is there a network?); $hint"
    PYTHON=${PYTHON:-$(command -v python3 || true)}
    missing=$(missing_system_packages | tr '\n' ' ')
    [ -z "${missing% }" ] || fail "installed, but still not found: ${missing% }"
  fi
  optional=$(missing_optional_packages | tr '\n' ' ')
  if [ -n "$optional" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    say "      optional: installing $optional"
    quietly "optional system packages" apt_install $optional ||
      say "      not installed, and not needed: $optional"
  fi
}

# ---- 2. to 4. Python ------------------------------------------------------------------------------

# The version and the site folders of a torch that $1 can import, without importing it: "2.11.0 DIR…".
torch_of() {
  "$1" - <<'PY' 2>/dev/null || true
import importlib.metadata as metadata, importlib.util as util, os, sys
try:
    version = metadata.version("torch").split("+")[0]
except metadata.PackageNotFoundError:
    sys.exit(1)
if util.find_spec("torch") is None:
    sys.exit(1)
print(version, *[p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")])
PY
}

# What was asked for: another answer than the last time's, and Python's steps are gone through again.
wanted_stamp() {
  cat tools/requirements.txt
  echo "torch $TORCH_VERSION, oldest $TORCH_OLDEST"
}

# Is the torch that .torch names still there, and, if it is .venv's own, of the version wanted?
torch_is_there() {
  local dir
  [ -f "$VENV/.torch" ] || return 1
  dir=$(cat "$VENV/.torch")
  [ -d "$dir/torch" ] || return 1
  [[ $dir != "$VENV"/* ]] || compgen -G "$dir/torch-$TORCH_VERSION*.dist-info" >/dev/null
}

# Was .venv made from the interpreter that PYTHON names (when it names one), and does it run?
venv_is_right() {
  "$VENV/bin/python" -c pass 2>/dev/null &&
    { [ -z "$PYTHON_GIVEN" ] || [ "$(cat "$VENV/.python" 2>/dev/null)" = "$PYTHON_GIVEN" ]; }
}

setup_python() {
  # In .venv: .python, what it was made from; .torch, the folder that has torch; .stamp, what was wanted
  # when the last step ended well.
  local stamp=$VENV/.stamp
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted_stamp)" ] && torch_is_there && venv_is_right; then
    return
  fi

  worked=1
  local version
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  at_least "$version" "$PYTHON_OLDEST" ||
    fail "Python is $version ($PYTHON), expected $PYTHON_OLDEST or newer; name another with PYTHON=…"

  # A given PYTHON that .venv was not made from, or a .venv that no longer runs: start it again.
  if [ -d "$VENV" ]; then
    if venv_is_right; then
      say "[2/4] .venv: there"
    else
      say "[2/4] .venv: made again from $PYTHON ($version)"
      rm -rf "$VENV" 2>/dev/null || fail "could not remove $VENV, which another user made; remove it first"
    fi
  else
    say "[2/4] .venv: made from $PYTHON ($version)"
  fi
  if [ ! -d "$VENV" ]; then
    quietly "venv" "$PYTHON" -m venv "$VENV" || {
      rm -rf "$VENV"
      fail "could not make .venv with $PYTHON -m venv (Debian package python3-venv)"
    }
    echo "$PYTHON" >"$VENV/.python"
  fi
  rm -f "$stamp"

  setup_torch

  say "[4/4] Python packages: those of tools/requirements.txt"
  quietly "Python packages" "$VENV/bin/python" -m pip install --progress-bar off -r tools/requirements.txt ||
    fail "could not install the Python packages of tools/requirements.txt (is there a network?)"
  wanted_stamp >"$stamp"
}

setup_torch() {
  local found version site
  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  if torch_is_there; then
    say "[3/4] torch: there"
    return
  fi
  rm -f "$site/moestro_torch.pth"
  found=$(torch_of "$PYTHON")
  version=${found%% *}
  if [ -n "$found" ] && at_least "$version" "$TORCH_OLDEST"; then
    say "[3/4] torch: using $version of $PYTHON, no second copy"
    local dir
    for dir in ${found#* }; do
      echo "import site; site.addsitedir('$dir')"
    done >"$site/moestro_torch.pth"
    "$VENV/bin/python" -c 'import torch' 2>/dev/null ||
      fail "torch $version of $PYTHON cannot be imported; mend it, or name another interpreter with PYTHON=…"
    dirname "$("$VENV/bin/python" -c \
      'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')" >"$VENV/.torch"
    return
  fi
  [ -z "$found" ] || say "      torch $version of $PYTHON is older than $TORCH_OLDEST: not used"
  local free_gb
  free_gb=$(($(df -Pk "$VENV" | awk 'NR == 2 {print $4}') / 1024 / 1024))
  [ "$free_gb" -ge "$TORCH_FREE_GB" ] ||
    fail "torch needs $TORCH_FREE_GB GB of free disk, and $VENV has $free_gb GB"
  say "[3/4] torch: installing $TORCH_VERSION (4.6 GB, about a minute on a fast line)"
  quietly "torch" "$VENV/bin/python" -m pip install --progress-bar off "torch==$TORCH_VERSION" ||
    fail "could not install the Python package torch $TORCH_VERSION (is there a network?); an environment that \
has torch $TORCH_OLDEST or newer can be named with PYTHON=…"
  echo "$site" >"$VENV/.torch"
}

PYTHON_GIVEN=${PYTHON:+$(command -v "$PYTHON" || true)}
[ -z "${PYTHON:-}" ] || [ -n "$PYTHON_GIVEN" ] || fail "PYTHON is $PYTHON, which is not a program"
PYTHON=${PYTHON_GIVEN:-$(command -v python3 || true)}
worked=0
setup_system_packages
setup_python
if [ "$worked" -eq 0 ]; then say "set-up: nothing missing"; else say "set-up: done in $SECONDS s"; fi
