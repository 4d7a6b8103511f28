"""What the processes of test_stream_end.py run."""

import json
import sys

import torch.distributed as dist

from xlength.datasets.stream_end import EqualSteps

CASES = [
    # batches of each rank, interval
    ([5, 7, 6], 8),
    ([0, 3, 2], 8),
    ([1, 1, 2], 1),
    ([8, 8, 8], 4),
    ([20, 9, 20], 3),
    ([40, 41, 40], 8),
    ([15, 16, 17], 8),
    ([31, 100, 63], 16),
]
BROKEN_OFF_AFTER = 11


def main(result):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    passes, most_ahead = [], []
    for counts, interval in CASES:
        equal, source = EqualSteps(interval), Source(counts[rank])
        drawn, ahead = [], 0
        for batch in equal.over(source):
            drawn.append(batch)
            ahead = max(ahead, source.read - len(drawn))
        passes.append(drawn)
        most_ahead.append(ahead)
    # Another pass with the same object, and one that training breaks off at the same step.
    equal = EqualSteps(4)
    again = [list(equal.over(range(count + rank))) for count in (5, 9)]
    broken = []
    for batch in equal.over(range(50 + rank)):
        broken.append(batch)
        if len(broken) == BROKEN_OFF_AFTER:
            break
    dist.barrier()
    with open(f"{result}{rank}.json", "w") as file:
        json.dump({"passes": passes, "ahead": most_ahead, "again": again, "broken": broken}, file)
    dist.destroy_process_group()


class Source:
    def __init__(self, count):
        self.count, self.read = count, 0

    def __iter__(self):
        for i in range(self.count):
            self.read += 1
            yield i


if __name__ == "__main__":
    main(sys.argv[1])
