# SPDX-License-Identifier: Apache-2.0
"""Start and the way back."""

from __future__ import annotations

import pytest
from ansible.module_utils.gpu_units_host import HostError

from tests.unit.units_kit import lab, no_disk, wanted

__all__ = ["lab", "no_disk"]  # fixtures


def test_failed_start_names_unit_result_and_journal(lab):
    lab.swap(wanted("r1", "a", "b"))
    lab.systemd.dies.add("sglang@b.service")
    with pytest.raises(HostError) as caught:
        lab.start()
    text = str(caught.value)
    assert "sglang@b.service did not start (result exit-code, its process ended with status 1): Job failed." in text
    assert "\nfirst error: RuntimeError: no such kernel\n" in text
    assert "  RuntimeError: no such kernel" in text
    # The host goes back after this, so nothing that may serve again by then is restarted by the fix.
    assert "put its first error right, then `ansible-playbook site.yml`\n" in text
    assert "restart" not in text
    assert "sglang@a.service" not in text
    assert lab.systemd.log[-1] == "stop sglang@b.service"


def test_start_without_a_deployment(lab):
    with pytest.raises(HostError, match="nothing is deployed"):
        lab.start()


def test_rollback_goes_back_and_forth(lab):
    one, two = wanted("r1", "a"), wanted("r2", "a", "b", unit="v2")
    lab.go(one)
    lab.go(two)
    result = lab.rollback()
    assert (result["rolled_back"], result["started"]) == (True, ["sglang@a.service"])
    assert result["deployment"]["id"] == one["id"]
    lab.agrees(one, previous=two)
    assert lab.systemd.active == {"sglang@a.service"}
    lab.rollback()
    lab.agrees(two, previous=one)
    assert lab.systemd.active == {"sglang@a.service", "sglang@b.service"}


def test_rollback_of_the_first_deployment_leaves_nothing(lab):
    one = wanted("r1")
    lab.go(one)
    for check in (True, False):
        with pytest.raises(
            HostError, match=r"nothing was deployed before .*`.* --tags rollback -e rollback_to_nothing=true`"
        ):
            lab.rollback(check=check)
    lab.agrees(one, previous=None)
    assert lab.systemd.active == {"sglang@a.service"}
    result = lab.rollback(to_nothing=True)
    assert result["deployment"] is None
    assert "nothing was deployed before" in result["notes"][0]
    lab.agrees(None, previous=one)
    assert lab.systemd.active == set()
    lab.rollback()
    lab.agrees(one, previous=None)


def test_rollback_with_nothing_at_all(lab):
    with pytest.raises(HostError, match="nothing to go back to"):
        lab.rollback()


def test_rollback_needs_the_old_release(lab):
    lab.go(wanted("r1"))
    lab.go(wanted("r2"))
    (lab.root / "opt/sglang-fleet/releases/r1/manifest.json").unlink()
    with pytest.raises(HostError, match="release r1 is not complete"):
        lab.rollback()
    lab.agrees(wanted("r2"), previous=wanted("r1"))
    assert lab.systemd.active == {"sglang@a.service"}


def test_failed_deployment_is_put_aside_and_never_comes_back(lab):
    one, two, bad = wanted("r1"), wanted("r2"), wanted("r3")
    lab.go(one)
    lab.go(two)
    lab.swap(bad)
    result = lab.rollback(discard=bad["id"])
    assert result["rolled_back"]
    lab.agrees(two, previous=one)
    assert lab.live("failed") == bad["id"]
    assert lab.systemd.active == {"sglang@a.service"}
    lab.rollback()
    lab.agrees(one, previous=two)


def test_failed_first_deployment_leaves_nothing(lab):
    bad = wanted("r3")
    lab.swap(bad)
    lab.rollback(discard=bad["id"])
    lab.agrees(None, previous=None)
    assert lab.live("failed") == bad["id"]


def test_discarding_what_is_not_live_only_starts_what_is(lab):
    one, two = wanted("r1"), wanted("r2")
    lab.go(one)
    lab.go(two)
    lab.systemd.active.clear()
    for discard in ("", "ffffffffffff"):
        result = lab.rollback(discard=discard)
        assert not result["rolled_back"]
        lab.agrees(two, previous=one)
        assert lab.systemd.active == {"sglang@a.service"}
    assert not result["changed"]


def test_old_engine_that_does_not_come_back_is_said(lab):
    lab.go(wanted("r1"))
    lab.go(wanted("r2"))
    lab.systemd.dies.add("sglang@a.service")
    with pytest.raises(HostError, match=r"rolled back to deployment .* but it does not run"):
        lab.rollback()
    assert lab.live() == wanted("r1")["id"]
