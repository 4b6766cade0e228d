#!/bin/sh
# What the container does with its words: none trains the quickstart; options and scripts go to python; a program is
# run as it stands; anything else is a verb of embark.
set -eu
case "${1:-}" in
  "") set -- embark train quickstart ;;
  -* | *.py) set -- python "$@" ;;
  *) if ! command -v "$1" >/dev/null 2>&1; then set -- embark "$@"; fi ;;
esac
exec "$@"
