# SPDX-License-Identifier: Apache-2.0
"""Facts: the programs' real words in, plain data out; and what only a real file system and real sockets can show."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils import gpu_host_gather as gather

ROLE = Path(__file__).parents[2] / "roles/gpu_host"


def test_gpus_come_in_pci_order_with_their_own_index() -> None:
    # The format of nvidia-smi 580 as recorded on an H200; a second GPU before it, and a device without memory counters.
    text = (
        "00000000:81:00.0, GPU-b, NVIDIA H200, 9.0, 143771, 1643, 580.159.04\n"
        "00000000:06:00.0, GPU-a, NVIDIA H200, 9.0, [N/A], [Not Supported], 580.159.04\n"
    )
    gpus, driver = gather.parse_gpus(text)
    assert driver == "580.159.04"
    assert [(gpu["index"], gpu["uuid"], gpu["memory_total_mib"], gpu["memory_used_mib"]) for gpu in gpus] == [
        (0, "GPU-a", None, None),
        (1, "GPU-b", 143771, 1643),
    ]


def test_pci_order_is_that_of_numbers_not_of_words() -> None:
    text = "".join(f"{bus}, GPU-{bus}, X, 12.0, 1, 1, 580.1\n" for bus in ("00010000:01:00.0", "00000000:C1:00.0"))
    assert [gpu["pci"] for gpu in gather.parse_gpus(text)[0]] == ["00000000:c1:00.0", "00010000:01:00.0"]


def test_a_message_in_place_of_a_table_is_no_gpu() -> None:
    assert gather.parse_gpus("No devices were found\n") == ([], None)


def test_processes() -> None:
    assert gather.parse_processes("GPU-a, 428, python3, 1634\n") == [
        {"gpu_uuid": "GPU-a", "pid": 428, "name": "python3", "memory_mib": 1634}
    ]


@pytest.mark.parametrize(
    "text",
    [
        "DRIVER version      : 580.159.04\nCUDA Version        : 13.0\n",
        "| Driver Version: 580.159.04  CUDA Version: 13.0 |",
    ],
)
def test_cuda_of_the_driver(text: str) -> None:
    assert gather.parse_cuda_driver(text) == "13.0"
    assert gather.parse_cuda_driver("nothing") is None


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/system-sglang.slice/sglang@gpu0.service\n", "sglang@gpu0.service"),
        ("5:cpu:/\n1:name=systemd:/system.slice/ssh.service\n0::/\n", "ssh.service"),
        ("0::/user.slice/user-0.slice/session-1.scope\n", None),
        ("0::/\n", None),
    ],
)
def test_unit_of_a_process(text: str, unit: str | None) -> None:
    assert gather.unit_from_cgroup(text) == unit


def test_nvcc_and_systemd_versions() -> None:
    assert gather.parse_nvcc("Cuda compilation tools, release 13.0, V13.0.88\n") == "13.0"
    assert gather.parse_nvcc("") is None
    assert gather.parse_systemd("systemd 252 (252.39-1~deb12u1)\n+PAM\n") == 252
    assert gather.parse_systemd("") is None


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_real_listener_is_found_with_its_process(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        server.listen()
        port = server.getsockname()[1]
        found = [entry for entry in gather.gather_ports() if entry["port"] == port]
    assert [(entry["address"], entry["pid"]) for entry in found] == [(address, os.getpid())]
    assert found[0]["process"]


def test_addresses_that_can_be_bound() -> None:
    answer = gather.bindable(["127.0.0.1", "192.0.2.1"])
    assert answer["127.0.0.1"] is None
    assert answer["192.0.2.1"]


def test_interpreters_of_the_wanted_versions_only() -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = gather.gather_pythons([here, "2.6"])
    assert {python["version"] for python in found} == {here}
    assert all(python["venv"] and Path(python["path"]).exists() for python in found)


def test_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    facts = gather.gather_room(str(tmp_path / "a/b"))
    assert facts["disk"]["path"] == str(tmp_path)
    assert 0 < facts["disk"]["free"] <= facts["disk"]["total"]
    assert facts["current"] is None
    (tmp_path / "current").symlink_to("releases/abc")
    assert gather.gather_room(str(tmp_path))["current"] == "abc"


def test_a_program_that_is_missing_or_hangs_is_told() -> None:
    assert gather.run(["/nonexistent/program"])[0] == 127
    assert gather.run(["sleep", "60"], timeout=0.1)[0] == 124


# --- models -------------------------------------------------------------------------------------


def model(folder: Path, config: object, weights: tuple[str, ...] = ("model.safetensors",)) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in weights:
        (folder / name).write_bytes(b"12345")
    return str(folder)


def test_the_bundled_pair(repo: Path) -> None:
    target = gather.gather_model(str(repo / "models/nano/target"))
    drafter = gather.gather_model(str(repo / "models/nano/draft"))
    assert (target["exists"], target["missing"], target["error"], target["hybrid"]) == (True, [], None, False)
    assert drafter["architectures"] == ["DFlashDraftModel"]
    assert drafter["block_size"] == 16
    assert drafter["vocab_size"] == target["vocab_size"]
    assert drafter["num_target_layers"] == target["num_layers"]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_next"},
        {"model_type": "x", "layer_types": ["full_attention", "linear_attention"]},
        {"model_type": "qwen3_5_moe", "text_config": {"model_type": "y"}},
        {"model_type": "x", "text_config": {"model_type": "y", "layer_types": ["linear_attention"]}},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
        {"model_type": "x", "linear_attn_config": {}},
    ],
)
def test_hybrid_models(config: dict[str, object]) -> None:
    assert gather.describe_config(config)["hybrid"]


@pytest.mark.parametrize(
    "config",
    [{"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, {"model_type": "llama"}, {}],
)
def test_dense_models(config: dict[str, object]) -> None:
    assert not gather.describe_config(config)["hybrid"]


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    assert not gather.gather_model(str(tmp_path / "no"))["exists"]
    (tmp_path / "empty").mkdir()
    assert gather.gather_model(str(tmp_path / "empty"))["missing"] == ["config.json", "*.safetensors"]
    assert "config.json" in gather.gather_model(model(tmp_path / "broken", "{"))["error"]
    assert "no map" in gather.gather_model(model(tmp_path / "list", "[]"))["error"]
    assert gather.gather_model(model(tmp_path / "bare", {}, ()))["missing"] == ["*.safetensors"]


def test_a_download_that_was_cut_short(tmp_path: Path) -> None:
    names = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    path = model(tmp_path / "m", {}, (names[0],))
    index = tmp_path / "m/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    facts = gather.gather_model(path)
    assert facts["missing"] == [names[1]]
    assert facts["weights"] == 5
    index.write_text("{}")
    assert gather.gather_model(path)["missing"][0].startswith("model.safetensors.index.json")


# --- the whole, on this machine -----------------------------------------------------------------


def test_recording_runs_alone_without_ansible() -> None:
    script = ROLE / "module_utils/gpu_host_gather.py"
    done = subprocess.run(
        [sys.executable, "-I", str(script), "--record", "the test machine"], capture_output=True, text=True, check=True
    )
    recorded = json.loads(done.stdout)
    assert recorded["recorded"]["machine"] == "the test machine"
    assert set(recorded) == {"recorded", "gpu", "nvcc"}


def test_facts_of_this_machine_can_be_judged() -> None:
    from ansible.module_utils.gpu_host_judge import judge

    facts = gather.gather("/opt/sglang-fleet", ["3.12", "3.11"], ["/nonexistent"], ["127.0.0.1"])
    json.dumps(facts)
    verdict = judge("here", {"profile": "auto", "instances": [{"name": "a"}]}, facts)
    assert not verdict["ok"]
