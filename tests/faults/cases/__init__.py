"""The table: every fault, in one file for each kind of trouble."""

from faults.cases import exceptions, good, leaving, mismatches, settings, signals, stuck
from faults.fault import Case, Fault

FAULTS: tuple[Fault, ...] = tuple(
    fault for module in (good, exceptions, leaving, signals, mismatches, stuck, settings) for fault in module.FAULTS
)


def all_cases(mpi: str | None = None) -> list[Case]:
    """Every job of every fault that is for this MPI; all of them where it is None."""
    return [case for fault in FAULTS if fault.mpi in (None, mpi) or mpi is None for case in fault.cases()]


def quick_cases(mpi: str | None = None) -> list[Case]:
    """One job of each fault that is in the quick choice."""
    return [case for case in all_cases(mpi) if case.fault.quick == (case.ranks, case.mode)]
