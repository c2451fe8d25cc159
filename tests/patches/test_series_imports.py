# SPDX-License-Identifier: Apache-2.0
"""The repository's series on a whole release: every patched module can be imported, with the profile's environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils import ddtree_patches_series as core

from fleet import series
from tests import venv
from tests.unit.series_kit import tree_hash


@pytest.fixture(scope="module")
def patchable() -> Iterator[Path]:
    """A release of its own; the shared one is for reading only."""
    try:
        with venv.scratch() as root:
            yield venv.build_release(root)
    except venv.NoPython as error:  # the lock has wheels for 3.11 and 3.12 only; such a machine can build no release
        pytest.skip(str(error))


def test_every_patched_module_is_imported(patchable: Path) -> None:
    one = series.load(venv.ENGINE, series.ROOT)
    site, stamp = core.find_site(patchable / "venv"), patchable / core.STAMP
    env = {name: value.replace("{release}", str(patchable)) for name, value in venv.profile("cpu")["env"].items()}
    before = tree_hash(site / one.distribution)

    def imports() -> list[str]:
        return list(core.check_imports(patchable / "venv/bin/python", site, one, env, 600))

    done = core.apply(one, site, stamp=stamp, imports=imports)
    assert (done.was, done.state, done.changed) == ("clean", "applied", True)
    assert done.imported == list(one.imports)
    assert {core.module_name(path) for path in one.files if path.endswith(".py")} >= set(one.imports)
    assert json.loads(stamp.read_text())["imported"] == list(one.imports)
    after = tree_hash(site / one.distribution)
    changed = {f"{one.distribution}/{p}" for p in after.keys() | before.keys() if after.get(p) != before.get(p)}
    assert changed == set(one.files), "the imports wrote into the release"
    again = core.apply(one, site, stamp=stamp, imports=imports, published=True)
    assert (again.was, again.changed, again.imported) == ("applied", False, [])
