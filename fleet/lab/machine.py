# SPDX-License-Identifier: Apache-2.0
"""What a host needs of the machine's own setup: name servers, trust, proxies, package indexes.

All of it is read from the machine's configuration, so a lab behind a proxy or a private index works like the machine.
"""

from __future__ import annotations

import configparser
import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# Variables that say whom to trust and where packages are. What names places of the machine (caches, targets) is left out.
_VARIABLES = """
*_proxy *_PROXY SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS GIT_SSL_CAINFO
PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_CERT PIP_CLIENT_CERT PIP_TRUSTED_HOST
PIP_CONSTRAINT PIP_DEFAULT_TIMEOUT PIP_TIMEOUT PIP_RETRIES PIP_DISABLE_PIP_VERSION_CHECK PIP_CONFIG_FILE
UV_INDEX UV_INDEX_* UV_DEFAULT_INDEX UV_EXTRA_INDEX_URL UV_FIND_LINKS UV_INSECURE_HOST UV_NATIVE_TLS
UV_SYSTEM_CERTS UV_HTTP_TIMEOUT UV_HTTP_RETRIES UV_CONFIG_FILE UV_PYTHON_INSTALL_MIRROR HF_ENDPOINT
"""
VARIABLES = tuple(_VARIABLES.split())
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LOCAL_CERTS = Path("/usr/local/share/ca-certificates")
_FILE_KEYS = {"cert", "client-cert", "constraint", "constraints", "build-constraint", "build-constraints"}
_PACKAGE_KEYS = {"find-links", "index-url", "extra-index-url", "index", "default-index", "url"}
_APT = re.compile(
    r"^(Acquire::(?:(?:https?|ftp)(?:::[\w.-]+)?::(?:Proxy|CaInfo|CaPath|Verify-Peer|Verify-Host|Timeout)(?:::[\w.-]+)?"
    r'|Check-Valid-Until|Check-Date|Retries|ForceIPv4) "[^"]+";)$',
    re.MULTILINE,
)


@dataclass(frozen=True)
class Machine:
    """What hosts get. `files`: path in the host to path here. `binds`: folders of packages. `ports`: of proxies, indexes."""

    environment: Mapping[str, str]
    nameservers: tuple[str, ...]
    files: Mapping[Path, Path]
    binds: tuple[Path, ...]
    ports: tuple[int, ...]
    apt_options: tuple[str, ...]
    warnings: tuple[str, ...] = field(default=())


def pick_environment(env: Mapping[str, str], etc_environment: str = "") -> dict[str, str]:
    """Variables to hand on; the caller's win over those of /etc/environment. A value with a line break is left out."""
    found = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=\"?([^\"\n]*)\"?\s*$", etc_environment, re.MULTILINE))
    found.update(env)
    return {
        k: v
        for k, v in sorted(found.items())
        if v and "\n" not in v and any(fnmatch.fnmatchcase(k, p) for p in VARIABLES)
    }


def nameservers(resolv_conf: str, resolved_conf: str = "") -> tuple[str, ...]:
    """IPv4 servers a host can reach. A stub on the loopback is nobody inside a host: then what systemd-resolved asks."""
    for text in (resolv_conf, resolved_conf):
        found = re.findall(r"^\s*nameserver\s+([0-9.]+)\s*$", text, re.MULTILINE)
        found = [s for s in found if not s.startswith("127.")]
        if found:
            return tuple(dict.fromkeys(found))
    return ()


def pip_files(env: Mapping[str, str], home: Path) -> dict[Path, Path]:
    """pip's configuration files that exist: where a host looks for each, and where it is here."""
    found = {}
    for folder in [*env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"), ""]:
        path = Path(folder or "/etc") / ("pip/pip.conf" if folder else "pip.conf")
        found[path if path.is_relative_to("/etc") else Path("/etc/xdg/pip/pip.conf")] = path
    config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    found[Path("/root/.pip/pip.conf")] = home / ".pip/pip.conf"
    found[Path("/root/.config/pip/pip.conf")] = config / "pip/pip.conf"
    if env.get("PIP_CONFIG_FILE"):
        found[Path(env["PIP_CONFIG_FILE"])] = Path(env["PIP_CONFIG_FILE"])
    return {there: here for there, here in found.items() if here.is_file()}


def uv_files(env: Mapping[str, str], home: Path) -> dict[Path, Path]:
    """uv's configuration files that exist, as `pip_files`."""
    config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    found = {Path("/etc/uv/uv.toml"): Path("/etc/uv/uv.toml"), Path("/root/.config/uv/uv.toml"): config / "uv/uv.toml"}
    if env.get("UV_CONFIG_FILE"):
        found[Path(env["UV_CONFIG_FILE"])] = Path(env["UV_CONFIG_FILE"])
    return {there: here for there, here in found.items() if here.is_file()}


def config_values(path: Path) -> list[tuple[str, str]]:
    """(key, word) of a pip or uv configuration file; a value of several words gives several."""
    if path.suffix == ".toml":
        return list(_toml_values(tomllib.loads(path.read_text())))
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(path.read_text(), str(path))
    return [(k, w) for section in parser.sections() for k, v in parser.items(section) for w in v.split()]


def _toml_values(table: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in table.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from _toml_values(item)
            elif isinstance(item, str):
                yield key, item


def package_folder(word: str) -> Path | None:
    """Folder to show to hosts for a local find-links or index URL; None for what is not local.

    The pages of an index in `simple` link to files beside it, so its parent is meant.
    """
    url = urlsplit(word)
    if url.scheme not in ("", "file") or not url.path.startswith("/"):
        return None
    path = Path(unquote(url.path))
    if path.name == "simple" and len(path.parts) > 2:
        path = path.parent
    return path if path.is_dir() and len(path.parts) > 1 else None


def url_port(word: str) -> int | None:
    """Port of an http(s) URL or of a proxy written as host:port."""
    url = urlsplit(word if "://" in word else f"http://{word}")
    try:
        return url.port if url.scheme in ("http", "https") and url.hostname else None
    except ValueError:  # a word such as a path with a colon
        return None


def apt_options(dump: str) -> list[str]:
    """Settings of `apt-config dump` that decide whether archives can be reached and are believed."""
    return _APT.findall(dump)


def look(env: Mapping[str, str], home: Path, apt_dump: str) -> Machine:
    """Read the machine's setup. Files that hosts can't have (no such file) are left out; nothing is written."""
    environment = pick_environment(env, _text(Path("/etc/environment")))
    files = {**pip_files(environment, home), **uv_files(environment, home)}
    words = [(k.lower(), w) for k, v in environment.items() for w in v.split()]
    values = [(k, w) for path in files.values() for k, w in config_values(path)]
    packages = [w for k, w in values if k in _PACKAGE_KEYS]
    packages += [w for k, w in words if re.search("index|find_links", k)]
    proxies = [w for k, w in words if k.endswith("_proxy") and k != "no_proxy"] + [w for k, w in values if k == "proxy"]
    # Files that the configuration names: certificate bundles, constraints.
    for word in [w for _, w in words] + [w for k, w in values if k in _FILE_KEYS]:
        if word.startswith("/") and Path(word).is_file():
            files.setdefault(Path(word), Path(word))
    folders = {f for f in map(package_folder, packages) if f}
    certs = Path(environment.get("SSL_CERT_DIR", BUNDLE.parent))
    if certs.is_dir() and certs != BUNDLE.parent:
        folders.add(certs)
    for cert in LOCAL_CERTS.rglob("*.crt"):
        files.setdefault(cert, cert)
    if BUNDLE.is_file():
        files.setdefault(BUNDLE, BUNDLE)
    warnings = [
        f"{w}: a host can't reach the machine's loopback; give an address that the machine's bridge can reach"
        for w in [*packages, *proxies]
        if re.search(r"//(?:[^/@]*@)?(?:localhost|127\.)", w)
    ]
    servers = nameservers(_text(Path("/etc/resolv.conf")), _text(Path("/run/systemd/resolve/resolv.conf")))
    if not servers:
        warnings.append("no name server with an IPv4 address in /etc/resolv.conf: hosts can't look names up")
    return Machine(
        environment=environment,
        nameservers=servers,
        files=files,
        binds=tuple(sorted(folders)),
        ports=tuple(sorted({p for p in map(url_port, [*packages, *proxies, *_apt_proxies(apt_dump)]) if p})),
        apt_options=tuple(apt_options(apt_dump)),
        warnings=tuple(warnings),
    )


def _apt_proxies(dump: str) -> list[str]:
    return re.findall(r'^Acquire::https?(?:::[\w.-]+)?::Proxy(?:::[\w.-]+)? "([^"]+)";$', dump, re.MULTILINE)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
