"""gloo's turn of comm.py: prints `kind bytes microseconds` lines, measured as `dcc bench comm` measures, in fewer transfers: they take long."""

import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROUNDS = 5
WARM_S = 0.25
FIRST, MOST_S = 4, 0.1  # transfers by which the seconds of a round are judged, and their limit


def work(rank, ranks, least, most, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    began, warm = time.perf_counter(), torch.zeros(1)
    while warm.item() < WARM_S:  # ranks that began on one processor come to others that are free
        warm.fill_(time.perf_counter() - began)
        dist.all_reduce(warm, dist.ReduceOp.MAX)
    size = least
    while size <= most:
        for kind, call, result in transfers(rank, ranks, size):
            count = max(4, min(400, (16 << 20) // size))
            count = max(4, min(count, int(MOST_S / (seconds(call, FIRST) / FIRST))))
            times = []
            for _ in range(ROUNDS):
                if kind == "all_reduce":
                    result.fill_(1)
                    call()
                    assert result[0] == ranks, "the sum of ones"
                times.append(seconds(call, count) / count / (2 if kind == "send" else 1))
            if rank == 0:
                print(kind, size, f"{1e6 * statistics.median(times):.4f}", flush=True)
        size *= 4
    dist.destroy_process_group()


def seconds(call, count):
    """Of so many transfers on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def transfers(rank, ranks, size):
    """(name, call, result) of each kind; `size` is bytes of the whole tensor."""
    elements = size // 4
    part = max(elements // ranks, 1)
    tensor, own, whole = torch.ones(elements), torch.ones(part), list(torch.ones(part * ranks).chunk(ranks))
    every, block = torch.ones(part * ranks), max(part // ranks, 1)
    given, taken = torch.ones(block * ranks), torch.ones(block * ranks)

    def message():
        if rank == 0:
            dist.send(tensor, 1)
        if rank < 2:
            dist.recv(tensor, 1 - rank)
        if rank == 1:
            dist.send(tensor, 0)

    yield "all_reduce", lambda: dist.all_reduce(tensor), tensor
    yield "all_gather", lambda: dist.all_gather(whole, own), whole[0]
    yield "reduce_scatter", lambda: dist.reduce_scatter_tensor(own, every), own
    yield "all_to_all", lambda: dist.all_to_all_single(taken, given), taken
    yield "send", message, tensor


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, least, most = map(int, sys.argv[1:])
    mp.spawn(work, (ranks, least, most, port), nprocs=ranks)
