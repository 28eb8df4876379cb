#!/bin/sh
# A wheel in an empty environment and an empty folder: `make release` tries it on each Python.
# Usage: released.sh PYTHON WHEEL; TORCH_INDEX, if set, is where torch and torchvision come from.
set -eu
python=$1 wheel=$(realpath "$2") checkout=$(cd "$(dirname "$0")/.." && pwd)
if ! "$python" -c "" 2>/dev/null; then echo "$python: not on this machine, not tried"; exit 0; fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
pip="$folder/venv/bin/pip install --quiet --disable-pip-version-check -c $checkout/constraints.txt"
if [ -n "${TORCH_INDEX:-}" ]; then $pip --no-deps --index-url "$TORCH_INDEX" torch torchvision; fi
$pip "$wheel"
cd "$folder"
unset PYTHONPATH
regimes="$folder/venv/bin/regimes"
"$regimes" run smoke --set epochs=2 --quiet
"$regimes" report runs/smoke
"$regimes" figure 2 "$checkout/data/reference/small.tar.xz"
"$regimes" figure levels runs/smoke
"$folder/venv/bin/python" -c "import regimes, regimes_study; print('$python:', regimes.__version__, 'works')"
