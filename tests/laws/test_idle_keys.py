"""No key of conf/ is idle: for each of them tests/keys.yaml names a run in which another value
changes a weight, a row or a line, a test that shows it, or the reason why this machine cannot.

A key is a dotted path and the function that takes it, so the `algorithm.epochs` of thirty
algorithms is one key. Advice (`suggests`), presets and Hydra's own keys only set other keys.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rlkit
from parametrise import every_extra, read_yaml
from rlkit.commands.cli import main
from rlkit.config.compose import compose, conf_dir, experiment
from rlkit.engines import Batched
from rlkit.episodes.samplers import with_outcomes
from rlkit.episodes.stream import take
from rlkit.models.chat import encode_prompt, encode_scaffold, encode_text
from rlkit.system import rng
from rlkit.types import Generation, Message, Rollout, Step, Task, ToolCall, ToolResult

TESTS = Path(__file__).resolve().parents[1]
PRESETS = ("experiment", "debug")
TABLE = read_yaml((TESTS / "keys.yaml").read_text())
# names that a user chooses
NAMES = re.compile(r"(?<=\bphases\.)\w+|(?<=\bterms\.)\w+(?=\.weight$)")
KINDS = {"shown", "without"}  # beside the kinds of runs below

# ------------------------------------------------------------------------------------ all the keys


def merge(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


@functools.cache
def read_option(name: str) -> dict[str, Any]:
    """An option's file, over those of its own group that it is built on."""
    node = read_yaml(Path(conf_dir(), f"{name}.yaml").read_text()) or {}
    out: dict[str, Any] = {}
    for part in node.get("defaults", ()):
        if isinstance(part, str) and part != "_self_" and "/" not in part:
            out = merge(out, read_option(str(Path(name).parent / part)))
    return merge(out, {k: v for k, v in node.items() if k not in ("defaults", "shelf")})


def leaves(node: Mapping[str, Any], path: str, taker: str) -> Iterator[tuple[str, str]]:
    """(dotted path, name of the function that takes it) of each value."""
    taker = node.get("_target_", taker)
    for key, value in node.items():
        where = NAMES.sub("NAME", f"{path}.{key}".lstrip("."))
        if isinstance(value, dict) and value:
            yield from leaves(value, where, taker)
        elif key not in ("_target_", "_partial_"):
            yield where, taker.rpartition(".")[2]


def all_keys() -> set[tuple[str, str]]:
    """Every key of conf/ that is no advice, preset or key of Hydra's."""
    out = set()
    for file in Path(conf_dir()).rglob("*.yaml"):
        name = file.relative_to(conf_dir()).with_suffix("")
        if name.parts[0] not in PRESETS:
            found = leaves(read_option(str(name)), ".".join(name.parts[:-1]), "")
            out |= {key for key in found if not {"suggests", "hydra"} & {*key[0].split(".")}}
    return out


def entries() -> Iterator[tuple[dict[str, Any], str, str | None]]:
    """(row of the table, dotted path, taker where the row names one)."""
    for row in TABLE:
        for path in row["keys"]:
            yield row, path, row.get("of")


def test_every_key_stands_in_the_table_once():
    """A new key needs a run in which it acts. One that acts in none is removed."""
    keys = all_keys()
    takers: dict[str, set[str]] = {}
    for path, taker in keys:
        takers.setdefault(path, set()).add(taker)
    named = []
    for _, path, of in entries():
        assert path in takers, f"tests/keys.yaml: {path} is no key of conf/"
        assert of or len(takers[path]) == 1, f"tests/keys.yaml: {path} of which of {takers[path]}?"
        named += [(path, one) for one in takers[path] if of in (None, one)]
    assert sorted(keys - {*named}) == []
    assert sorted({key for key in named if named.count(key) > 1}) == []


def test_presets_set_only_keys_of_groups():
    known = {path for path, _ in all_keys()}
    tops = {path.partition(".")[0] for path in known}
    for file in Path(conf_dir()).rglob("*.yaml"):
        name = file.relative_to(conf_dir()).with_suffix("")
        if name.parts[0] in PRESETS:
            for path, _ in leaves(read_option(str(name)), "", ""):
                top = path.partition(".")[0]
                assert top in {*tops, "hydra"}, f"{file}: {path}"


@functools.cache
def names_of_tests(file: str) -> dict[str, str]:
    """Name of each function of a test file → its text."""
    text = (TESTS / file).read_text()
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    return {n.name: ast.get_source_segment(text, n) or "" for n in nodes}


@pytest.mark.slow
@pytest.mark.skipif(not every_extra(), reason="tests of a missing extra are not there")
def test_the_tests_of_the_table_are_there_and_each_reason_is_a_sentence():
    for row, path, _ in entries():
        assert row["kind"] in KINDS | RUNS.keys()
        if row["kind"] == "without":
            assert row["why"].endswith(".") and len(row["why"]) > 20
        if row["kind"] == "shown":
            file, _, name = row["by"].partition("::")
            assert name in names_of_tests(file), row["by"]
            assert path.rpartition(".")[2] in (TESTS / file).read_text(), (path, row["by"])


# ----------------------------------------------------------------------------------- what runs give

SMALL = ["trainer.threads=1", "trainer.accelerator=cpu", "evaluation.n=0", "logger=none"]


def digest(value: Any) -> str:
    """Of nested containers of tensors, numbers and text."""
    if isinstance(value, torch.Tensor):
        data = value.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(data).hexdigest()
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{digest(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(digest, value))}]"
    return repr(value)


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("perf/")}


@functools.cache
def small_policy():
    """A Qwen3 of one layer with the tokenizer of the embedded model."""
    from transformers import AutoModelForCausalLM

    tiny = rlkit.load_policy(path="tiny")
    config = copy.deepcopy(tiny.model.config)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    for name, size in (sizes | {"num_attention_heads": 2, "num_key_value_heads": 1}).items():
        setattr(config, name, size)
    config.layer_types = config.layer_types[:1]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.4)  # so that its distributions differ
    return tiny._replace(model=model)


PROMPT: tuple[Message, ...] = ({"role": "user", "content": "What is 3 + 4?"},)
TEXTS = (
    "It is 7, so it is 7, so it is 7.\n#### 7",
    "<think>\n3 + 4\n</think>\n\nThe answer is 8",
    "7",
    "I do not know.",
)
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
DEMONSTRATION = ({"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"})


@functools.cache
def played() -> list[Rollout]:
    """Two groups of four episodes with two replies each, sampled by something close to the
    policy: a call of a tool, rewards of steps, and one episode that is cut."""
    policy = small_policy()
    prompt = tuple(encode_text(policy.renderer, "What is 3 + 4?"))
    after = tuple(encode_text(policy.renderer, "\nYes?\n"))
    random = torch.Generator().manual_seed(1)
    out = []
    for i in range(8):
        ids = [encode_text(policy.renderer, TEXTS[(i + turn) % 4])[: 9 + i] for turn in range(2)]
        whole = torch.tensor([[*prompt, *ids[0], *after, *ids[1]]])
        with torch.no_grad():
            found = policy.model(whole).logits.log_softmax(-1)[0, :-1]
        chosen = found.gather(1, whole[0, 1:, None])[:, 0]
        noise = torch.randn(len(chosen), generator=random) * (0.05 if i % 2 else 0.6)
        old = [min(-1e-4, p) for p in (chosen + noise).tolist()]
        begin = len(prompt) - 1
        second = begin + len(ids[0]) + len(after)
        call = ToolCall("1", "calculator", {"expression": "3 + 4"})
        steps = (
            Step(
                PROMPT,
                prompt,
                tuple(ids[0]),
                tuple(old[begin : begin + len(ids[0])]),
                "stop",
                content=TEXTS[i % 4],
                tool_calls=(call,) * (i % 3),
                tool_results=(ToolResult("1", "calculator", "7", True),) * (i % 3),
                reward=0.25 * (i % 3),
            ),
            Step(
                ({"role": "user", "content": "Yes?"},),
                after,
                tuple(ids[1]),
                tuple(old[second:]),
                "length" if i == 5 else "stop",
                content=TEXTS[(i + 1) % 4],
                reward=0.5 * (i % 2),
                kept=len(prompt) + len(ids[0]),
            ),
        )
        task = Task(str(i // 4), PROMPT, answer="7", metadata={"messages": DEMONSTRATION})
        scores = {"numeric": float(i % 4 == 1), "format": 0.5 if i > 3 else 0.5 * (i % 2)}
        status = "truncated" if i == 5 else "terminated"
        cut = "length" if i == 5 else ""
        rollout = Rollout(task, steps, status, cut, group=i // 4, sample=i % 4)
        out.append(
            rollout._replace(
                reward=sum(scores.values()) + 0.1 * (i == 6), rewards=scores, greedy_reward=0.5
            )
        )
    return out


def run_steps(words: list[str], folder: Path, steps: int = 2) -> Any:
    """Steps of a learner on the same episodes: weights and metrics."""
    x = experiment(compose([*SMALL, "optimizer.lr=3e-3", "schedule=constant", *words]))
    policy = small_policy()
    own = policy._replace(model=copy.deepcopy(policy.model))
    learner = rlkit.Learner(x, own, exact=True)
    rows = []
    for _ in range(steps):
        with rng.seed_block(0):
            rows.append(timeless(learner.step(played())))
    return rows, dict(learner.nets.state_dict())


def score_all(words: list[str], folder: Path) -> Any:
    """The scores of the same episodes."""
    x = experiment(compose([*SMALL, *words]))
    scored = rlkit.score(played(), x.reward)
    return [(r.reward, r.rewards, r.statuses) for r in scored]


ROWS = {
    "rows.jsonl": [
        {"prompt": f"{i} + 1?", "question": f"{i} + 2?", "answer": f"{i + 1}", "other": f"{i + 2}"}
        for i in range(24)
    ],
    "more.jsonl": [{"prompt": f"{i} - 1?", "answer": f"{i - 1}"} for i in range(9)],
    "talk.jsonl": [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "7"},
            ],
            "turns": [{"role": "user", "content": f"{i}!"}, {"role": "assistant", "content": "8"}],
            "truth": f"{i}",
            "other": f"{i + 1}",
        }
        for i in range(24)
    ],
    "gsm8k/train.jsonl": [
        {"question": f"{i} + 1?", "answer": f"<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(24)
    ],
    "mbpp/train.jsonl": [
        {
            "text": f"Add {i}.",
            "code": f"def f(n):\n  return n + {i}",
            "task_id": i,
            "test_setup_code": "",
            "test_list": [f"assert f({n}) == {n + i}" for n in range(3)],
        }
        for i in range(9)
    ],
}
ROWS["more_talk.jsonl"] = ROWS["talk.jsonl"][5:]
ROWS["mbpp_2/train.jsonl"] = ROWS["mbpp/train.jsonl"][1:]
ROWS["gsm8k_2/train.jsonl"] = ROWS["gsm8k/train.jsonl"][1:]


def write_rows(folder: Path) -> None:
    for name, rows in ROWS.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_tasks(words: list[str], folder: Path) -> Any:
    """The tasks of all splits, and what reward=by_task and environment=by_task hold for them."""
    write_rows(folder)
    composed = compose([*SMALL, "evaluation.n=8", *words])
    x = experiment(composed)
    return rlkit.load_tasks(x), composed.config["reward"], composed.config["environment"]


class Game:
    """A game of three turns without rewards."""

    def reset(self, *, seed):
        self.turns = 0
        return "Move.", {}

    def step(self, action):
        self.turns += 1
        return f"You said {action}.", 0.0, self.turns == 3, False, {}


def speak(policy, prompts, seeds, params):
    """A reply that depends on the prompt's length alone, cut at the limit: calls, guesses, moves
    and thoughts."""
    said = (
        "<think>\nhm\n</think>\n\nIt is <guess>50</guess>",
        '<tool_call>{"name": "calculator", "arguments": {"expression": "3 + 4"}}</tool_call>' * 2,
        '<tool_call>{"name": "python", "arguments": {"code": "print(7 ** 3000)"}}</tool_call>',
        "<guess>25</guess>",
    )
    out = []
    for prompt in prompts:
        text = said[len(prompt) % len(said)]
        ids = (*encode_scaffold(policy.renderer, text), policy.eos_token_ids[0])
        cut = ids[: params.max_new_tokens]
        reason = "stop" if cut == ids else "length"
        out.append(Generation(cut, (-1.0,) * len(cut), reason))
    return out


def play(words: list[str], folder: Path, engine: Any = None) -> Any:
    """The episodes of the first step, with a policy that says the same to the same prompt."""
    common = ["batch.prompts=4", "batch.group_size=2", "reward.terms={}"]
    x = experiment(compose([*SMALL, *common[:2], *words]))
    if engine is not None:
        x = x._replace(generation=x.generation._replace(engine=engine))
    tasks = rlkit.load_tasks(x).train
    found, *_ = rlkit.experience(x, small_policy(), tasks, rlkit.StreamState(), step=0)
    return [
        (
            r.task.id,
            r.reward,
            r.status,
            r.truncation,
            [(s.prompt, s.response_ids, s.dropped, s.forced) for s in r.steps],
            [[result.content for result in s.tool_results] for s in r.steps],
        )
        for r in found
    ]


def play_a_script(words: list[str], folder: Path) -> Any:
    return play(words, folder, Batched(speak))


def make_model(words: list[str], folder: Path) -> Any:
    """The policy: its weights, how it is computed, and the ids of a conversation with tools."""
    (folder / "mine.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    x = experiment(compose([*SMALL, *words]))
    policy = x.model(device="cpu")
    model = policy.model
    own = getattr(model, "config", None)
    ids = [encode_prompt(policy.renderer, PROMPT, tools) for tools in ([], [SCHEMA])]
    return (
        dict(model.state_dict()),
        [getattr(part, "scaling", None) for part in model.modules()],
        own and (own._attn_implementation, getattr(model, "is_gradient_checkpointing", None)),
        [(type(part).__name__, getattr(part, "update_kernel", None)) for part in model.modules()],
        policy.renderer.thinking,
        policy.context_length,
        ids,
    )


def draw_prompts(words: list[str], folder: Path) -> Any:
    """The prompts of forty steps in which every fifth problem is always solved, and the others
    more or less often."""
    x = experiment(compose([*SMALL, *words]))
    tasks = [Task(f"t/{i}", ()) for i in range(20)]
    state, drawn = rlkit.StreamState(), []
    for _ in range(40):
        own, state = take(tasks, state, 4, seed=0, sampler=x.sampler)
        drawn.append([task.id for task in own])
        groups = [
            Rollout(task, (), group=k, reward=float(j < int(task.id[2:]) % 5))
            for k, task in enumerate(own)
            for j in range(4)
        ]
        state = state._replace(sampler=with_outcomes(x.sampler, state.sampler, groups))
    return drawn


def train(words: list[str], folder: Path) -> Any:
    """`rlkit train`: its lines before the first step, its metrics and its files."""
    out = io.StringIO()
    place = folder / f"run_{len(list(folder.iterdir()))}"
    small = ["trainer.steps=2", "batch.prompts=2", "batch.group_size=2", "task.max_samples=16"]
    given = [*SMALL, *small, "generation.max_new_tokens=8", "callbacks.checkpoint.model=false"]
    with contextlib.redirect_stdout(out):
        status = main(["train", *given, *words, f"hydra.run.dir={place}"])
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    files = sorted(str(f.relative_to(place)) for f in place.rglob("*") if f.is_file())
    lines = out.getvalue().replace(str(place), "").partition("\nstep 1/")[0]
    samples = [f.read_text() for f in sorted(place.glob("samples/*"))]
    return status, lines, [timeless(row) for row in rows], files, samples


RUNS = {
    "step": run_steps,
    "score": score_all,
    "tasks": read_tasks,
    "script": play_a_script,
    "play": play,
    "model": make_model,
    "draw": draw_prompts,
    "train": train,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in TABLE if row["kind"] in RUNS],
    ids=lambda row: " ".join(filter(None, (row["kind"], row.get("of"), next(iter(row["keys"]))))),
)
def test_another_value_of_a_key_changes_the_run(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)  # for Game
    run = RUNS[row["kind"]]
    if "steps" in row:
        run = functools.partial(run, steps=row["steps"])
    base = list(row.get("base", ()))
    plain = digest(run(base, tmp_path))
    idle = []
    for path, value in row["keys"].items():
        text = value if isinstance(value, str) else json.dumps(value)
        path = path.replace("phases.NAME", "phases.explore").replace("NAME", "numeric")
        if digest(run([*base, f"{path}={text}"], tmp_path)) == plain:
            idle.append(f"{path}={text}")
    assert not idle
