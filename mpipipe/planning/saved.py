"""Measurements kept in a file: what one rank and one link cost in the mean, to predict other numbers of ranks with."""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from mpipipe import files
from mpipipe.errors import ConfigError
from mpipipe.planning.profile import LayerCosts, Link, Profile, RankCosts, Sizes
from mpipipe.schedules import Links

MOST = 64 << 20  # bytes of a file
FORMAT = "mpipipe profile 2"
OF_A_STEP = ("step", "scale", "alone", "process")  # what a Profile has as well, the same on all ranks


@dataclass(frozen=True)
class SavedProfile:
    """What was measured, as means over ranks and links. Sequences of a micro-batch are the keys of mappings.

    Parameters
    ----------
    facts : mapping of str to object
        What the times hold for, besides the layers: a training with other facts has to be measured anew.
    layers : tuple of str
        What each kind of layer is.
    ranks : int
        On how many it was measured.
    costs, links, sizes : mappings of int to RankCosts, Link and Sizes
        Means over the ranks and links; bytes.
    optimizer, sums, step, scale, alone, process : float
        As in a Profile; the first two as means over the ranks.
    oversubscribed : str
        How many ranks shared how many cores meanwhile, and what follows for the times, as `mpipipe info` says it; ""
        where none did.

    Examples
    --------
    >>> from mpipipe.planning import LayerCosts, Link, RankCosts, SavedProfile, Sizes
    >>> rank = RankCosts((LayerCosts(1.0, 2.0, 1.0, 1.0),))
    >>> saved = SavedProfile({}, ("linear",), 2, {2: rank}, {2: Link()}, {2: Sizes((100,), (100,), 10)}, 0.5, 0.0)
    >>> made = saved.profile(4, ["linear"] * 8, [1, 4], states=(8,) * 8, trained=(1,) * 8)
    >>> made.ranks, made.costs[4][0].layers[0].forward, made.sizes[1].message
    (4, 2.0, 5)
    """

    facts: Mapping[str, Any]
    layers: tuple[str, ...]
    ranks: int
    costs: Mapping[int, RankCosts]
    links: Mapping[int, Link]
    sizes: Mapping[int, Sizes]
    optimizer: float
    sums: float
    step: float = 0.0
    scale: float = 1.0
    alone: float = 1.0
    process: int = 0
    oversubscribed: str = ""

    @classmethod
    def of(
        cls, profile: Profile, signatures: Sequence[str], facts: Mapping[str, Any], oversubscribed: str = ""
    ) -> SavedProfile:
        """Take the means of a profile, for any number of ranks.

        Parameters
        ----------
        profile : Profile
            What was measured.
        signatures : sequence of str
            What each layer of the model is; equal ones are of one kind.
        facts : mapping of str to object
        oversubscribed : str
        """
        real = slice(0, max(1, profile.ranks - 1))  # the link from the last rank to the first is there for chunks alone
        return cls(
            facts=dict(facts),
            layers=tuple(dict.fromkeys(signatures)),
            ranks=profile.ranks,
            costs={size: combined(fmean, *ranks) for size, ranks in profile.costs.items()},
            links={size: combined(fmean, *links[real]) for size, links in profile.links.items()},
            sizes=profile.sizes,
            optimizer=fmean(profile.optimizer),
            sums=fmean(profile.sums),
            oversubscribed=oversubscribed,
            **{name: getattr(profile, name) for name in OF_A_STEP},
        )

    def check(self, facts: Mapping[str, Any], signatures: Iterable[str]) -> None:
        """Raise ConfigError where a training has other facts, or a layer that was not measured.

        Parameters
        ----------
        facts, signatures : as for `of`
        """
        remedy = "measure this training: mpiexec -n 2 python -m mpipipe plan ... --save-profile FILE"
        for name, value in facts.items():
            if self.facts.get(name) != value:
                raise ConfigError(
                    "the profile is of another training",
                    found=f"{name} = {self.facts.get(name)}",
                    expected=f"{name} = {value}",
                    remedy=remedy,
                )
        for place, each in enumerate(signatures):
            if each not in self.layers:
                raise ConfigError(
                    "a layer of this model was not measured for the profile",
                    found=f"layer {place}: {each}",
                    expected="one of those that were measured, such as "
                    + get_close_matches(each, self.layers, 1, 0)[0],
                    remedy=remedy,
                )

    def doubts(self, ranks: int, replicas: int, rows: int, linked: bool) -> list[str]:
        """Say what a prediction leaves out, takes from far away or from rough times, a line each.

        Parameters
        ----------
        ranks, replicas, rows : int
            Ranks and replicas of the pipeline, and sequences of a micro-batch.
        linked : bool
            Whether a model of the links is given.
        """
        lines, largest = [], max(self.costs)
        if ranks > 1 and self.ranks == 1 and not linked:
            lines.append("not counted: messages, since the measured pipeline had one rank; give --transfer-model")
        if replicas > 1 and not self.sums:
            lines.append(f"not counted: the sums over {replicas} replicas, which were not measured")
        if rows > 2 * largest:
            lines.append(f"far from what was measured: micro-batches of {rows} sequences, the largest had {largest}")
        if self.oversubscribed:
            lines.append(f"measured where {self.oversubscribed}")
        return lines

    def profile(
        self,
        ranks: int,
        signatures: Sequence[str],
        sizes: Iterable[int],
        *,
        states: tuple[int, ...],
        trained: tuple[int, ...],
        links: Links | None = None,
        stride: int = 1,
    ) -> Profile:
        """Give the profile of a pipeline of `ranks` ranks that are like the mean of the measured ones.

        Parameters
        ----------
        ranks : int
            Of the pipeline.
        signatures : sequence of str
            What each layer of the model is.
        sizes : iterable of int
            Sequences of a micro-batch. Costs between two measured sizes lie on the line through them; above the
            largest one and below the smallest one they are in proportion to the sequences.
        states, trained : tuple of int
            As in a Profile.
        links : Links, optional
            Between ranks; by default each is like the mean of the measured ones.
        stride : int
            From a rank of the pipeline to the next, in the numbering of nodes.
        """
        wanted = sorted({*sizes})
        bytes_ = {size: record_at(self.sizes, size) for size in wanted}
        between = {size: [record_at(self.links, size)] * ranks for size in wanted}
        if links is not None:
            pairs = [(rank * stride, (rank + 1) % ranks * stride) for rank in range(ranks)]
            for size in wanted:
                times = [links.times(pair, bytes_[size].message)[1] for pair in pairs]
                between[size] = [Link(each.message, time) for each, time in zip(between[size], times)]
        return Profile(
            kinds=tuple(self.layers.index(each) for each in signatures),
            costs={size: (record_at(self.costs, size),) * ranks for size in wanted},
            links={size: tuple(each) for size, each in between.items()},
            sizes=bytes_,
            states=states,
            trained=trained,
            optimizer=(self.optimizer,) * ranks,
            sums=(self.sums,) * ranks,
            **{name: getattr(self, name) for name in OF_A_STEP},
        )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all; raises ConfigError where it cannot be."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        with files.writing("the profile", path):
            files.write_whole(path, content.encode())

    @classmethod
    def read(cls, path: Path) -> SavedProfile:
        """Read what `save` has written; raises ConfigError where there is no such file."""
        try:
            given = json.loads(files.read_text(path, MOST))
            if given.pop("format") != FORMAT or not isinstance(given["facts"], dict):
                raise ValueError("another format")
            if not given["layers"] or not all(isinstance(each, str) for each in given["layers"]):
                raise ValueError("no layers")
            for each in given["costs"].values():
                each["layers"] = [LayerCosts(**one) for one in each["layers"]]
            for name, kind in (("costs", RankCosts), ("links", Link), ("sizes", Sizes)):
                read = {int(size): kind(**values) for size, values in given[name].items()}
                given[name] = {size: combined(checked, each) for size, each in read.items()}
            found = cls(**{**given, "layers": tuple(given["layers"])})
            _check_sizes(found)
            combined(checked, (found.optimizer, found.sums, *(getattr(found, name) for name in OF_A_STEP)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                "no profile can be read there",
                found=f"{path}: {getattr(error, 'strerror', None) or error}",
                expected="a file that `mpipipe plan --save-profile FILE` has written",
            ) from error
        return found


def _check_sizes(found: SavedProfile) -> None:
    """Raise ValueError where something is missing, or no count."""
    kinds = len(found.layers)
    if not found.costs or not found.costs.keys() == found.links.keys() == found.sizes.keys() or min(found.costs) < 1:
        raise ValueError("sizes of micro-batches are missing")
    lengths = {len(each.layers) for each in found.costs.values()}
    lengths |= {len(each) for sizes in found.sizes.values() for each in (sizes.activation, sizes.split)}
    if lengths != {kinds}:
        raise ValueError(f"{kinds} layers, and numbers of {sorted(lengths)}")
    if type(found.ranks) is not int or found.ranks < 1 or not 0 < found.scale < math.inf or not 0 <= found.alone <= 1:
        raise ValueError("ranks, scale or alone out of range")
    if not isinstance(found.oversubscribed, str):
        raise ValueError("no sentence about cores")


# -- Records of numbers, such as measured costs: one like others, whose numbers are a function of theirs --------


Record = TypeVar("Record")


def record_at(measured: Mapping[int, Record], size: int) -> Record:
    """Return the record of micro-batches of `size` sequences: between measured ones on a line, else in proportion."""
    if size in measured:
        return measured[size]
    known = sorted(measured)
    place = bisect(known, size)
    if place in (0, len(known)):  # in proportion: on a line through two sizes, noise would grow with the distance
        low, high = 0, known[max(0, place - 1)]
    else:
        low, high = known[place - 1], known[place]
    share = (size - low) / (high - low)

    def on_line(ends: Sequence[float]) -> float:
        start, end = (0.0, ends[0]) if len(ends) == 1 else ends
        found = max(0.0, start + (end - start) * share)
        return round(found) if isinstance(end, int) else found

    return combined(on_line, *(measured[each] for each in (low, high) if each))


def combined(function: Callable[[Sequence[Any]], Any], *records: Any) -> Any:
    """Return a record like these, whose numbers are a function of theirs."""
    first = records[0]
    if is_dataclass(first):
        kind: Any = type(first)
        names = [entry.name for entry in fields(first) if getattr(first, entry.name) is not None]  # `again` may be
        return kind(**{name: combined(function, *(getattr(each, name) for each in records)) for name in names})
    if isinstance(first, (tuple, list)):
        return tuple(combined(function, *each) for each in zip(*records))
    return function(records)


def checked(numbers: Sequence[Any]) -> Any:
    """Return the only number; raises ValueError unless it is finite and at least 0."""
    (number,) = numbers
    if type(number) not in (int, float) or not 0 <= float(number) < math.inf:
        raise ValueError(f"{number!r} is no number of at least 0")
    return number
