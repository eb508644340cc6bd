"""A memory checker for Triton kernels that needs no GPU: it watches every load and store that the interpreter makes.

    with watched():
        chunk_delta_triton(q, k, v, coef)

Raises `MemoryFault` at an access outside every tensor given to the kernel (on a card an illegal address, or a neighbour's bytes), and at
what the interpreter hides because it runs programs one after the other and each in one piece:

* two programs touch the same bytes, and one of them writes;
* a program reads or writes what it wrote, or writes over what it read, with no `tl.debug_barrier` between that makes its threads wait for
  each other. Allowed is to write a tile back to where it was read from, by one warp, or if it is so large that no two threads
  read a number.

`torch.empty` is filled with NaN meanwhile, so what is read before anyone wrote it shows in the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from triton.runtime import interpreter

NOBODY, MANY = -1, -2


class MemoryFault(AssertionError):
    """A kernel touched memory that it must not touch."""


class Storage:
    """One tensor's storage during one launch: who read and who wrote each byte, and (of the running program) before which barrier."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.size = begin, size
        self.reader, self.writer = np.full(size, NOBODY, np.int32), np.full(size, NOBODY, np.int32)
        self.read_at, self.written_at = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.tiles: set[bytes] = set()
        """The tiles read by the running program, by their addresses."""


class Watch:
    def __init__(self) -> None:
        self.kernel, self.threads, self.barriers, self.program = "", 0, 0, -1
        self.storages: list[Storage] = []

    def launch(self, kernel: str, tensors: list[torch.Tensor]) -> None:
        self.kernel, self.program = kernel, -1
        found = {(s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in tensors)}
        self.storages = [Storage(begin, size) for begin, size in sorted(found) if size]

    def access(self, addresses: np.ndarray, mask: np.ndarray, width: int, write: bool) -> None:
        addresses = np.broadcast_to(addresses, mask.shape).astype(np.int64)
        tile, addresses = addresses.tobytes(), addresses[mask]
        dims, place = interpreter.interpreter_builder.grid_dim, interpreter.interpreter_builder.grid_idx
        program = (place[0] * dims[1] + place[1]) * dims[2] + place[2]
        if program != self.program:
            self.program = program
            for storage in self.storages:
                storage.tiles.clear()
        where, left = f"{self.kernel}, program {place}", np.ones(len(addresses), bool)
        for storage in self.storages:
            inside = (addresses >= storage.begin) & (addresses + width <= storage.begin + storage.size)
            if inside.any():
                left &= ~inside
                at = np.unique(addresses[inside] - storage.begin)
                if write:
                    if len(at) < inside.sum():
                        raise MemoryFault(f"{where}: one store writes an address twice")
                    own = tile in storage.tiles and (self.threads == 32 or mask.size >= self.threads * max(1, 16 // width))
                    self._write(storage, at, own, where)
                else:
                    storage.tiles.add(tile)
                    self._read(storage, at, where)
        if left.any():
            raise MemoryFault(f"{where}: {'stores' if write else 'loads'} {left.sum()} numbers outside every tensor")

    def _read(self, storage: Storage, at: np.ndarray, where: str) -> None:
        reader, writer = storage.reader[at], storage.writer[at]
        if ((writer != NOBODY) & (writer != self.program)).any():
            raise MemoryFault(f"{where}: reads what another program wrote")
        if ((writer == self.program) & (storage.written_at[at] == self.barriers)).any():
            raise MemoryFault(f"{where}: reads what it wrote, and its other threads may not have written yet")
        storage.reader[at] = np.where((reader == NOBODY) | (reader == self.program), self.program, MANY)
        storage.read_at[at] = self.barriers

    def _write(self, storage: Storage, at: np.ndarray, own: bool, where: str) -> None:
        reader, writer = storage.reader[at], storage.writer[at]
        if ((writer != NOBODY) & (writer != self.program)).any():
            raise MemoryFault(f"{where}: writes what another program wrote")
        if ((reader != NOBODY) & (reader != self.program)).any():
            raise MemoryFault(f"{where}: writes what another program reads")
        if ((writer == self.program) & (storage.written_at[at] == self.barriers)).any():
            raise MemoryFault(f"{where}: writes an address again")
        if not own and ((reader == self.program) & (storage.read_at[at] == self.barriers)).any():
            raise MemoryFault(f"{where}: writes where it has read, and its other threads may not have read yet")
        storage.writer[at], storage.written_at[at] = self.program, self.barriers


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Every kernel run by the interpreter inside is watched."""
    watch, builder, executor = Watch(), interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, init = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    call, barrier = executor.__call__, builder.create_barrier

    def watched_load(self, ptrs, mask, *rest, **named):
        watch.access(ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8, write=False)
        return load(self, ptrs, mask, *rest, **named)

    def watched_store(self, ptrs, value, mask, *rest, **named):
        watch.access(ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8, write=True)
        return store(self, ptrs, value, mask, *rest, **named)

    def watched_launch(self, args, named):
        found = init(self, args, named)
        tensors = [x for x in (*found[0], *found[1].values()) if torch.is_tensor(x)]
        watch.launch(self.fn.__name__, tensors)
        return found

    def watched_call(self, *args, **named):
        watch.threads = 32 * named.get("num_warps", 4)
        return call(self, *args, **named)

    def watched_barrier(self):
        watch.barriers += 1
        return barrier(self)

    strict, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    builder.create_masked_load, builder.create_masked_store, executor._init_args_hst = watched_load, watched_store, watched_launch
    executor.__call__, builder.create_barrier = watched_call, watched_barrier
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield watch
    finally:
        builder.create_masked_load, builder.create_masked_store, executor._init_args_hst = load, store, init
        executor.__call__, builder.create_barrier = call, barrier
        torch.use_deterministic_algorithms(strict)
        torch.utils.deterministic.fill_uninitialized_memory = fill
