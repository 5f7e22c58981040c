"""Sums by NCCL, between ranks that MPI has started: whether, and how.

channel         whether all ranks can use it, agreed by them; one communicator of NCCL and the stream that is its own
sums            sums over replicas
"""
