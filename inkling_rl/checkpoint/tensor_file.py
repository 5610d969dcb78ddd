"""One safetensors file: where every tensor lies, reading rows of one, writing rows of one.

The library maps a file and hands out whole tensors; pages that it has touched count as the process's memory, and it
writes from a dictionary that holds everything. Here rows are read into memory of their own with `pread`, and written
with `pwrite` at a place that the header has fixed beforehand, so that a process holds what it works on and no more.
Names, shapes and dtypes only, no meaning. torch is imported where rows become tensors.

Source: the safetensors format (8 bytes with the header's length, little endian; a JSON header padded with spaces to a
multiple of 8; the data). Files are byte for byte those of `safetensors.torch.save_file`: the widest dtypes first, then
by name.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inkling_rl.checkpoint.layout import CheckpointError, TensorSpec

if TYPE_CHECKING:
    import torch

COPY_BYTES = 16 * 2**20
_MAX_HEADER_BYTES = 100 * 10**6  # the library's own limit
# In the library's order of dtypes; files list the later ones first.
_DTYPES: tuple[tuple[str, str, int], ...] = (
    ("BOOL", "bool", 1),
    ("U8", "uint8", 1),
    ("I8", "int8", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E8M0", "float8_e8m0fnu", 1),
    ("I16", "int16", 2),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("I32", "int32", 4),
    ("F32", "float32", 4),
    ("F64", "float64", 8),
    ("I64", "int64", 8),
)
_TORCH_NAMES = {stored: name for stored, name, _ in _DTYPES}
_STORED_NAMES = {name: stored for stored, name, _ in _DTYPES}
_SIZES = {name: size for _, name, size in _DTYPES}
_ORDER = {name: position for position, (_, name, _) in enumerate(_DTYPES)}


def num_bytes(spec: TensorSpec) -> int:
    """Size of a tensor's data."""
    return prod(spec.shape) * _SIZES[spec.dtype]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor within a file."""

    spec: TensorSpec
    offset: int
    """Of its first byte, from the start of the file."""

    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension; all of them for a scalar."""
        return self.num_bytes // max(1, self.num_rows)

    @property
    def num_rows(self) -> int:
        return self.spec.shape[0] if self.spec.shape else 1

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, int]]:
        """First row and the one after the last of pieces of about `max_bytes`, one row at least."""
        step = max(1, max_bytes // max(1, self.row_bytes))
        for start in range(0, self.num_rows, step):
            yield start, min(start + step, self.num_rows)


class TensorFile:
    """A safetensors file opened for reading; closed when it is dropped.

    Raises:
        CheckpointError: no readable safetensors file, or one that is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
            self.places = _places(self.descriptor)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} must be a readable safetensors file; got: {error}. Copy it again") from error

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows `start` to `stop` of the first dimension (all of a scalar), in memory of their own.

        Raises:
            CheckpointError: the file has become shorter since it was opened, or torch has no such dtype.
        """
        import torch

        place = self.places[name]
        stop = place.num_rows if stop is None else stop
        assert 0 <= start <= stop <= place.num_rows
        dtype = getattr(torch, place.spec.dtype, None)
        if dtype is None:
            raise CheckpointError(f"{self.path.name}:{name} must have a dtype of torch; got {place.spec.dtype}")
        content = torch.empty((stop - start) * place.row_bytes, dtype=torch.uint8, device="cpu")
        self._fill(memoryview(content.numpy()), place.offset + start * place.row_bytes)
        shape = (stop - start, *place.spec.shape[1:]) if place.spec.shape else ()
        return content.view(dtype).reshape(shape)

    def _fill(self, buffer: memoryview, offset: int) -> None:
        while buffer:
            count = os.preadv(self.descriptor, [buffer], offset)
            if count == 0:
                raise CheckpointError(f"{self.path} must have its full length; it was cut while being read")
            buffer, offset = buffer[count:], offset + count


class TensorFileWriter:
    """A safetensors file whose tensors are known beforehand and arrive in rows.

    Each tensor's rows come in order; those of different tensors may alternate. Not thread-safe.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self.path = path
        header, self.places = _header(specs)
        self._rows = dict.fromkeys(specs, 0)
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        _write(self.descriptor, memoryview(header), 0)

    @property
    def is_complete(self) -> bool:
        return all(self._rows[name] == place.num_rows for name, place in self.places.items())

    def incomplete(self) -> list[str]:
        """Tensors that miss rows."""
        return [name for name, place in self.places.items() if self._rows[name] != place.num_rows]

    def write(self, name: str, rows: torch.Tensor, start: int = 0) -> None:
        """Write the next rows of a tensor, on the CPU and of its dtype; a scalar is one row."""
        import torch

        place = self.places[name]
        assert str(rows.dtype).removeprefix("torch.") == place.spec.dtype, f"{name}: {rows.dtype}"
        num_rows = rows.shape[0] if place.spec.shape else 1
        self._advance(name, start, num_rows)
        content = rows.contiguous().reshape(-1).view(torch.uint8)
        assert content.numel() == num_rows * place.row_bytes, f"{name}: {list(rows.shape)}"
        _write(self.descriptor, memoryview(content.numpy()), place.offset + start * place.row_bytes)

    def copy(self, name: str, source: TensorFile, start: int, stop: int) -> None:
        """Copy rows `start` to `stop` of a tensor of another file, by the kernel where it can."""
        place, origin = self.places[name], source.places[name]
        assert place.spec == origin.spec, name
        self._advance(name, start, stop - start)
        done, end, in_kernel = start * place.row_bytes, stop * place.row_bytes, True
        while done < end:
            size, count = min(COPY_BYTES, end - done), 0
            if in_kernel:
                count = _copy_in_kernel(source, self, size, origin.offset + done, place.offset + done)
                in_kernel = count > 0
            if not count:
                buffer = memoryview(bytearray(size))
                source._fill(buffer, origin.offset + done)
                _write(self.descriptor, buffer, place.offset + done)
                count = size
            done += count

    def close(self) -> None:
        """Bring the file to the disk and close it. Safe to call again."""
        if self.descriptor >= 0:
            try:
                os.fsync(self.descriptor)
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Close without waiting for the disk. Safe to call again."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _advance(self, name: str, start: int, num_rows: int) -> None:
        if start != self._rows[name] or start + num_rows > self.places[name].num_rows:
            raise CheckpointError(
                f"{name} must be written once, its rows in order; got rows {start} to {start + num_rows} after "
                f"{self._rows[name]}. Remove what came twice"
            )
        self._rows[name] += num_rows


def _copy_in_kernel(source: TensorFile, target: TensorFileWriter, size: int, offset: int, target_offset: int) -> int:
    """Bytes copied; 0 between file systems, or under a kernel, that cannot."""
    try:
        return os.copy_file_range(source.descriptor, target.descriptor, size, offset, target_offset)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        return 0


def _write(descriptor: int, buffer: memoryview, offset: int) -> None:
    while buffer:
        count = os.pwrite(descriptor, buffer, offset)
        buffer, offset = buffer[count:], offset + count


def _header(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, Place]]:
    """Length and header as the file begins, and where each tensor lies."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    names = sorted(specs, key=lambda name: (-_ORDER[specs[name].dtype], name))
    for name in names:
        spec, size = specs[name], num_bytes(specs[name])
        entries[name] = {
            "dtype": _STORED_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    places, begin = {}, 8 + len(text)
    for name in names:
        first, end = entries[name]["data_offsets"]
        places[name] = Place(specs[name], begin + first, end - first)
    return len(text).to_bytes(8, "little") + text, places


def _places(descriptor: int) -> dict[str, Place]:
    file_bytes = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(file_bytes - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
    header = json.loads(os.pread(descriptor, length, 8))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        dtype = _TORCH_NAMES.get(entry["dtype"], entry["dtype"])
        spec = TensorSpec(tuple(entry["shape"]), dtype)
        if dtype in _SIZES and num_bytes(spec) != end - first:
            raise ValueError(f"{name} of {end - first} bytes, which are not {entry['dtype']} {entry['shape']}")
        places[name] = Place(spec, 8 + length + first, end - first)
    _check_cover(places, 8 + length, file_bytes)
    return places


def _check_cover(places: Mapping[str, Place], begin: int, file_bytes: int) -> None:
    """The data of the tensors must fill the file from the header to the end, without gaps or overlaps."""
    for place in sorted(places.values(), key=lambda place: (place.offset, place.num_bytes)):
        if place.offset != begin:
            raise ValueError(f"tensors that leave a gap or overlap at byte {min(begin, place.offset)}")
        begin += place.num_bytes
    if begin != file_bytes:
        raise ValueError(f"{file_bytes} bytes where the header describes {begin}")
