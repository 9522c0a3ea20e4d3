#!/usr/bin/env bash
# Builds, then runs the command-line tool's benchmark. Arguments go to moestro bench (--help lists them).
source "$(dirname "$0")/common.sh"
tools/build.sh
exec "$BUILD/cli/moestro" bench "$@"
