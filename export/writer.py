"""Streams a model to the disk, a few rows at a time, and never shows an unfinished file: it is
written under another name, read back, and only then renamed."""

import os
import secrets
import shutil
from pathlib import Path

import numpy as np
import xxhash
from tqdm import tqdm

from export.errors import ExportError
from export.format import BF16, Layout, Tensor
from export.model import Part

# Temporary files that may exist. Noted before they do, so that a signal at any moment finds them.
unfinished: list[Path] = []

CHUNK_BYTES = 8 << 20  # float32 bytes held at once; a few times as much while dequantising


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32, rounded to nearest even, as uint16. NaN is not handled."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _refuse(part: Part, first_row: int, values: np.ndarray, bad: np.ndarray, why: str) -> None:
    if bad.any():
        place = [int(i) for i in np.argwhere(bad)[0]]
        value = values[tuple(place)]
        place[0] += first_row
        raise ExportError(f"tensor {part.name}: value {value} at {place} {why}")


def encoded_chunks(tensor: Tensor):
    """The tensor's bytes as contiguous arrays, each value checked to be finite on both sides."""
    for part in tensor.parts:
        row_bytes = 4 * int(np.prod(part.shape[1:]))
        step = max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, part.shape[0], step):
            values = np.ascontiguousarray(part.read(start, min(start + step, part.shape[0])))
            _refuse(part, start, values, ~np.isfinite(values), "is not finite")
            if tensor.dtype == BF16:
                bits = to_bf16(values)
                overflow = (bits & 0x7FFF) == 0x7F80
                _refuse(part, start, values, overflow, "is too large for bf16; use --dtype f32")
                values = bits
            yield values


def _write(file, layout: Layout, progress: tqdm) -> None:
    file.write(bytes(layout.head_bytes))
    for tensor in layout.tensors:
        file.write(bytes(tensor.offset - file.tell()))
        digest = xxhash.xxh64()
        for chunk in encoded_chunks(tensor):
            data = memoryview(chunk).cast("B")
            file.write(data)
            digest.update(data)
            progress.update(len(data))
        tensor.checksum = digest.intdigest()
    file.write(bytes(layout.file_bytes - file.tell()))
    file.seek(0)
    file.write(layout.head())
    file.flush()
    os.fsync(file.fileno())


def _verify(path: Path, layout: Layout, progress: tqdm) -> None:
    """Reads the file back from the disk and compares it with what was meant."""
    with path.open("rb") as file:
        # Else the pages just written would answer in the disk's place.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if os.fstat(file.fileno()).st_size != layout.file_bytes:
            raise ExportError(f"{path}: the file just written has the wrong length")
        if file.read(layout.head_bytes) != layout.head():
            raise ExportError(f"{path}: the head reads back differently: is the disk failing?")
        for tensor in layout.tensors:
            file.seek(tensor.offset)
            digest, left = xxhash.xxh64(), tensor.bytes
            while left:
                data = file.read(min(left, CHUNK_BYTES))
                if not data:
                    break
                digest.update(data)
                progress.update(len(data))
                left -= len(data)
            if left or digest.intdigest() != tensor.checksum:
                raise ExportError(
                    f"{path}: tensor {tensor.name} reads back differently: is the disk failing?"
                )


def _sync_folder(folder: Path) -> None:
    """Makes the rename durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_unfinished() -> None:
    for path in unfinished:
        path.unlink(missing_ok=True)


def check_target(target: Path) -> None:
    if target.is_dir():
        raise ExportError(f"{target} is a directory; -o takes the file to write")
    if target.exists() and not target.is_file():
        raise ExportError(f"{target} is a device or a pipe; -o takes the file to write")
    if not target.parent.is_dir():
        raise ExportError(f"the folder {target.parent} does not exist")


def write_model(layout: Layout, target: Path) -> None:
    """Writes target, or leaves it as it was."""
    check_target(target)
    free = shutil.disk_usage(target.parent).free
    if free < layout.file_bytes:
        raise ExportError(
            f"{target.parent}: {layout.file_bytes} bytes needed, {free} free; "
            "nothing has been written"
        )
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    unfinished.append(temporary)
    try:
        total = 2 * sum(tensor.bytes for tensor in layout.tensors)
        with tqdm(total=total, unit="B", unit_scale=True, leave=False, disable=None) as progress:
            with temporary.open("xb") as file:
                progress.set_description("writing")
                _write(file, layout, progress)
            progress.set_description("reading back")
            _verify(temporary, layout, progress)
        temporary.replace(target)
        _sync_folder(target.parent)
    finally:
        discard_unfinished()
