#!/bin/sh
# the image's entry point: `docker run raycore MODEL [FLAG]...` serves a model, `docker run raycore generate PROMPT` runs a
# command of raycore, and `docker run raycore bash` another program
set -eu
case "${1:-}" in
    serve) shift ;;
    run-batch | generate | chat | complete | bench | simulate | status | scale | collect-env | completion) exec raycore "$@" ;;
    "" | -* | *.gguf) ;;
    # `command -v` finds directories, too: those are models
    *) if [ ! -d "$1" ] && command -v "$1" >/dev/null; then exec "$@"; fi ;;
esac
# 127.0.0.1, the default, could not be reached from outside of the container
exec raycore serve --host 0.0.0.0 "$@"
