#!/usr/bin/env bash
# Train on several processes of this machine, or of several machines:
#   tools/dist_train.sh CONFIG NUM_PROCESSES [arguments of xlength train]
# NUM_PROCESSES counts those of this machine, usually its accelerators. With several machines, run
# it on each with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set.
# It ends with the exit code of xlength train: 75 after a SIGTERM on which a checkpoint was saved (to
# be continued with --resume), 130 after Ctrl-C, 2 on bad input. torchrun by itself ends with 1 then.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,7s/^# //p' "$0" >&2
    exit 2
fi
config=$1
processes=$2
shift 2
if [ "${NNODES:-1}" = 1 ] && [ -z "${MASTER_PORT:-}" ]; then
    rendezvous=(--standalone)
else
    rendezvous=(
        --nnodes="${NNODES:-1}" --node-rank="${NODE_RANK:-0}"
        --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${MASTER_PORT:-29500}"
    )
fi
exec "${PYTHON:-python}" "$(dirname "$0")/torchrun.py" "${rendezvous[@]}" \
    --nproc-per-node="$processes" \
    "$(dirname "$0")/train.py" "$config" --launcher pytorch "$@"
