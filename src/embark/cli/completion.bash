
_embark_and_names() {
  _embark "$@"
  local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" names=""
  case "$word" in -*) return ;; esac
  case "$command" in @GROUPS@) command="$command ${COMP_WORDS[2]}" ;; esac
  case "$command" in
    @SPEC_COMMANDS@) names="@PRESETS@" ;;
    @RUN_COMMANDS@) names="$(cd runs 2>/dev/null && ls -d -- */ 2>/dev/null | tr -d /)" ;;
    @MACHINE_COMMANDS@) names="@MACHINES@" ;;
  esac
  if [ "$COMP_CWORD" -gt 1 ] && [ -n "$names" ]; then
    mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -W "$names" -- "$word"; compgen -f -- "$word")
  fi
}
# Without the options, bash would complete no file names.
complete -o bashdefault -o default -F _embark_and_names embark
