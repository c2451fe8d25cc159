# SPDX-License-Identifier: Apache-2.0
"""Why a host gave no answer, and the exact way to mend it: one cause each for what SSH, sudo and Python say.

`cause` reads exceptions of the connection, `ended` what a program left behind that did not run. Both give an Unreachable; where
the cause is not known its fix is empty.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import shlex
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleet.target import Target, Unreachable, given

OLD_PYTHON = "Python too old: "
SUDOERS = "/etc/sudoers.d/60-sglang-fleet"


def fix(target: Target, error: Unreachable, inventory: Sequence[str]) -> str:
    """What to do about a host that gave no answer; how to look further where nothing more is known than the text."""
    if error.fix:
        return error.fix
    ping = f"`{' '.join(['ansible', target.name, *given(inventory)])} -m ansible.builtin.ping`"
    if re.match(r"\w+(Error|Exception)\b", str(error)):
        return f"If {ping} answers, the host is fine and this is a fault of this program: report the line."
    return f"Repair it until {ping} answers."


# --- words -------------------------------------------------------------------------------------------------------


def _known_as(host: str, port: int) -> str:
    """A host as known_hosts names it."""
    return host if port == 22 else f"[{host}]:{port}"


def _client(program: str, target: Target, link: Any, *more: str) -> str:
    """A command of OpenSSH's clients to the host, as a person types it here."""
    port = [] if int(link.port) == 22 else ["-p", str(link.port)]
    return shlex.join([program, *target.ssh_words, *port, *more, f"{link.user}@{link.host}"])


def _known_hosts(link: Any, name: str) -> Path:
    """The file that knows a host's key, else the first one of the person's own."""
    from paramiko import HostKeys

    usual = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
    own = [Path(one).expanduser() for one in shlex.split(str(link.ssh_config.get("userknownhostsfile", usual)))]
    system = [
        Path(one) for one in shlex.split(str(link.ssh_config.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts")))
    ]
    holding = (file for file in (*own, *system) if file.is_file() and HostKeys(str(file)).lookup(name))
    return next(holding, own[0])


def unusable(file: str) -> str | None:
    """Why ssh leaves a key aside; None for one that it would use."""
    path = Path(file).expanduser()
    if not path.is_file():
        return "no such file"
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    return f"mode {mode:04o}, which ssh refuses" if mode & 0o077 and found.st_uid == os.getuid() else None


# --- no connection -----------------------------------------------------------------------------------------------


class UnknownKeyError(Exception):
    """A host showed a key that no known_hosts file has."""

    def __init__(self, key: Any) -> None:
        super().__init__(key.fingerprint)
        self.key = key


def cause(target: Target, link: Any, error: Exception) -> Unreachable:
    """What a failed connection means. `link`: the Fabric connection to the host, or to the jump host that gave the error."""
    from paramiko import SSHException
    from paramiko.ssh_exception import AuthenticationException, BadHostKeyException, NoValidConnectionsError

    if isinstance(error, BadHostKeyException):
        return _host_key(link, error.key, changed=True)
    if isinstance(error, UnknownKeyError):
        return _host_key(link, error.key, changed=False)
    if isinstance(error, AuthenticationException) or "No authentication methods" in str(error):
        return _refused(target, link, str(error))
    if "private key file" in str(error):
        return _refused(target, link, str(error))
    if isinstance(error, socket.gaierror):
        return Unreachable(
            f"the name {link.host} is not known here ({error.strerror})",
            f"Write the host's address into {target.where}, as ansible_host: ADDRESS (`ip -br address` on its console shows it); "
            f"`getent hosts {shlex.quote(link.host)}` shows what a name means here.",
            "a name that this machine can look up, or an address",
        )
    if isinstance(error, NoValidConnectionsError):
        numbers = {getattr(one, "errno", None) for one in error.errors.values()}
        return _closed(target, link) if numbers == {errno.ECONNREFUSED} else _no_way(target, link, "no route to it")
    if isinstance(error, ConnectionRefusedError):
        return _closed(target, link)
    if isinstance(error, TimeoutError):
        return _no_way(target, link, f"nothing came back in {target.timeout} s")
    if getattr(error, "errno", None) in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return _no_way(target, link, "no route to it")
    if isinstance(error, SSHException) and "No existing session" in str(error):  # greeted, and then silent
        return _hung(link)
    if isinstance(error, SSHException) and "banner" in str(error):
        if isinstance(error.__context__, TimeoutError):
            return _hung(link)
        return Unreachable(
            f"what answers on port {link.port} is not SSH, or closed at once",
            f"`{_client('ssh', target, link, '-v')} true` shows what answers; on the host's console `ss -ltnp` shows the port "
            f"of sshd, for ansible_port: PORT in {target.where}.",
        )
    return Unreachable(f"{error or type(error).__name__}")


def _host_key(link: Any, key: Any, *, changed: bool) -> Unreachable:
    """A host key is never taken over here: the person compares it first."""
    kind = {"ssh-rsa": "rsa", "ssh-ed25519": "ed25519"}.get(key.get_name(), "ecdsa")
    name = _known_as(link.host, int(link.port))
    file = _known_hosts(link, name)
    show = f"`ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` on its console"
    add = f"echo {shlex.quote(f'{name} {key.get_name()} {key.get_base64()}')} >>{shlex.quote(str(file))}"
    if not changed:
        return Unreachable(
            f"its host key is not known here; it shows {key.fingerprint} ({kind})",
            f"If {show} shows the same, here: `{add}`.",
            f"the key of {name} in {file}",
        )
    forget = f"ssh-keygen -R {shlex.quote(name)} -f {shlex.quote(str(file))}"
    return Unreachable(
        f"its host key has changed: it shows {key.fingerprint} ({kind}), {file} has another",
        f"If {show} shows the same, it was installed anew; then here: `{forget} && {add}`. If not, another machine answers at "
        f"{link.host}: do not connect.",
        "the known host key",
    )


def _refused(target: Target, link: Any, told: str) -> Unreachable:
    """The login failed: which user, which keys, and how the key gets there."""
    keys = [str(Path(one).expanduser()) for one in _asked_keys(target, link)]
    aside = {key: why for key in keys if (why := unusable(key))}
    used = [key for key in keys if key not in aside] or _usual_keys(link)
    tried = [*used, *(["a password"] if target.password is not None else [])]
    observed = (
        f"user {link.user} is refused; tried {', '.join(tried) or ('no key' if aside else 'no key: there is none')}"
    )
    if aside:
        observed += f"; left aside: {', '.join(f'{key} ({why})' for key, why in aside.items())}"
    user = f"another user: ansible_user: NAME in {target.where}, with ansible_become: true"
    expected = f"a login as {link.user} by a key"
    if "encrypted" in told.lower():
        key = (used or keys or ["~/.ssh/id_ed25519"])[0]
        fix = f'`eval "$(ssh-agent)" && ssh-add {shlex.quote(key)}` here, in the shell that runs the next command.'
        return Unreachable(f"{observed}; the key has a passphrase, and no agent holds it", fix, expected)
    if aside and "no such file" not in (first := next(iter(aside.values()))):
        return Unreachable(observed, f"`chmod 600 {shlex.join(aside)}` here ({first}).", expected)
    key = (used or keys or [str(Path("~/.ssh/id_ed25519").expanduser())])[0]
    make = "" if used else f"ssh-keygen -t ed25519 -f {shlex.quote(key)} && "
    if "not a valid" in told:
        return Unreachable(
            f"{key} is no private key ({told})",
            f"Name the right file as ansible_ssh_private_key_file in {target.where}; `ssh-keygen -yf FILE` prints the public key "
            "of a good one.",
            "a private key",
        )
    copy = make + _client("ssh-copy-id", target, link, "-i", f"{key}.pub")
    line = f"the line of `ssh-keygen -yf {shlex.quote(key)}` into ~{link.user}/.ssh/authorized_keys on its console"
    # What sshd itself forbids, no key mends.
    ask = "sshd -T | grep -Ei '^(permitrootlogin|pubkeyauthentication|allow|deny)'"
    forbidden = f"where the key is there already, `{ask}` on its console as root shows whether sshd lets {link.user} in"
    if link.user == "root":
        config = "/etc/ssh/sshd_config.d/00-sglang-fleet.conf"
        allow = f"echo 'PermitRootLogin prohibit-password' >{config} && systemctl reload ssh"
        forbidden += f": `{allow}` mends permitrootlogin no"
    return Unreachable(
        observed, f"`{copy}` here; where no password is allowed, {line}; {forbidden}; or {user}.", expected
    )


def _asked_keys(target: Target, link: Any) -> list[str]:
    """Keys that inventory and ssh configuration name."""
    configured = link.ssh_config.get("identityfile", [])
    return list(dict.fromkeys([*target.keys, *([configured] if isinstance(configured, str) else configured)]))


def _usual_keys(link: Any) -> list[str]:
    """Keys that are looked at where none is named."""
    if link.connect_kwargs.get("look_for_keys") is False:
        return []
    names = (Path(f"~/.ssh/id_{kind}").expanduser() for kind in ("rsa", "ecdsa", "ed25519"))
    return [str(path) for path in names if path.is_file()]


def _closed(target: Target, link: Any) -> Unreachable:
    return Unreachable(
        f"{link.host} refuses connections to port {link.port}",
        "On its console as root: `systemctl enable --now ssh` (`sshd` on Fedora and its kin; `apt-get install -y openssh-server` "
        f"where there is none). `ss -ltnp` shows the port of sshd: another one than {link.port} goes into {target.where} as "
        "ansible_port: PORT.",
        f"sshd on port {link.port}",
    )


def _no_way(target: Target, link: Any, told: str) -> Unreachable:
    address = shlex.quote(link.host)
    return Unreachable(
        f"{link.host} port {link.port}: {told}",
        "On its console: `ip -br address` shows whether it is up and its address, which belongs into "
        f"{target.where} as ansible_host: ADDRESS; a firewall there: `ufw allow {link.port}/tcp`. From here: "
        f"`ip route get {address}` and `ping -c 3 {address}` show how far it gets.",
        f"an answer on port {link.port}",
    )


def _hung(link: Any) -> Unreachable:
    """The kernel takes connections for a program that does not run on."""
    return Unreachable(
        f"port {link.port} takes the connection, and then says nothing: sshd hangs, or it is no sshd",
        "On its console as root: `systemctl restart ssh` (`sshd` on Fedora and its kin); `ss -ltnp` shows who has the port, "
        "`uptime` and `dmesg | tail` what keeps the host busy.",
        f"a greeting of sshd on port {link.port}",
    )


def slow(target: Target, limit: float) -> Unreachable:
    """The program did not end in time."""
    return Unreachable(
        f"no answer from {target.address}: timed out after {limit:.0f} s",
        f"`uptime` and `dmesg | tail` on the host show what keeps it busy; --timeout {limit * 5:.0f} gives it more time "
        "(bin/preflight, bin/smoke).",
        f"an answer within {limit:.0f} s",
    )


# --- a connection, and no program ----------------------------------------------------------------------------------


def ended(target: Target, code: int, out: str, err: str, least: Sequence[int]) -> Unreachable:
    """What it means that the program ended with `code`."""
    said = [line.strip() for line in err.strip().splitlines() if line.strip()]
    last = said[-1] if said else f"the program ended with {code}"
    user = target.user or getpass.getuser()
    oldest = ".".join(map(str, max(tuple(least), (3, 11))))  # facts are read by an older one, and nothing else
    if match := re.search(r'[Pp]lease login as the user "?(\w+)"?', out + err):
        return Unreachable(
            f"{match[0]}",
            f"Write into {target.where}: ansible_user: {match[1]} and ansible_become: true.",
            f"a user that may run programs, unlike {user}",
        )
    if OLD_PYTHON in last:
        return Unreachable(
            last,
            f"On the host as root: `apt-get update && apt-get install -y python3.12`, then ansible_python_interpreter: "
            f"/usr/bin/python3.12 in {target.where}; without such a package, a newer distribution (Debian 12, Ubuntu 24.04).",
            f"Python {oldest} or newer as {target.python}",
        )
    if target.python in last and (code == 126 or "ermission denied" in last):
        real = f'"$(readlink -f {shlex.quote(target.python)})"'
        return Unreachable(
            f"Python may not be executed there: {last}",
            f"On its console as root: `chmod 755 {real}`; if it has that mode, `ls -lL {target.python}` and "
            f"`findmnt -T {real}` show a folder or a mount (noexec) that forbids it.",
            f"{target.python} executable for {target.become or user}",
        )
    if target.python in last and (code == 127 or "not found" in last):  # shells say it in many languages
        return Unreachable(
            f"no Python there: {last}",
            "On the host as root: `apt-get update && apt-get install -y python3` (`dnf install -y python3` on Fedora and its "
            "kin). "
            f"One at another place goes into {target.where} as ansible_python_interpreter: PATH; one that is there and that sudo "
            f'does not find is not executable: `chmod 755 "$(readlink -f {shlex.quote(target.python)})"`.',
            f"Python {oldest} or newer as {target.python}",
        )
    if target.become is not None and "sudo" in "\n".join(said[-3:]):
        return _sudo(target, user, said) or Unreachable(last)
    if "account is currently not available" in out + err:
        return Unreachable(
            f"user {user} has no shell there", f"On its console as root: `usermod -s /bin/bash {user}`.", "a shell"
        )
    return Unreachable(last)


def _sudo(target: Target, user: str, said: Sequence[str]) -> Unreachable | None:
    text = "\n".join(said[-3:])
    line = shlex.quote(f"{user} ALL=(ALL:ALL) NOPASSWD: ALL")
    allow = f"on its console as root: `echo {line} >{SUDOERS} && chmod 440 {SUDOERS} && visudo -c`"
    expected = f"sudo to {target.become} for {user}, without a question"
    if re.search(r"\bsudo\W*: ((command )?not found|No such file)", text):
        return Unreachable(
            "sudo is not installed there",
            "On its console as root: `apt-get update && apt-get install -y sudo`; or log in as root: "
            f"ansible_user: root in {target.where}.",
            expected,
        )
    if "unknown user" in text:
        return Unreachable(
            f"sudo knows no user {target.become} there",
            f"Write ansible_become_user: root into {target.where}.",
            "root by sudo",
        )
    if re.search(r"incorrect password|[Ss]orry, try again|no password was provided", text):
        return Unreachable(
            f"sudo refuses the password of {user}", f"Give the right one with -K, or do without: {allow}.", expected
        )
    if re.search(r"password is required|terminal is required|askpass", text):
        return Unreachable(
            f"sudo wants a password of {user}, as it does of those too who may not use it",
            f"Call it again with -K (asks for it here; site.yml takes -K too), or do without: {allow}.",
            expected,
        )
    if re.search(r"not in the sudoers|not allowed to|may not run", text):
        return Unreachable(f"{user} may not use sudo there", f"{allow[0].upper()}{allow[1:]}.", expected)
    if "must have a tty" in text:
        fix = f"On the host as root: `echo 'Defaults:{user} !requiretty' >>{SUDOERS} && chmod 440 {SUDOERS} && visudo -c`."
        return Unreachable("sudo wants a terminal there", fix, expected)
    return None
