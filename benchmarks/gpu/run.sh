#!/usr/bin/env bash
# Plans against a GPU's own figures (memory.py, less than 8 minutes), a trace of its streams
# (streams.py), numbers against eager PyTorch (numerics.py), and FSDP2 beside fxshard on an emulated
# network (emulated_network.py, 10 minutes).
#
#   bash benchmarks/gpu/run.sh                     # one GPU; writes benchmarks/results/<date>-<gpu>.*
#   bash benchmarks/gpu/run.sh --cpu --out FOLDER  # no GPU: small models, to the byte
#
# Python: $PYTHON, else .venv/bin/python of this checkout, else python3. It needs torch 2.11 to 2.15
# and what fxshard imports; fxshard itself need not be installed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
  python=python3
  if [[ -x "$root/.venv/bin/python" ]]; then python="$root/.venv/bin/python"; fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
"$python" - <<'PY'
import importlib.util
import sys

needed = ("torch", "numpy", "rich", "sympy", "tabulate")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} has no {', '.join(missing)}: install it, or set PYTHON.")
PY
status=0
"$python" -m benchmarks.gpu.memory "$@" || status=$?
# Then the others, unless only some models of memory.py are asked for.
device=() out=()
while (($#)); do
  case "$1" in
    --cpu) device=(--device cpu) ;;
    --out) out=(--out "$2"); shift ;;
    --out=*) out=("$1") ;;
    --only | --worlds) exit "$status" ;;
  esac
  shift
done
for script in streams numerics emulated_network; do
  "$python" -m "benchmarks.gpu.$script" "${device[@]}" "${out[@]}" || status=2
done
exit "$status"
