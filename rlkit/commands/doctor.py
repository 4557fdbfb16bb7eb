"""`rlkit doctor`: show this machine's resources for a run, one line each. Nothing is downloaded,
and no file is left behind."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlkit.commands.arguments import Arguments
from rlkit.errors import ConfigError, name_error

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# a checkpoint of Qwen3-1.7B with its optimizer takes some 20 GB, adapters megabytes
LOW_DISK_GB = 10.0


class Finding(NamedTuple):
    """One line of the output. `bad` means that nothing can be trained on this machine. `warn` means
    that something may go wrong, or is slower than necessary."""

    what: str
    text: str
    state: Literal["ok", "warn", "bad", "off"] = "ok"  # off: a missing optional part


def _examine() -> list[Finding]:
    """Examine everything, in the order in which a run needs it. A failing part is a finding, never
    an error."""
    parts: tuple[Callable[[], list[Finding]], ...] = (
        check_python,
        check_packages,
        check_processors,
        check_devices,
        check_sandbox,
        check_disk,
        models,
        check_extras,
    )
    return [finding for part in parts for finding in _check_safely(part)]


def _check_safely(part: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return part()
    except Exception as error:  # this command must show every error of a broken installation
        return [Finding(part.__name__, name_error(error), "bad")]


def _show(findings: list[Finding]) -> str:
    """Write the findings as lines, and a last line on whether a run can start."""
    marks = {"ok": "ok  ", "warn": "warn", "bad": "BAD ", "off": "-   "}
    lines = [f"{marks[f.state]}  {f.what:<16} {f.text}" for f in findings]
    bad = [f.what for f in findings if f.state == "bad"]
    return "\n".join([*lines, "", f"not ready: {', '.join(bad)}" if bad else "ready: rlkit train"])


def check_python() -> list[Finding]:
    """Report the interpreter and the operating system."""
    return [
        Finding("python", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}")
    ]


def list_requirements(own: Distribution, extra: str = "") -> list[tuple[Requirement, str]]:
    """List (requirement, installed version) for rlkit or an extra; the version is "" if the package
    is missing."""
    from packaging.requirements import Requirement

    out = []
    for line in own.requires or ():
        needed = Requirement(line)
        applies = needed.marker is None or needed.marker.evaluate({"extra": extra})
        if applies and bool(extra) == ("extra ==" in line) and needed.name != own.name:
            with suppress(PackageNotFoundError):
                out.append((needed, version(needed.name)))
                continue
            out.append((needed, ""))
    return out


def _fits(needed: Requirement, installed: str) -> bool:
    """Return whether an installed version meets the requirement."""
    return bool(installed) and needed.specifier.contains(installed, prereleases=True)


def check_packages() -> list[Finding]:
    """Check rlkit and its requirements against the accepted versions."""
    from rlkit.errors import find_distribution

    own = find_distribution()
    if own is None:
        return [
            Finding(
                "rlkit",
                "is not installed, so its versions are not known; pip install -c constraints.txt"
                " -e .",
                "warn",
            )
        ]
    out = [Finding("rlkit", f"{own.name} {own.version} at {Path(__file__).parent.parent}")]
    for needed, installed in list_requirements(own):
        wanted = f"{needed.name}{needed.specifier}"
        remedy = (
            f"{installed or 'is not installed'}; rlkit takes {wanted}: pip install -c"
            f" constraints.txt '{wanted}'"
        )
        out.append(
            Finding(needed.name, installed)
            if _fits(needed, installed)
            else Finding(needed.name, remedy, "bad")
        )
    return out


def check_processors() -> list[Finding]:
    """Report the cores for this process, and torch's threads."""
    import torch

    from rlkit.system.processors import count_cores

    return [
        Finding("processors", f"{count_cores()} cores, {torch.get_num_threads()} threads of torch")
    ]


def check_devices() -> list[Finding]:
    """Report every GPU, after computing one matrix product on it."""
    import torch

    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else f"CUDA {torch.version.cuda}, but no GPU is seen"
        )
        return [Finding("devices", f"cpu ({why}); trainer=auto takes the CPU")]
    out = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        square = torch.eye(64, device=f"cuda:{index}")
        works = bool(torch.equal(square @ square, square))
        text = (
            f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB, bfloat16"
            f" {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
        )
        out.append(
            Finding(
                f"cuda:{index}",
                text if works else f"{text}; computes wrong numbers",
                "ok" if works else "bad",
            )
        )
    return out


def check_sandbox() -> list[Finding]:
    """Report the level of the sandbox, found by its self-test with hostile programs."""
    from rlkit.sandbox import SandboxError, find_level

    try:
        level = find_level()
    except SandboxError as error:
        return [Finding("sandbox", f"{error}; tasks whose code is run are refused", "warn")]
    text = str(level).removeprefix("sandbox: ")
    if level.name == "basic":
        return [
            Finding(
                "sandbox",
                f"{text}; model-written code is refused unless sandbox=weak consents"
                f" ({'; '.join(level.reasons)})",
                "warn",
            )
        ]
    return [Finding("sandbox", text)]


def check_disk() -> list[Finding]:
    """Report the disk space for runs, and whether this folder is writable."""
    from rlkit.runs.folder import OUTPUTS

    place = next(p for p in (OUTPUTS.resolve(), *OUTPUTS.resolve().parents) if p.exists())
    if not os.access(place, os.W_OK):
        return [
            Finding("disk", f"{place} cannot be written; change to a folder of your own", "bad")
        ]
    free = shutil.disk_usage(place).free / 1e9
    return [
        Finding(
            "disk",
            f"{free:.1f} GB free for {OUTPUTS.resolve()}",
            "ok" if free >= LOW_DISK_GB else "warn",
        )
    ]


def models() -> list[Finding]:
    """Report whether the embedded model can be read."""
    from rlkit.models.load import TINY

    missing = [
        name
        for name in ("config.json", "model.safetensors", "tokenizer.json")
        if not (TINY / name).is_file()
    ]
    if missing:
        return [
            Finding(
                "embedded model", f"{TINY} lacks {', '.join(missing)}; install rlkit again", "bad"
            )
        ]
    return [Finding("embedded model", str(TINY))]


def check_extras() -> list[Finding]:
    """Report the optional parts, and how to get missing ones."""
    from rlkit.errors import find_distribution, install

    own = find_distribution()
    if own is None:
        return []
    out = []
    for name in own.metadata.get_all("Provides-Extra") or ():
        missing = [
            f"{needed.name}{needed.specifier}"
            for needed, installed in list_requirements(own, name)
            if not _fits(needed, installed)
        ]
        text = f"absent: {', '.join(missing)} ({install(name)})" if missing else "there"
        out.append(Finding(f"extra {name}", text, "off" if missing else "ok"))
    return out


def command(arguments: Arguments) -> int:
    """Show versions, devices, sandbox, disk and extras of this machine. The exit status is 1 if
    nothing can be trained here.

        rlkit doctor
        rlkit doctor debug=true
    """
    if arguments.overrides:
        raise ConfigError("rlkit doctor takes no overrides; rlkit check takes those of a run")
    findings = _examine()
    print(_show(findings))
    return 1 if any(f.state == "bad" for f in findings) else 0
