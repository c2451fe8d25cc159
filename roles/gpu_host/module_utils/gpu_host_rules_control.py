# SPDX-License-Identifier: Apache-2.0
"""Rules about what a run itself needs: root and a Python on the host, key files on the control machine."""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.gpu_host_rules import BLOCK, WARN, Case, Hit, Map, rule, version

OLDEST_PYTHON = "3.11"  # what the roles' code is written for


@rule(
    "not-root",
    BLOCK,
    "Releases, units, users and the journal are root's; without it a run ends half-way, and facts are missing here.",
    source="docs/operations.md",
)
def not_root(case: Case) -> Iterator[Hit]:
    """The facts were read by root, as everything else will be done."""
    platform = case.facts["platform"]
    if platform.get("euid"):
        who = f"{platform.get('user') or 'somebody'} (uid {platform['euid']})"
        fix = f"Set ansible_become: true in {case.where}, and no ansible_become_user other than root."
        yield Hit("the run", f"is {who} on the host", "root, by login or by become", fix)


@rule(
    "interpreter-old",
    BLOCK,
    "The interpreter that Ansible runs modules with is too old for those of the swap and the smoke.",
    source="roles/smoke/module_utils/smoke_run.py",
)
def interpreter_old(case: Case) -> Iterator[Hit]:
    """Ansible's interpreter on the host is new enough for every module, not only for this one."""
    platform = case.facts["platform"]
    if not platform.get("python") or version(platform["python"]) >= version(OLDEST_PYTHON):
        return
    fitting = [one["path"] for one in case.facts["pythons"] if version(one["version"]) >= version(OLDEST_PYTHON)]
    fix = f"Write ansible_python_interpreter: {fitting[0]} into {case.where}." if fitting else ""
    yield Hit(
        f"{platform.get('interpreter') or 'the interpreter'} of Ansible",
        f"Python {platform['python']}",
        f"Python {OLDEST_PYTHON} or newer",
        fix
        or f"Install the Python that python-missing names, then write its path into {case.where} as ansible_python_interpreter.",
    )


# --- key files ----------------------------------------------------------------------------------------------------


def _keys(case: Case) -> list[Map]:
    """Key files of the control machine, as `fleet.keyfiles.found` tells of them."""
    return list(case.wanted.get("key_files") or [])


@rule(
    "api-key-file",
    BLOCK,
    "The key is copied to the host in the swap, when engines are stopped already; without one the run ends there.",
    source="docs/operations.md",
    needs_host=False,
)
def api_key_file(case: Case) -> Iterator[Hit]:
    """Every api_key_file is there and holds one key."""
    for one in _keys(case):
        if one["fault"]:
            named = one.get("instead")
            then = f"then write api_key_file: {named}" if named else "another file: set api_key_file"
            yield Hit(
                f"api_key_file of {one['of']}",
                f"{one['path']} on this control machine: {one['fault']}",
                "a file with one key on one line",
                f"{one['fix']}; {then} in {case.where}.",
            )


@rule(
    "api-key-open",
    WARN,
    "Whoever has an account on the control machine can read the key.",
    source="docs/operations.md",
    needs_host=False,
)
def api_key_open(case: Case) -> Iterator[Hit]:
    """No api_key_file can be read by everybody."""
    for one in _keys(case):
        if one["open"]:
            fix = f"`chmod 600 {one['quoted']}` on this control machine."
            yield Hit(f"api_key_file of {one['of']}", f"{one['path']} has mode {one['open']}", "mode 0600", fix)
