# SPDX-License-Identifier: Apache-2.0
"""What Ansible says about an inventory that it cannot use, with file, line and host: one sentence instead of its screens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml

from fleet.target import short_path
from fleet.yamlform import LOADER, Fault, files

VAULT_FILE = "Name the password file of the vault: `export ANSIBLE_VAULT_PASSWORD_FILE=FILE`"


@dataclass
class Told:
    """What Ansible would have printed."""

    warnings: list[str] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)  # (what failed, why): one of each plugin that tried

    def reasons(self) -> list[str]:
        """Why a source could not be read, as the YAML plugin has it: others try the same file and understand it less."""
        own = [why for what, why in self.errors if "'yaml'" in what]
        return own or [why for _, why in self.errors[-1:]]


@contextmanager
def collected() -> Iterator[Told]:
    """Keeps Ansible's own words about an inventory, which would come before and beside ours."""
    from ansible.utils.display import Display

    told = Told()
    kept = Display.warning, Display.error_as_warning, Display.deprecated
    try:
        Display.warning = lambda _, msg, *__, **___: told.warnings.append(str(msg))
        Display.error_as_warning = lambda _, msg, exception, **__: told.errors.append((str(msg), text(exception)))
        Display.deprecated = lambda _, msg, *__, **___: told.warnings.append(str(msg))
        yield told
    finally:
        Display.warning, Display.error_as_warning, Display.deprecated = kept


def text(error: BaseException) -> str:
    """An error of Ansible's on one line, with its place where it has one."""
    said = " ".join(str(error).split())
    where = getattr(error, "_formatted_source_context", None) or ""
    match = re.search(r"Origin: (\S+?:\d+)", where)
    if match is None or match[1] in said:
        return said
    return f"{said} ({short_path(match[1])})"


def place(value: Any) -> str | None:
    """`file:line` that a value of the inventory comes from."""
    from ansible.errors import AnsibleError

    match = re.search(r"\((\S+:\d+)\)$", text(AnsibleError("here", obj=value)))
    return match[1] if match else None


def unreadable(sources: Sequence[str], loader: Any) -> Fault | None:
    """The first file that Ansible cannot take though its form is right: a vault without its password, an unknown tag."""
    from ansible.errors import AnsibleError

    for path, _ in files(sources):
        try:
            loader.load_from_file(str(path), cache="none")
        except AnsibleError as error:
            return Fault(f"{short_path(path)}: {text(error)}", hint(error) or f"Correct {short_path(path)}")
    return None


def hint(error: BaseException) -> str:
    """The next step that an error's text asks for; empty where it does not tell."""
    return VAULT_FILE if "vault" in str(error).lower() else ""


def line_of(name: str, sources: Sequence[str]) -> str | None:
    """`file:line` where a host is named."""
    for path, variables in files(sources):
        for node in yaml.parse(path.read_text(encoding="utf-8"), LOADER) if not variables else []:
            if isinstance(node, yaml.ScalarEvent) and node.value == name and node.start_mark:
                return f"{short_path(path)}:{node.start_mark.line + 1}"
    return None
