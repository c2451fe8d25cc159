# SPDX-License-Identifier: Apache-2.0
"""Hosts of the inventory, and Python run on them over SSH without a play.

A host is reached as Ansible would reach it: address, user, port, key, become, and the `-o` options of ansible.cfg and the
inventory, the site's own ssh configuration included. Host keys are checked; the connection itself is Fabric's.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import getpass
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet import causes, faults, ssh, yamlform
from fleet.importer import ROOT
from fleet.target import Misuse, Target, Unreachable, given, short_path, site_command

__all__ = ["Misuse", "Target", "Unreachable", "given", "short_path", "site_command"]

GROUPS = ("gpu_hosts", "lab")  # the hosts of every play
START = "#SMOKE\n"  # what comes before it on stdin, a password that sudo did not ask for, is no program


def choosing_hosts(parser: argparse.ArgumentParser) -> None:
    """The options by which every door names its hosts: `limit` and `inventory`, as `targets` takes them."""
    parser.add_argument(
        "-l", "--limit", metavar="HOST,..", help="only these hosts or groups, as in ansible-playbook -l"
    )
    parser.add_argument(
        "-i", "--inventory", action="append", default=[], metavar="FILE", help="default: that of ansible.cfg"
    )


def asking_password(parser: argparse.ArgumentParser) -> None:
    """The option of doors that need nobody's password on the way, as `with_password` takes it."""
    parser.add_argument(
        "-K", "--ask-become-pass", action="store_true", help="ask for the password of sudo, as ansible-playbook -K does"
    )


def with_password(hosts: Sequence[Target], ask: bool) -> list[Target]:
    """The hosts, with a password of sudo that is asked for once where `ask` and the inventory has none."""
    if not ask:
        return list(hosts)
    try:
        password = getpass.getpass("BECOME password: ")
    except EOFError as error:
        raise Misuse("-K asks for a password, and there is nobody to answer", "call it on a terminal") from error
    return [
        host if host.become is None or host.become_password else dataclasses.replace(host, become_password=password)
        for host in hosts
    ]


def seconds(text: str) -> float:
    """A time limit of an option: more than 0. Raises argparse's error."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, such as 60")
    return value


# --- inventory ---------------------------------------------------------------------------------------------------


def targets(inventory: Sequence[str], limit: str | None, *prefixes: str) -> list[Target]:
    """The hosts of an inventory that a limit names, all without one, with their variables that begin with one of `prefixes`.

    As in the plays, only hosts of GROUPS count. Raises Misuse for an inventory that cannot be read, an unknown host, or none at
    all, with the file and line where Ansible or YAML know one.
    """
    from ansible import constants as c
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.vars.manager import VariableManager

    sources = list(inventory) or list(c.DEFAULT_HOST_LIST)
    if missing := [s for s in inventory if "," not in s and not Path(s).exists()]:
        raise Misuse(f"no inventory {missing[0]}", "name a file or folder that is there with -i")
    sources = [source if "," in source else str(Path(source).absolute()) for source in sources]  # as Ansible does
    loader = DataLoader()
    loader.set_basedir(str(ROOT))  # variables beside site.yml count for its plays
    with faults.collected() as told:
        loader.set_vault_secrets(_vault_secrets())
        try:
            manager = InventoryManager(loader=loader, sources=sources)
            hosts = _chosen(manager, sources, limit, told.warnings)
            variables = VariableManager(loader=loader, inventory=manager)
            named = [(host.name, variables.get_vars(host=host)) for host in hosts]
        except AnsibleError as error:
            known = yamlform.in_files(sources) or faults.unreadable(sources, loader)
            told_by, fix = known or ("; ".join([faults.text(error), *told.reasons()]), faults.hint(error))
            again = " ".join(["ansible-inventory", *given(inventory), "--list"])
            raise Misuse(
                f"the inventory cannot be used: {told_by}", fix or f"correct it until `{again}` shows the hosts"
            ) from error
    return [_templated(name, values, loader, prefixes) for name, values in named]


def _chosen(manager: Any, sources: Sequence[str], limit: str | None, warnings: Sequence[str]) -> list[Any]:
    """Hosts that a limit names and the plays are for. Raises Misuse where none is left."""
    from ansible.inventory.manager import split_host_pattern

    everyone = sorted(host.name for host in manager.get_hosts())
    where = ", ".join(source if "," in source else short_path(source) for source in sources)
    if not everyone:
        fix = "write hosts under a group of the plays, as in `gpu_hosts: {hosts: {NAME: {ansible_host: ADDRESS}}}`"
        raise Misuse("; ".join([f"no host in {where}", *warnings]), fix)
    for pattern in split_host_pattern(limit) if limit else []:
        if not pattern.startswith(("!", "&")) and not manager.list_hosts(pattern):
            likely = sorted(difflib.get_close_matches(pattern, everyone, 3)) or everyone
            known = ", ".join(likely[:30]) + (f" and {len(likely) - 30} more" if len(likely) > 30 else "")
            raise Misuse(
                f"no host matches {pattern!r} in {where}; it has {known}", f"name one of them, as in -l {likely[0]}"
            )
    chosen = manager.get_hosts(limit or "all")
    played = {host.name for group in GROUPS if group in manager.groups for host in manager.groups[group].get_hosts()}
    found = [host for host in chosen if host.name in played]
    if not chosen:
        fix = f"name one of them, as in -l {everyone[0]}"
        raise Misuse(f"-l {limit} leaves no host of {where}; it has {', '.join(everyone[:30])}", fix)
    if not found:
        names = [host.name for host in chosen]
        line = faults.line_of(names[0], sources) or where
        raise Misuse(
            f"no play is for {', '.join(names[:10])} ({line}): in none of the groups {' and '.join(GROUPS)}",
            f"write it under gpu_hosts, as in `gpu_hosts: {{hosts: {{{names[0]}: }}}}`",
        )
    return found


def _templated(name: str, given: Mapping[str, Any], loader: Any, prefixes: Sequence[str]) -> Target:
    """A host with its variables, each templated for itself, so that a fault names the variable."""
    from ansible import constants as c
    from ansible.errors import AnsibleError
    from ansible.template import Templar

    templar = Templar(loader=loader, variables=given)
    wanted = {}
    for key, value in given.items():
        if key.startswith(("ansible_", *prefixes)) or key == "inventory_dir":
            try:
                wanted[key] = templar.template(value)
            except AnsibleError as error:
                raise _unusable(name, key, value, error) from error
    return dataclasses.replace(target(name, wanted, c), written=given)


def _unusable(name: str, key: str, value: Any, error: Exception) -> Misuse:
    """A variable that cannot be templated, with its place: an encrypted value has one of its own."""
    said, where = faults.text(error), faults.place(value)
    place = f" ({where})" if where and not re.search(r":\d+(:\d+)?\)$", said) else ""
    return Misuse(
        f"{name}: variable {key} cannot be used: {said}{place}",
        faults.hint(error) or f"correct it, or define the name that it uses; `grep -rn {key} .` finds where it stands",
    )


@functools.cache
def _vault_secrets() -> Any:
    """Secrets of the vaults that ansible.cfg names; Ansible lets a process read them once."""
    from ansible import constants as c
    from ansible.cli import CLI
    from ansible.errors import AnsibleError
    from ansible.parsing.dataloader import DataLoader

    try:
        return CLI.setup_vault_secrets(DataLoader(), list(c.DEFAULT_VAULT_IDENTITY_LIST), auto_prompt=False)
    except AnsibleError as error:
        raise Misuse(
            f"the password of the vault cannot be read: {faults.text(error)}",
            "name a file that is there, as in `export ANSIBLE_VAULT_PASSWORD_FILE=FILE`; `ansible-config dump --only-changed` "
            "shows where it is named",
        ) from error


def target(name: str, given: Mapping[str, Any], defaults: Any) -> Target:
    """How Ansible's variables and configuration (`defaults`, ansible.constants) say that a host is reached."""

    def first(*names: str) -> Any:
        return next((given[n] for n in names if given.get(n) not in (None, "")), None)

    folder = given.get("inventory_dir")
    where = short_path(Path(str(folder)) / "host_vars" / f"{name}.yml") if folder else "its host_vars"
    port = first("ansible_port", "ansible_ssh_port") or defaults.DEFAULT_REMOTE_PORT
    if port is not None and not (str(port).isdigit() and 0 < int(port) < 65536):
        place = faults.place(port) or where
        raise Misuse(
            f"{name}: ansible_port is {port!r}, expected a number from 1 to 65535 ({place})",
            f"write the port of sshd, as in ansible_port: 22, into {place.partition(':')[0]}",
        )
    key = first("ansible_ssh_private_key_file", "ansible_private_key_file") or defaults.DEFAULT_PRIVATE_KEY_FILE
    user = first("ansible_user", "ansible_ssh_user") or defaults.DEFAULT_REMOTE_USER
    become = first("ansible_become")
    if become is None:
        become = True  # as every play says
    method = first("ansible_become_method") or defaults.DEFAULT_BECOME_METHOD
    if _true(become) and str(method) != "sudo":
        raise Misuse(
            f"{name}: become method {method} is not supported here, only sudo",
            f"set ansible_become_method: sudo in {where}, or use the plays: `ansible-playbook playbooks/preflight.yml -l {name}` "
            "and playbooks/smoke.yml",
        )
    becoming = str(first("ansible_become_user") or defaults.DEFAULT_BECOME_USER) if _true(become) else None
    local = str(first("ansible_connection") or "") in ("local", "ansible.builtin.local")
    if becoming == (getpass.getuser() if local else user):
        becoming = None  # Ansible does not call sudo for it either
    words = _ssh_words(given, defaults)
    python = first("ansible_python_interpreter") or defaults.config.get_config_value("INTERPRETER_PYTHON")
    address = str(first("ansible_host", "ansible_ssh_host") or name)
    return Target(
        name=name,
        address=address,
        local=local,
        user=None if user is None else str(user),
        port=None if port is None else int(port),
        keys=() if key is None else (str(Path(str(key)).expanduser()),),
        password=_text(first("ansible_password", "ansible_ssh_password", "ansible_ssh_pass")),
        ssh_config=ssh.config(address, words),
        ssh_words=ssh.shown(words),
        timeout=int(defaults.DEFAULT_TIMEOUT),
        become=becoming,
        become_password=_text(first("ansible_become_password", "ansible_become_pass")),
        python=str(python) if str(python).startswith("/") else "/usr/bin/python3",
        where=where,
        variables=dict(given),
    )


def _ssh_words(given: Mapping[str, Any], defaults: Any) -> list[str]:
    """Options for ssh out of a host's variables, the environment and ansible.cfg, as Ansible's own connection takes them."""
    from ansible.plugins.loader import connection_loader

    connection_loader.get("ssh", class_only=True)  # makes its options known
    names = ("ssh_args", "ssh_common_args", "ssh_extra_args")
    settings = {"plugin_type": "connection", "plugin_name": "ssh", "variables": dict(given)}
    return shlex.split(" ".join(str(defaults.config.get_config_value(name, **settings) or "") for name in names))


# Variables that say how ssh itself reaches a host, and are no part of its name.
WAY = (
    "ansible_ssh_args",
    "ansible_ssh_common_args",
    "ansible_ssh_extra_args",
    "ansible_port",
    "ansible_ssh_port",
    "ansible_ssh_private_key_file",
    "ansible_private_key_file",
)


def client_options(given: Mapping[str, Any]) -> str:
    """What a person writes after `ssh` or `scp` to reach a host as Ansible does, from its variables; often nothing."""
    from ansible import constants as c

    port = given.get("ansible_port") or given.get("ansible_ssh_port") or c.DEFAULT_REMOTE_PORT
    key = (
        given.get("ansible_ssh_private_key_file") or given.get("ansible_private_key_file") or c.DEFAULT_PRIVATE_KEY_FILE
    )
    words = [*ssh.shown(_ssh_words({name: given[name] for name in WAY if name in given}, c))]
    words += ["-o", f"Port={port}"] if port and str(port) != "22" else []
    words += ["-i", str(Path(str(key)).expanduser())] if key else []
    return shlex.join(words)


def _true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "on", "1")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


# --- program ----------------------------------------------------------------------------------------------------


def run_python(target: Target, program: str, limit: float, least: tuple[int, int] = (3, 11)) -> str:
    """Run a program on a host, fed by stdin so that nothing is installed there; what it printed.

    least: the oldest Python that the program runs on. Raises Unreachable when the host cannot be reached, the program fails, or
    `limit` seconds pass.
    """
    loader = (
        f"import sys; sys.version_info >= {least} or sys.exit({causes.OLD_PYTHON!r} + sys.version.split()[0]); "
        f"exec(sys.stdin.buffer.read().split({START.encode()!r}, 1)[1])"
    )
    words = [target.python, "-I", "-c", loader]
    stdin = START + program
    if target.become is not None:
        flags = ["-n"] if target.become_password is None else ["-S", "-p", ""]
        words = ["env", "LC_ALL=C", "sudo", *flags, "-H", "-u", target.become, "--", *words]
        stdin = stdin if target.become_password is None else f"{target.become_password}\n{stdin}"
    if target.local:
        code, out, err = _local(target, words, stdin, limit)
    else:
        code, out, err = ssh.run(target, shlex.join(words), stdin, limit)
    if code:
        raise causes.ended(target, code, out, err, least)
    return out


def _local(target: Target, words: Sequence[str], stdin: str, limit: float) -> tuple[int, str, str]:
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=limit, check=False)
    except FileNotFoundError as error:
        return 127, "", f"{words[0]}: No such file or directory ({error.strerror})"
    except subprocess.TimeoutExpired:
        raise causes.slow(target, limit) from None
    except OSError as error:
        raise Unreachable(str(error)) from error
    return done.returncode, done.stdout, done.stderr


def module_program(sources: Mapping[str, str], entry: str, payload: Mapping[str, Any]) -> str:
    """A program that carries role code under its Ansible names and calls `entry`.main(payload)."""
    return "\n".join(
        [
            "import json, sys, types",
            f"sources = json.loads({json.dumps(dict(sources))!r})",
            f"payload = json.loads({json.dumps(payload)!r})",
            "for name in ('ansible', 'ansible.module_utils'):",
            "    sys.modules[name] = types.ModuleType(name)",
            "for name, text in sources.items():",
            "    full = 'ansible.module_utils.' + name",
            "    module = sys.modules[full] = types.ModuleType(full)",
            "    setattr(sys.modules['ansible.module_utils'], name, module)",
            "    exec(compile(text, name + '.py', 'exec'), module.__dict__)",
            f"sys.modules['ansible.module_utils.{entry}'].main(payload)",
            "",
        ]
    )
