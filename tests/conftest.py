"""Fixtures that several test files share. No test touches the network."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import gzip
import json
import os
import pickle
import random
import signal
import tempfile
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process a core: torch's own threads would fight
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_STATE = tempfile.TemporaryDirectory(
    prefix="rlkit_state_"
)  # where runs of the tests are noted as their own
os.environ["XDG_STATE_HOME"] = _STATE.name
# else a copy of this process that ends would remove the folder
os.register_at_fork(after_in_child=_STATE._finalizer.detach)

# The same examples in each run, so that a failure belongs to the change at hand;
# `--hypothesis-profile=random` searches among others.
settings.register_profile("random", settings.default)
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

os.fsync = lambda handle: (
    None
)  # no test cuts the power; each run would wait for the disk some forty times
# A shell's background job ignores Ctrl-C, and one under nohup a closed terminal. So would all
# processes that tests interrupt.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
# while files are imported: what they make stays, and looking through it again and again is a third
# of the time
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """`--doctest-modules` is for the package: a test file is not compiled and imported a second
    time to look for examples in it."""
    found = yield
    return [file for file in found if not isinstance(file, DoctestModule)]


LONG = {  # the tests that CI leaves to .ci/long
    line
    for line in (Path(__file__).parent / "long.txt").read_text().splitlines()
    if not line.startswith("#")
}
COLLECTED: set[str] = set()  # their names, with and without the case
CASES = 3  # of a slow law that CI tries; .ci/long tries the others
# laws whose cases are cheap, and are what rlkit exists for
ALL_CASES = ("tests/laws/test_catalogue.py", "tests/functional/test_functional_laws.py")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    laws: dict[str, list[pytest.Item]] = {}
    for item in items:
        law = item.nodeid.partition("[")[0]
        names = {item.nodeid, law}
        COLLECTED.update(names)
        if names & LONG:
            item.add_marker(pytest.mark.long)
        elif item.get_closest_marker("slow") and not law.startswith(ALL_CASES):
            laws.setdefault(law, []).append(item)
    for cases in laws.values():
        last = len(cases) - 1
        spread = {round(last * i / (CASES - 1)) for i in range(CASES)}
        for i, item in enumerate(cases):
            if len(cases) > CASES and i not in spread:
                item.add_marker(pytest.mark.long)


@pytest.fixture
def long_names_without_a_test(request) -> set[str]:
    """Lines of long.txt whose file was collected as a whole and has no such test."""
    whole = {name.partition("::")[0] for name in COLLECTED}
    if any("::" in arg for arg in request.config.args):
        pytest.skip("only some tests of a file were asked for")
    return {name for name in LONG - COLLECTED if name.partition("::")[0] in whole}


def pytest_collection_finish():
    """No collection of garbage goes through the half a million objects of the imports again, and
    few go through all others."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 50)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def give_memory_back():
    """What the runs of a file have freed, which a run keeps for its next step, and models in cycles
    that no collection has come to. A process of tests held 10 GiB without it."""
    yield
    statm = Path("/proc/self/statm")
    if statm.exists() and int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > 2 << 30:
        gc.collect()
        with contextlib.suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def nothing_lost():
    """Each test begins as a process does: no earlier test's refused output is remembered."""
    from rlkit.system.files import LOST

    LOST.clear()


@pytest.fixture(scope="session", autouse=True)
def composing():
    """Hydra composes the same in less than half the time: what it does for each of fifty files of
    options, hundreds of times, is done once.

    A file is read once, and each composition gets a copy. A folder of options is listed once, and a
    text with `${…}` is parsed once. The map for `${…}` in defaults is made where there is one.
    After the merges, not after each of them, every node is told its parent. Gives a function that
    switches this off and on.
    """
    from hydra._internal import defaults_list
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository
    from hydra.core.object_type import ObjectType
    from omegaconf import base, grammar_parser
    from omegaconf.base import Box

    load, interpolation_map, known = (
        ConfigRepository.load_config,
        defaults_list._create_interpolation_map,
        {},
    )
    merge, adopt = ConfigLoaderImpl._compose_config_from_defaults_list, Box._re_parent
    options, parsed = ConfigRepository.get_group_options, grammar_parser.parse
    parse_once = functools.lru_cache(10_000)(parsed)

    def load_config(self, config_path):
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None:
            return None
        if source.scheme() == "file":
            changed = Path(source.path, source._normalize_file_name(config_path)).stat()
            key = (source.path, config_path, changed.st_mtime_ns, changed.st_size, changed.st_ino)
        else:
            key = (source.scheme(), source.provider, source.path, config_path)
        if key not in known:
            known[key] = pickle.dumps(load(self, config_path))
        return pickle.loads(known[key])

    def list_once(source, group, results_filter):
        if source.scheme() != "file":
            return source.list(group, results_filter)
        changed = Path(source.path, group).stat()
        key = (source.path, group, results_filter, changed.st_mtime_ns, changed.st_ino)
        if key not in known:
            known[key] = source.list(group, results_filter)
        return known[key]

    def get_group_options(self, group_name, results_filter=ObjectType.CONFIG):
        sources = [source for source in self.sources if source.is_group(group_name)]
        found = [list_once(source, group_name, results_filter) for source in sources]
        return sorted({name for names in found for name in names})

    def where_needed(overrides, defaults, self_added):
        return (
            interpolation_map(overrides, defaults, self_added)
            if any(d.is_interpolation() for d in defaults)
            else None
        )

    def merge_all(self, defaults, repo):
        Box._re_parent = lambda self: None
        try:
            config = merge(self, defaults, repo)
        finally:
            Box._re_parent = adopt
        adopt(config)
        return config

    def switch(on):
        ConfigRepository.load_config = load_config if on else load
        ConfigRepository.get_group_options = get_group_options if on else options
        base.parse = parse_once if on else parsed
        defaults_list._create_interpolation_map = where_needed if on else interpolation_map
        ConfigLoaderImpl._compose_config_from_defaults_list = merge_all if on else merge

    switch(True)
    return switch


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
def toolless(tiny):
    """The tokenizer of the embedded model with the template of SmolLM2-135M-Instruct, which knows
    no tools."""
    import copy

    tokenizer = copy.deepcopy(tiny.renderer.tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging"
        " Face<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' +"
        " message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The option of `model` for SmolLM2-135M-Instruct, if `rlkit get` has fetched it."""
    from rlkit.models.load import find_fetched_folder

    name = "smollm2_135m"
    folder = find_fetched_folder(name)
    if folder is None or not folder.is_dir():
        pytest.skip(f"SmolLM2 is not on this machine: rlkit get {name} fetches it")
    return name


@pytest.fixture(scope="session")
def experiment():
    """The default experiment, as `rlkit train` would build it."""
    from rlkit.config.compose import compose, experiment

    return experiment(compose([]))


class Weather:
    """Waiting for something outside, without time: what is waited for comes in an order, and after
    turns of the loop, that `seed` says."""

    def __init__(self, seed):
        self.rng, self.coming, self.task = random.Random(seed), [], None

    async def pause(self, *_):
        if self.task is None:
            self.task = asyncio.create_task(self.blow())
        here = asyncio.Event()
        self.coming.append(here)
        await here.wait()

    async def blow(self):
        while self.coming or self.rng.random() < 0.9:
            if self.coming and self.rng.random() < 0.3:
                self.coming.pop(self.rng.randrange(len(self.coming))).set()
            await asyncio.sleep(0)  # one turn of the loop
        self.task = None


@pytest.fixture(scope="session")
def weather():
    return Weather


@pytest.fixture(scope="session")
def complete():
    """(engine, policy, prompts, seeds, follow, **params) → the last completion of each prompt, all
    prompts sampled side by side.

    `follow(index, reply)` gives the next prompt of the same episode and its seed, or None; without
    it each has one completion.
    """
    from rlkit.system.loops import run, run_together
    from rlkit.types import SamplingParams

    def complete(engine, policy, prompts, seeds, follow=lambda index, reply: None, **params):
        async def episode(index, prompt, seed):
            try:
                while True:
                    reply = await engine.generate(index, prompt, seed, SamplingParams(**params))
                    after = follow(index, reply)
                    if after is None:
                        return reply._replace(versions=())
                    prompt, seed = after
            finally:
                engine.release(index)

        async def all_of_them():
            await engine.load(policy, 0)
            return await run_together(
                episode(i, p, s) for i, (p, s) in enumerate(zip(prompts, seeds, strict=True))
            )

        return run(all_of_them())

    return complete


@pytest.fixture(scope="session")
def reference():
    """(policy, prompts, seeds, **params) → completions of the reference engine."""
    from rlkit.engines.transformers import complete
    from rlkit.types import SamplingParams

    def reference(policy, prompts, seeds, *, max_rows=256, use_cache=True, **params):
        return complete(
            policy, prompts, seeds, SamplingParams(**params), max_rows=max_rows, use_cache=use_cache
        )

    return reference


@pytest.fixture(scope="session")
def same():
    """(a, b) → whether nested containers of tensors and numbers are equal, bit for bit; nan equals
    nan."""
    import torch

    def equal(a, b) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(equal, a, b))
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or (a != a and b != b)

    return equal


@pytest.fixture(scope="session")
def timeless():
    """(file of rollouts) → its rollouts without the seconds that their tools took."""

    def read(path: Path) -> list[dict]:
        with gzip.open(path, "rt") as lines:
            found = [json.loads(line) for line in lines]
        for result in (
            r for rollout in found for step in rollout["steps"] for r in step["tool_results"]
        ):
            del result["seconds"]
        return found

    return read


@pytest.fixture(scope="session")
def forked():
    """`copies.start_copy_of_rlkit`, in a process that has imported what a command needs."""
    from copies import import_all, start_copy_of_rlkit

    import_all()
    return start_copy_of_rlkit
