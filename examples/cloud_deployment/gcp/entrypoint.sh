#!/bin/sh
# Without arguments it trains the quickstart; options and scripts go to python; a program runs as it is; anything else
# is a command of embark.
set -eu
case "${1:-}" in
  "") set -- embark train quickstart ;;
  -* | *.py) set -- python "$@" ;;
  *) if ! command -v "$1" >/dev/null 2>&1; then set -- embark "$@"; fi ;;
esac
exec "$@"
