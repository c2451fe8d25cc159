# SPDX-License-Identifier: Apache-2.0
"""Cases of the rules about models: what is done to the good host, and what the message has to hold."""

from __future__ import annotations

from typing import Any

from tests.unit.judge_kit import GIB, Change, both, drafter, first, good, host, inventory, target

SCP = "`ssh root@192.0.2.200 mkdir -p /srv/target && scp -r FOLDER/* root@192.0.2.200:/srv/target/`"
CUT = {
    "file": "model-00002-of-00004.safetensors",
    "size": 1048576,
    "expected": 4999802720,
    "lfs": False,
    "what": "its header says another size",
}
POINTER = {**CUT, "size": 135, "lfs": True, "what": "it is a Git LFS pointer, not the file"}
NOTHING: dict[str, Any] = {"file": False, "link": None, "models": []}
NEAR = [{"path": "/srv/target/it", "drafter": False}, {"path": "/srv/target/draft", "drafter": True}]
CLOSED = {"path": "/srv", "real": "/data", "need": "search", "mode": "0750", "owner": "ann"}
INNER = {"path": "/srv/target", "real": "/data/target", "need": "read and search", "mode": "0700", "owner": "root"}
FILE = {"need": "read", "mode": "0600", "owner": "root"}
FILES = [
    {**FILE, "path": f"/srv/target/{n}", "real": f"/data/target/{n}"} for n in ("config.json", "model.safetensors")
]
NONE = {"found": False, "broken": []}


def gone(**instead: Any) -> Change:
    """Something else in place of the target's folder."""
    return target(exists=False, instead=NOTHING | instead)


MODELS: list[tuple[str, Change, list[str]]] = [
    ("model-path-bad", first(model_path="org/model"), ["model_path", "absolute"]),
    ("model-path-bad", first(draft_model_path=None), ["draft_model_path nothing"]),
    (
        "path-hidden",
        first(model_path="/home/ann/target"),
        ["`mkdir -p /srv/models && mv /home/ann/target /srv/models/target`", "model_path: /srv/models/target in"],
    ),
    ("path-hidden", first(draft_model_path="/tmp/drafter"), ["/tmp/drafter"]),
    (
        "path-hidden",
        first(model_path="/root/hub/models--org--m/snapshots/ab"),
        ["`mkdir -p /srv/models && cp -rLT /root/hub/models--org--m/snapshots/ab /srv/models/org--m`"],
    ),
    (
        "path-hidden",
        target(leads=["/root/.cache/blobs", "/srv/target"], barred=[CLOSED]),
        ["/srv/target, whose files lie in /root/.cache/blobs", "cp -rLT /srv/target"],
    ),
    ("model-missing", gone(), ["model_path /srv/target: no such folder", SCP, "instance gpu0 and 7 more"]),
    (
        "model-missing",
        both(inventory(reach=""), gone()),
        ["`mkdir -p /srv/target && cp -rL FOLDER/* /srv/target/`"],
    ),
    (
        "model-missing",
        gone(models=[{"path": "/srv/targets", "drafter": False}]),
        ["no such folder", "Set model_path: /srv/targets in host_vars/ct200.yml", f"copy it there: {SCP}"],
    ),
    (
        "model-missing",
        gone(file=True, models=[{"path": "/srv", "drafter": False}]),
        ["/srv/target: it is a file", "Set model_path: /srv in host_vars/ct200.yml"],
    ),
    ("model-missing", gone(file=True), ["Name the model's folder as model_path in", "GGUF"]),
    (
        "model-missing",
        gone(link=["/srv/target", "/mnt/big/t"]),
        ["/srv/target is a link to /mnt/big/t, which is not there", "`ln -sfn FOLDER /srv/target`"],
    ),
    ("model-missing", target(missing=["config.json"]), ["no config.json", SCP]),
    (
        "model-missing",
        target(missing=["config.json", "*.safetensors"], instead=NOTHING | {"models": NEAR}, tokenizer=NONE),
        ["no config.json, *.safetensors", "Set model_path: /srv/target/it in host_vars/ct200.yml"],
    ),
    (
        "model-missing",
        target(missing=["config.json"], instead=NOTHING | {"models": [NEAR[0], {"path": "/b", "drafter": False}]}),
        ["to the one that is meant: /srv/target/it, /b."],
    ),
    (
        "model-missing",
        target(
            missing=[f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)], partial=["/srv/target/x.incomplete"]
        ),
        [
            "no model-00001-of-00004.safetensors, ",
            " and 1 more; a copy or download was cut short: /srv/target/x.incomplete",
        ],
    ),
    (
        "model-missing",
        target(error="config.json: broken"),
        ["broken", "scp FOLDER/config.json root@192.0.2.200:/srv/target/"],
    ),
    (
        "model-missing",
        target(error="/srv/target: Permission denied", tokenizer=NONE),
        ["Permission denied", "`chmod -R a+rX /srv/target`"],
    ),
    ("drafter-missing", drafter(exists=False), ["draft_model_path /srv/drafter", "no such folder"]),
    (
        "drafter-missing",
        drafter(missing=["config.json"], instead=NOTHING | {"models": NEAR}),
        ["Set draft_model_path: /srv/target/draft in"],
    ),
    # files
    (
        "weights-broken",
        target(broken=[CUT]),
        [
            "model_path /srv/target: model-00002-of-00004.safetensors has 1048576 bytes, its header says another size",
            "4999802720 bytes",
            "`scp FOLDER/model-00002-of-00004.safetensors root@192.0.2.200:/srv/target/`",
            "instance gpu0 and 7 more",
        ],
    ),
    ("weights-broken", drafter(broken=[{**CUT, "expected": None}] * 4), ["whole files", "and", "scp -r FOLDER/*"]),
    (
        "weights-broken",
        target(broken=[POINTER], git=True),
        ["Git LFS pointer", "`git -C /srv/target lfs pull`", "Or copy it"],
    ),
    ("weights-broken", target(broken=[POINTER]), ["Git LFS pointer", "`scp FOLDER/model-00002"]),
    (
        "model-unreadable",
        target(barred=[CLOSED, INNER]),
        [
            "/srv (mode 0750, owner ann), /srv/target (mode 0700, owner root) closed to user sglang, who will be one of the",
            "`chmod a+x /data && chmod -R a+rX /data/target`",
        ],
    ),
    (
        "model-unreadable",
        drafter(barred=FILES),
        ["`chmod a+r /data/target/config.json /data/target/model.safetensors`"],
    ),
    ("model-unreadable", target(barred=FILES * 2), ["`chmod -R a+rX /data/target`"]),
    (
        "model-unreadable",
        both(target(barred=[CLOSED]), host(user={"name": "ann", "uid": 1000, "gid": 1000, "groups": []})),
        ["closed to user ann folders"],
    ),
    (
        "tokenizer-missing",
        target(tokenizer=NONE),
        ["model_path /srv/target: no tokenizer", "`scp FOLDER/tokenizer* root@"],
    ),
    (
        "tokenizer-missing",
        target(tokenizer={"found": True, "broken": [{**POINTER, "file": "tokenizer.json"}]}),
        ["tokenizer.json has 135 bytes, it is a Git LFS pointer", "scp FOLDER/tokenizer.json root@"],
    ),
    (
        "tokenizer-missing",
        both(
            first(args={"tokenizer_path": "/srv/t"}),
            lambda _, facts: facts["models"].update({"/srv/t": {"exists": False, "error": None, "missing": []}}),
        ),
        ["tokenizer-path /srv/t: no tokenizer"],
    ),
    # what they are
    (
        "target-kind",
        target(architectures=["DFlashDraftModel"], tokenizer=NONE),
        ["Set model_path in host_vars/ct200.yml", "to the target, draft_model_path: /srv/target."],
    ),
    (
        "target-kind",
        both(target(architectures=["DFlashDraftModel"]), drafter(architectures=["Qwen3ForCausalLM"])),
        ["Exchange the two in host_vars/ct200.yml", ": model_path: /srv/drafter, draft_model_path: /srv/target."],
    ),
    (
        "drafter-kind",
        drafter(architectures=["Qwen3ForCausalLM"], hidden_size=7),
        ["Qwen3ForCausalLM", "DFlashDraftModel"],
    ),
    (
        "drafter-kind",
        inventory(defaults={**good()[0]["defaults"], "draft_model_path": "/srv/target"}),
        ["and the target itself", "mode: baseline", "instance gpu0 and 7 more"],
    ),
    ("drafter-foreign", drafter(vocab_size=7, mask_token_id=9999), ["vocabulary 7", "1024"]),
    ("drafter-foreign", drafter(num_target_layers=36), ["36", "4"]),
    (
        "drafter-foreign",
        drafter(num_target_layers=None, target_layer_ids=[0, 4]),
        ["target_layer_ids [0, 4]", "layers 0 to 3"],
    ),
    ("drafter-foreign", drafter(vocab_size=None, mask_token_id=1024), ["mask token 1024", "1024 tokens"]),
    ("drafter-malformed", drafter(block_size=1), ["block_size 1", "2 or more", "scp FOLDER/config.json root@"]),
    ("drafter-malformed", drafter(target_layer_ids="all"), ["target_layer_ids 'all'", "/srv/drafter/config.json"]),
    ("drafter-malformed", drafter(mask_token_id=-1), ["mask_token_id -1"]),
]
DUMMY = {"load-format": "dummy"}
# What looks alike and is no fault.
QUIET_MODELS: dict[str, Change] = {
    "weights that are made up": both(
        first(args=DUMMY),
        lambda wanted, _: wanted["instances"].__delitem__(slice(1, None)),
        target(broken=[CUT], missing=["*.safetensors"]),
        drafter(broken=[CUT]),
    ),
    "a drafter's weights where nothing drafts": both(
        lambda wanted, _: wanted["defaults"].update(mode="baseline"), drafter(broken=[CUT], barred=FILES, block_size=0)
    ),
    "requests of token ids": both(
        lambda wanted, _: wanted["defaults"].update(args={"skip_tokenizer_init": True}), target(tokenizer=NONE)
    ),
    "a tokenizer that lies elsewhere": both(
        lambda wanted, _: wanted["defaults"].update(args={"tokenizer-path": "/srv/t"}),
        target(tokenizer=NONE),
        lambda _, facts: facts["models"].update(
            {
                "/srv/t": {
                    "exists": True,
                    "error": None,
                    "missing": ["config.json"],
                    "tokenizer": {"found": True, "broken": []},
                }
            }
        ),
    ),
    "a drafter that says little of its target": drafter(
        block_size=None, num_target_layers=None, target_layer_ids=None, mask_token_id=None
    ),
    "partial files beside whole ones": target(partial=["/srv/target/.cache/huggingface/download/x.incomplete"]),
    "facts of models without files": lambda _, facts: (
        [
            model.pop(key)
            for model in facts["models"].values()
            for key in ("broken", "barred", "tokenizer", "leads", "instead")
        ]
        and None
    ),
    "large weights": target(weights=60 * GIB),
}
