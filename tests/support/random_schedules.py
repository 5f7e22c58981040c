"""Schedules drawn at random, all of which can run."""

from graphlib import TopologicalSorter

from hypothesis import strategies as st

from mpipipe.schedules import Action, Schedule


@st.composite
def runnable_schedules(draw, slices=1):
    """Any placement, backwards split or not, forwards run again or not; any order that respects all data edges.

    Where sequences are cut into slices, edges lead from each slice of a stage to the next one, and back.
    """
    ranks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, ranks - 1), max_size=4))
    placement = draw(st.permutations([*range(ranks), *extra]))
    stages, microbatches = len(placement), draw(st.integers(1, 4))
    needs, backward = {}, {}
    for microbatch in range(microbatches * slices):
        ready = None
        chain = [Action(stage, "F", microbatch) for stage in range(stages)]
        for stage in reversed(range(stages)):
            split = draw(st.booleans())
            chain.append(Action(stage, "I" if split else "B", microbatch))
            backward[stage, microbatch] = chain[-1]
            if split:
                needs[Action(stage, "W", microbatch)] = {chain[-1]}
            if draw(st.booleans()):
                needs[Action(stage, "R", microbatch)] = {Action(stage, "F", microbatch)}
        for action in chain:
            again = Action(action.stage, "R", microbatch)
            needs[action] = {ready} if ready else set()
            if action.op in "BI" and again in needs:
                needs[action].add(again)
            ready = action
    for (stage, unit), action in backward.items():
        if unit % slices:
            needs[Action(stage, "F", unit)].add(Action(stage, "F", unit - 1))
            needs[backward[stage, unit - 1]].add(action)
    orders = [[] for _ in range(ranks)]
    sorter = TopologicalSorter(needs)
    sorter.prepare()
    pool = []
    while sorter.is_active():
        pool.extend(sorter.get_ready())
        action = pool.pop(draw(st.integers(0, len(pool) - 1)))
        orders[placement[action.stage]].append(action)
        sorter.done(action)
    return Schedule("random", placement, microbatches, orders, slices=slices)
