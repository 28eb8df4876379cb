#!/bin/sh
# Writes constraints.txt anew: the versions of every package that any extra installs, directly or not, for
# all Pythons of pyproject.toml. A version that the file has stays, unless `--upgrade` asks for the newest.
# Usage: locked.sh UV [--upgrade | --upgrade-package NAME]...
set -eu
uv=$1
shift
cd "$(dirname "$0")/.."
new=$(mktemp)
trap 'rm -f "$new" "$new.kept"' EXIT
cp constraints.txt "$new"
"$uv" pip compile --quiet --universal --python-version 3.11 --all-extras --no-header --no-annotate \
    --no-emit-package regimes "$@" -o "$new" pyproject.toml
# CUDA's libraries stand in the metadata of each torch, and are others in each build of it
{ sed '/^[^#]/,$d' constraints.txt; grep -vE '^(nvidia-|cuda-|triton)' "$new"; } >"$new.kept"
cat "$new.kept" >constraints.txt
