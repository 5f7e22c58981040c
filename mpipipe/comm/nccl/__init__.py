"""Sums by NCCL, between ranks that MPI has started: whether, and how.

channel         whether all ranks can use it; one communicator of NCCL, and its stream
sums            sums over replicas
"""
