#!/bin/sh
# A wheel and an sdist, each in an empty folder of an environment that has nothing else: `make release`
# tries them on each Python.
# Usage: released.sh PYTHON WHEEL SDIST; TORCH_INDEX, if set, is where torch and torchvision come from.
set -eu
python=$1
shift
checkout=$(cd "$(dirname "$0")/.." && pwd)
if ! "$python" -c "" 2>/dev/null; then echo "$python: not on this machine, not tried"; exit 0; fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
pip="$folder/venv/bin/pip install --quiet --disable-pip-version-check -c $checkout/constraints.txt"
regimes="$folder/venv/bin/regimes"
unset PYTHONPATH
if [ -n "${TORCH_INDEX:-}" ]; then $pip --no-deps --index-url "$TORCH_INDEX" torch torchvision; fi
for built; do
    $pip "$built"
    $pip --no-deps --force-reinstall "$built" # not what the one before has left
    (
        mkdir "$folder/$(basename "$built")" && cd "$folder/$(basename "$built")"
        "$regimes" run smoke --set epochs=2 --quiet
        "$regimes" report runs/smoke
        "$regimes" figure 2 "$checkout/data/reference/small.tar.xz"
        "$regimes" figure levels runs/smoke
        "$regimes" doctor >doctor.txt || { cat doctor.txt; exit 1; }
        "$folder/venv/bin/python" -c "import regimes, analysis; print('$python:', regimes.__version__, 'works')"
    )
    echo "$python: $(basename "$built")"
done
