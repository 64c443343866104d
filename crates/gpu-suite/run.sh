#!/bin/sh
# Tests and measures the GPUs of this machine: sh run.sh --require cuda,2 --out results
# Needs a driver and nothing else; `sh run.sh --help` tells the rest.
exec "$(dirname "$0")/gpu-suite" run "$@"
