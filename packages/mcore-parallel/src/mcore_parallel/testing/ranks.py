"""Real gloo ranks for tests: a persistent pool of forked processes per test worker, a fresh world per job.

A job is a top-level function ``fn(rank, world_size, *args)``. Its result comes back pickled; the first rank that
failed on its own account (not through a peer's end) shows its traceback. A job over its time limit kills the pool.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

import torch
import torch.distributed as dist

_GRACE_SECONDS = 3.0
_PEER_WORDS = ("Connection closed by peer", "Timed out waiting", "Connection reset", "Broken pipe", "recv_rank", "pair")


class RankFailure(AssertionError):
    """A rank raised, died or took too long; the text holds its rank and its own traceback."""


@dataclass
class _Reply:
    rank: int
    ok: bool
    value: Any
    seconds: float


def _serve(pipe: connection.Connection) -> None:
    torch.set_num_threads(1)  # first thing: a forked child must not use the parent's OpenMP pool
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        pipe.send_bytes(_run_job(job))


def _run_job(job: bytes) -> bytes:
    began = time.perf_counter()
    rank = -1
    try:
        fn, rank, world_size, store, limit, args = pickle.loads(job)
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                rank=rank,
                world_size=world_size,
                store=dist.FileStore(store, world_size),
                timeout=timedelta(seconds=limit),
            )
            dist.barrier()  # a rank that is done at once must not leave while others still connect to it
        try:
            value = fn(rank, world_size, *args)
        finally:
            if world_size > 1:
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
            gc.collect()
        return pickle.dumps(_Reply(rank, True, value, time.perf_counter() - began))
    except BaseException:
        return pickle.dumps(_Reply(rank, False, traceback.format_exc(), time.perf_counter() - began))


class RankPool:
    """Up to ``size`` forked processes that run jobs of any world size up to it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = get_context("fork")
        self._workers: list[tuple[Any, connection.Connection]] = []
        self._owner = os.getpid()

    def _ensure(self, count: int) -> None:
        # torch.optim and checkpointing import this at first use, for seconds: once here, not once in each fork.
        importlib.import_module("torch._dynamo")
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], limit: float) -> list[Any]:
        """Run ``fn(rank, world_size, *args)`` on ranks ``0 .. world_size - 1``; results by rank."""
        self._ensure(world_size)
        with tempfile.TemporaryDirectory(prefix="mcore-ranks-") as folder:
            store = os.path.join(folder, "store")
            for rank in range(world_size):
                self._workers[rank][1].send_bytes(pickle.dumps((fn, rank, world_size, store, limit, args)))
            replies = self._collect(world_size, limit)
        failed = sorted((r for r in replies if not r.ok), key=lambda r: (_is_peer_error(r.value), r.seconds))
        if failed:
            self.close()  # a world that broke once may hold stuck sockets
            raise RankFailure(f"rank {failed[0].rank} of {world_size} failed:\n{failed[0].value}")
        return [reply.value for reply in sorted(replies, key=lambda r: r.rank)]

    def _collect(self, world_size: int, limit: float) -> list[_Reply]:
        waiting = {self._workers[rank][1]: rank for rank in range(world_size)}
        deadline = time.monotonic() + limit + 5
        replies: list[_Reply] = []
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and any(not reply.ok for reply in replies):
                return replies
            if not ready:
                self.close()
                raise RankFailure(f"ranks {sorted(waiting.values())} of {world_size} took longer than {limit} s")
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                replies.append(self._receive(pipe, waiting.pop(pipe)))
                if not replies[-1].ok:  # peers stuck in a collective end soon or are killed
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return replies

    def _receive(self, pipe: connection.Connection, rank: int) -> _Reply:
        try:
            reply: _Reply = pickle.loads(pipe.recv_bytes())
            return reply
        except (EOFError, ConnectionError):
            process = self._workers[rank][0]
            process.join(5)
            return _Reply(rank, False, f"the process died with exit code {process.exitcode}", 0.0)

    def close(self) -> None:
        """Kill the processes (a new job forks new ones)."""
        if os.getpid() != self._owner:
            return
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join(5)
        self._workers = []


def _is_peer_error(text: str) -> bool:
    last = text.strip().rsplit("\n", 1)[-1]
    return any(word in last for word in _PEER_WORDS)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, limit: float = 60.0, fresh: bool = False
) -> list[Any]:
    """Run the top-level function ``fn(rank, world_size, *args)`` on real gloo ranks; returns results by rank.

    ``fresh``: in processes of its own, for jobs that change what later jobs would see.

    Raises:
        RankFailure: a rank raised (its traceback is shown), died, or the job took longer than ``limit`` seconds.
    """
    if not fresh:
        return _pool().run(fn, world_size, args, limit)
    pool = RankPool(world_size)
    try:
        return pool.run(fn, world_size, args, limit)
    finally:
        pool.close()


def _pool() -> RankPool:
    # One pool per test process, kept on the interpreter's own module table entry of this module.
    module = sys.modules[__name__]
    pool = getattr(module, "_current_pool", None)
    if pool is None or pool._owner != os.getpid():
        pool = RankPool(8)
        module._current_pool = pool  # type: ignore[attr-defined]
        atexit.register(pool.close)
    return pool
