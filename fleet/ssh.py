# SPDX-License-Identifier: Apache-2.0
"""SSH as the site's own client would do it: its configuration, its known hosts, its keys. The connection itself is Fabric's."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fleet import causes
from fleet.target import Misuse, Target, Unreachable

# What keeps a connection of Ansible's open says nothing about whom we talk to.
NOT_SHOWN = ("control", "serveralive")
SHORT = {"-i": "IdentityFile", "-p": "Port", "-l": "User", "-J": "ProxyJump"}
PATIENCE = (
    0.75  # of the time for a connection, for the server's first words: so it ends as that, and not as no connection
)
# Its failures are raised as well; the text that it logs on the way is for developers.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of an ssh command line that say whom we talk to and whom we trust: `-o`, `-F` and those of SHORT.

    Raises Misuse for one without its value. Others (-C, -q, -4 ..) are left out.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, value = word[:2], word[2:]
        if flag not in ("-o", "-F", *SHORT):
            continue
        if not value:
            if not rest:
                raise Misuse(
                    f"ssh option {flag} of the inventory has no value",
                    f"complete it in ansible_ssh_common_args or ansible_ssh_extra_args: `grep -rn -e 'ssh.*{flag}' .` finds it",
                )
            value = rest.pop(0)
        yield flag, value


def _setting(flag: str, value: str) -> tuple[str, str]:
    """`-o Name=Value`, `-o "Name Value"` and short options as name and value."""
    if flag in SHORT:
        return SHORT[flag], value
    name, _, setting = value.partition("=") if "=" in value else value.partition(" ")
    return name.strip(), setting.strip()


def config(host: str, words: Sequence[str]) -> str:
    """Words of an ssh command line as the text of an ssh configuration; the caller's own file follows unless -F is given.

    As with ssh itself, they hold for the host and not for a jump host on the way.
    """
    lines, files = [], [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")]
    for flag, value in options(words):
        if flag == "-F":
            files = [] if value in ("none", "/dev/null") else [Path(value).expanduser()]
        else:
            lines.append("  {} {}".format(*_setting(flag, value)))
    own = "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
    return "\n".join([f"Host {host}", *lines, "Host *", own, ""])


def shown(words: Sequence[str]) -> tuple[str, ...]:
    """The same words for a command that a person copies, in the form that ssh and ssh-copy-id take."""
    found: list[str] = []
    for flag, value in options(words):
        if flag == "-F":
            found += ["-F", value]
        elif not (pair := _setting(flag, value))[0].lower().startswith(NOT_SHOWN):
            found += ["-o", "=".join(pair)]
    return tuple(found)


# --- connection --------------------------------------------------------------------------------------------------


def run(target: Target, command: str, stdin: str, limit: float) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command on a host. Raises Unreachable, with the cause and what to do about it."""
    from paramiko import SSHException

    with connection(target) as link:
        for hop in reversed(list(_hops(link))):
            try:
                hop.open()
            except (SSHException, OSError, EOFError, causes.UnknownKeyError) as error:
                raise causes.cause(target, hop, error) from error
        try:
            to, out, err = link.client.exec_command(command, timeout=limit)
            with contextlib.suppress(OSError):  # a login that is refused reads no stdin; why, it prints
                to.write(stdin)
                to.flush()
                to.channel.shutdown_write()
            text, errors = out.read().decode(errors="replace"), err.read().decode(errors="replace")
            return out.channel.recv_exit_status(), text, errors
        except TimeoutError as error:
            raise causes.slow(target, limit) from error
        except (SSHException, OSError, EOFError) as error:
            if "Timeout" in str(error):  # of a channel, which paramiko has no type for
                raise causes.slow(target, limit) from error
            raise Unreachable(f"the connection broke while the program ran: {error or type(error).__name__}") from error


def connection(target: Target) -> Any:
    """A Fabric connection that trusts known host keys only, its jump hosts included."""
    import fabric
    from paramiko import SSHConfig

    options = SSHConfig.from_text(target.ssh_config)
    config = fabric.Config(ssh_config=options)
    connect: dict[str, Any] = {"banner_timeout": target.timeout * PATIENCE}
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
    for hop in _hops(link):
        _trust(hop)
    return link


def _hops(link: Any) -> Iterator[Any]:
    """A connection and the jump hosts before it, the first one last."""
    while link is not None and not isinstance(link, str):  # a ProxyCommand is a text
        yield link
        link = link.gateway


def _policies() -> dict[str, Any]:
    """What becomes of a key that is not known, by StrictHostKeyChecking; everything else asks, and here nobody can answer."""
    import paramiko

    class Refuse(paramiko.RejectPolicy):
        """As its parent, with the key, so that a person can compare it."""

        def missing_host_key(self, client: Any, hostname: str, key: Any) -> NoReturn:  # noqa: ARG002 - paramiko's
            raise causes.UnknownKeyError(key)

    return {
        "no": paramiko.WarningPolicy,
        "off": paramiko.WarningPolicy,
        "accept-new": paramiko.AutoAddPolicy,
        "ask": Refuse,
    }


def _trust(link: Any) -> None:
    """Fabric takes any host key as it comes; here unknown ones are refused unless the site's ssh options say otherwise.

    Keys that ssh would leave aside are left aside: paramiko takes readable ones and stops at one that is not there.
    """
    options, policies = link.ssh_config, _policies()
    strict = str(options.get("stricthostkeychecking", "ask")).lower()
    link.client.set_missing_host_key_policy(policies.get(strict, policies["ask"])())
    files = []
    for option, usual in (
        ("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"),
        ("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"),
    ):
        files += shlex.split(str(options.get(option, usual)))
    for name in files:
        if (path := Path(name).expanduser()).is_file():
            link.client.load_system_host_keys(str(path))
    if keys := link.connect_kwargs.get("key_filename"):
        link.connect_kwargs["key_filename"] = [str(Path(k).expanduser()) for k in keys if not causes.unusable(k)]
