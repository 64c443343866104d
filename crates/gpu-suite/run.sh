#!/bin/sh
# Tests and measures the GPUs of this machine: sh run.sh --require cuda,2 --out results
# Needs a driver and nothing else; `sh run.sh --help` tells the rest.
case $0 in
*/*) suite=${0%/*}/gpu-suite ;;
*) suite=./gpu-suite ;;
esac
# Some ways of carrying files lose the mark of a program.
[ -x "$suite" ] || chmod +x "$suite"
exec "$suite" run "$@"
