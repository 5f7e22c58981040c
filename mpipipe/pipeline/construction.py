"""The agreement of all ranks on the pipeline that they are about to build, before anything is built."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from mpipipe import arrays
from mpipipe.comm import share
from mpipipe.comm.alarm import Alarm, wait
from mpipipe.errors import MismatchError, MpipipeError, PeerError
from mpipipe.nn import Stage
from mpipipe.pipeline.arguments import check_arguments, device_of
from mpipipe.pipeline.ties import check_ties, tie_facts

COMPARED = ("schedule", "recompute", "parameters' names, shapes and dtypes", "parameters' values")


def agree_on_construction(comm, replicas, stages, schedule, loss, recompute):
    """Check the arguments of a Pipeline on every rank; raises the same error on all of them where one is wrong.

    Parameters
    ----------
    comm : the pipeline's private communicator
    replicas : the user's communicator of the ranks with the same stages, or None

    Returns every rank's tie facts, and the devices of all ranks, in rank order.
    """
    error = None
    try:
        check_arguments(stages, schedule, loss, comm, replicas)
    except Exception as caught:
        error = caught
    facts = None
    if error is None:
        numbers = schedule.stages_of(comm.rank)
        about = (schedule.fingerprint, schedule.microbatches, bool(recompute), replicas is not None)
        facts = about, schedule.name, tie_facts(stages, numbers), device_of(stages)
    verdict, everyone = None, []
    try:
        everyone = share.agree(comm, error, facts)
        _compare_ranks(comm.rank, everyone)
    except MpipipeError as caught:
        verdict = caught
    alarm = Alarm([comm])
    if replicas is not None and replicas.size > 1:
        verdict = _compare_replicas(alarm, replicas, stages, facts, verdict)
    try:
        _raise_any(comm, verdict)
    except MpipipeError:
        alarm.silence()  # and is not freed: notes may be under way still
        raise
    alarm.close()
    return [ties for _, _, ties, _ in everyone], [device for *_, device in everyone]


def _raise_any(comm, verdict):
    """Raise this rank's error, or else one that another rank of the pipe has."""
    others = [other for other in comm.allgather(verdict) if other is not None]
    if verdict is not None:
        raise verdict
    if others:
        others[0].echo = True
        raise others[0]


def _compare_ranks(rank, everyone):
    """Raise MismatchError, on every rank alike, where the facts of the ranks of one pipe differ."""
    try:
        for other, (about, name, *_) in enumerate(everyone):
            if about != everyone[0][0]:
                raise MismatchError(
                    "ranks were given different pipelines",
                    rank=other,
                    found=_describe(about, name),
                    expected=f"{_describe(*everyone[0][:2])}, as on rank 0",
                    remedy="build the same schedule with the same arguments on every rank",
                )
        check_ties([ties for _, _, ties, _ in everyone])
    except MpipipeError as problem:
        problem.echo = rank != 0
        raise


def _describe(about, name):
    fingerprint, microbatches, recompute, replicated = about
    parts = f"{microbatches} micro-batches", f"recompute {recompute}", f"fingerprint {fingerprint:x}"
    return ", ".join([name, *parts, "with replicas" if replicated else "without replicas"])


def _compare_replicas(alarm, replicas, stages, facts, verdict):
    """The error to raise: this pipe's own, or one about the replicas; None where all is well.

    A rank of another pipe may have been given no replicas, and would be waited for in vain: whoever finds an error
    tells its own pipe, and waiting ranks listen.
    """
    mine = np.zeros(1 + len(COMPARED), np.int64)
    mine[0] = verdict is not None
    if facts is not None:
        fingerprint, _, recompute, _ = facts[0]
        mine[1:] = fingerprint, recompute, *_digests(stages)
    table = np.zeros((replicas.size, mine.size), np.int64)
    try:
        wait(replicas.Iallgather(mine, table))
        if verdict is None:
            verdict = _difference(replicas, table)
    except PeerError as caught:
        verdict = verdict or caught
    if verdict is not None:
        alarm.sound(f"a pipeline could not be built: {verdict}")
    return verdict


def _difference(replicas, table):
    """What differs between the replicas, by the table of their facts."""
    failed = np.flatnonzero(table[:, 0])
    if failed.size:
        error = PeerError(f"the pipeline of replica {failed[0]} could not be built; its own report says why")
        error.echo = True
        return error
    for column, name in enumerate(COMPARED, start=1):
        different = np.flatnonzero(table[:, column] != table[0, column])
        if different.size:
            problem = MismatchError(
                f"replicas differ in {name}",
                found=f"replica {different[0]}",
                expected="the same as replica 0",
                remedy="give the stages of all replicas the same seed and sizes, and all ranks the same schedule",
            )
            problem.echo = replicas.rank != 0
            return problem
    return None


def _digests(stages):
    """Two numbers: for the names, shapes and dtypes of this rank's parameters, and for their values."""
    shapes, values = blake2b(digest_size=8), blake2b(digest_size=8)
    for stage in stages:
        if isinstance(stage, Stage):
            for name in stage.parameters:
                array = stage.parameters[name]
                shapes.update(f"{name} {stage.dtype} {array.dtype} {array.shape}".encode())
            values.update(arrays.download(stage.parameters.flat).data)
        elif getattr(stage, "gradients", None) is not None:
            shapes.update(f"{stage.gradients.flat.dtype} {stage.gradients.flat.shape}".encode())
    return [int.from_bytes(digest.digest(), "big") >> 1 for digest in (shapes, values)]
