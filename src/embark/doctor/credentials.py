"""Finds the clouds that this machine has credentials for, and their sources, by name only: never a secret."""

import stat

from embark.values import JsonDict, read_table
from .host import Check, Checks, Host

Source = JsonDict
SOURCES: list[Source] = read_table(__file__, "credentials.toml")["source"]


def check_credentials(host: Host) -> Checks:
    found = [source for source in SOURCES if _is_there(host, source)]
    mistakes = [mistake for source in SOURCES if (mistake := _mistake(host, source))]
    names = [f"{source['cloud']}: {source['name']}" for source in found]
    if mistakes:
        yield Check("credentials", "wrong", "; ".join([*mistakes, *names]), "complete ones, if any",
                    "set what is missing, or unset the rest")
        return
    text = "; ".join(names) or "none found: local files need none"
    open_files = [f"~/{source['home']}" for source in found if source.get("is_secret")
                  and host.home(source["home"]).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)]
    if open_files:
        yield Check("credentials", "warning", f"{text}; others can read {' and '.join(open_files)}",
                    "readable by you only", f"chmod 600 {' '.join(open_files)}")
    else:
        yield Check("credentials", "ok", text)


def _is_there(host: Host, source: Source) -> bool:
    if "home" in source:
        file = host.home(source["home"])
        return file.is_file() and source.get("has", "") in file.read_text(errors="replace")
    return all(host.env.get(name) for name in source["env"])


def _mistake(host: Host, source: Source) -> str:
    missing = [name for name in source.get("env", ()) if not host.env.get(name)]
    if source.get("is_pair") and len(missing) == 1:
        return f"{missing[0]} is not set, and its other half is"
    if source.get("is_file") and not missing and not host.path(host.env[source["env"][0]]).is_file():
        return f"{source['env'][0]} names a missing file"
    return ""
