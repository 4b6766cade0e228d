
_embark() {
  local -a names=()
  local command="$words[2]"
  case "$command" in @GROUPS@) command="$command $words[3]" ;; esac
  case "$command" in
    @SPEC_COMMANDS@) names=(@PRESETS@) ;;
    @RUN_COMMANDS@) names=(runs/*(N/:t)) ;;
    @MACHINE_COMMANDS@) names=(@MACHINES@) ;;
  esac
  if (( CURRENT > 2 )) && [[ "$words[CURRENT]" != -* ]]; then
    compadd -a names
    _files
  fi
  _cyclopts_embark "$@"
  # Its descriptions of arguments keep zsh from inserting what matches.
  (( compstate[nmatches] )) && : "${compstate[insert]:=unambiguous}"
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _embark embark
