"""A job of ranks, from its first communicator to its exit code. The room that initialises MPI, and only when called.

where a rank stands      runtime, context, settings, cores, describe, rank_list, types
agreement                group, consensus, peers, communicators, collect
waiting                  wait, requests
hangs                    flight, watch/
dead ranks               lifeline
the end of a job         exit, report, ended
a job that is preempted  preemption, stop_signals
ranks without MPI        inprocess
"""
