#!/usr/bin/env bash
# Sets up, builds, and trains the tiny preset on real text: the sources of Python's standard library.
# Arguments go to moestro.train (--help lists them) and come after the preset, so they win.
source "$(dirname "$0")/common.sh"
tools/build.sh
export PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
exec "$VENV/bin/python" -m moestro.train --preset tiny "$@"
