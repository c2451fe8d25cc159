# SPDX-License-Identifier: Apache-2.0
"""Taking over the real engine as far as that needs no copy of it: what is found, and that a patched one is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ansible.module_utils import ddtree_patches_series as core
from ansible.module_utils import sglang_venv_adopt as adopt

from fleet import series
from tests import venv


def test_the_real_engine_is_found_whole_and_its_patched_form_refused(
    release: Path, engine_site: Path, tmp_path: Path
) -> None:
    plan = venv.make_plan()
    whole = adopt.scan([str(release / "venv")])
    assert adopt.check(whole, plan) == []
    assert (whole.packages, whole.skipped, whole.loose) == (plan["packages"], {}, [])
    for name in ("sglang", "sglang-0.5.11.dist-info"):
        shutil.copytree(engine_site / name, tmp_path / name)
    folders = [str(tmp_path), str(release / "venv")]
    assert adopt.scan(folders).chosen["sglang"].site == str(tmp_path)
    found = series.load(venv.ENGINE)
    core.apply(found, tmp_path, stamp=tmp_path / core.STAMP, imports=None)
    with pytest.raises(adopt.AdoptError, match="somebody patched this already: ") as caught:
        adopt.check(adopt.scan(folders), plan)
    changed = [path for path in found.files if path.endswith(".py")]
    assert f"and {len(changed) - 3} more are not as the wheel" in str(caught.value)
