"""Hand what the user configured for pip on to uv, which does not read it by itself.

Where packages come from, certificates, proxies and time limits. What the user set for uv already (UV_*, SSL_CERT_FILE,
HTTPS_PROXY, ...) stays as it is. pip treats all its indexes alike, so uv is told to do so too.
"""

import configparser
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ALWAYS = {"UV_PYTHON_DOWNLOADS": "never", "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_PROGRESS": "1"}
# What uv calls the same thing, so that a user's own setting under any of the names wins.
SPELLINGS = {
    "UV_DEFAULT_INDEX": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "UV_INDEX": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "HTTPS_PROXY": ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"),
    "HTTP_PROXY": ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"),
}


@dataclass(frozen=True)
class UvSettings:
    """What to add to uv's environment and command line, and what was left out (sentences for the user)."""

    env: Mapping[str, str]
    flags: tuple[str, ...]
    notices: tuple[str, ...]


def uv_settings(environ: Mapping[str, str] = os.environ) -> UvSettings:
    """uv's settings for this user: pip's configuration, translated. `environ` is where PIP_* and UV_* are read."""
    return translate(pip_options(environ), environ)


def pip_options(environ: Mapping[str, str]) -> dict[str, str]:
    """pip's options by name (`index-url`), merged as `pip install` would: global, then install, then PIP_*."""
    rank = {"global": 0, "install": 1, ":env:": 2}
    known = sorted((item for item in read_options(environ) if item[0] in rank), key=lambda item: rank[item[0]])
    return {name: value for _, name, value in known}


def translate(options: Mapping[str, str], environ: Mapping[str, str]) -> UvSettings:
    """pip's options as uv's environment variables and flags. A folder that is not there is left out, with a notice:
    pip passes over it, uv stops at it."""
    links, missing = _local_links(options.get("find-links", "").split())
    certificate = options.get("cert", "")
    proxy = options.get("proxy", "")
    proxy = proxy if not proxy or "://" in proxy else f"http://{proxy}"
    no_index = options.get("no-index", "").lower() in ("1", "true", "yes", "on")
    wanted = {
        **ALWAYS,
        "UV_DEFAULT_INDEX": "" if no_index else options.get("index-url", ""),
        "UV_INDEX": "" if no_index else " ".join(options.get("extra-index-url", "").split()),
        "UV_FIND_LINKS": ",".join(links),
        "UV_INSECURE_HOST": " ".join(options.get("trusted-host", "").split()),
        "UV_KEYRING_PROVIDER": "subprocess" if options.get("keyring-provider") == "subprocess" else "",
        "UV_HTTP_TIMEOUT": _whole_seconds(options.get("timeout") or options.get("default-timeout")),
        "SSL_CERT_DIR" if os.path.isdir(certificate) else "SSL_CERT_FILE": certificate,
        "SSL_CLIENT_CERT": options.get("client-cert", ""),
        "HTTPS_PROXY": proxy,
        "HTTP_PROXY": proxy,
    }
    env = {name: value for name, value in wanted.items() if value and not _is_set(name, environ)}
    notices = tuple(f"pip's find-links names {path}, which is not there: left out" for path in missing)
    return UvSettings(env, ("--no-index",) if no_index else (), notices)


def _is_set(name: str, environ: Mapping[str, str]) -> bool:
    return any(environ.get(spelling) for spelling in SPELLINGS.get(name, (name,)))


def _local_links(links: list[str]) -> tuple[list[str], list[str]]:
    """(usable, missing) find-links; local ones made absolute, because uv runs in a folder of its own."""
    usable: list[str] = []
    missing: list[str] = []
    for link in links:
        local = link.removeprefix("file://") if "://" not in link or link.startswith("file://") else None
        path = Path(local).expanduser().absolute() if local is not None else None
        if path is None:
            usable.append(link)
        else:
            (usable if path.exists() else missing).append(str(path))
    return usable, missing


def _whole_seconds(text: str | None) -> str:
    """uv wants whole seconds, pip takes fractions; "" where there is nothing to hand on."""
    try:
        return str(max(1, round(float(text)))) if text else ""
    except ValueError:
        return ""


def read_options(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(section, option, value) of pip's files, then of PIP_* variables (section `:env:`), as `pip config list`."""
    for path in _config_files(environ):
        parser = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error):  # pip itself complains about a broken file
            parser.read(path, encoding="utf-8")
        for section in parser.sections():
            yield from ((section, _plain(option), value) for option, value in parser.items(section))
    for name, value in environ.items():
        if name.startswith("PIP_"):
            yield ":env:", _plain(name.removeprefix("PIP_")), value


def _config_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """pip.conf of the system, the user, this environment and $PIP_CONFIG_FILE; a later file wins. $PIP_CONFIG_FILE
    replaces the user's, and /dev/null there means none at all (pip's rules: its documentation, topic configuration).
    """
    home, own = Path(environ.get("HOME") or Path.home()), environ.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return
    for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep):
        yield Path(folder) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    if not own or not Path(own).exists():
        yield home / ".pip" / "pip.conf"
        yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if own:
        yield Path(own)


def _plain(option: str) -> str:
    return option.lower().replace("_", "-").removeprefix("--")
