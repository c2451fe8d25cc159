# SPDX-License-Identifier: Apache-2.0
"""What of the machine's setup reaches a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.lab import machine


def test_environment_is_trust_and_packages_only() -> None:
    env = {
        "HTTPS_PROXY": "http://proxy.example:3128",
        "no_proxy": "localhost",
        "SSL_CERT_FILE": "/etc/ssl/x.crt",
        "PIP_INDEX_URL": "https://index.example/simple",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_CACHE_DIR": "/somewhere/here",
        "PIP_TARGET": "/somewhere/here",
        "HOME": "/home/x",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PIP_CERT": "",
        "PIP_TRUSTED_HOST": "two\nlines",
    }
    found = machine.pick_environment(
        env, 'export HTTP_PROXY="http://from-file.example"\nHTTPS_PROXY=http://file.example\nPATH="/bin"\n'
    )
    assert found == {
        "HTTPS_PROXY": "http://proxy.example:3128",
        "HTTP_PROXY": "http://from-file.example",
        "no_proxy": "localhost",
        "SSL_CERT_FILE": "/etc/ssl/x.crt",
        "PIP_INDEX_URL": "https://index.example/simple",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
    }


def test_name_servers_a_host_can_reach() -> None:
    assert machine.nameservers("search x\nnameserver 192.0.2.1\nnameserver 192.0.2.1\nnameserver fe80::1\n") == (
        "192.0.2.1",
    )
    assert machine.nameservers("nameserver 127.0.0.53\n", "nameserver 192.0.2.9\n") == ("192.0.2.9",)
    assert machine.nameservers("nameserver 127.0.0.53\n", "nameserver 127.0.0.1\n") == ()


def test_configuration_values(tmp_path: Path) -> None:
    pip = tmp_path / "pip.conf"
    pip.write_text("[global]\nfind-links = /a\n  /b\nextra-index-url = file:///c/simple\n[install]\nno-deps = yes\n")
    assert ("find-links", "/a") in machine.config_values(pip)
    assert ("find-links", "/b") in machine.config_values(pip)
    assert ("extra-index-url", "file:///c/simple") in machine.config_values(pip)
    uv = tmp_path / "uv.toml"
    uv.write_text(
        'find-links = ["/d"]\nnative-tls = true\n[[index]]\nname = "x"\nurl = "https://i.example:8443/simple"\n'
    )
    assert machine.config_values(uv) == [("find-links", "/d"), ("name", "x"), ("url", "https://i.example:8443/simple")]


def test_package_folders(tmp_path: Path) -> None:
    (tmp_path / "index/simple").mkdir(parents=True)
    (tmp_path / "with blank").mkdir()
    assert machine.package_folder(f"file://{tmp_path}/index/simple") == tmp_path / "index"
    assert machine.package_folder(f"file://{tmp_path}/with%20blank") == tmp_path / "with blank"
    assert machine.package_folder(str(tmp_path)) == tmp_path
    for word in ("https://index.example/simple", "/no/such/folder", "relative", "/", "yes"):
        assert machine.package_folder(word) is None


def test_ports() -> None:
    assert machine.url_port("http://proxy.example:3128") == 3128
    assert machine.url_port("proxy.example:8080") == 8080
    assert machine.url_port("https://user:word@index.example:8443/simple") == 8443
    for word in ("https://index.example/simple", "file:///a", "socks5://p.example:1080", "http://x:notaport/"):
        assert machine.url_port(word) is None


def test_apt_settings_that_decide_reach_and_belief() -> None:
    dump = """Acquire "";
Acquire::Check-Valid-Until "false";
Acquire::http::Proxy "http://apt.example:3142";
Acquire::https::archive.example::Verify-Peer "true";
Acquire::http::Proxy::archive.example "DIRECT";
Acquire::IndexTargets::deb::Packages::MetaKey "x";
Acquire::Retries "";
APT::Install-Recommends "0";
"""
    assert machine.apt_options(dump) == [
        'Acquire::Check-Valid-Until "false";',
        'Acquire::http::Proxy "http://apt.example:3142";',
        'Acquire::https::archive.example::Verify-Peer "true";',
        'Acquire::http::Proxy::archive.example "DIRECT";',
    ]
    found = machine.look({}, Path("/nonexistent"), dump)
    assert 3142 in found.ports


def test_look_follows_the_callers_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LOCAL_CERTS", tmp_path / "certs")
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs/site.crt").write_text("site")
    (tmp_path / "wheels").mkdir()
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("x==1\n")
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text(
        f"[global]\nconstraint = {constraints}\nfind-links = {tmp_path}/wheels\n"
    )
    env = {
        "PIP_CERT": str(tmp_path / "certs/site.crt"),
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "XDG_CONFIG_DIRS": "/nonexistent",
    }
    found = machine.look(env, tmp_path, "")
    assert found.files[Path("/root/.config/pip/pip.conf")] == tmp_path / ".config/pip/pip.conf"
    assert found.files[constraints] == constraints
    assert found.files[tmp_path / "certs/site.crt"] == tmp_path / "certs/site.crt"
    assert tmp_path / "wheels" in found.binds
    assert 9 in found.ports
    assert any("loopback" in w for w in found.warnings)
