#!/bin/sh
# `keys`: make the keys of a deployment, once. Anything else: wait for the keys if there are to be any, then run stretto.
set -eu
if [ "$1" = keys ]; then
    [ -f "$STRETTO_KEYS/server.json" ] || stretto keys new
    exit 0
fi
if [ "$1" = serve ] && [ "${STRETTO_WAIT_FOR_KEYS:-}" = 1 ]; then
    while [ ! -f "$STRETTO_KEYS/client.json" ]; do sleep 0.2; done
fi
if [ "$1" = serve ] && [ "${STRETTO_RANKS:-1}" -gt 1 ]; then
    exec torchrun --standalone --nproc-per-node="$STRETTO_RANKS" -m stretto "$@"
fi
exec stretto "$@"
