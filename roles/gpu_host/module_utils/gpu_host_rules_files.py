# SPDX-License-Identifier: Apache-2.0
"""Rules about the files of target and drafter: the right folder, whole, and the engine's user may read it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from ansible.module_utils.gpu_host_rules import BLOCK, MODES, Case, Hit, Map, args_of, label, rule, shown
from ansible.module_utils.gpu_host_words import near

HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 - refused, not used
DRAFTER = "DFlashDraftModel"
KEYS = ("model_path", "draft_model_path")
# Formats of weights that the checks of files are about; others fetch, make up or convert them.
FORMATS = ("auto", "safetensors", "fastsafetensors")
FEW = 3


def model_paths(instances: list[Map]) -> list[str]:
    """Every folder of a host that rules about models have to know: of targets, drafters and tokenizers of their own."""
    paths = [one.get(key) for one in instances for key in KEYS]
    paths += [args_of(one).get("tokenizer-path") for one in instances]
    return sorted({path for path in paths if isinstance(path, str) and path.startswith("/")})


class Use(NamedTuple):
    """A folder as one key of instances names it: a fault of it is told once."""

    path: str
    key: str
    instances: list[tuple[int, Map]]
    model: Map

    @property
    def thing(self) -> str:
        """The instances in a message."""
        first = label(self.instances[0][1], self.instances[0][0])
        return f"{first} and {len(self.instances) - 1} more" if len(self.instances) > 1 else first


def named(case: Case, *keys: str) -> Iterator[Use]:
    """Absolute paths of models as instances name them, drafters only where a mode drafts; looked at or not."""
    found: dict[tuple[str, str], Use] = {}
    for key in keys or KEYS:
        for at, instance in enumerate(case.instances):
            path = instance.get(key)
            if isinstance(path, str) and (key == "model_path" or instance.get("mode") != "baseline"):
                use = found.setdefault((path, key), Use(path, key, [], case.model(path) or {}))
                use.instances.append((at, instance))
    yield from found.values()


def uses(case: Case, *keys: str) -> Iterator[Use]:
    """Those that were looked at."""
    return (use for use in named(case, *keys) if use.model)


def once(case: Case) -> Iterator[Use]:
    """Every folder once, whatever keys name it."""
    told: set[str] = set()
    for use in uses(case):
        if use.path not in told:
            told.add(use.path)
            yield use


def read_from_files(use: Use) -> bool:
    """Whether an instance loads the weights as they lie there."""
    for _, instance in use.instances:
        args = args_of(instance)
        how = args.get("load-format", "auto")
        if use.key == "draft_model_path":
            how = args.get("speculative-draft-load-format", how)
        if how in FORMATS:
            return True
    return False


def hidden(path: str, model: Map) -> str | None:
    """A folder of the model that the unit does not see, links followed."""
    return next((one for one in (path, *model.get("leads", [])) if f"{one}/".startswith(HIDDEN)), None)


def copy(case: Case, path: str, names: list[str] | None = None) -> str:
    """The command that copies a model, or some of its files, from FOLDER here to the host; links become files."""
    # A pattern among the names is the shell's to read.
    sources = " ".join(f"FOLDER/{name if '*' in name else shlex.quote(name)}" for name in names or []) or "FOLDER/*"
    to, reach, options = shlex.quote(path), case.wanted.get("reach", case.host), case.wanted.get("ssh") or ""
    if not reach:
        return f"mkdir -p {to} && cp -rL {sources} {to}/"
    there = shlex.quote(f"{reach}:{path}/")
    ssh, scp = (f"{program} {options}".rstrip() for program in ("ssh", "scp"))
    return f"{scp} {sources} {there}" if names else f"{ssh} {reach} mkdir -p {to} && {scp} -r {sources} {there}"


def copied(case: Case, path: str, names: list[str] | None = None) -> str:
    """The fix for a model that is there in part."""
    return f"Copy it again: `{copy(case, path, names)}`, with FOLDER a folder that has all of the model."


def some(words: list[str]) -> str:
    """The first of many words of a message, and how many more there are."""
    more = f" and {len(words) - FEW} more" if len(words) > FEW else ""
    return ", ".join(words[:FEW]) + more


@rule(
    "model-path-bad",
    BLOCK,
    "An engine serves folders of the host, a target and, in all modes but baseline, a drafter; none is fetched by its name.",
    source="docs/operations.md",
    needs_host=False,
)
def model_path_bad(case: Case) -> Iterator[Hit]:
    """Absolute paths for the target, and for the drafter in every speculating mode."""
    for at, instance in enumerate(case.instances):
        mode = instance.get("mode")
        for key in ("model_path", "draft_model_path"):
            path = instance.get(key)
            if key == "draft_model_path" and (mode == "baseline" or mode not in MODES) and path is None:
                continue
            if not isinstance(path, str) or not path.startswith("/"):
                yield Hit(
                    label(instance, at),
                    f"{key} {shown(path)}",
                    "the absolute path of a folder on the host",
                    f"Set {key} for it in {case.where} or in gpu_units_defaults"
                    + ("; without a drafter, mode: baseline." if key == "draft_model_path" else "."),
                )


@rule(
    "path-hidden",
    BLOCK,
    "The unit sees no home folder and has its own /tmp (ProtectHome, PrivateTmp), so the engine would not find it.",
    source="https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html",
    needs_host=False,
)
def path_hidden(case: Case) -> Iterator[Hit]:
    """Models lie where a hardened unit can read them, links followed."""
    for use in named(case):
        found = hidden(use.path, use.model)
        if found:
            # Hugging Face's cache holds links, which lead nowhere once they are moved.
            cached = re.search(r"/models--([^/]+)/snapshots/", use.path)
            to = f"/srv/models/{cached.group(1) if cached else use.path.rstrip('/').rpartition('/')[2]}"
            verb = "cp -rLT" if cached or found != use.path else "mv"
            yield Hit(
                use.thing,
                f"{use.key} {use.path}" + ("" if found == use.path else f", whose files lie in {found}"),
                "a folder outside of home folders and /tmp, such as /srv/models",
                f"On the host: `mkdir -p /srv/models && {verb} {shlex.quote(use.path)} {shlex.quote(to)}`; "
                f"then set {use.key}: {to} in {case.where}.",
            )


@rule(
    "model-missing",
    BLOCK,
    "The engine would fail at its start; nothing is fetched by it.",
    source="docs/operations.md",
)
def model_missing(case: Case) -> Iterator[Hit]:
    """The target's folder has config.json and all of its weights."""
    for use in uses(case, "model_path"):
        yield from _folder(case, use)


@rule(
    "drafter-missing",
    BLOCK,
    "Every mode but baseline drafts with this model.",
    source="docs/operations.md",
)
def drafter_missing(case: Case) -> Iterator[Hit]:
    """The drafter's folder has config.json and all of its weights, in every mode that drafts."""
    for use in uses(case, "draft_model_path"):
        yield from _folder(case, use)


def _folder(case: Case, use: Use) -> Iterator[Hit]:
    """What lies there in place of a model, or what a model's folder lacks."""
    path, model = use.path, use.model
    instead = model.get("instead") or {}
    missing = [one for one in model["missing"] if one == "config.json" or read_from_files(use)]
    expected = "a folder with config.json and weights"
    if not model["exists"]:
        observed, fix = _nothing(case, use, instead)
    elif model["error"]:
        observed, expected = model["error"], "a config.json that can be read"
        fix = copied(case, path, ["config.json"])
        if "ermission denied" in observed:
            fix = f"Let root and others read it, where the files are stored: `chmod -R a+rX {shlex.quote(path)}`."
    elif missing:
        observed, fix = f"no {some(missing)}", copied(case, path)
        if model.get("partial"):
            observed += f"; a copy or download was cut short: {some(model['partial'])}"
        if "config.json" in missing:
            fix = _meant(case, use, fix)
    else:
        return
    yield Hit(use.thing, f"{use.key} {path}: {observed}", expected, fix)


def _nothing(case: Case, use: Use, instead: Map) -> tuple[str, str]:
    """(what is observed, fix) where no folder is."""
    if instead.get("file"):
        fix = f"Name the model's folder as {use.key} in {case.where}; one file alone, such as GGUF, is not served."
        return "it is a file", _meant(case, use, fix)
    if instead.get("link"):
        link, aim = instead["link"]
        fix = f"Mount or copy what it leads to, or let it lead to the model: `ln -sfn FOLDER {shlex.quote(link)}`."
        return f"{link} is a link to {aim}, which is not there", fix
    fix = f"Copy it there: `{copy(case, use.path)}`, with FOLDER where it lies; or correct {use.key} in {case.where}."
    return "no such folder", _meant(case, use, fix)


def _meant(case: Case, use: Use, otherwise: str) -> str:
    """The fix where models lie just below or beside the path: name those that fit the key."""
    there = (use.model.get("instead") or {}).get("models") or []
    fitting = [one["path"] for one in there if one["drafter"] == (use.key == "draft_model_path")]
    folder, _, name = use.path.rstrip("/").rpartition("/")
    if (
        not use.model["exists"] and folder
    ):  # what lies beside it is meant only if its name is nearly the one that was written
        names = {path.removeprefix(f"{folder}/"): path for path in fitting if path.startswith(f"{folder}/")}
        alike = [names[one] for one in names if name.lower() in one.lower()] or [
            names[one] for one in near(name, names)
        ]
        fitting = [path for path in fitting if path in alike or path not in names.values()]
    if len(fitting) == 1:
        return f"Set {use.key}: {fitting[0]} in {case.where}. If that is not the model: {otherwise[:1].lower()}{otherwise[1:]}"
    if fitting:
        return f"Set {use.key} in {case.where} to the one that is meant: {', '.join(fitting)}."
    return otherwise
