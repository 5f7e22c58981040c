"""The tensors of a folder read into our arrays: each rank reads those that its own parameters are made of, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.checkpoint import TensorEntry, TensorFile
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.language.models.huggingface.folder import COPY_AGAIN, NOT_THESE, Folder, count_not_finite, opened
from mpipipe.language.models.huggingface.names import Part, head_of, parts_of, shape_of, tied_to, view

PIECE_BYTES = 1 << 20  # of a tensor that are read at once: they are still in the cache when they are converted
LINE_BYTES = 64  # of a cache
FLOATS = ("float64", "float32", "bfloat16", "float16")


def read(folder: Folder, parameters: Mapping[str, Array]) -> int:
    """Set parameters of a model from the tensors that they are made of; return how many bytes were read.

    Parameters
    ----------
    folder : Folder
        What `open_folder` returns.
    parameters : mapping of str to array
        Arrays by their names in the model, such as `Stage.parameters`, on the host or on a GPU, of any dtype.

    Raises
    ------
    ArgumentError, NonFiniteError
        For a tensor of another shape or dtype, a damaged file, and an unknown parameter; for NaN and infinity.
    """
    targets = _Targets(folder, parameters)
    wanted = [part for part in parts_of(folder.family.table, folder.model) if part.ours in targets.names]
    targets.expect(wanted)
    done = 0
    for place in dict.fromkeys(folder.places[part.theirs][0] for part in wanted):
        with opened(folder.path / place) as file:
            for part in wanted:
                if folder.places[part.theirs][0] == place:
                    _read_part(folder, file, part, targets.arrays_of(part))
                    targets.has_read(part)
            done += file.bytes_read
    head = head_of(folder.model)
    if folder.spare_head is not None and head in parameters:
        done += _compare_head(folder, arrays.download(parameters[head]))
    return done


class _Targets:
    """The arrays to be set. One on a GPU is set on the host first, and uploaded when all its tensors have been read."""

    def __init__(self, folder: Folder, parameters: Mapping[str, Array]) -> None:
        self.folder, self.parameters = folder, parameters
        self.names: dict[str, list[str]] = {}  # by the name that the table has: an embedding may be a head, too
        for name in parameters:
            self.names.setdefault(tied_to(name, folder.model), []).append(name)
        self.left: Counter[str] = Counter()  # tensors of each that have not been read
        self.on_host: dict[str, np.ndarray] = {}

    def expect(self, wanted: Sequence[Part]) -> None:
        """Note which tensors will be read. Raises ArgumentError if an array has none."""
        self.left = Counter(part.ours for part in wanted)
        missing = sorted(set(self.names) - set(self.left))
        if missing:
            raise ArgumentError(
                f"{self.folder.family.architecture} has no tensor for the parameter {missing[0]}",
                found=f"{len(missing)} such parameters",
                expected="parameters of models.GPT as config.json describes it",
                remedy="build the model from the description in the folder",
            )

    def arrays_of(self, part: Part) -> list[np.ndarray]:
        """Return the host arrays that a tensor is a part of."""
        return [self._host(name) for name in self.names[part.ours]]

    def _host(self, name: str) -> np.ndarray:
        array = self.parameters[name]
        if not arrays.is_device(array):
            return array
        if name not in self.on_host:
            self.on_host[name] = np.empty(array.shape, array.dtype)
        return self.on_host[name]

    def has_read(self, part: Part) -> None:
        """Note that a tensor has been read; upload an array that is complete."""
        self.left[part.ours] -= 1
        for name in self.names[part.ours] if not self.left[part.ours] else ():
            if name in self.on_host:
                arrays.upload(self.on_host.pop(name), out=self.parameters[name])


def _read_part(folder: Folder, file: TensorFile, part: Part, ours: list[np.ndarray]) -> None:
    name = folder.places[part.theirs][1]
    entry = _entry(file, name)
    expected = shape_of(part.tensor, ours[0].shape, folder.model)
    if entry.kind.name not in FLOATS or entry.shape != expected:
        raise ArgumentError(
            f"the tensor {name} does not fit the model",
            found=f"{entry} in {file.path}",
            expected=f"{' or '.join(FLOATS)}, {list(expected)}",
            remedy=NOT_THESE,
        )
    views = [view(part.tensor, array, folder.model) for array in ours]
    for first, stop, piece in _pieces(file, name, views[0].shape):
        if count := count_not_finite(piece):
            raise NonFiniteError(
                f"the tensor {name} is not finite",
                found=f"{count} values that are NaN or infinite in {file.path}",
                expected="finite numbers",
                remedy=COPY_AGAIN,
            )
        for each in views:
            _set(each[first:stop], piece, part.tensor.form)


def _set(target: np.ndarray, piece: np.ndarray, form: str) -> None:
    """Copy a piece; into rows of a transposed array a line of the processor's cache at a time, six times as fast."""
    step = LINE_BYTES // target.itemsize if form == "transposed" else len(piece)
    for first in range(0, len(piece), step):
        target[first : first + step] = piece[first : first + step]


def _entry(file: TensorFile, name: str) -> TensorEntry:
    if name not in file.arrays:
        raise ArgumentError(
            f"a file of the model folder has no tensor {name}",
            found=f"{len(file.arrays)} others in {file.path}",
            expected="what the index says",
            remedy=COPY_AGAIN,
        )
    return file.arrays[name]


def _pieces(file: TensorFile, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (start, stop, values) along the first axis; halves as float32. A piece is gone when the next one comes."""
    entry = file.arrays[name]
    row = max(1, entry.nbytes // max(1, shape[0]))
    step = max(1, PIECE_BYTES // row)
    buffer = np.empty((min(step, shape[0]), *shape[1:]), entry.kind)
    wide = np.empty(buffer.shape, np.float32) if arrays.is_half(entry.kind) else buffer
    for first in range(0, shape[0], step):
        stop = min(first + step, shape[0])
        file.read_into(name, buffer[: stop - first], first * row)
        if wide is not buffer:
            wide[: stop - first] = buffer[: stop - first]
        yield first, stop, wide[: stop - first]


def _compare_head(folder: Folder, embedding: np.ndarray) -> int:
    """Raise ArgumentError unless a head that is stored next to a tied embedding is the same; return the bytes read."""
    assert folder.spare_head is not None
    place, name = folder.spare_head
    with opened(folder.path / place) as file:
        same = _entry(file, name).shape == embedding.shape and all(
            np.array_equal(embedding[first:stop], piece.astype(embedding.dtype))
            for first, stop, piece in _pieces(file, name, embedding.shape)
        )
        if not same:
            raise ArgumentError(
                "embedding and head of the model folder are two matrices",
                found=f"{name} in {file.path} differs from the embedding",
                expected="one, as tie_word_embeddings = true in config.json says",
                remedy="set tie_word_embeddings to false in config.json if the model was trained so",
            )
        return file.bytes_read
