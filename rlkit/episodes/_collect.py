"""Play many episodes at the same time, from tasks to finished rollouts. Training, evaluation and
plain rollouts use the same function.

`collect_groups` makes a Seat for each episode: `make_group` for the samples of a task, and
`make_samples` distributes the players of games over tables. `play_seat` then plays one episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

from rlkit.engines import Cached
from rlkit.environments import find_environment
from rlkit.episodes.episode import Say, mark_failed, play
from rlkit.episodes.replies import Encode, check_engine, make_encoder, make_speaker
from rlkit.errors import ConfigError, Hung, suggest_name
from rlkit.functional import mix
from rlkit.models import load_policy
from rlkit.system import rng
from rlkit.system.copies import copy_value
from rlkit.system.loops import await_value, is_left, make_blocking, run_together, set_substitute
from rlkit.system.shared_state import guard_state
from rlkit.types import (
    Engine,
    Environment,
    Messages,
    Playing,
    Policy,
    Rollout,
    SamplingParams,
    Session,
    Step,
    Task,
)

KEYS = count()  # the next key; an engine identifies an episode by its key


class Start:
    """Let all episodes wait for each other before their first replies. Otherwise the order in which
    the first prompts become ready would decide which episodes decode together."""

    def __init__(self, *, waits: bool):
        self.waits = waits
        self.missing = 0
        self.all_here = asyncio.Event()

    def place(self) -> Place:
        """Register an episode. All episodes then wait until this episode is ready for its first
        reply."""
        self.missing += 1
        return Place(self)


class Place:
    """Hold the place of one episode in a `Start`. The episode reports here that it is ready for its
    first reply, and then waits until all other episodes are ready too."""

    def __init__(self, start: Start):
        self.start = start
        self.here = False

    def arrive(self) -> None:
        """Report that the episode is ready for its first reply, or that it is over."""
        self.start.missing -= not self.here
        self.here = True
        if not self.start.missing:
            self.start.all_here.set()

    async def ready(self) -> None:
        """Wait until every episode has arrived."""
        self.arrive()
        if self.start.waits:
            await self.start.all_here.wait()


class Speaker(NamedTuple):
    """Hold a model, its engine, its sampling parameters and its encoder of first prompts."""

    policy: Policy
    engine: Engine
    params: SamplingParams
    encode: Encode


class Turns:
    """Hold an engine's key for one episode, or for the two episodes of a game. The two players of a
    game can share a key, because only one of them asks for a completion at a time."""

    def __init__(self, key: int, players: int = 1):
        self.key = key
        self.players = players

    def leave(self, engine: Engine) -> None:
        """Give up an episode's use of the key, because the episode is over. When no episode uses
        the key any more, release the key in the engine."""
        self.players -= 1
        if not self.players:
            engine.release(self.key)


class Seat(NamedTuple):
    """Describe an episode's position in one call of `collect`: its task, group, sample, key and
    callbacks."""

    task: Task
    group: int
    sample: int
    turns: Turns
    place: Place
    done: Callable[[Rollout], None]
    spent: Callable[[float], None]
    table: Any = None  # the shared instance of a game; `player`: this episode's seat
    player: int = 0


class Shared(NamedTuple):
    """Hold what all episodes of one call of `collect` share."""

    own: Speaker  # the policy that the call samples
    start: Start
    group_size: int
    seed: int
    step: int
    version: int  # of the policy's weights
    done: Callable[[Rollout], None]
    spent: Callable[[float], None]


class Underway:
    """Hold an episode that is being played: its rollout so far, and whether it still uses its key
    in the engine."""

    def __init__(self, at: Seat, engine: Engine):
        self.at = at
        self.engine = engine
        self.rollout = Rollout(at.task, (), group=at.group, sample=at.sample)
        self.has_key = True

    def keep(self, rollout: Rollout) -> None:
        """Keep the rollout, which has one more step."""
        self.rollout = rollout

    def release(self) -> None:
        """Give up the key. A second call does nothing."""
        if self.has_key:
            self.has_key = False
            self.at.turns.leave(self.engine)

    def leave(self) -> None:
        """Give up the key, and let the other episodes begin without this one."""
        self.release()
        self.at.place.arrive()

    def fail(self, error: BaseException) -> Rollout:
        """Return the result of an episode that was left behind: its rollout so far, marked as
        failed. The other players of its table are told."""
        self.leave()
        if self.at.table is not None:
            self.at.table.lost(self.at.player, error)
        rollout = mark_failed(self.rollout, str(error))
        self.at.done(rollout)
        return rollout


def ignore_value(value: Any) -> None:
    """Ignore the value; a callback that does nothing."""


async def load_other_player(path: str, policy: Policy, params: SamplingParams) -> Speaker:
    """Load the opponent of a policy. The opponent samples with the policy's sampling parameters,
    but with admission="free": its engine never waits for the answer of an episode that is due soon.
    Otherwise the policy's engine and the opponent's engine could wait for each other."""
    weights = next(policy.model.parameters())
    rival, engine = _load_player(path, str(weights.device))
    # load the weights only once: they never change, and episodes of other calls may be using them
    if not isinstance(engine, Cached) or engine.decoder is None:
        await await_value(engine.load(rival, 0))
    return Speaker(rival, engine, params._replace(admission="free"), make_encoder(rival))


@cache  # opponents of a mixture take turns
def _load_player(path: str, device: str) -> tuple[Policy, Engine]:
    rival = load_policy(path=path, device=device)
    rival.model.requires_grad_(False)
    return rival, Cached()


Played = Coroutine[Any, Any, Rollout]


def make_samples(
    how: Environment,
    task: Task,
    size: int,
    seat: Callable[..., Seat],
    alone: Callable[[Seat], Played],
    against: Callable[[Seat], Played],
) -> list[Played]:
    """Make the episodes of all samples of a task. Without a table, each sample plays alone. In a
    game, all samples share one table, or two samples share each table. At a table for two, a sample
    without a partner is played by `against`.

    Args:
      seat: function from (sample, table, player) to the Seat.
      alone, against: functions from a Seat to the coroutine of an episode.
    """
    if how.table is None:
        return [alone(seat(j)) for j in range(size)]
    make, players, opponent = how.table
    if not players:
        shared = make(copy_value(task), size)
        return [alone(seat(j, shared, j)) for j in range(size)]
    played: list[Played] = []
    pairs = range(0, size - 1, 2) if opponent is None else ()
    for j in pairs:
        first = seat(j, make(copy_value(task), 2))
        first.turns.players = 2
        played += [alone(first), alone(first._replace(sample=j + 1, player=1))]
    rest = [seat(j, make(copy_value(task), 2)) for j in range(len(played), size)]
    return played + [against(at._replace(player=(at.group + at.sample) % 2)) for at in rest]


def with_version(said: Step, version: int) -> Step:
    """Return the step with this version of the weights, unless its engine has reported versions."""
    return said._replace(versions=said.versions or ((0, version),))


def make_say(who: Speaker, how: Environment, at: Seat, seed: int, version: int) -> Say:
    """Return the function that produces the replies of an episode. The first reply waits until all
    episodes of the call are ready for theirs."""
    speak = make_speaker(
        who.policy, how, who.engine, who.params, key=at.turns.key, seed=seed, encode=who.encode
    )

    async def say(rollout: Rollout, messages: Messages, session: Session) -> Step | None:
        if is_left():
            raise Hung("the episode is over")
        await at.place.ready()
        said = await speak(rollout, messages, session)
        return None if said is None else with_version(said, version)

    return say


async def play_seat(shared: Shared, who: Speaker, how: Environment, at: Seat) -> Rollout:
    """Play the episode of a seat, and give its rollout to `at.done`.

    Args:
      who: the model that replies.
      how: the environment of the episode.
    """
    if at.table is not None:
        how = how._replace(session=lambda task: at.table.player(at.player))
    seed = mix(shared.seed, shared.step, at.group, at.sample)
    underway = Underway(at, who.engine)
    set_substitute(underway.fail)
    converse = partial(
        play,
        at.task,
        how,
        make_say(who, how, at, seed, shared.version),
        group=at.group,
        sample=at.sample,
        seed=seed,
        said=underway.release,
        spent=at.spent,
        so_far=underway.keep,
    )
    try:
        if how.play is None:
            rollout = await converse()
        else:
            episode = Playing(
                at.task,
                how,
                who.policy,
                who.engine,
                who.params,
                seed=seed,
                keys=KEYS,
                ready=at.place.ready,
                give_way=at.place.arrive,
                converse=converse,
            )
            rollout = await how.play(episode)
            steps = tuple(with_version(step, shared.version) for step in rollout.steps)
            rollout = rollout._replace(steps=steps, group=at.group, sample=at.sample)
    finally:
        underway.leave()
    rollout = name_limit(who.policy, rollout)
    if how.table is not None and how.table.players:
        rollout = rollout._replace(player=at.player)
    if not is_left():
        at.done(rollout)
    return rollout


async def play_without_partner(shared: Shared, how: Environment, at: Seat) -> Rollout:
    """Play a sample without a partner: against the opponent model if the table has one, otherwise
    against the policy itself. The other side's episode is not used for training."""
    own = shared.own
    other = at._replace(
        sample=shared.group_size + at.sample,
        player=1 - at.player,
        done=ignore_value,
        spent=ignore_value,
    )
    rival = own
    opponent = how.table and how.table.opponent
    if opponent is None:
        at.turns.players = 2
    else:
        rival = await load_other_player(opponent, own.policy, own.params)
        other = other._replace(turns=Turns(next(KEYS)), place=Start(waits=False).place())
    both = [play_seat(shared, own, how, at), play_seat(shared, rival, how, other)]
    return (await run_together(both))[0]


def make_group(shared: Shared, how: Environment, task: Task, group: int) -> list[Played]:
    """Make the episodes of all samples of a task; `group` is its position in the RL step."""

    def seat(sample: int, table: Any = None, player: int = 0) -> Seat:
        turns, place = Turns(next(KEYS)), shared.start.place()
        return Seat(task, group, sample, turns, place, shared.done, shared.spent, table, player)

    who = shared.own
    if how.table is not None and not how.table.players:
        # Episodes that share a table wait for each other's replies. Therefore the engine must not
        # hold back a prompt until another episode's prompt arrives: the other episode may be
        # waiting for the reply to this prompt.
        who = who._replace(params=who.params._replace(admission="free"))
    alone = partial(play_seat, shared, who, how)
    against = partial(play_without_partner, shared, how)
    return make_samples(how, task, shared.group_size, seat, alone, against)


async def collect_groups(
    policy: Policy,
    tasks: Sequence[Task],
    environment: Environment | Callable[[Task], Environment],
    *,
    engine: Engine | None = None,
    group_size: int = 1,
    seed: int = 0,
    step: int = 0,
    first: int = 0,
    version: int = 0,
    on_done: Callable[[Rollout], None] | None = None,
    spent: Callable[[float], None] = ignore_value,
    **params: Any,
) -> list[Rollout]:
    """Play `group_size` independent episodes of each task, all of them at the same time.

    `collect` is the blocking form of this coroutine. `collect` also works inside a running event
    loop.

    Args:
      policy: the model to sample, with its current weights.
      tasks: the prompts, one group per task.
      environment: one environment for all tasks, or a function from a task to its environment.
      engine: samples the completions. None makes a new `rlkit.engines.Cached()`. If you call this
        function many times, pass the same engine each time: its cache and its compiled code outlive
        a call.
      group_size: number of samples per task, > 0.
      seed, step: the run's seed and the number of the RL step. Together with the positions of the
        task and the sample, these two numbers are the only source of randomness
        (rlkit.functional.mix). Therefore the same call gives the same rollouts in any batch, on any
        rank. The numbers also seed the random generators of python, numpy and torch for the
        session. A plain tool runs in a thread, so its random numbers do not follow this seed.
      first: position of the first of these tasks in the RL step. The position is above 0 if an
        earlier call has played other prompts of the same step.
      version: number of RL steps that have trained the weights.
      on_done: called with the rollout of each episode as soon as the episode is over.
      spent: called at the end of each episode with the seconds that it spent in its session.
      params: fields of SamplingParams (temperature, max_new_tokens, …).
    Returns: unscored rollouts in the order of the tasks. The samples of a task are consecutive.
    Raises: the first error of any episode, unchanged. Every session is closed before it is raised.
    """
    unknown = [name for name in params if name not in SamplingParams._fields]
    if unknown:
        near = suggest_name(unknown[0], SamplingParams._fields)
        raise ConfigError(f"rlkit.collect: there is no '{unknown[0]}'.{near}")
    sampling = SamplingParams(**params)
    engine = Cached() if engine is None else engine
    check_engine(engine)
    await await_value(engine.load(policy, version))
    shared = Shared(
        own=Speaker(policy, engine, sampling, make_encoder(policy)),
        start=Start(waits=sampling.admission != "free"),
        group_size=group_size,
        seed=seed,
        step=step,
        version=version,
        done=on_done or ignore_value,
        spent=spent,
    )
    with rng.keep_generators(), guard_state(environment):
        return await run_together(
            (
                episode
                for group, task in enumerate(tasks, first)
                for episode in make_group(shared, find_environment(environment, task), task, group)
            ),
            announced=True,
        )


collect = make_blocking(collect_groups, name="collect")


def name_limit(policy: Policy, rollout: Rollout) -> Rollout:
    """Return the rollout. If the last reply ended because the model's context was full, change the
    rollout's truncation from "length" to "context"."""
    if rollout.truncation != "length":
        return rollout
    last = rollout.steps[-1]
    full = last.prompt_length + len(last.response_ids) >= policy.context_length
    return rollout._replace(truncation="context") if full else rollout
