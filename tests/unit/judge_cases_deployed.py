# SPDX-License-Identifier: Apache-2.0
"""Cases of the rules about what an earlier run left on the host; judge_cases has the others and tells what a row is."""

from __future__ import annotations

from typing import Any

from tests.unit.judge_kit import Change, both, clock, first, host, kernel

ROOT_DISK = {"point": "/", "type": "ext4", "options": ["relatime", "rw"]}
READ_ONLY = {"point": "/etc", "type": "ext4", "options": ["ro"]}
OPT = "/opt/sglang-fleet"
CACHE = [{"path": f"{OPT}/releases/abc/cache", "uid": 998, "owner": "sglang"}]
TRITON = {"path": f"{OPT}/releases/abc/cache/triton", "uid": 0, "owner": "root"}
USER = {"name": "sglang", "uid": 998, "gid": 998, "groups": [998]}


def left(**keys: Any) -> Change:
    """What an earlier run left; nothing that is not named."""
    return host(deployed={"broken": [], "gone": None, "cache": [], "masked": {}, "failed": [], **keys})


def mounts(**places: dict[str, Any]) -> Change:
    """How the folder of releases is mounted, and other places, `_` for their slashes."""
    return host(mounts={OPT: ROOT_DISK, **{name.replace("_", "/"): mount for name, mount in places.items()}})


STATE = {"point": "/var/lib", "type": "xfs", "options": ["ro"]}
DEPLOYED: list[tuple[str, Change, list[str]]] = [
    (
        "state-read-only",
        mounts(_etc=READ_ONLY, _etc_systemd_system=READ_ONLY),
        ["/etc read-only, mounted at /etc", "`mount -o remount,rw /etc`"],
    ),
    (
        "state-read-only",
        host(mounts={OPT: ROOT_DISK, "/etc": ROOT_DISK, "/var/lib/sglang-fleet": STATE}),
        ["/var/lib/sglang-fleet read-only", "`mount -o remount,rw /var/lib`"],
    ),
    (
        "record-broken",
        left(broken=[{"path": "/var/lib/sglang-fleet/deployments/current.json", "error": "cut"}]),
        ["damaged: cut", "`rm /var/lib/sglang-fleet/deployments/current.json`; site.yml then writes it anew"],
    ),
    (
        "record-broken",
        left(broken=[{"path": "/var/lib/sglang-fleet/deployments/previous.json", "error": "cut"}]),
        ["`rm /var/lib/sglang-fleet/deployments/previous.json`; no rollback leads to what it held"],
    ),
    (
        "unit-masked",
        left(masked={"sglang@gpu1.service": "masked", "sglang@old.service": "masked"}),
        ["instance gpu1 sglang@gpu1.service is masked", "`systemctl unmask sglang@gpu1.service`"],
    ),
    (
        "unit-masked",
        left(masked={"sglang@gpu1.baseline.service": "masked-runtime"}),
        ["`systemctl unmask --runtime sglang@gpu1.baseline.service`"],
    ),
    ("release-gone", left(gone="abc"), ["/opt/sglang-fleet/current leads to releases/abc", "site.yml -l ct200"]),
    (
        "cache-owner",
        both(left(cache=[{**CACHE[0], "uid": 0, "owner": "root"}, TRITON]), host(user=USER)),
        ["abc/cache and 1 more there of user root", "`chown -R sglang: /opt/sglang-fleet/releases/abc/cache`"],
    ),
    (
        "cache-owner",
        both(left(cache=[*CACHE, TRITON]), host(user=USER)),
        ["abc/cache/triton of user root", "`chown -R sglang: /opt/sglang-fleet/releases/abc/cache`"],
    ),
    (
        "disk-none",
        host(current="abc", disk={"path": OPT, "free": 63 << 20, "total": 1 << 40}),
        ["63 MiB free", "64 MiB to start again", "`du -xh --max-depth=3"],
    ),
    (
        "clock-behind",
        both(clock(before_build=True, source=None), kernel(virt="container", virt_name="lxc")),
        [
            "On the machine that runs this container: first `date -s @SECONDS`, with what `date +%s` says on a machine whose"
        ],
    ),
    (
        "unit-failed",
        left(failed=["sglang@gpu2.service", "sglang@old.service"]),
        ["instance gpu2 sglang@gpu2.service failed", "`journalctl -u sglang@gpu2.service -n 100 --no-pager`"],
    ),
]

QUIET_DEPLOYED: dict[str, Change] = {
    "a host that serves": both(left(cache=CACHE), host(user=USER, current="abc")),
    "a cache before the engine's user is made": left(cache=[TRITON]),
    "a masked unit of an instance that is gone": left(masked={"sglang@old.service": "masked"}),
}

TEMPLATE = "/srv/templates/chat.jinja"
PEM = "/etc/ssl/private/engine.key"


def file(path: str, *barred: dict[str, str]) -> Change:
    """A file of the host as it was looked at, with what is closed on the way to it."""
    return host(files={path: {"exists": True, "barred": list(barred)}}, user=USER)


def closed(path: str, need: str) -> dict[str, str]:
    return {"path": path, "real": path, "need": need, "mode": "0600", "owner": "root"}


GIVEN: list[tuple[str, Change, list[str]]] = [
    (
        "arg-file",
        both(first(args={"chat-template": TEMPLATE}), host(files={TEMPLATE: {"exists": False, "barred": []}})),
        [
            "chat-template /srv/templates/chat.jinja: no such file",
            "scp FILE root@192.0.2.200:/srv/templates/chat.jinja`",
        ],
    ),
    (
        "arg-file",
        both(
            first(args={"chat_template": TEMPLATE}),
            file(TEMPLATE, closed("/srv/templates", "search"), closed(TEMPLATE, "read")),
        ),
        ["closed to user sglang", f"`chmod a+x /srv/templates && chmod a+r {TEMPLATE}`"],
    ),
    (
        "arg-file",
        both(first(args={"ssl-keyfile": PEM}), file(PEM, closed(PEM, "read"))),
        [f'`chgrp "$(id -gn sglang)" {PEM} && chmod g+r {PEM}`'],
    ),
    ("arg-file", first(args={"chat-template": "chat.jinja"}), ["a relative path", "host_vars/ct200.yml"]),
    (
        "arg-file",
        first(args={"chat-template": "/home/ann/chat.jinja"}),
        [
            "units do not see",
            "cp /home/ann/chat.jinja /srv/models/chat.jinja`; then set chat-template: /srv/models/chat.jinja",
        ],
    ),
]
QUIET_DEPLOYED |= {
    "a template by its name": first(args={"chat-template": "chatml"}),
    "a template that is there": both(first(args={"chat-template": TEMPLATE}), file(TEMPLATE)),
    "a template that was not looked at": first(args={"chat-template": TEMPLATE}),
}
DEPLOYED += GIVEN
