#!/usr/bin/env bash
# Sets up, builds, and trains the tiny preset on real text: the sources of Python's standard library.
# Arguments go to moestro.train (--help lists them) in place of the preset.
source "$(dirname "$0")/common.sh"
tools/build.sh
use_built_package
[ $# -gt 0 ] || set -- --preset tiny
exec "$VENV/bin/python" -m moestro.train "$@"
