#!/usr/bin/env bash
# Makes the virtual environment: finds Python 3.12, gets uv, installs the pinned stack with bytecode compiled.
# usage: scripts/setup.sh VENV [oracles]
# With "oracles": only the libraries that the number formats are compared with (pyproject's extra of that name), into
# VENV/oracles and not among the stack's packages, where peft and transformers would import torchao in every process.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

say() { printf '%s\n' "setup: $*"; }

is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3 $(ls -d "$(pyenv root 2>/dev/null)"/versions/3.12*/bin/python3.12 2>/dev/null | sort -rV); do
    [ -n "$candidate" ] && is_312 "$candidate" && { echo "$candidate"; return; }
  done
  echo 3.12   # uv downloads one where it can
}

find_uv() {
  if command -v uv >/dev/null; then command -v uv; return; fi
  [ -x "$venv-uv/bin/uv" ] || { python3 -m venv "$venv-uv" && "$venv-uv/bin/pip" install -q uv; } >&2
  echo "$venv-uv/bin/uv"
}

started=$(date +%s)
uv=$(find_uv)
if [ "${2:-}" = oracles ]; then
  # Without their dependencies, which the stack has but for these two.
  "$uv" pip install -q --python "$venv/bin/python" --constraint constraints.txt --no-deps --target "$venv/oracles" \
    ml-dtypes nvidia-modelopt torchao pulp scipy
  say "oracles in $venv/oracles after $(( $(date +%s) - started )) s"
  exit
fi
python=$(find_python)
engine=cpu
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && engine=gpu
if ! [ -x "$venv/bin/python" ] || ! is_312 "$venv/bin/python"; then
  say "virtual environment in $venv with $python"
  "$uv" venv -q --clear --python "$python" "$venv"
fi
say "installing the stack for $engine (torch, vLLM, SkyRL, DeepSpeed: about 7 GB)"
"$uv" pip install -q --compile-bytecode --python "$venv/bin/python" --constraint constraints.txt \
  --override overrides.txt -e ".[$engine,dev]"
# The project's own folders too: an environment that forbids writing bytecode would compile them in every process.
"$venv/bin/python" -m compileall -q inkling_rl rollout trainer lora recipes
# Number formats are converted on the host on every machine; the engine's kernels are for engines without a GPU.
"$venv/bin/python" -m inkling_rl.formats.kernels
if [ "$engine" = cpu ]; then
  "$venv/bin/python" -m rollout.kernels.build
fi
say "done in $(( $(date +%s) - started )) s"
