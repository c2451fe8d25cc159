# SPDX-License-Identifier: Apache-2.0
"""What the smoke reads from a host and asks of it: systemd, journal, processes, the engine's HTTP interface.

Everything that touches the machine is a method of `Host` or a function on a URL, so that tests can stand in for it.
Python 3.11+, standard library only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from ansible.module_utils import gpu_units_ended as ended

UNIT_PROPERTIES = (*ended.PROPERTIES, "InvocationID", "MainPID", "ControlGroup")
# systemd's own message for "unit is being started" (sd-messages.h, SD_MESSAGE_UNIT_STARTING).
UNIT_STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"
# One hierarchy, or systemd's own beside the old ones.
CGROUPS = [Path("/sys/fs/cgroup", name) for name in ("", "unified", "systemd")]

# The engine listens on this host: a proxy of the environment must not be asked for it.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class SmokeError(Exception):
    """Something the operator has to put right; the text names the thing, the expected state and the next step."""


class DeploymentError(SmokeError):
    """The record of the deployment cannot be used: `told` says why, `fix` what to do."""

    def __init__(self, told: str, fix: str) -> None:
        super().__init__(f"{told}; {fix}")
        self.told, self.fix = told, fix


def require_root() -> None:
    """Raises SmokeError for any other user: what it reads (units, journal, keys) is root's."""
    if os.geteuid() != 0:
        raise SmokeError(
            f"this needs root on the host, not uid {os.geteuid()}; set ansible_become: true in its host_vars"
        )


class Host:
    """The machine that the instances run on."""

    def __init__(
        self,
        state: str = "/var/lib/sglang-fleet",
        config: str = "/etc/sglang-fleet/instances",
        releases: str = "/opt/sglang-fleet/releases",
        root: str = "/",
    ) -> None:
        self.root = Path(root)
        self.state, self.config, self.releases = Path(state), Path(config), Path(releases)

    def deployment(self) -> dict[str, Any] | None:
        """The current deployment, None where nothing is deployed. Raises DeploymentError if it cannot be used."""
        path = self.state / "deployments" / "current.json"
        try:
            current = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(current["release"], str) or not isinstance(current["instances"], list):
                raise TypeError("release is a text and instances a list")
            if not isinstance(current["files"], dict):
                raise TypeError("files is a map")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DeploymentError(
                f"{path} cannot be used ({error!r})",
                f"`rm {path}` on the host, then `{{site}}`, which writes it anew",
            ) from error
        return dict(current)

    def unit(self, unit: str) -> dict[str, str]:
        """Properties of a unit, as systemd prints them."""
        text = _run("systemctl", "show", unit, f"--property={','.join(UNIT_PROPERTIES)}")
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def systemctl(self, verb: str, unit: str, timeout: float) -> str | None:
        """Run a verb on a unit; None when it worked, else what systemctl said."""
        try:
            done = subprocess.run(
                ["systemctl", verb, unit], capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return f"systemctl {verb} {unit} did not return within {timeout:.0f} s"
        if done.returncode == 0:
            return None
        return done.stderr.strip() or f"systemctl {verb} {unit} ended with {done.returncode}"

    def why(self, unit: str, state: Mapping[str, str], lines: Sequence[str], then: str | None = None) -> ended.Cause:
        """Why a unit does not serve, and what mends it; `{site}` stands for the command that deploys the host."""
        return ended.why(unit, state, lines, "{site}", then)

    def journal(self, invocation: str) -> Iterator[str]:
        """Messages of all processes of one invocation of a unit, oldest first."""
        yield from _journal(f"_SYSTEMD_INVOCATION_ID={invocation}")

    def journal_tail(self, unit: str, invocation: str, lines: int) -> list[str]:
        """The last messages of an invocation: what its processes wrote, and systemd's word on it."""
        matches = [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"]
        if not invocation:
            matches = [f"_SYSTEMD_UNIT={unit}", "+", f"UNIT={unit}"]
        return list(_journal(f"--lines={lines}", *matches))

    def journal_settings(self) -> str:
        """The files of journald's settings, each after its name; empty where they cannot be had."""
        try:
            return _run("systemd-analyze", "cat-config", "systemd/journald.conf")
        except SmokeError:
            return ""  # it only explains a check that has failed

    def journal_has_start(self, invocation: str) -> bool:
        """Whether systemd's message about the start of this invocation is still in the journal.

        The oldest messages are dropped first, so with this one there, nothing of the invocation has been dropped.
        """
        return any(_journal("--lines=1", f"MESSAGE_ID={UNIT_STARTING}", f"INVOCATION_ID={invocation}"))

    def processes(self, cgroup: str) -> list[int]:
        """Process ids in a control group and below it; empty when it is gone."""
        pids: list[int] = []
        folders = [root / cgroup.lstrip("/") for root in CGROUPS] if cgroup.strip("/") else []
        for path in (file for folder in folders for file in folder.rglob("cgroup.procs")):
            try:
                pids += [int(pid) for pid in path.read_text(encoding="ascii").split()]
            except OSError:  # the group went away while it was read
                continue
        return sorted(set(pids))

    def running_releases(self, cgroup: str) -> list[str]:
        """Release ids that the processes of a control group have files mapped from or work in.

        The interpreter of a venv is a link out of it and `current` is a link too, so the command line tells nothing; the
        working folder and mapped libraries carry the real path.
        """
        pattern = re.compile(re.escape(str(self.releases)) + r"/([^/\s]+)/")
        found: set[str] = set()
        for pid in self.processes(cgroup):
            try:
                maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
                folder = str(Path(f"/proc/{pid}/cwd").readlink())
            except OSError:  # the process ended
                continue
            found |= set(pattern.findall(f"{maps}\n{folder}/"))
        return sorted(found)

    def instance_text(self, name: str) -> str | None:
        """The file that an instance's engine is started with, None where there is none."""
        try:
            return (self.config / f"{name}.yaml").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SmokeError(
                f"the file of instance {name} cannot be read ({error}); set ansible_become: true in its host_vars"
            ) from error

    def matrix_rows(self, release: str) -> list[dict[str, Any]]:
        """Rows of the matrix of backends that a release was built for; [] for one without."""
        path = self.releases / release / "manifest.json"
        try:
            return list(json.loads(path.read_text(encoding="utf-8")).get("backends") or [])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise SmokeError(f"{path} cannot be used ({error!r}); `{{site}}` builds the release again") from error

    def api_key(self, path: str | None) -> str | None:
        if not path:
            return None
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SmokeError(
                f"the API key cannot be read ({error}); set ansible_become: true in its host_vars"
            ) from error


def _run(*command: str) -> str:
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SmokeError(f"{' '.join(command[:2])} failed ({error}); this host needs a running systemd") from error
    if done.returncode:
        raise SmokeError(f"{' '.join(command[:2])} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _journal(*matches: str) -> Iterator[str]:
    command = ["journalctl", "--quiet", "--no-pager", "--all", "--output=json", "--output-fields=MESSAGE", *matches]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        stdout, stderr = cast(IO[bytes], process.stdout), cast(IO[bytes], process.stderr)
        for raw in stdout:
            yield _message(json.loads(raw).get("MESSAGE"))
        error = stderr.read().decode(errors="replace").strip()
        if process.wait():
            raise SmokeError(
                f"journalctl failed: {error or process.returncode}; set ansible_become: true in its host_vars"
            )


def _message(value: Any) -> str:
    """A message field: text, or a list of bytes where it is not plain text, or a list of several such."""
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return bytes(value).decode("utf-8", errors="replace")
        return "\n".join(_message(item) for item in value)
    return "" if value is None else str(value)


# --- engine ------------------------------------------------------------------------------------------------------


def _request(url: str, body: dict[str, Any] | None, key: str | None, timeout: float) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)  # noqa: S310 (the URL is the deployment's own)
    try:
        with _direct.open(request, timeout=timeout) as response:
            return int(response.status), response.read()
    except urllib.error.HTTPError as error:
        return int(error.code), error.read()


def health(url: str, key: str | None, timeout: float) -> str:
    """ "200", another status, or why there was no answer."""
    try:
        return str(_request(f"{url}/health", None, key, timeout)[0])
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def scheduler_states(url: str, key: str | None, timeout: float, fields: Sequence[str]) -> list[dict[str, Any]] | str:
    """The named fields of every scheduler's arguments as they are in use, or why there are none.

    Only those are kept: the whole answer holds the API key.
    """
    try:
        status, raw = _request(f"{url}/server_info", None, key, timeout)
        if status != 200:
            return f"HTTP {status} from /server_info"
        states = json.loads(raw)["internal_states"]
        return [{field: state[field] for field in fields if field in state} for state in states]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {getattr(error, 'reason', error)}"


def generate(url: str, text: str, tokens: int, key: str | None, timeout: float, likeliest: int = 0) -> dict[str, Any]:
    """One greedy request of exactly `tokens` tokens to the native interface.

    Returns {ids, top, meta, error}; `top` holds the `likeliest` (log-probability, token id) pairs of each position.
    """
    body: dict[str, Any] = {
        "text": text,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    if likeliest:
        body |= {"return_logprob": True, "top_logprobs_num": likeliest, "logprob_start_len": -1}
    try:
        status, raw = _request(f"{url}/generate", body, key, timeout)
        if status != 200:
            return _failed(f"HTTP {status}: {raw[:200].decode(errors='replace')}")
        answer = json.loads(raw)
        meta = dict(answer["meta_info"])
        ids = [int(token) for token in answer["output_ids"]]
        top = [[[float(p[0]), int(p[1])] for p in position] for position in meta.get("output_top_logprobs") or []]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _failed(f"{type(error).__name__}: {getattr(error, 'reason', error)}")
    if likeliest and len(top) != len(ids):
        return _failed(f"{len(ids)} tokens came with log-probabilities of {len(top)}")
    return {"ids": ids, "top": top, "meta": meta, "error": None}


def _failed(error: str) -> dict[str, Any]:
    return {"ids": [], "top": [], "meta": {}, "error": error}


def dtype_of(instance: Mapping[str, Any]) -> str:
    """The number type that an instance computes in; `auto` is resolved as the engine does it, from the model's config.

    Raises SmokeError where that cannot be told.
    """
    dtype = str(instance["dtype"])
    if dtype != "auto":
        return dtype
    path = Path(str(instance["model_path"])) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SmokeError(
            f"instance {instance['name']} has dtype auto and {path} does not tell which ({error}); "
            f"name the dtype in the inventory"
        ) from error
    inner = {**config, **(config.get("text_config") or {})}
    stored = str(inner.get("dtype") or inner.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float16" if stored == "float32" else stored


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all; readable by everyone, as it holds no secret."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w", encoding="utf-8") as handle:
            json.dump(value, handle, indent=1)
            handle.write("\n")
            handle.flush()
            os.fsync(handle.fileno())
        new.chmod(0o644)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
