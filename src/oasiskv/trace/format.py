"""A trace in memory and in a file: wanted blocks per step, layer and KV head.

The file is one xz stream: a line of JSON (``header.Header``), then the body, little-endian 32-bit
unsigned numbers: ``positions[steps]``, ``ends[steps]``, ``counts[steps][layers][heads]`` and
``gaps[changes]``. docs/traces.md has the whole schema.
"""

import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oasiskv.errors import TraceError
from oasiskv.trace.header import MAX_BODY_BYTES, MAX_NUMBER, MAX_TILES, Header, parse_header

MAX_HEADER_BYTES = 2**16
"""The header's line ends within so many bytes."""

_NUMBERS = np.dtype("<u4")
# What unpacking may take beside its output; the dictionary of our own preset takes 9 MiB.
_XZ_MEMORY_BYTES = 2**27

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class TraceStep(NamedTuple):
    """What one step wants.

    Attributes:
        position: tokens computed when it was predicted.
        end: one past the last candidate block; the first candidate follows the sink.
        wanted: int64 ``[layers, heads, K]`` blocks of the request in ascending order, padded with
            -1 at the end.
    """

    position: int
    end: int
    wanted: Ints


@dataclass(frozen=True, eq=False)
class Trace:
    """Wanted blocks of a whole run, as changes from step to step.

    Args:
        header: shape and origin.
        positions: int64 ``[steps]`` tokens computed when the step's blocks were predicted.
        ends: int64 ``[steps]`` one past the last candidate block.
        counts: int64 ``[steps, layers * heads]`` changes of each step and row.
        blocks: int64 ``[changes]`` the blocks that change, ascending within a step and row: one
            that the step before wanted is wanted no more, any other is wanted from here on. Before
            the first step none is.

    Raises:
        TraceError: the arrays contradict the header or one another.
    """

    header: Header
    positions: Ints
    ends: Ints
    counts: Ints
    blocks: Ints

    def __post_init__(self) -> None:
        _check(self)

    @property
    def candidates(self) -> tuple[int, int]:
        """Candidate blocks of the first and of the last step."""
        sink = self.header.sink_blocks
        return int(self.ends[0]) - sink, int(self.ends[-1]) - sink

    def masks(self) -> Iterator[Mask]:
        """Each step's wanted blocks: bool ``[layers * heads, ends[-1]]``, valid until the next."""
        rows, width = self.header.rows, int(self.ends[-1])
        mask = np.zeros((rows, width), dtype=np.bool_)
        flat = mask.reshape(-1)
        offset = np.arange(rows) * width
        begin = 0
        for counts in self.counts:
            end = begin + int(counts.sum())
            # Within a step and row blocks ascend, so no place comes twice.
            flat[np.repeat(offset, counts) + self.blocks[begin:end]] ^= True
            begin = end
            yield mask

    def steps(self) -> Iterator[TraceStep]:
        """The steps in order; each has arrays of its own."""
        head = self.header
        for position, end, mask in zip(self.positions, self.ends, self.masks(), strict=True):
            row, block = mask.nonzero()
            sizes = mask.sum(axis=1)
            wanted = np.full((head.rows, head.budget_blocks), -1, dtype=np.int64)
            wanted[row, np.arange(len(row)) - np.repeat(sizes.cumsum() - sizes, sizes)] = block
            shape = (head.layers, head.kv_heads, head.budget_blocks)
            yield TraceStep(int(position), int(end), wanted.reshape(shape))


def encode_trace(trace: Trace) -> bytes:
    """The bytes of a trace file."""
    gaps = _to_gaps(trace.blocks, trace.counts)
    parts = (trace.positions, trace.ends, trace.counts.reshape(-1), gaps)
    line = trace.header.model_dump_json().encode() + b"\n"
    return lzma.compress(line + np.concatenate(parts).astype(_NUMBERS).tobytes())


def decode_trace(data: bytes, what: str) -> Trace:
    """A trace from the bytes of its file, which may be anything.

    Args:
        data: the bytes.
        what: the file's name, for errors.

    Raises:
        TraceError: they are no trace, a damaged one, or one that is too large.
    """
    unpacked = _Unpacked(data, what)
    line, separator, begun = unpacked.read(MAX_HEADER_BYTES).partition(b"\n")
    if not separator:
        raise TraceError(f"{what} is no trace: no line ends in its first {MAX_HEADER_BYTES} bytes")
    header = parse_header(line, what)
    # One byte more than there should be, to see whether there is.
    body = begun + unpacked.read(header.body_bytes + 1 - len(begun))
    if len(body) != header.body_bytes or not unpacked.ended:
        raise TraceError(
            f"{what} is damaged: its header asks for a body of {header.body_bytes} bytes, it holds "
            f"{'more' if len(body) >= header.body_bytes else len(body)}"
        )
    numbers = np.frombuffer(body, dtype=_NUMBERS).astype(np.int64)
    steps, cells = header.steps, header.steps * header.rows
    positions, ends, flat, gaps = np.split(numbers, [steps, 2 * steps, 2 * steps + cells])
    counts = flat.reshape(steps, header.rows)
    if int(counts.sum()) != header.changes:
        raise TraceError(
            f"{what} is damaged: it counts {counts.sum()} changes, its header {header.changes}"
        )
    try:
        return Trace(header, positions, ends, counts, _from_gaps(gaps, counts))
    except TraceError as error:
        raise TraceError(f"{what} is damaged: {error}") from None


def read_trace_file(path: Path) -> Trace:
    """Read a trace file, which is not trusted.

    Raises:
        TraceError: it cannot be read, or see ``decode_trace``.
    """
    most = MAX_BODY_BYTES + MAX_HEADER_BYTES
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    if len(data) > most:
        raise TraceError(f"{path} is larger than any trace, {most} bytes")
    return decode_trace(data, str(path))


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace file, in place of one that is there.

    Raises:
        TraceError: it cannot be written.
    """
    try:
        path.write_bytes(encode_trace(trace))
    except OSError as error:
        raise TraceError(f"cannot write the trace {path}: {error.strerror}") from error


class _Unpacked:
    """The content of an xz stream, read in parts whose size is bounded beforehand."""

    def __init__(self, data: bytes, what: str) -> None:
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
        self._data, self._what = data, what

    def read(self, most: int) -> bytes:
        """The next bytes, ``most`` of them unless the stream is shorter."""
        parts = []
        while most > 0 and not self._stream.eof:
            data, self._data = self._data, b""
            try:
                part = self._stream.decompress(data, most)
            except lzma.LZMAError as error:
                raise TraceError(f"{self._what} is no trace, or a damaged one: {error}") from None
            if not part and self._stream.needs_input:
                raise TraceError(f"{self._what} is damaged: it ends too early")
            parts.append(part)
            most -= len(part)
        return b"".join(parts)

    @property
    def ended(self) -> bool:
        """Nothing is left, neither of the stream nor after it."""
        return self._stream.eof and not self._stream.unused_data


def _firsts(counts: Ints) -> Ints:
    """Where in ``blocks`` each step and row begins that has any: int64 ``[<= steps * rows]``."""
    sizes = counts.reshape(-1)
    return (sizes.cumsum() - sizes)[sizes > 0]


def _to_gaps(blocks: Ints, counts: Ints) -> Ints:
    """Per step and row the first block, then how many blocks lie between one and the next."""
    gaps = np.diff(blocks, prepend=0) - 1
    firsts = _firsts(counts)
    gaps[firsts] = blocks[firsts]
    return gaps


def _from_gaps(gaps: Ints, counts: Ints) -> Ints:
    """What ``_to_gaps`` was made of."""
    firsts = _firsts(counts)
    distances = gaps + 1
    distances[firsts] = gaps[firsts]
    # At most 2**27 numbers below 2**32: no overflow.
    sums = distances.cumsum()
    before = sums[firsts] - distances[firsts]
    return sums - np.repeat(before, np.diff(firsts, append=len(gaps)))


def _check(trace: Trace) -> None:
    """See ``Trace``."""
    head, positions, ends, counts = trace.header, trace.positions, trace.ends, trace.counts
    shape = (head.steps, head.rows)
    if positions.shape != shape[:1] or ends.shape != shape[:1] or counts.shape != shape:
        raise TraceError(f"arrays of another shape than steps and rows {shape}")
    if len(trace.blocks) != head.changes or int(counts.sum()) != head.changes:
        raise TraceError(f"{len(trace.blocks)} changed blocks, the header says {head.changes}")
    if bool((np.diff(positions) < 0).any()) or bool((np.diff(ends) < 0).any()):
        raise TraceError("a step has fewer tokens or candidate blocks than the one before")
    if int(ends[0]) <= head.sink_blocks or bool((ends > positions // head.block_tokens).any()):
        raise TraceError("candidates end within the sink, or after the last closed block")
    if head.rows * int(ends[-1]) > MAX_TILES or int(positions[-1]) > MAX_NUMBER:
        raise TraceError(
            f"{head.rows} rows of {ends[-1]} blocks at position {positions[-1]}: at most "
            f"{MAX_TILES} tiles and position {MAX_NUMBER}"
        )
    _check_blocks(trace)


def _check_blocks(trace: Trace) -> None:
    head, counts, blocks = trace.header, trace.counts, trace.blocks
    firsts = _firsts(counts)
    rising = np.diff(blocks, prepend=-1) > 0
    rising[firsts] = True
    if not bool(rising.all()):
        raise TraceError("blocks of a step and row do not ascend")
    limits = np.repeat(trace.ends, counts.sum(axis=1))
    if bool(((blocks < head.sink_blocks) | (blocks >= limits)).any()):
        raise TraceError("a wanted block is no candidate of its step")
    sizes = _set_sizes(trace)
    if int(sizes.max()) > head.budget_blocks:
        raise TraceError(f"a step wants {sizes.max()} blocks, K is {head.budget_blocks}")


def _set_sizes(trace: Trace) -> Ints:
    """Wanted blocks of each step and row: int64 ``[steps, rows]``, at the cost of the changes."""
    counts, width = trace.counts, int(trace.ends[-1])
    cell = np.repeat(np.arange(counts.size), counts.reshape(-1))
    tile = cell % trace.header.rows * width + trace.blocks
    order = np.argsort(tile, kind="stable")
    # Of each tile's changes the first makes it wanted, the second not, and so on.
    _, begins, lengths = np.unique(tile[order], return_index=True, return_counts=True)
    turn = np.arange(len(order)) - np.repeat(begins, lengths)
    grown = np.zeros(counts.size, dtype=np.int64)
    np.add.at(grown, cell[order], 1 - turn % 2 * 2)
    sizes: Ints = grown.reshape(counts.shape).cumsum(axis=0)
    return sizes
