# SPDX-License-Identifier: Apache-2.0
"""Hosts that give no answer: every cause is told apart and has a command that mends it. Texts of sudo, shells and Python are
those that a lab host gave; keys are tried against a real SSH server in this process."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from fleet import causes, remote, ssh


class Server:
    """An SSH server that shows a host key and refuses every login, or lets in whoever has `admits`."""

    def __init__(self) -> None:
        self.key = paramiko.ECDSAKey.generate()
        self.admits: str | None = None
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        outer = self

        class Login(paramiko.ServerInterface):
            def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
                good = key.get_base64() == outer.admits
                return paramiko.common.AUTH_SUCCESSFUL if good else paramiko.common.AUTH_FAILED

            def get_allowed_auths(self, username: str) -> str:
                return "publickey"

        kept = []
        while True:
            try:
                link, _ = self._listening.accept()
            except OSError:
                return
            transport = paramiko.Transport(link)
            transport.add_server_key(self.key)
            transport.start_server(event=threading.Event(), server=Login())
            kept.append(transport)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, stdin=subprocess.DEVNULL
    )
    return path


def target(port: int, known: Path, *keys: Path, address: str = "127.0.0.1", **more: Any) -> remote.Target:
    words = f"-F none -o IdentitiesOnly=yes -o UserKnownHostsFile={known} -o GlobalKnownHostsFile=/dev/null".split()
    return remote.Target(
        "h1",
        address,
        user="admin",
        port=port,
        keys=tuple(map(str, keys)),
        ssh_config=ssh.config(address, words),
        ssh_words=ssh.shown(words),
        timeout=5,
        where="host_vars/h1.yml",
        **more,
    )


def silent(one: remote.Target) -> remote.Unreachable:
    with pytest.raises(remote.Unreachable) as caught:
        remote.run_python(one, "print(1)", 10)
    return caught.value


def command(text: str) -> str:
    """The last command between backticks that is called here."""
    return str(re.findall(r"here: `([^`]+)`", text)[-1])


# --- connection --------------------------------------------------------------------------------------------------


def test_an_unknown_host_key_is_shown_and_its_fix_makes_it_known(server: Server, key: Path, tmp_path: Path) -> None:
    one = target(server.port, tmp_path / "known_hosts", key)
    said = silent(one)
    assert f"its host key is not known here; it shows {server.key.fingerprint} (ecdsa)" in str(said)
    assert "`ssh-keygen -lf /etc/ssh/ssh_host_ecdsa_key.pub` on its console" in said.fix
    subprocess.run(command(said.fix), shell=True, check=True)
    assert "user admin is refused" in str(silent(one))


def test_a_changed_host_key_is_shown_and_its_fix_replaces_it(server: Server, key: Path, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    old = paramiko.ECDSAKey.generate()
    known.write_text(f"[127.0.0.1]:{server.port} {old.get_name()} {old.get_base64()}\n")
    one = target(server.port, known, key)
    said = silent(one)
    assert f"its host key has changed: it shows {server.key.fingerprint} (ecdsa), {known} has another" in str(said)
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {known}" in said.fix
    assert "do not connect" in said.fix
    subprocess.run(command(said.fix), shell=True, check=True, capture_output=True)
    assert "user admin is refused" in str(silent(one))
    assert old.get_base64() not in known.read_text()


def test_a_refused_key_is_named_with_the_command_that_brings_it_there(
    server: Server, key: Path, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{server.port} {server.key.get_name()} {server.key.get_base64()}\n")
    said = silent(target(server.port, known, key))
    assert str(said) == f"user admin is refused; tried {key}"
    copy = f"`ssh-copy-id -F none -o IdentitiesOnly=yes -o UserKnownHostsFile={known} -o GlobalKnownHostsFile=/dev/null"
    assert said.fix.startswith(f"{copy} -p {server.port} -i {key}.pub admin@127.0.0.1` here")
    assert "~admin/.ssh/authorized_keys" in said.fix
    assert "ansible_user: NAME in host_vars/h1.yml" in said.fix
    assert "`sshd -T | grep -Ei" in said.fix
    assert "PermitRootLogin" not in said.fix
    said = silent(dataclasses.replace(target(server.port, known, key), user="root"))
    assert "`echo 'PermitRootLogin prohibit-password' >/etc/ssh/sshd_config.d/00-sglang-fleet.conf" in said.fix


def test_keys_that_ssh_leaves_aside_are_left_aside_and_told(server: Server, key: Path, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{server.port} {server.key.get_name()} {server.key.get_base64()}\n")
    none = tmp_path / "none"
    said = silent(target(server.port, known, none))
    assert str(said) == f"user admin is refused; tried no key; left aside: {none} (no such file)"
    assert f"`ssh-keygen -t ed25519 -f {none} && ssh-copy-id " in said.fix
    server.admits = key.with_suffix(".pub").read_text().split()[1]
    assert "refused" not in str(silent(target(server.port, known, none, key))), "the other key is taken"
    key.chmod(0o644)
    said = silent(target(server.port, known, key))
    assert f"left aside: {key} (mode 0644, which ssh refuses)" in str(said)
    assert f"`chmod 600 {key}` here" in said.fix


def test_a_key_with_a_passphrase_needs_an_agent(server: Server, tmp_path: Path) -> None:
    known, locked = tmp_path / "known_hosts", tmp_path / "locked"
    known.write_text(f"[127.0.0.1]:{server.port} {server.key.get_name()} {server.key.get_base64()}\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True)
    said = silent(target(server.port, known, locked))
    assert "the key has a passphrase, and no agent holds it" in str(said)
    assert said.fix.startswith(f'`eval "$(ssh-agent)" && ssh-add {locked}` here')


def test_a_closed_port_an_unknown_name_and_another_service(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = silent(target(port, tmp_path / "known_hosts"))
    assert str(said) == f"127.0.0.1 refuses connections to port {port}"
    assert "On its console as root: `systemctl enable --now ssh`" in said.fix
    assert "host_vars/h1.yml as ansible_port: PORT" in said.fix
    said = silent(target(22, tmp_path / "known_hosts", address="no-such-host.invalid"))
    assert "the name no-such-host.invalid is not known here" in str(said)
    assert "Write the host's address into host_vars/h1.yml, as ansible_host: ADDRESS" in said.fix
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()  # noqa: PLW0108 - it waits
        said = silent(target(other.getsockname()[1], tmp_path / "known_hosts"))
    assert "is not SSH" in str(said)
    assert "-v admin@127.0.0.1 true` shows what answers" in said.fix


@pytest.mark.parametrize("patience", [0.3, 9], ids=["no greeting in time", "no session in time"])
def test_a_server_that_takes_connections_and_says_nothing(
    patience: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an sshd that was stopped: the kernel answers for it. Either limit may end first."""
    monkeypatch.setattr(ssh, "PATIENCE", patience)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        port = hung.getsockname()[1]
        said = silent(dataclasses.replace(target(port, tmp_path / "known_hosts"), timeout=1))
    assert str(said) == f"port {port} takes the connection, and then says nothing: sshd hangs, or it is no sshd"
    assert said.fix.startswith("On its console as root: `systemctl restart ssh`")


@pytest.mark.parametrize(
    "error", [TimeoutError("timed out"), OSError(113, "No route to host"), OSError(101, "unreachable")]
)
def test_no_way_to_a_host(error: OSError, tmp_path: Path) -> None:
    one = target(22, tmp_path / "known_hosts", address="192.0.2.9")
    said = causes.cause(one, ssh.connection(one), error)
    assert "192.0.2.9 port 22: " in str(said)
    for words in (
        "On its console: `ip -br address`",
        "ansible_host: ADDRESS",
        "`ufw allow 22/tcp`",
        "`ip route get 192.0.2.9`",
    ):
        assert words in said.fix


# --- what a host says --------------------------------------------------------------------------------------------

HOST = remote.Target("h1", "192.0.2.1", user="admin", become="root", where="host_vars/h1.yml")
SUDOERS = "`echo 'admin ALL=(ALL:ALL) NOPASSWD: ALL' >/etc/sudoers.d/60-sglang-fleet && chmod 440"


@pytest.mark.parametrize(
    ("code", "err", "told", "fix"),
    [
        (1, "sudo: a password is required", "sudo wants a password of admin", "Call it again with -K"),
        (1, "sudo: a password is required", "sudo wants a password of admin", SUDOERS),
        (1, "Sorry, try again.\nsudo: no password was provided\nsudo: 1 incorrect password attempt", "sudo refuses the", "-K"),
        (1, "sudo: admin is not in the sudoers file.", "admin may not use sudo there", f"On its console as root: {SUDOERS}"),
        (127, "env: 'sudo': No such file or directory", "sudo is not installed there", "apt-get install -y sudo`"),
        (127, "bash: line 1: sudo: command not found", "sudo is not installed there", "apt-get install -y sudo`"),
        (1, "sudo: unknown user: app", "sudo knows no user root there", "ansible_become_user: root into host_vars/h1.yml"),
        (1, "sudo: sorry, you must have a tty to run sudo", "sudo wants a terminal", "!requiretty"),
        (1, "sudo: /usr/bin/python3: command not found", "no Python there", "apt-get install -y python3`"),
        (127, "bash: line 1: /usr/bin/python3: No such file or directory", "no Python there", "ansible_python_interpreter: PATH"),
        (127, "bash: Zeile 1: /usr/bin/python3: Datei oder Verzeichnis nicht gefunden", "no Python there", "python3`"),
        (127, "sh: 1: /usr/bin/python3: not found", "no Python there", "apt-get install -y python3`"),
        (126, "bash: line 1: /usr/bin/python3: Permission denied", "Python may not be executed", "`chmod 755 \"$(readlink -f"),
        (1, "sudo: /usr/bin/python3: command not found", "no Python there", "not executable: `chmod 755"),
        (1, "Python too old: 3.6.9", "Python too old: 3.6.9", "ansible_python_interpreter: /usr/bin/python3.12"),
    ],
)  # fmt: skip
def test_what_sudo_and_python_say(code: int, err: str, told: str, fix: str) -> None:
    said = causes.ended(HOST, code, "", err, (3, 11))
    assert told in str(said)
    assert fix in said.fix


def test_what_a_login_says() -> None:
    cloud = 'Please login as the user "ubuntu" rather than the user "root".\n'
    said = causes.ended(dataclasses.replace(HOST, user="root", become=None), 142, cloud, "", (3, 11))
    assert "ansible_user: ubuntu and ansible_become: true" in said.fix
    said = causes.ended(HOST, 1, "This account is currently not available.\n", "", (3, 11))
    assert said.fix == "On its console as root: `usermod -s /bin/bash admin`."


def test_an_old_python_is_found_before_the_program_meets_it() -> None:
    here = remote.Target("here", "here", local=True)
    with pytest.raises(remote.Unreachable, match=r"Python too old: 3\.\d+"):
        remote.run_python(here, "print(1)", 30, (9, 0))


def test_an_unknown_cause_says_how_to_look_further() -> None:
    said = causes.ended(HOST, 1, "", "KeyError: 'gpu'", (3, 11))
    assert causes.fix(HOST, said, ["a b.yml"]).startswith(
        "If `ansible h1 -i 'a b.yml' -m ansible.builtin.ping` answers"
    )
    said = causes.ended(HOST, 1, "", "something else", (3, 11))
    assert causes.fix(HOST, said, []) == "Repair it until `ansible h1 -m ansible.builtin.ping` answers."
