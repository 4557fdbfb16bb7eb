"""Fixtures that several test files share. No test touches the network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process a core: torch's own threads would fight
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real rows and the real chat template, kept beside a checkout; absent elsewhere."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: the real data sets are not part of the project")
    return SHARED


@pytest.fixture(scope="session")
def tiny():
    """The embedded model. Tests must not change its weights."""
    from rlkit.models import load_policy

    return load_policy(path="tiny")


@pytest.fixture(scope="session")
def experiment():
    """The default experiment, as `rlkit train` would build it."""
    from rlkit.compose import compose, experiment

    return experiment(compose([]))
