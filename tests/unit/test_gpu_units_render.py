# SPDX-License-Identifier: Apache-2.0
"""The wanted deployment from the inventory: files, flags, environment, and one clear sentence per mistake."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import gpu_units_instances as wanted
from ansible.module_utils import gpu_units_render as r

GPUS = [{"index": i, "uuid": f"GPU-{i:08d}-aaaa"} for i in range(4)]
SM90 = {"name": "sm90", "args": {"attention-backend": "triton", "page-size": 1}, "env": {"X": "{release}/profile"}}
CPU = {"name": "cpu", "args": {"device": "cpu", "dtype": "float32"}, "env": {"CUDA_VISIBLE_DEVICES": ""}}
DEFAULTS = {"model_path": "/srv/models/target", "draft_model_path": "/srv/models/drafter"}
COMMON = {r.UNIT: "[Unit]\n"}


@pytest.fixture(scope="module")
def modes(repo: Path) -> dict[str, Any]:
    return yaml.safe_load((repo / "roles/gpu_units/files/modes.yml").read_text())


def render(
    modes: dict[str, Any], *instances: dict[str, Any], profile: dict[str, Any] = SM90, **more: Any
) -> dict[str, Any]:
    given = {
        "instances": list(instances),
        "defaults": DEFAULTS,
        "profile": profile,
        "modes": modes,
        "gpus": [] if profile is CPU else GPUS,
        "release": "abc",
        "common": COMMON,
        "start_timeout": 900,
    }
    return r.render(**{**given, **more})


def config(deployment: dict[str, Any], name: str) -> dict[str, Any]:
    return yaml.safe_load(deployment["files"][f"{r.ETC}/{name}.yaml"])


def environment(deployment: dict[str, Any], name: str) -> dict[str, str]:
    """As systemd reads it: unlike a shell it expands nothing, but the four escapes are the same."""
    lines = [line for line in deployment["files"][f"{r.ETC}/{name}.env"].splitlines() if not line.startswith("#")]
    script = "set -a\n" + "\n".join(lines) + "\nexec env -0"
    done = subprocess.run(["env", "-i", "/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if "=" in entry)


def problems(modes: dict[str, Any], *instances: dict[str, Any], **more: Any) -> list[str]:
    with pytest.raises(wanted.InvalidError) as caught:
        render(modes, *instances, **more)
    return caught.value.problems


def test_ddtree_flags_and_published_keys(modes):
    done = render(modes, {"name": "gpu0", "gpus": [0], "port": 30000})
    assert config(done, "gpu0") == {
        "attention-backend": "triton",
        "host": "127.0.0.1",
        "model-path": "/srv/models/target",
        "page-size": 1,
        "port": 30000,
        "speculative-algorithm": "DDTREE",
        "speculative-ddtree-budget": 15,
        "speculative-ddtree-spine": 0,
        "speculative-ddtree-topk": 8,
        "speculative-draft-model-path": "/srv/models/drafter",
    }
    (published,) = done["instances"]
    assert published == {
        "name": "gpu0",
        "mode": "ddtree",
        "unit": "sglang@gpu0.service",
        "baseline_unit": "sglang@gpu0.baseline.service",
        "url": "http://127.0.0.1:30000",
        "address": "127.0.0.1",
        "port": 30000,
        "gpus": [GPUS[0]["uuid"]],
        "budget": 15,
        "topk": 8,
        "spine": 0,
        "model_path": "/srv/models/target",
        "draft_model_path": "/srv/models/drafter",
        "dtype": "auto",
        "profile": "sm90",
        "api_key_file": None,
    }
    assert done["files"][r.UNIT] == "[Unit]\n"


@pytest.mark.parametrize(
    ("mode", "speculative"),
    [
        ("baseline", {}),
        ("dflash", {"algorithm": "DFLASH", "draft-model-path": "/srv/models/drafter"}),
        (
            "ddtree-shadow",
            {
                "algorithm": "DDTREE",
                "draft-model-path": "/srv/models/drafter",
                "ddtree-budget": 7,
                "ddtree-topk": 4,
                "ddtree-spine": 2,
                "ddtree-shadow-linear": True,
            },
        ),
    ],
)
def test_modes_are_flags(modes, mode, speculative):
    done = render(modes, {"name": "a", "gpus": [0], "port": 30000, "mode": mode, "budget": 7, "topk": 4, "spine": 2})
    flags = {
        key.removeprefix("speculative-"): v for key, v in config(done, "a").items() if key.startswith("speculative-")
    }
    assert flags == speculative


def test_the_baseline_is_the_same_instance_without_speculation(modes):
    args = {"mem_fraction_static": 0.8, "speculative-dflash-block-size": 16}
    done = render(modes, {"name": "a", "gpus": [1], "port": 30001, "args": args})
    own, base = config(done, "a"), config(done, "a.baseline")
    assert own["speculative-dflash-block-size"] == 16
    assert base == {key: value for key, value in own.items() if not key.startswith("speculative-")}
    assert done["files"][f"{r.ETC}/a.env"] == done["files"][f"{r.ETC}/a.baseline.env"]


def test_the_baseline_ends_its_instance_and_is_not_restarted(modes):
    done = render(modes, {"name": "a", "gpus": [1], "port": 30001})
    text = done["files"]["etc/systemd/system/sglang@a.baseline.service.d/10-sglang-fleet.conf"]
    assert {"Conflicts=sglang@a.service", "After=sglang@a.service", "Restart=no"} <= set(text.splitlines())


def test_layers_of_args_and_env(modes):
    done = render(
        modes,
        {"name": "a", "gpus": [0], "port": 30000, "args": {"page-size": None, "b": 3}, "env": {"Y": "own"}},
        defaults={**DEFAULTS, "args": {"b": 2, "c": 1, "attention_backend": "fa3"}, "env": {"Y": "default", "Z": "z"}},
    )
    flags = config(done, "a")
    assert (flags["b"], flags["c"], flags["attention-backend"]) == (3, 1, "fa3")
    assert "page-size" not in flags
    env = environment(done, "a")
    assert (env["X"], env["Y"], env["Z"]) == ("/opt/sglang-fleet/current/profile", "own", "z")


def test_gpus_by_index_and_uuid_are_bound_by_uuid(modes):
    done = render(modes, {"name": "a", "gpus": [2, GPUS[1]["uuid"]], "port": 30000})
    env = environment(done, "a")
    assert env["CUDA_VISIBLE_DEVICES"] == f"{GPUS[2]['uuid']},{GPUS[1]['uuid']}"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert config(done, "a")["tp-size"] == 2


def test_own_parallel_sizes_are_kept(modes):
    done = render(modes, {"name": "a", "gpus": [0, 1], "port": 30000, "args": {"dp-size": 2}})
    assert "tp-size" not in config(done, "a")
    done = render(
        modes,
        {"name": "a", "gpus": [0, 1], "port": 1024, "args": {"tp-size": 2, "dp-size": 2, "enable-dp-attention": True}},
    )
    assert config(done, "a")["tp-size"] == 2


def test_cpu_profile_has_no_gpu(modes):
    done = render(modes, {"name": "a", "port": 30000}, profile=CPU)
    assert environment(done, "a")["CUDA_VISIBLE_DEVICES"] == ""
    assert done["instances"][0]["dtype"] == "float32"


def test_every_cache_is_inside_the_release(modes):
    env = environment(render(modes, {"name": "a", "gpus": [0], "port": 30000}), "a")
    for name in ("HOME", "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert env[name].startswith("/opt/sglang-fleet/current/cache")
    assert env["HF_HUB_OFFLINE"] == "1"


def test_environment_survives_quoting(modes):
    value = 'a "quoted" $HOME `id` back\\slash  two spaces #no comment'
    done = render(modes, {"name": "a", "gpus": [0], "port": 30000, "env": {"ODD": value}})
    assert environment(done, "a")["ODD"] == value


def test_values_of_flags_keep_their_type(modes):
    args = {
        "text": "yes",
        "number": 1.5,
        "set": True,
        "unset": False,
        "many": [1, 2],
        "json": {"a": {"b": 1}},
        "odd": "a: b # c",
    }
    flags = config(render(modes, {"name": "a", "gpus": [0], "port": 30000, "args": args}), "a")
    assert json.loads(flags.pop("json")) == {"a": {"b": 1}}
    assert {key: flags[key] for key in args if key != "json"} == {
        key: value for key, value in args.items() if key != "json"
    }


def test_the_key_itself_is_in_no_file(modes):
    done = render(modes, {"name": "a", "gpus": [0], "port": 30000, "api_key_file": "keys/a"})
    for unit in ("a", "a.baseline"):
        assert "LoadCredential=api_key:/etc/sglang-fleet/keys/a" in directives(done, unit)
    assert not [name for name in environment(done, "a") if "KEY" in name]
    assert done["instances"][0]["api_key_file"] == "/etc/sglang-fleet/keys/a"
    assert "api-key" not in config(done, "a")


def directives(deployment: dict[str, Any], config: str) -> list[str]:
    """What the drop-in of a unit adds to [Service]."""
    return deployment["files"][r.dropin_of(config)].partition("[Service]\n")[2].splitlines()


def test_an_engine_sees_its_own_gpus_alone(modes):
    gpus = [{**gpu, "minor": 3 - gpu["index"]} for gpu in GPUS]  # node numbers follow no order that a person knows
    done = render(modes, {"name": "a", "gpus": [2, 0], "port": 30000}, gpus=gpus)
    expected = ["/dev/char/195:255", "char-nvidia-uvm", "char-nvidia-caps", "char-nvidia-caps-imex-channels"]
    expected += ["/dev/char/195:1", "/dev/char/195:3"]
    lines = ["DevicePolicy=closed", *(f"DeviceAllow={device} rw" for device in expected), "ProtectClock=yes"]
    assert directives(done, "a") == lines
    assert directives(done, "a.baseline")[-len(lines) :] == lines


def test_a_gpu_of_unknown_number_opens_all(modes):
    lines = directives(render(modes, {"name": "a", "gpus": [0], "port": 30000}), "a")
    assert {"DeviceAllow=char-nvidia-frontend rw", "DeviceAllow=char-nvidia rw"} < set(lines)
    assert not [line for line in lines if "195:0" in line]


def test_without_a_gpu_no_device_is_left(modes):
    done = render(modes, {"name": "a", "port": 30000}, profile=CPU)
    assert directives(done, "a") == ["DevicePolicy=closed", "ProtectClock=yes"]


def test_device_policy_can_be_given_up_as_a_whole(modes):
    """ProtectClock alone would close all devices again."""
    done = render(modes, {"name": "a", "gpus": [0], "port": 30000}, device_policy="auto")
    assert r.dropin_of("a") not in done["files"]
    assert not [line for line in directives(done, "a.baseline") if "Device" in line or "Clock" in line]


def test_the_waiter_is_told_the_models(modes):
    env = environment(render(modes, {"name": "a", "gpus": [0], "port": 30000}), "a")
    assert env["FLEET_MODELS"] == "/srv/models/target:/srv/models/drafter"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("10.1.2.3", "http://10.1.2.3:30000"),
        ("::1", "http://[::1]:30000"),
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://[::1]:30000"),
        ("node7.example", "http://node7.example:30000"),
    ],
)
def test_url(address, url):
    assert wanted.url_of(address, 30000) == url


def test_exposed_names_instances_without_a_key(modes):
    done = render(
        modes,
        {"name": "a", "gpus": [0], "port": 30000, "address": "10.1.2.3"},
        {"name": "b", "gpus": [1], "port": 30001, "address": "10.1.2.3", "api_key_file": "k"},
        {"name": "c", "gpus": [2], "port": 30002, "address": "::1"},
    )
    assert r.exposed(done) == ["instance a listens on 10.1.2.3:30000 without an API key"]


A = {"name": "a", "gpus": [0], "port": 30000}
B = {"name": "b", "gpus": [1], "port": 30001}


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        (
            [{**A, "mode": "tree"}],
            "instance a: unknown mode 'tree'; expected one of baseline, dflash, ddtree-shadow, ddtree",
        ),
        (
            [A, {**B, "gpus": [0]}],
            "instance b: GPU GPU-00000000-aaaa is already used by instance a; one instance per GPU",
        ),
        ([A, {**B, "gpus": [GPUS[0]["uuid"]]}], "instance b: GPU GPU-00000000-aaaa is already used by instance a"),
        ([{**A, "gpus": [0, 0]}], "instance a: GPU 0 is named twice; each GPU once"),
        ([{**A, "gpus": [9]}], "instance a: GPU 9 is not on this host; it has 0 (GPU-00000000-aaaa)"),
        ([{**A, "gpus": [True]}], "instance a: GPU True is not on this host"),
        ([{**A, "gpus": []}], "instance a: gpus is empty; name at least one GPU"),
        ([{**A, "gpus": 0.5}], "instance a: gpus is 0.5, expected a list"),
        ([A, {**B, "port": 30000}], "instance b: port 30000 is already used by instance a"),
        ([{**A, "port": 80}], "instance a: port is 80, expected a number from 1024 to 65535"),
        ([{**A, "port": "30000"}], "instance a: port is '30000', expected a number"),
        ([A, {**B, "name": "a"}], "instance a: the name is used twice"),
        ([{**A, "name": "a.baseline"}], "instance a.baseline: name 'a.baseline' is not usable"),
        ([{**A, "name": "../x"}], "instance ../x: name '../x' is not usable"),
        ([{"gpus": [0]}], "instance number 1: name, port missing"),
        ([{**A, "buget": 3}], "instance a: unknown key buget; known are "),
        ([{**A, "budget": 0}], "instance a: budget is 0, expected a whole number of at least 1"),
        ([{**A, "budget": True}], "instance a: budget is True, expected a whole number of at least 1"),
        ([{**A, "topk": "8"}], "instance a: topk is '8', expected a whole number of at least 1"),
        ([{**A, "spine": 16}], "instance a: spine 16 is above budget 15"),
        ([{**A, "draft_model_path": None}], "instance a: mode ddtree needs draft_model_path"),
        ([{**A, "model_path": "org/model"}], "instance a: model_path is 'org/model', expected the absolute path"),
        ([{**A, "model_path": "/home/me/m"}], "instance a: model_path /home/me/m is hidden from the unit"),
        (
            [{**A, "args": {"page-size": 16}}],
            "instance a: page-size 16 can't be used with mode ddtree; set page-size 1",
        ),
        (
            [{**A, "args": {"api_key": "x"}}],
            "instance a: args has api-key; use the instance's key api_key_file instead",
        ),
        ([{**A, "args": {"--port": 1}}], "instance a: args has port; use the instance's key port instead"),
        ([{**A, "args": {"a b": 1}}], "instance a: args has 'a b', which is no flag of the engine"),
        ([{**A, "args": ["x"]}], "instance a: args is ['x'], expected a mapping"),
        ([{**A, "args": {"x": [[1]]}}], "instance a: args x is a list of lists or mappings"),
        (
            [{**A, "env": {"CUDA_VISIBLE_DEVICES": "0"}}],
            "instance a: env has CUDA_VISIBLE_DEVICES; use the instance's key gpus",
        ),
        ([{**A, "env": {"A-B": "0"}}], "instance a: env has 'A-B', which is no name of a variable"),
        ([{**A, "env": {"A": "x\ny"}}], "instance a: env A has more than one line"),
        ([{**A, "address": "no such"}], "instance a: address is 'no such', expected an IP address or name of the host"),
        ([{**A, "args": {"tp-size": 2}}], "instance a: tp-size 2 needs 2 GPUs, but gpus names 1"),
        ([{**A, "args": {"tp-size": 0}}], "instance a: {'tp-size': 0} must be whole numbers above 0"),
        (
            [{**A, "api_key_file": 5}],
            "instance a: api_key_file is 5, expected the path of a file on the control machine",
        ),
        ([], "gpu_units_instances is empty; add at least one"),
        (["a"], "instance number 1: 'a' is not a mapping"),
    ],
)
def test_a_mistake_gets_one_sentence(modes, instances, expected):
    found = problems(modes, *instances)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_all_mistakes_at_once(modes):
    found = problems(modes, {**A, "budget": 0, "mode": "x"}, {**B, "port": 30000, "topk": 0})
    assert len(found) == 3


def test_gpus_are_refused_on_the_cpu_profile(modes):
    (found,) = problems(modes, A, profile=CPU)
    assert found.startswith("instance a: gpus is [0], but profile cpu has none")


def test_a_mistake_in_the_defaults_is_named_once(modes):
    (found,) = problems(modes, A, B, defaults={**DEFAULTS, "modle": 1})
    assert found.startswith("gpu_units_defaults: unknown key modle")


def test_the_id_follows_content_alone(modes):
    one, same = render(modes, A), render(modes, dict(reversed(A.items())))
    assert one["id"] == same["id"]
    assert len({one["id"], render(modes, A, release="def")["id"], render(modes, {**A, "budget": 7})["id"]}) == 3


def test_a_switch_changes_one_instance_and_its_id(modes):
    live = render(modes, A, B, release="live")
    other = render(modes, {**A, "mode": "dflash"}, {**B, "budget": 7}, release="newer")
    done = r.switched(live, other, "a")
    assert (done["release"], done["switched"]) == ("live", True)
    assert [instance["mode"] for instance in done["instances"]] == ["dflash", "ddtree"]
    assert config(done, "a")["speculative-algorithm"] == "DFLASH"
    assert {path for path in live["files"] if live["files"][path] != done["files"].get(path)} == {f"{r.ETC}/a.yaml"}
    assert done["id"] == r.deployment_id(done) != live["id"]
    back = r.switched(done, render(modes, A, B), "a")
    assert back["id"] == live["id"]


def names(instances: list[dict[str, Any]]) -> list[str]:
    return [instance["name"] for instance in instances]


def test_only_what_changes_is_stopped(modes):
    old = render(modes, A, B)
    assert names(r.changed_instances(old, render(modes, A, B))) == []
    assert names(r.changed_instances(old, render(modes, A, {**B, "budget": 7}))) == ["b"]
    assert names(r.changed_instances(old, render(modes, A))) == ["b"]
    assert names(r.changed_instances(old, render(modes, A, B, {"name": "c", "gpus": [2], "port": 30002}))) == []
    assert names(r.changed_instances(old, render(modes, A, B, release="def"))) == ["a", "b"]
    assert names(r.changed_instances(old, render(modes, A, B, common={r.UNIT: "[Unit]\n#\n"}))) == ["a", "b"]
    assert names(r.changed_instances(old, None)) == ["a", "b"]
    assert r.changed_instances(None, old) == []


def test_the_engine_reads_the_config(modes):
    """The file form is the engine's: dashes as in its help, true for a flag without value, lists in one line."""
    text = render(modes, {**A, "mode": "ddtree-shadow"})["files"][f"{r.ETC}/a.yaml"]
    assert "speculative-ddtree-shadow-linear: true\n" in text
    assert 'speculative-algorithm: "DDTREE"\n' in text
