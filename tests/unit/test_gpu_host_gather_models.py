# SPDX-License-Identifier: Apache-2.0
"""Model folders: what a config.json says, what a download left out."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from ansible.module_utils import gpu_host_gather_access as access
from ansible.module_utils import gpu_host_gather_models as gather


def model(folder: Path, config: object, weights: tuple[str, ...] = ("model.safetensors",)) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in weights:
        (folder / name).write_bytes(tensors())
    return str(folder)


def tensors(size: int = 4, **header: object) -> bytes:
    """A safetensors file of one tensor with `size` bytes."""
    text = json.dumps({"__metadata__": {"format": "pt"}, "a": {"data_offsets": [0, size]}} | header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def test_the_bundled_pair(repo: Path) -> None:
    target = gather.gather_model(str(repo / "models/nano/target"))
    drafter = gather.gather_model(str(repo / "models/nano/draft"))
    assert (target["exists"], target["missing"], target["error"], target["hybrid"]) == (True, [], None, False)
    assert drafter["architectures"] == ["DFlashDraftModel"]
    assert drafter["block_size"] == 16
    assert drafter["vocab_size"] == target["vocab_size"]
    assert drafter["num_target_layers"] == target["num_layers"]
    assert (drafter["target_layer_ids"], drafter["mask_token_id"]) == ([0, 1, 2], 3)
    assert (target["broken"], target["partial"], target["instead"], drafter["broken"]) == ([], [], None, [])
    assert (target["tokenizer"], drafter["tokenizer"]["found"]) == ({"found": True, "broken": []}, False)


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


def test_what_lies_in_place_of_a_model(tmp_path: Path) -> None:
    above = tmp_path / "pair"
    above.mkdir()
    target = model(above / "target", {})
    drafter = model(above / "draft", {"architectures": ["DFlashDraftModel"]})
    both = [{"path": drafter, "drafter": True}, {"path": target, "drafter": False}]
    assert gather.gather_model(str(above))["instead"] == {"file": False, "link": None, "models": both}
    assert gather.gather_model(str(above / "targt"))["instead"]["models"] == both, (
        "a slip of the pen: what is beside it"
    )
    file = gather.gather_model(f"{target}/config.json")
    assert (file["exists"], file["instead"]) == (
        False,
        {"file": True, "link": None, "models": [{"path": target, "drafter": False}]},
    )
    (tmp_path / "link").symlink_to("/nothing/at/all")
    gone = gather.gather_model(str(tmp_path / "link/target"))
    assert gone["instead"]["link"] == [str(tmp_path / "link"), "/nothing/at/all"]
    assert gather.gather_model(target)["instead"] is None


def test_a_cache_of_downloads_is_told_by_the_snapshot_in_use(tmp_path: Path) -> None:
    repo = tmp_path / "hub/models--org--m"
    for name in ("aaaa", "bbbb"):
        (repo / "snapshots").mkdir(parents=True, exist_ok=True)
        model(repo / "snapshots" / name, {})
    os.utime(repo / "snapshots/aaaa", (0, 0))
    for path in (repo, tmp_path / "hub", tmp_path):
        (found,) = gather.gather_model(str(path))["instead"]["models"]
        assert found["path"] == str(repo / "snapshots/bbbb"), "the newest"
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("aaaa")
    (found,) = gather.gather_model(str(repo))["instead"]["models"]
    assert found["path"] == str(repo / "snapshots/aaaa")


def test_a_download_cut_short_names_what_is_missing(tmp_path: Path) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    path = model(tmp_path / "m", {"model_type": "qwen3"}, names[:1])
    assert gather.gather_model(path)["missing"] == [names[1]], "the name alone tells how many there are"
    index = tmp_path / "m/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    facts = gather.gather_model(path)
    assert facts["missing"] == [names[1]]
    assert facts["weights"] == len(tensors())
    (tmp_path / "m" / names[1]).symlink_to("../../blobs/1f")
    assert gather.gather_model(path)["missing"] == [f"{names[1]} (a link to ../../blobs/1f, which is not there)"]
    (tmp_path / "m" / names[0]).unlink()
    (tmp_path / "m" / names[1]).unlink()
    assert gather.gather_model(path)["missing"] == list(names), "the index alone tells too"
    index.write_text("{}")
    assert gather.gather_model(path)["missing"][0].startswith("model.safetensors.index.json (KeyError")


def test_weights_that_lie_there_twice_count_once(tmp_path: Path) -> None:
    names = ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors", "pytorch_model.bin")
    path = model(tmp_path / "m", {"model_type": "mistral"}, names)
    size = len(tensors())
    assert gather.gather_model(path)["weights"] == 3 * size, "without an index all of the better kind"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "m/consolidated.safetensors").write_bytes(b"cut")
    facts = gather.gather_model(path)
    assert (facts["weights"], facts["missing"], facts["broken"]) == (2 * size, [], []), (
        "what is not loaded may be broken"
    )
    pair = model(tmp_path / "pair", {}, ("model.safetensors", "consolidated.safetensors"))
    (tmp_path / "pair/consolidated.safetensors").write_bytes(b"cut")
    assert gather.gather_model(pair)["broken"] == []


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4999802720\n"
ZIP = b"PK\x03\x04" + bytes(100) + b"PK\x05\x06" + bytes(18)
WHOLE = tensors(1000)


@pytest.mark.parametrize(
    ("name", "content", "expected", "what"),
    [
        ("model.safetensors", WHOLE[:-1], len(WHOLE), "its header says another size"),
        ("model.safetensors", WHOLE + b"x", len(WHOLE), "its header says another size"),
        ("model.safetensors", WHOLE[:40], None, "it ends within its header of"),
        ("model.safetensors", b"", None, "it is empty"),
        ("model.safetensors", b"1234", None, "it has no header"),
        ("model.safetensors", bytes(1000), None, "it has no header"),
        ("model.safetensors", b"\xff" * 1000, None, "it has no header"),
        ("model.safetensors", struct.pack("<Q", 4) + b"[[]]", None, "it has no header"),
        ("model.safetensors", struct.pack("<Q", 4) + b"{{{{", None, "it has no header"),
        ("model.safetensors", tensors(4, b={"shape": [1]}), None, "it has no header"),
        ("model.safetensors", POINTER, 4999802720, "Git LFS pointer"),
        ("model.safetensors", b"\n<!DOCTYPE html><html>401", None, "HTML page"),
        ("pytorch_model.bin", POINTER, 4999802720, "Git LFS pointer"),
        ("pytorch_model.bin", ZIP[:-30], None, "its end is missing"),
        ("pytorch_model.bin", b"garbage", None, "like no file of PyTorch"),
    ],
)
def test_weights_that_are_not_whole(tmp_path: Path, name: str, content: bytes, expected: int | None, what: str) -> None:
    path = model(tmp_path / "m", {}, ())
    (tmp_path / "m" / name).write_bytes(content)
    (fault,) = gather.gather_model(path)["broken"]
    assert (fault["file"], fault["size"], fault["expected"]) == (name, len(content), expected)
    assert what in fault["what"]
    assert fault["lfs"] == content.startswith(b"version")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", WHOLE),
        ("model.safetensors", struct.pack("<Q", 2) + b"{}"),
        ("pytorch_model.bin", ZIP),
        ("pytorch_model.bin", b"\x80\x02" + bytes(100)),
        ("model.pt", ZIP),
    ],
)
def test_weights_that_are_whole(tmp_path: Path, name: str, content: bytes) -> None:
    path = model(tmp_path / "m", {}, ())
    (tmp_path / "m" / name).write_bytes(content)
    (tmp_path / "m/training_args.bin").write_bytes(b"no weights")
    facts = gather.gather_model(path)
    assert (facts["broken"], facts["missing"], facts["weights"]) == ([], [], len(content))


def test_many_large_files_are_looked_at_by_their_heads(tmp_path: Path) -> None:
    names = [f"model-{n:05d}-of-00200.safetensors" for n in range(1, 201)]
    path = model(tmp_path / "m", {}, ())
    size = 4 << 30
    whole = tensors(0, a={"data_offsets": [0, size]})
    for name in names:
        with (tmp_path / "m" / name).open("wb") as file:
            file.write(whole)
            file.truncate(len(whole) + size)  # sparse
    facts = gather.gather_model(path)
    assert (facts["weights"], facts["broken"]) == (200 * (size + len(whole)), [])


def test_downloads_and_copies_that_were_cut_short(tmp_path: Path) -> None:
    path = model(tmp_path / "snapshots", {})
    whole = tmp_path / "snapshots"
    left = [
        ".cache/huggingface/download/ab.incomplete",
        "x.part",
        ".model.safetensors.x8Ab1z",
        "../blobs/cd.incomplete",
    ]
    for name in left:
        (whole / name).parent.mkdir(parents=True, exist_ok=True)
        (whole / name).touch()
    (whole / ".gitattributes").touch()
    facts = gather.gather_model(path)
    assert facts["partial"] == sorted(str(whole / name) for name in left[:3]) and facts["broken"] == []
    snapshot = model(whole / "abcd", {})
    assert [Path(one).name for one in gather.gather_model(snapshot)["partial"]] == ["cd.incomplete"]
    (whole / "model.safetensors.aria2").touch()
    assert "aria2" in gather.gather_model(path)["broken"][0]["what"]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, False),
        ({"tokenizer_config.json": "{}", "special_tokens_map.json": "{}"}, False),
        ({"tokenizer.json": "{}"}, True),
        ({"tokenizer.model": "x"}, True),
        ({"vocab.json": "{}"}, False),
        ({"vocab.json": "{}", "merges.txt": "x"}, True),
        ({"qwen.tiktoken": "x"}, True),
        ({"tekken.json": "{}"}, True),
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["t.T", null]}}'}, True),
    ],
)
def test_a_tokenizer(tmp_path: Path, files: dict[str, str], found: bool) -> None:
    path = model(tmp_path / "m", {})
    for name, text in files.items():
        (tmp_path / "m" / name).write_text(text)
    assert gather.gather_model(path)["tokenizer"] == {"found": found, "broken": []}


def test_a_tokenizer_that_is_not_whole(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {})
    for text, what in ((POINTER, "Git LFS"), (b"", "empty"), (b'{"model": {', "no whole JSON")):
        (tmp_path / "m/tokenizer.json").write_bytes(text)
        (fault,) = gather.gather_model(path)["tokenizer"]["broken"]
        assert what in fault["what"]


STRANGER = {"name": "sglang", "uid": None, "gid": None, "groups": []}


def closed(path: str, below: Path, **user: object) -> list[tuple[str, str]]:
    """What is closed to a user, below a folder: those above belong to the test run."""
    found = gather.gather_model(path, STRANGER | user)["barred"]
    return [(one["path"].removeprefix(str(below)), one["need"]) for one in found if one["path"].startswith(f"{below}/")]


def test_what_the_engines_user_may_not_read(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    path = model(store / "m", {})
    (tmp_path / "link").symlink_to("store/m")
    for folder in (store, store / "m"):
        folder.chmod(0o755)
    for file in (store / "m").iterdir():
        file.chmod(0o644)
    assert closed(path, tmp_path) == []
    store.chmod(0o750)
    assert closed(path, tmp_path) == [("/store", "search")]
    assert closed(str(tmp_path / "link"), tmp_path) == [("/store", "search")], "links are followed"
    assert closed(path, tmp_path, groups=[store.stat().st_gid]) == []
    assert closed(path, tmp_path, uid=os.getuid()) == []
    store.chmod(0o711)
    assert closed(path, tmp_path) == [], "a folder on the way need not be read"
    (store / "m").chmod(0o711)
    assert closed(path, tmp_path) == [("/store/m", "read and search")]
    (store / "m").chmod(0o755)
    (store / "m/model.safetensors").chmod(0o600)
    (store / "m/README.md").touch(0o600)
    (store / "m/tokenizer.json").touch(0o600)
    wanted = [("/store/m/model.safetensors", "read"), ("/store/m/tokenizer.json", "read")]
    assert closed(path, tmp_path) == wanted, "not what the engine does not read"
    (store / "m/model.safetensors").chmod(0o040)
    assert ("/store/m/model.safetensors", "read") in closed(path, tmp_path, uid=os.getuid()), "even its owner"
    (one,) = [one for one in gather.gather_model(path, STRANGER)["barred"] if one["path"].endswith("model.safetensors")]
    assert (one["mode"], one["real"]) == ("0040", str(store / "m/model.safetensors"))


def test_a_user_who_is_there_already_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(tmp_path / "m", {})
    (tmp_path / "m").chmod(0o700)
    user = {"name": "sglang", "uid": os.getuid() + 7, "gid": 7, "groups": []}
    monkeypatch.setattr(access.os, "geteuid", lambda: 0)
    monkeypatch.setattr(access, "in_child", lambda work, seconds: [])
    assert gather.gather_model(path, user)["barred"] == [], "an access list lets it in"
    monkeypatch.setattr(access, "in_child", lambda work, seconds: [path])
    assert [one["path"] for one in gather.gather_model(path, user)["barred"]] == [path]


def test_the_engines_user() -> None:
    root = access.engine_user("root", [])
    assert (root["uid"], root["gid"]) == (0, 0) and 0 in root["groups"]
    assert access.engine_user("nobody-of-this-name", ["root", "none"]) == {
        "name": "nobody-of-this-name",
        "uid": None,
        "gid": None,
        "groups": [0],
    }


def test_a_folder_that_may_not_be_looked_at_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, user: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(gather, "_gather", refuse)
    assert gather.gather_model("/net/m")["error"] == "/net/m: Permission denied"
