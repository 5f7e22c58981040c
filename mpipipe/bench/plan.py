"""`bench plan`: predicted steps against real ones, for plans drawn at random.

The speed of a shared machine changes from second to second. So the steps of each plan alternate with those of the
chosen plan, and their ratio is measured. The time of a plan is its median ratio, times the median step of the chosen
plan in the whole run. Noise is how far the turns of one plan are apart: half of the plans have a smaller spread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import mean, median

from mpipipe.comm.mesh import Mesh
from mpipipe.job import runtime
from mpipipe.job.group import group_of
from mpipipe.job.types import Communicator
from mpipipe.language.models import GPT
from mpipipe.language.task import TextTask
from mpipipe.planning import Choice, Profile, Space, predict
from mpipipe.planning.find import PlanReport, find_plan, in_words, shown_seconds
from mpipipe.planning.links import TrialSteps, trial_steps
from mpipipe.planning.problem import MeasuredRanks
from mpipipe.planning.search import cuts_by_time
from mpipipe.train import TrainConfig
from mpipipe.train.planned import measured_ranks

PAIRS = 3  # in each turn of a plan: its steps, between those of the chosen plan
STEPS = 2  # in a row
MOVED = 2  # layers that may lie elsewhere than in the cut by time


def run(configurations: int, repeats: int, seed: int, config: TrainConfig) -> None:
    """Print each plan, the errors of predictions, and whether the chosen plan is the fastest of all."""
    comm = runtime.world()
    with Mesh(comm, pipe=comm.size) as mesh:
        measured = measured_ranks(config, TextTask(config, GPT), mesh)
        problem = measured.problem
        found = find_plan(measured, "cpu")
        drawn = [] if comm.rank else draw(found, problem.space, configurations, Random(seed))
        choices = group_of(comm).broadcast("bench: the plans", drawn)
        turns = measure(measured, choices, repeats, Random(seed))
        if comm.rank == 0:
            predicted = [predict(found.profile, each, problem.rows, problem.trained_layers).seconds for each in choices]
            _report(comm, found, choices, predicted, turns)


def measure(measured: MeasuredRanks, choices: Sequence[Choice], repeats: int, random: Random) -> list[list[float]]:
    """Return seconds of a step for each plan and turn; the first plan is the one that all others alternate with."""
    ratios: dict[Choice, list[float]] = {choice: [] for choice in choices[1:]}
    seconds: list[float] = []
    with trial_steps(measured, choices[0]) as first:
        for _ in range(repeats):
            for choice in random.sample(choices[1:], len(choices) - 1):
                with trial_steps(measured, choice) as other:
                    before, between = _alternate(first, other)
                ratios[choice].append(median(b / a for a, b in zip(_pairwise_means(before), between)))
                seconds += before
    typical = median(seconds)
    return [[typical], *([ratio * typical for ratio in ratios[choice]] for choice in choices[1:])]


def _alternate(first: TrialSteps, other: TrialSteps) -> tuple[list[float], list[float]]:
    """Return the seconds of a step of `first`, which has one turn more, and of `other`, in each of their turns."""
    before, between = [mean(first.steps(STEPS))], []
    for _ in range(PAIRS):
        between.append(mean(other.steps(STEPS)))
        before.append(mean(first.steps(STEPS)))
    return before, between


def _pairwise_means(numbers: Sequence[float]) -> list[float]:
    """Return the mean of each number and the next."""
    return [(a + b) / 2 for a, b in pairwise(numbers)]


def draw(found: PlanReport, space: Space, count: int, random: Random) -> list[Choice]:
    """Return the chosen plan, and others drawn at random, no two alike."""
    drawn = [found.choice]
    for _ in range(100 * count):
        if len(drawn) > count:
            break
        choice = _drawn(found.profile, space, random)
        if choice not in drawn:
            drawn.append(choice)
    return drawn


def _drawn(profile: Profile, space: Space, random: Random) -> Choice:
    name, chunks = random.choice(space.forms)
    microbatches = random.choice(space.microbatches)
    size, placement = -(-space.rows // microbatches), Choice(name, chunks, microbatches, ()).placement(space.ranks)
    partition = list(random.choice(cuts_by_time(profile, size, placement)))
    for _ in range(random.randint(0, MOVED)):
        giver, taker = random.choice(range(len(partition))), random.choice(range(len(partition)))
        if abs(giver - taker) == 1 and partition[giver] > 1:
            partition[giver] -= 1
            partition[taker] += 1
    choice = Choice(name, chunks, microbatches, tuple(partition))
    return replace(choice, recompute=True) if random.random() < 0.2 else choice


def _report(
    comm: Communicator,
    found: PlanReport,
    choices: Sequence[Choice],
    predicted: Sequence[float],
    turns: list[list[float]],
) -> None:
    measured = [median(each) for each in turns]
    errors = [abs(guess / real - 1) for guess, real in zip(predicted, measured)]
    spreads = [(max(each) - min(each)) / median(each) for each in turns]
    noise = median(spreads)
    lines = []
    for place in sorted(range(len(choices)), key=lambda each: measured[each]):
        choice, guess, real = choices[place], predicted[place], measured[place]
        lines.append(
            f"plan {choice.schedule} x {choice.chunks}, {choice.microbatches} micro-batches, layers "
            f"{','.join(map(str, choice.partition))}, run again {choice.recomputation}: {shown_seconds(real)} a step, "
            f"predicted {shown_seconds(guess)}, error {guess / real - 1:+.1%}, spread {spreads[place]:.1%}"
        )
    behind = measured[0] / min(measured) - 1
    verdict = "the fastest" if behind == 0 else "within noise of the fastest" if behind <= noise else "not the fastest"
    lines += [
        f"plan: {len(choices)} configurations on {comm.size} ranks: error {median(errors):.1%} median, "
        f"{max(errors):.1%} worst (2 % and 4 % with a core for each rank); noise {noise:.1%}",
        f"plan: chosen {in_words(found.plans[0])}",
        f"plan: measured {shown_seconds(measured[0])}, {behind:.1%} behind the fastest: {verdict}",
    ]
    if found.oversubscribed:
        lines.append(f"plan: {found.oversubscribed}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
