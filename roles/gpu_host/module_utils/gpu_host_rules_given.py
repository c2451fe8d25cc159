# SPDX-License-Identifier: Apache-2.0
"""Rules about single files of the host that flags of an instance name: templates and certificates."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, Case, Hit, Map, args_of, label, rule
from ansible.module_utils.gpu_host_rules_files import HIDDEN

# Flags whose file an engine opens at its start: server_args.py and managers/template_manager.py of SGLang 0.5.11, 2026-11. A
# template may be a name that the engine knows instead, so only what is a path by its form is looked for.
FLAGS = ("chat-template", "completion-template", "ssl-ca-certs", "ssl-certfile", "ssl-keyfile")
KEY = "ssl-keyfile"
ENDINGS = (".jinja", ".json", ".pem", ".crt", ".key")


def file_paths(instances: list[Map]) -> list[str]:
    """Files of a host that the rule here has to know."""
    values = [args_of(one).get(name) for one in instances for name in FLAGS]
    return sorted({value for value in values if isinstance(value, str) and value.startswith("/")})


@rule(
    "arg-file",
    BLOCK,
    "The engine opens this file at its start and ends without it, after the engine before it was stopped.",
    source="https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/managers/template_manager.py",
)
def arg_file(case: Case) -> Iterator[Hit]:
    """Files that flags name are there, in sight of the unit, and the engine's user may read them."""
    for at, instance in enumerate(case.instances):
        for name in FLAGS:
            path = args_of(instance).get(name)
            told = _fault(case, name, path) if isinstance(path, str) else None
            if told:
                observed, fix = told
                yield Hit(
                    label(instance, at), f"{name} {path}: {observed}", "a file that the engine's user can read", fix
                )


def _fault(case: Case, name: str, path: str) -> tuple[str, str] | None:
    """(what is observed, fix) of a flag's file; None where nothing is wrong or it was not looked at."""
    if not path.startswith("/"):
        if not path.endswith(ENDINGS):
            return None
        return "a relative path, which no unit finds", f"Write the file's absolute path as {name} in {case.where}."
    to = f"/srv/models/{path.rpartition('/')[2]}"
    if path.startswith(HIDDEN):
        moved = f"`mkdir -p /srv/models && cp {shlex.quote(path)} {shlex.quote(to)}`"
        return "in a folder that units do not see", f"On the host: {moved}; then set {name}: {to} in {case.where}."
    file = (case.facts.get("files") or {}).get(path)
    if file is None:
        return None
    if not file["exists"]:
        return (
            "no such file",
            f"Copy it there: `{_copy(case, path)}`, with FILE where it lies; or correct {name} in {case.where}.",
        )
    user = case.facts.get("user") or {}
    if not file["barred"] or (
        name == KEY and user.get("uid") is None
    ):  # nobody can be given a key before the user is made
        return None
    closed = file["barred"][0]
    return (
        f"{closed['path']} (mode {closed['mode']}, owner {closed['owner']}) closed to user {user['name']}",
        f"On the host: `{' && '.join(_opening(one, name, user) for one in file['barred'])}`.",
    )


def _opening(closed: Map, name: str, user: Map) -> str:
    """The command that opens a folder on the way, or the file: a private key to the engine's group only."""
    real = shlex.quote(closed["real"])
    if closed["need"] != "read":
        return f"chmod a+x {real}"
    return f'chgrp "$(id -gn {user["name"]})" {real} && chmod g+r {real}' if name == KEY else f"chmod a+r {real}"


def _copy(case: Case, path: str) -> str:
    """The command that copies one file from here to the host."""
    reach, options = case.wanted.get("reach", case.host), case.wanted.get("ssh") or ""
    to, folder = shlex.quote(path), shlex.quote(path.rpartition("/")[0] or "/")
    if not reach:
        return f"mkdir -p {folder} && cp FILE {to}"
    ssh, scp = (f"{program} {options}".rstrip() for program in ("ssh", "scp"))
    return f"{ssh} {reach} mkdir -p {folder} && {scp} FILE {shlex.quote(f'{reach}:{path}')}"
