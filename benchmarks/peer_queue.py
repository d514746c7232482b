"""vLLM's side of `executor_round_trip.py`: calls over its shared-memory MessageQueue, as its executor makes them.

Runs in vLLM's environment: `python peer_queue.py NUM_WORKERS`. For each line `NUM_CALLS` on standard input, it prints a
JSON list with the seconds of each call. An empty line ends it.
"""

import json
import multiprocessing
import sys
import time

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

ARGUMENT = b"x" * 2000


def serve(handle, rank, pipe):
    requests = MessageQueue.create_from_handle(handle, rank)
    replies = MessageQueue(1, 1)
    pipe.send(replies.export_handle())
    requests.wait_until_ready()
    replies.wait_until_ready()
    while True:
        method, args, _, reply_rank = requests.dequeue(indefinite=True)
        if method == "stop":
            return
        if reply_rank is None or reply_rank == rank:
            replies.enqueue((1, (rank, len(args[0]))))


def main(num_workers):
    context = multiprocessing.get_context("spawn")
    requests = MessageQueue(num_workers, num_workers)
    processes, pipes = [], []
    for rank in range(num_workers):
        pipe, other_end = context.Pipe()
        process = context.Process(target=serve, args=(requests.export_handle(), rank, other_end), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(pipe)
    replies = [MessageQueue.create_from_handle(pipe.recv(), 0) for pipe in pipes]
    requests.wait_until_ready()
    for queue in replies:
        queue.wait_until_ready()
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            requests.enqueue(("size", (ARGUMENT,), {}, None))
            for queue in replies:
                queue.dequeue()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)
    requests.enqueue(("stop", (), {}, None))
    for process in processes:
        process.join(5)


if __name__ == "__main__":
    main(int(sys.argv[1]))
