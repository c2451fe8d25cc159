# SPDX-License-Identifier: Apache-2.0
"""Cases of the rules about what a run itself needs: as in judge_cases.py."""

from __future__ import annotations

from typing import Any

from tests.unit.judge_kit import PYTHON, Change, both, good, host, inventory

LOGIN = {"euid": 1000, "user": "admin", "python": "3.12.3", "interpreter": "/usr/bin/python3"}
KEY: dict[str, Any] = {"of": "instance gpu0", "path": "keys/one", "quoted": "keys/one"}
KEY |= {"fault": None, "fix": None, "open": None}
STRAY = {
    "path": "host_vars/ct-200.yml",
    "why": "no host ct-200 is in this inventory",
    "fix": "`mv host_vars/ct-200.yml host_vars/ct200.yml`",
}
MAKE = "`openssl rand -hex 32 >keys/one`"


def platform(**keys: Any) -> Change:
    """Set facts of the platform."""
    return host(platform={**good()[1]["platform"], **LOGIN, "euid": 0, "user": "root", **keys})


CONTROL: list[tuple[str, Change, list[str]]] = [
    (
        "not-root",
        platform(euid=1000, user="admin"),
        ["admin (uid 1000)", "ansible_become: true in host_vars/ct200.yml"],
    ),
    ("not-root", platform(euid=1000, user=None), ["somebody (uid 1000)"]),
    (
        "interpreter-old",
        platform(python="3.10.12"),
        ["/usr/bin/python3 of Ansible", "3.10.12", "ansible_python_interpreter: /usr/bin/python3.12 into host_vars"],
    ),
    (
        "interpreter-old",
        both(platform(python="3.9.2"), host(pythons=[PYTHON | {"version": "3.10", "venv": True}, PYTHON])),
        ["3.9.2", "/usr/bin/python3.12"],
    ),
    (
        "api-key-file",
        inventory(key_files=[{**KEY, "fault": "no such file", "fix": MAKE}]),
        [
            "api_key_file of instance gpu0",
            "keys/one on this control machine: no such file",
            MAKE,
            "host_vars/ct200.yml",
        ],
    ),
    (
        "api-key-file",
        inventory(key_files=[{**KEY, "fault": "2 lines", "fix": "`(set -C)` makes one", "instead": "keys/gpu0"}]),
        ["`(set -C)` makes one; then write api_key_file: keys/gpu0 in host_vars/ct200.yml"],
    ),
    (
        "file-unread",
        inventory(unread_files=[STRAY]),
        ["host_vars/ct-200.yml", "not read: no host ct-200 is in this inventory", STRAY["fix"]],
    ),
    (
        "instances-malformed",
        inventory(instances=None, unread_files=[STRAY]),
        ["no instance; host_vars/ct-200.yml is there and is not read: no host ct-200", STRAY["fix"]],
    ),
    (
        "key-twice",
        inventory(twice=[{"name": "topk", "at": "host_vars/ct200.yml:7", "before": "host_vars/ct200.yml:3"}]),
        [
            "topk is written a second time, before at host_vars/ct200.yml:3",
            "Remove one of the two `topk:` in host_vars/ct200.yml.",
        ],
    ),
    (
        "api-key-open",
        inventory(key_files=[{**KEY, "open": "0644"}]),
        ["keys/one has mode 0644", "`chmod 600 keys/one`"],
    ),
]
QUIET_CONTROL: dict[str, Change] = {
    "root by become, with a Python that fits": platform(),
    "facts from before these were gathered": platform(euid=None, python=None),
    "a key file as it should be": inventory(key_files=[KEY]),
}
