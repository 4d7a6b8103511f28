"""Real processes that are asked to stop, lose a rank, or go on with another number of ranks.

As ``kill.py``, run as a module: ``python -m tests.resume.signals FOLDER SCENARIO``.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.resume.kill import (
    compare,
    config,
    config_file,
    entries,
    fork_ranks,
    kill_group,
    run_killed,
    wait_all,
    warm_up,
)


def prepare(folder, name, case="TokenBudget", workers=0, epochs=None, timeout=60, slow=0.0):
    """A folder with a config; ``slow`` seconds a step."""
    run = folder / name
    run.mkdir(parents=True)
    text = config(case, workers, seed=3, epochs=epochs).replace("timeout=60", f"timeout={timeout}")
    if slow:
        text = text.replace(
            "dict(type='ConsumedLog')", f"dict(type='ConsumedLog'), dict(type='Slow', s={slow})"
        )
    config_file(run).write_text(text)
    return run


def wait_for_steps(run, steps):
    until = time.monotonic() + 120
    while len(entries(run, 0)) < steps and time.monotonic() < until:
        time.sleep(0.005)
    return len(entries(run, 0))


def whole_run(folder, ranks, **options):
    whole = prepare(folder, "whole", **options)
    run_killed(whole, lambda attempt: ranks, 0, random.Random(0))
    return whole


def output(run, rank):
    return (run / f"output{rank}.txt").read_text()


def stop(folder, ranks=1, workers=0):
    """SIGTERM to one rank: all save at the end of a step and end with 75; then resume.

    With workers the whole group of processes gets the signal, as from a launcher.
    """
    whole = whole_run(folder, ranks, workers=workers)
    cut = prepare(folder, "cut", slow=0.05, workers=workers)
    pids = fork_ranks(cut, ranks)
    wait_for_steps(cut, 7)
    if workers:
        os.killpg(pids[-1], signal.SIGTERM)
    else:
        os.kill(pids[-1], signal.SIGTERM)
    begin = time.monotonic()
    codes = wait_all(pids, 60)
    seconds = time.monotonic() - begin
    done = max(iteration for iteration, _ in entries(cut, 0)) + 1
    last = Path((cut / "last_checkpoint").read_text()).name
    run_killed(cut, lambda attempt: ranks, 0, random.Random(0))
    problems = compare(whole, cut, ranks)
    return dict(codes=codes, seconds=seconds, done=done, last=last, problems=problems)


def stop_two_ranks(folder):
    return stop(folder, 2)


def stop_by_epoch(folder):
    """In epoch 1, with checkpoints that are saved and called by epochs."""
    was = "by_epoch=False, interval=3, max_keep_ckpts=2"
    now = "by_epoch=True, interval=1, max_keep_ckpts=1, filename_tmpl='ep{}.pth'"
    for name, slow in (("whole", 0), ("cut", 0.05)):
        run = prepare(folder, name, slow=slow)
        text = config_file(run).read_text()
        assert was in text
        config_file(run).write_text(text.replace(was, now))
    run_killed(folder / "whole", lambda attempt: 1, 0, random.Random(0))
    cut = folder / "cut"
    pids = fork_ranks(cut, 1)
    wait_for_steps(cut, 17)
    os.kill(pids[0], signal.SIGTERM)
    codes = wait_all(pids, 60)
    done = max(iteration for iteration, _ in entries(cut, 0)) + 1
    files = sorted(path.name for path in cut.glob("*.pth"))
    run_killed(cut, lambda attempt: 1, 0, random.Random(0))
    return dict(codes=codes, done=done, files=files, problems=compare(folder / "whole", cut, 1))


def stop_with_workers(folder):
    return stop(folder, 1, workers=2)


def stop_twice(folder):
    """A second SIGTERM ends the run at once, in the middle of a long step."""
    cut = prepare(folder, "cut", slow=5)
    pids = fork_ranks(cut, 1)
    wait_for_steps(cut, 1)
    os.kill(pids[0], signal.SIGTERM)
    time.sleep(1.5)
    os.kill(pids[0], signal.SIGTERM)
    begin = time.monotonic()
    codes = wait_all(pids, 60)
    return dict(codes=codes, seconds=time.monotonic() - begin)


def stop_one_after_the_other(folder):
    """SIGTERM reaches rank 1 when it knows from rank 0 already, which is saving."""
    cut = prepare(folder, "cut")
    text = config_file(cut).read_text()
    hooks = "dict(type='ConsumedLog'), dict(type='SlowSave')"
    config_file(cut).write_text(text.replace("dict(type='ConsumedLog')", hooks))
    pids = fork_ranks(cut, 2)
    wait_for_steps(cut, 4)
    os.kill(pids[0], signal.SIGTERM)
    time.sleep(1)
    os.kill(pids[1], signal.SIGTERM)
    return dict(codes=wait_all(pids, 60))


VALIDATION = """
val_dataloader = dict(
    batch_size=1, dataset=dict(type='NoisyText', length=[3, 4, 5, 6, 7]),
    sampler=dict(type='DefaultSampler', shuffle=False, round_up=False),
    collate_fn=dict(type='tiny_collate'))
val_cfg = dict()
val_evaluator = dict(type='Seen')
"""


def stop_in_validation(folder):
    """SIGTERM to rank 1 of 2 in a validation in which rank 0 has 3 steps and rank 1 has 2."""
    for name, seconds in (("whole", 0), ("cut", 1.5)):
        run = prepare(folder, name)
        text = config_file(run).read_text().replace("max_iters=32", "max_iters=8, val_interval=4")
        hooks = f"dict(type='ConsumedLog'), dict(type='ValidationLog', s={seconds})"
        text = text.replace("dict(type='ConsumedLog')", hooks)
        config_file(run).write_text(text + VALIDATION)
    run_killed(folder / "whole", lambda attempt: 2, 0, random.Random(0))
    cut = folder / "cut"
    pids = fork_ranks(cut, 2)
    until = time.monotonic() + 120
    while not (cut / "validation1.txt").exists() and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(pids[1], signal.SIGTERM)
    codes = wait_all(pids, 60)
    steps = (cut / "validation0.txt").read_text().splitlines()
    last = Path((cut / "last_checkpoint").read_text()).name
    run_killed(cut, lambda attempt: 2, 0, random.Random(0))
    seen = [line for line in (cut / "validation0.txt").read_text().splitlines() if "saw" in line]
    problems = compare(folder / "whole", cut, 2)
    return dict(codes=codes, steps=steps, last=last, seen=seen, problems=problems)


def dead_rank(folder):
    """SIGKILL to one rank: the other ends by itself, with a message."""
    cut = prepare(folder, "cut", timeout=30)
    pids = fork_ranks(cut, 2)
    wait_for_steps(cut, 4)
    kill_group(pids[1])
    begin = time.monotonic()
    codes = wait_all(pids, 60)
    return dict(codes=codes, seconds=time.monotonic() - begin, output=output(cut, 0)[-3000:])


def hung_rank(folder):
    """A rank that stands still: the other ends within the configured time-out."""
    cut = prepare(folder, "cut", timeout=6)
    pids = fork_ranks(cut, 2)
    wait_for_steps(cut, 4)
    os.kill(pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    codes = wait_all(pids[:1], 60)
    seconds = time.monotonic() - begin
    kill_group(pids[1])
    wait_all(pids[1:], 10)
    return dict(codes=codes, seconds=seconds, output=output(cut, 0)[-3000:])


def unequal_ranks(folder):
    """Ranks of 25 and 24 samples, in 5 batches each, resumed at the end of the epoch."""
    changes = {
        "range(50)": "range(49)",
        "round_up=True": "round_up=False",
        "dict(batch_size=4": "dict(batch_size=5",
        "per_device_batch_size=8": "per_device_batch_size=5",
        "accumulative_counts=2": "accumulative_counts=1",
        "interval=3": "interval=5",
    }
    for name, steps in (("whole", 10), ("cut", 5), ("cut", 10)):
        if not (folder / name).exists():
            prepare(folder, name, case="LengthGroupedSampler")
        text = config("LengthGroupedSampler", 0, seed=3)
        for was, now in {**changes, "max_iters=32": f"max_iters={steps}"}.items():
            assert was in text
            text = text.replace(was, now)
        config_file(folder / name).write_text(text)
        run_killed(folder / name, lambda attempt: 2, 0, random.Random(0))
    return dict(problems=compare(folder / "whole", folder / "cut", 2))


def elastic(folder):
    """1 -> 2 -> 1 -> 2 ... ranks, changed at every kill: every sample once in every epoch."""
    result = {}
    for case in ("TokenBudget", "Packing", "LengthGroupedSampler"):
        cut = prepare(folder, case, case=case, epochs=3)
        rng = random.Random(5)
        counts = run_killed(cut, lambda attempt: 1 + attempt % 2, 6, rng)
        result[case] = {**counts, "epochs": _drawn(cut)}
    return result


def _drawn(run):
    """Of every epoch, samples that the steps in the last checkpoint's past drew, in all ranks."""
    import torch

    checkpoint = torch.load(Path((run / "last_checkpoint").read_text()), weights_only=False)
    total = checkpoint["meta"]["iter"]
    lines = map(json.loads, (run / "steps.jsonl").read_text().splitlines())
    steps = {}
    for entry in lines:
        steps.setdefault(entry["iter"], []).append(entry)
    drawn = {}
    for iteration, every in steps.items():
        last = max(entry["attempt"] for entry in every)  # earlier ones are forgotten
        for entry in every:
            if iteration < total and entry["attempt"] == last:
                drawn.setdefault(entry["epoch"], []).extend(entry["samples"])
    return {
        epoch: {
            "missing": sorted(set(range(50)) - set(samples)),
            "repeated": len(samples) - len(set(samples)),
        }
        for epoch, samples in drawn.items()
    }


if __name__ == "__main__":
    warm_up()
    scenario = globals()[sys.argv[2]]
    print(json.dumps(scenario(Path(sys.argv[1]))))
