"""Sums and messages by NCCL, between ranks that MPI has started: whether, and how.

choice          whether all ranks can use it, agreed by them
channel         one communicator of NCCL and the stream that is its own
task            calls of NCCL that wait for other ranks, on a thread, while the rank waits where it can hear
sums            sums over replicas
"""
