# SPDX-License-Identifier: Apache-2.0
"""Hosts of the inventory, and Python run on them over SSH without a play.

A host is reached as Ansible would reach it: address, user, port, key, become, and the `-o` options of ansible.cfg and the
inventory, the site's own ssh configuration included. Host keys are checked; the connection itself is Fabric's.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = "#SMOKE\n"  # what comes before it on stdin, a password that sudo did not ask for, is no program


class Misuse(Exception):
    """The call cannot be meant like this; exit code 2."""


class Unreachable(Exception):
    """No answer from a host; the text says why and what to do."""


@dataclass(frozen=True)
class Target:
    """How one host is reached, and its inventory variables, templated."""

    name: str
    address: str
    local: bool = False
    user: str | None = None
    port: int | None = None
    keys: tuple[str, ...] = ()
    password: str | None = field(default=None, repr=False)
    ssh_config: str = ""
    timeout: int = 20
    become: str | None = None
    become_password: str | None = field(default=None, repr=False)
    python: str = "/usr/bin/python3"
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False)


def choosing_hosts(parser: argparse.ArgumentParser) -> None:
    """The options by which every door names its hosts: `limit` and `inventory`, as `targets` takes them."""
    parser.add_argument(
        "-l", "--limit", metavar="HOST,..", help="only these hosts or groups, as in ansible-playbook -l"
    )
    parser.add_argument(
        "-i", "--inventory", action="append", default=[], metavar="FILE", help="default: that of ansible.cfg"
    )


# --- inventory ---------------------------------------------------------------------------------------------------


def targets(inventory: Sequence[str], limit: str | None, *prefixes: str) -> list[Target]:
    """The hosts of an inventory that a limit names, all without one, with their variables that begin with one of `prefixes`.

    Raises Misuse for an inventory that cannot be read, an unknown host, or none at all.
    """
    from ansible import constants as c
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import InventoryManager, split_host_pattern
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar
    from ansible.vars.manager import VariableManager

    sources = list(inventory) or list(c.DEFAULT_HOST_LIST)
    if missing := [s for s in inventory if "," not in s and not Path(s).exists()]:
        raise Misuse(f"no inventory {missing[0]}; name a file or folder with -i")
    try:
        loader = DataLoader()
        loader.set_vault_secrets(_vault_secrets())
        manager = InventoryManager(loader=loader, sources=sources)
        for pattern in split_host_pattern(limit) if limit else []:
            if not pattern.startswith(("!", "&")) and not manager.list_hosts(pattern):
                known = ", ".join(sorted(h.name for h in manager.get_hosts())) or "none"
                raise Misuse(f"no host matches {pattern!r} in {', '.join(sources)}; it has {known}")
        hosts = manager.get_hosts(limit or "all")
        variables = VariableManager(loader=loader, inventory=manager)
        found = []
        for host in hosts:
            given = variables.get_vars(host=host)
            wanted = {k: v for k, v in given.items() if k.startswith(("ansible_", *prefixes))}
            found.append(target(host.name, Templar(loader=loader, variables=given).template(wanted), c))
    except AnsibleError as error:
        raise Misuse(f"the inventory cannot be used: {error}") from error
    if not found:
        raise Misuse(f"no host in {', '.join(sources)}")
    return found


@functools.cache
def _vault_secrets() -> Any:
    """Secrets of the vaults that ansible.cfg names; Ansible lets a process read them once."""
    from ansible import constants as c
    from ansible.cli import CLI
    from ansible.parsing.dataloader import DataLoader

    return CLI.setup_vault_secrets(DataLoader(), list(c.DEFAULT_VAULT_IDENTITY_LIST), auto_prompt=False)


def target(name: str, given: Mapping[str, Any], defaults: Any) -> Target:
    """How Ansible's variables and configuration (`defaults`, ansible.constants) say that a host is reached."""

    def first(*names: str) -> Any:
        return next((given[n] for n in names if given.get(n) not in (None, "")), None)

    port = first("ansible_port", "ansible_ssh_port") or defaults.DEFAULT_REMOTE_PORT
    key = first("ansible_ssh_private_key_file", "ansible_private_key_file") or defaults.DEFAULT_PRIVATE_KEY_FILE
    user = first("ansible_user", "ansible_ssh_user") or defaults.DEFAULT_REMOTE_USER
    become = first("ansible_become")
    if become is None:
        become = defaults.DEFAULT_BECOME
    method = first("ansible_become_method") or defaults.DEFAULT_BECOME_METHOD
    if _true(become) and str(method) != "sudo":
        raise Misuse(
            f"{name}: become method {method} is not supported here, only sudo; use the play: site.yml --tags smoke"
        )
    words = [
        str(w) for n in ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args") if (w := first(n))
    ]
    python = first("ansible_python_interpreter") or defaults.config.get_config_value("INTERPRETER_PYTHON")
    address = str(first("ansible_host", "ansible_ssh_host") or name)
    return Target(
        name=name,
        address=address,
        local=str(first("ansible_connection") or "") in ("local", "ansible.builtin.local"),
        user=None if user is None else str(user),
        port=None if port is None else int(port),
        keys=() if key is None else (str(Path(str(key)).expanduser()),),
        password=_text(first("ansible_password", "ansible_ssh_password", "ansible_ssh_pass")),
        ssh_config=ssh_config(address, shlex.split(" ".join(words))),
        timeout=int(defaults.DEFAULT_TIMEOUT),
        become=str(first("ansible_become_user") or defaults.DEFAULT_BECOME_USER) if _true(become) else None,
        become_password=_text(first("ansible_become_password", "ansible_become_pass")),
        python=str(python) if str(python).startswith("/") else "/usr/bin/python3",
        variables=dict(given),
    )


def _true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "on", "1")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def ssh_config(host: str, words: Sequence[str]) -> str:
    """Words of an ssh command line as the text of an ssh configuration; the caller's own file follows unless -F is given.

    As with ssh itself, they hold for the host and not for a jump host on the way.
    """
    lines, files = [], [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")]
    short = {"-i": "IdentityFile", "-p": "Port", "-l": "User", "-J": "ProxyJump"}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, value = word[:2], word[2:]
        if flag in ("-o", "-F", *short) and not value:
            if not rest:
                raise Misuse(f"ssh option {flag} of the inventory has no value")
            value = rest.pop(0)
        if flag == "-o":
            name, _, setting = value.replace(" ", "=", 1).partition("=") if "=" not in value else value.partition("=")
            lines.append(f"  {name.strip()} {setting.strip()}")
        elif flag == "-F":
            files = [] if value in ("none", "/dev/null") else [Path(value).expanduser()]
        elif flag in short:
            lines.append(f"  {short[flag]} {value}")
        # other flags (-C, -q, -4 ..) change neither whom we talk to nor whom we trust
    own = "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
    return "\n".join([f"Host {host}", *lines, "Host *", own, ""])


# --- connection --------------------------------------------------------------------------------------------------


def run_python(target: Target, program: str, limit: float) -> str:
    """Run a program on a host, fed by stdin so that nothing is installed there; what it printed.

    Raises Unreachable when the host cannot be reached, the program fails, or `limit` seconds pass.
    """
    loader = f"import sys; exec(sys.stdin.buffer.read().split({START.encode()!r}, 1)[1])"
    words = [target.python, "-I", "-c", loader]
    stdin = START + program
    if target.become is not None:
        flags = ["-n"] if target.become_password is None else ["-S", "-p", ""]
        words = ["sudo", *flags, "-H", "-u", target.become, "--", *words]
        stdin = stdin if target.become_password is None else f"{target.become_password}\n{stdin}"
    if target.local:
        code, out, err = _local(words, stdin, limit)
    else:
        code, out, err = _ssh(target, shlex.join(words), stdin, limit)
    if code:
        last = err.strip().splitlines()[-1:] or [f"the program ended with {code}"]
        raise Unreachable(last[0])
    return out


def _local(words: Sequence[str], stdin: str, limit: float) -> tuple[int, str, str]:
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=limit, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(str(error)) from error
    return done.returncode, done.stdout, done.stderr


def _ssh(target: Target, command: str, stdin: str, limit: float) -> tuple[int, str, str]:
    from paramiko import SSHException
    from paramiko.ssh_exception import AuthenticationException, BadHostKeyException, NoValidConnectionsError

    with connection(target) as link:
        try:
            link.open()
            to, out, err = link.client.exec_command(command, timeout=limit)
            to.write(stdin)
            to.flush()
            to.channel.shutdown_write()
            text, errors = out.read().decode(errors="replace"), err.read().decode(errors="replace")
            return out.channel.recv_exit_status(), text, errors
        except BadHostKeyException as error:
            raise Unreachable(
                f"its host key is not the known one ({error}); compare it on the host's console"
            ) from error
        except AuthenticationException as error:
            raise Unreachable(f"user {link.user} is refused ({error}); check ansible_user and its key") from error
        except NoValidConnectionsError as error:
            raise Unreachable(f"{error}; is the host up, is sshd running?") from error
        except TimeoutError as error:
            raise Unreachable(
                f"no answer from {target.address}: {error or f'timed out after {limit:.0f} s'}"
            ) from error
        except (SSHException, OSError, EOFError) as error:
            raise Unreachable(f"{error or type(error).__name__}") from error


def connection(target: Target) -> Any:
    """A Fabric connection that trusts known host keys only, its jump hosts included."""
    import fabric
    from paramiko import SSHConfig

    options = SSHConfig.from_text(target.ssh_config)
    config = fabric.Config(ssh_config=options)
    connect: dict[str, Any] = {}
    if options.lookup(target.address).get("identitiesonly") == "yes":
        connect |= {"allow_agent": False, "look_for_keys": False}
    if target.keys:
        connect["key_filename"] = list(target.keys)
    if target.password is not None:
        connect["password"] = target.password
    link = fabric.Connection(
        target.address,
        user=target.user,
        port=target.port,
        config=config,
        connect_timeout=target.timeout,
        connect_kwargs=connect,
    )
    hop = link
    while isinstance(hop, fabric.Connection):
        _trust(hop)
        hop = hop.gateway
    return link


def _trust(link: Any) -> None:
    """Fabric takes any host key as it comes; here unknown ones are refused unless the site's ssh options say otherwise."""
    import paramiko

    options = link.ssh_config
    strict = str(options.get("stricthostkeychecking", "ask")).lower()
    policy = {"no": paramiko.WarningPolicy, "off": paramiko.WarningPolicy, "accept-new": paramiko.AutoAddPolicy}
    link.client.set_missing_host_key_policy(policy.get(strict, paramiko.RejectPolicy)())
    files = []
    for option, usual in (
        ("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"),
        ("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"),
    ):
        files += shlex.split(str(options.get(option, usual)))
    for name in files:
        if (path := Path(name).expanduser()).is_file():
            link.client.load_system_host_keys(str(path))


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
