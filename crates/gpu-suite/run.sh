#!/bin/sh
# Tests and measures the GPUs of this machine: sh run.sh --require cuda,2 --out results
# Needs a driver and nothing else; `sh run.sh --help` tells the rest.
case $0 in
*/*) here=${0%/*} ;;
*) here=. ;;
esac
suite=$here/gpu-suite
# Some ways of carrying files lose the mark of a program.
[ -x "$suite" ] || chmod +x "$suite"
# A driver does not always come with Vulkan's loader, so a bundle carries one; the machine's own goes first.
if [ -d "$here/lib" ] && ! ldconfig -p 2>/dev/null | grep -q libvulkan.so.1; then
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(cd "$here/lib" && pwd)
    export LD_LIBRARY_PATH
fi
# Container runtimes put the driver where that loader does not look.
manifest=share/vulkan/icd.d/nvidia_icd.json
if [ -e "/usr/local/nvidia/$manifest" ] && [ ! -e "/usr/$manifest" ] && [ ! -e "/etc/${manifest#share/}" ]; then
    export VK_ADD_DRIVER_FILES="${VK_ADD_DRIVER_FILES:-/usr/local/nvidia/$manifest}"
fi
exec "$suite" run "$@"
