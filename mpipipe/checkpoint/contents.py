"""The arrays of a rank in a checkpoint, by their names in the whole model.

parameters/<name>                    of every stage, with the state of modules of PyTorch
first/<name>, second/<name>, ...     of the optimizer
manifest.json (folders.py)           step, what each file holds, and what the caller gives as
                                     `state`: a training its configuration, its last record, the
                                     steps taken and the loss scale (train/trainer.py, `_state`)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeAlias

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.checkpoint.tensor_files import check_storable
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, world_ranks
from mpipipe.optim import Optimizer, StateShard, duplicate_name_error
from mpipipe.options import Values
from mpipipe.stages import as_stages

PARAMETERS = "parameters"
# Called before anything is written to the arrays.
Announcements: TypeAlias = "list[Callable[[], object]]"


def contents_of(stages: Sequence[object], optimizer: Optimizer | None) -> Values:
    """Return all arrays of this rank as "parameters/0.weight", "first/0.weight", ...

    StateShards stay what they are.

    Complex ones are pairs of real ones, (..., 2). Raises ArgumentError for two of one name, and for
    arrays that cannot be stored.
    """
    contents: Values = {}
    for stage in as_stages(stages):
        for name, array in stage.contents.items():
            if f"{PARAMETERS}/{name}" in contents:
                raise duplicate_name_error(name)
            contents[f"{PARAMETERS}/{name}"] = array
    for kind, states in {} if optimizer is None else optimizer.named_state().items():
        contents.update({f"{kind}/{name}": array for name, array in states.items()})
    for name, array in contents.items():
        if isinstance(array, StateShard):
            continue
        if array.flags.c_contiguous:
            contents[name] = arrays.as_reals(array)
        check_storable(name, contents[name])
    return contents


def state_names(stages: Sequence[object]) -> set[str]:
    """Return the names of what each replica has for itself, as statistics of batch norm."""
    inner_stages = [inner for stage in as_stages(stages) for inner in stage.inner_stages]
    return {f"{PARAMETERS}/{name}" for inner in inner_stages for name in inner.state}


def share_of(
    contents: Values, replicas: Communicator, state: Collection[str] = ()
) -> dict[str, Array]:
    """Return the arrays that this replica writes, for about equal bytes.

    Collective where there are StateShards.

    Each array goes to the replica that has fewest bytes, the largest first. `state` goes to replica
    0, as a copy: the next forward changes it, while a thread writes.
    """
    share = {}
    sizes = [0] * replicas.size
    for name, array in sorted(contents.items(), key=lambda entry: -entry[1].nbytes):
        writer = 0
        if name not in state:
            writer = sizes.index(min(sizes))
            sizes[writer] += array.nbytes
        whole = array
        if isinstance(array, StateShard):
            whole = array.whole()
        if writer == replicas.rank:
            share[name] = arrays.copied(whole) if name in state else whole
    return share


def check_shards(contents: Values, replicas: Communicator) -> None:
    """Raise ArgumentError where an optimizer is sharded over other ranks than these."""
    expected = world_ranks(replicas)
    for array in contents.values():
        if not isinstance(array, StateShard) or array.group.members == expected:
            continue
        raise ArgumentError(
            "the optimizer is sharded over other ranks than the replicas of the mesh",
            found=f"ranks {', '.join(map(str, array.group.members))} of the job",
            expected=f"ranks {', '.join(map(str, expected))}",
            remedy="give the optimizer replicas=mesh.replicas",
        )


def state_of(state: Values | None) -> Values:
    """Return a copy of plain state; raise ArgumentError for what JSON would change."""
    plain = dict(state or {})
    result: Values = {}
    with suppress(TypeError, ValueError):
        result = json.loads(json.dumps(plain))
    # A tuple would come back as a list, for example, and a number as a key as its text.
    if repr(result) != repr(plain):
        raise ArgumentError(
            "state is not plain",
            found=f"{plain!r:.300}",
            expected="dicts with strings as keys, lists, strings, numbers, booleans and None",
            remedy="convert it; arrays belong into stages",
        )
    return result


def announcements_of(
    stages: Sequence[object], optimizer: object
) -> tuple[list[Announcements], bool]:
    """Return the lists `before_write` of all that have one, and whether no write goes unannounced.

    Stages that the optimizer does not have are stepped by something else: an optimizer of PyTorch,
    for example, which announces nothing.
    """
    known = {*map(id, getattr(optimizer, "stages", stages))}
    lists = [getattr(thing, "before_write", None) for thing in (*stages, optimizer)]
    announced = None not in lists and known.issuperset(map(id, stages))
    return [functions for functions in lists if functions is not None], announced
