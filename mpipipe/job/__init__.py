"""A job of ranks, from its first communicator to its exit code.

This room initialises MPI, and only when called.

where a rank stands      runtime (world), settings, cores, types
its state                context
agreement                group: also what is known of others; consensus, communicators
waiting                  wait, requests
hangs                    watch/
the end of a job         exit, report
a job that is preempted  preemption, stop_signals
ranks without MPI        inprocess

Other rooms import the names below from here. A file is imported when one of its names is first used
(faces.py).
"""

from mpipipe.faces import lazy_face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpipipe.job.communicators import attributes, cached, world_ranks
    from mpipipe.job.consensus import VALUES, Ballot, agreed_by, digest, found_by_all, raise_on_all
    from mpipipe.job.context import (
        RankContext,
        current_rank,
        in_place_of,
        is_rank,
        register_progress,
        unregister_progress,
        whoami,
    )
    from mpipipe.job.cores import (
        cores_text,
        fair_shares,
        oversubscribed,
        own_cores,
        parse_cores,
        single_cores,
    )
    from mpipipe.job.exit import Stop, run_or_abort
    from mpipipe.job.group import RankGroup, group_of
    from mpipipe.job.preemption import Preemption, parse_duration
    from mpipipe.job.report import (
        AGREED,
        INTERRUPTED,
        describe_error,
        heading,
        is_users,
        users_frame,
        write,
    )
    from mpipipe.job.requests import keep_forever, own
    from mpipipe.job.runtime import mpi, tag_upper_bound, world
    from mpipipe.job.settings import GPU_DIRECT, NCCL, launcher_size
    from mpipipe.job.stop_signals import parse_signals
    from mpipipe.job.types import (
        Advancing,
        Buffer,
        Communicator,
        MpiCommunicator,
        ReplicaSum,
        Request,
        Snapshot,
        Testable,
    )
    from mpipipe.job.wait import Condition, ThreadTask, wait_for, wait_locally
    from mpipipe.job.watch.dump import process_fields
    from mpipipe.job.watch.watchdog import watching

if not TYPE_CHECKING:  # a checker of types would take each wrong name for an object
    __all__, __getattr__ = lazy_face(__name__, __file__)
