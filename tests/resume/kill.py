"""Trains in real processes that are killed at random moments until the run is done.

One process loads everything once and forks the ranks of every attempt, so that an attempt takes a
second or two. Run as a module it prints a JSON of what happened::

    python -m tests.resume.kill FOLDER --case TokenBudget --ranks 2 --workers 2 --kills 7 --seed 1
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

CONFIG = """
custom_imports = dict(imports=['xlength', 'tests.resume.kill_parts'])
model = dict(
    type='SupervisedFinetune', use_activation_checkpointing=False,
    llm=dict(
        type='AutoModelForCausalLM.from_config',
        config=dict(
            type='LlamaConfig', hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, vocab_size=128,
            attention_dropout=0.1)))
train_dataloader = {loader}
train_cfg = dict(type='TrainLoop', {limit})
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-2), accumulative_counts=2)
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=30)]
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=3, max_keep_ckpts=2))
custom_hooks = [dict(type='ConsumedLog')]
log_processor = dict(by_epoch=False)
randomness = dict(seed={seed})
env_cfg = dict(dist_cfg=dict(backend='gloo', timeout=60))
"""

LENGTHS = "[3 + (7 * i) % 23 for i in range(50)]"
MAP_STYLE = (
    "dict(batch_size={batch}, num_workers={workers}, dataset=dict(type='NoisyText', "
    f"length={LENGTHS}), collate_fn=dict(type='tiny_collate'), {{sampler}})"
)
LOADERS = {
    "LengthGroupedSampler": (
        4,
        "sampler=dict(type='LengthGroupedSampler', per_device_batch_size=8, round_up=True)",
    ),
    "TokenBudget": (
        1,
        "sampler=dict(type='PlanSampler', plan=dict(type='TokenBudget', max_tokens=64, "
        "accumulate=2)), batch_sampler=dict(type='PlanBatchSampler')",
    ),
    "Packing": (
        1,
        "sampler=dict(type='PlanSampler', plan=dict(type='Packing', max_length=64, "
        "accumulate=2)), batch_sampler=dict(type='PlanBatchSampler')",
    ),
}
STREAM = (
    "dict(batch_size=4, num_workers={workers}, sampler=None, dataset=dict("
    "type='LengthPoolSortDataset', pool_size=12, micro_batch_size=4, dataset=dict("
    f"type='TinyText', length={LENGTHS})), collate_fn=dict(type='tiny_collate'))"
)
CASES = [*LOADERS, "LengthPoolSortDataset"]


def config(case, workers, seed, epochs=None):
    """The text of a config."""
    if case == "LengthPoolSortDataset":
        loader = STREAM.format(workers=workers)
    else:
        batch, sampler = LOADERS[case]
        loader = MAP_STYLE.format(batch=batch, workers=workers, sampler=sampler)
    limit = f"max_epochs={epochs}" if epochs else "max_iters=32"
    return CONFIG.format(loader=loader, limit=limit, seed=seed)


def config_file(folder):
    """Beside the work dir, into which mmengine writes a copy."""
    return folder.parent / f"{folder.name}_config.py"


def fork_ranks(folder, ranks):
    """Start an attempt that resumes from whatever is there; returns the process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    os.environ["ATTEMPT"] = str(1 + int(os.environ.get("ATTEMPT", 0)))
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)  # its workers are killed with it
            code = 1
            try:
                code = _train(folder, rank, ranks, port)
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def _train(folder, rank, ranks, port):
    from xlength.cli import main

    output = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    arguments = ["train", str(config_file(folder)), "--work-dir", str(folder), "--resume"]
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        arguments += ["--launcher", "pytorch"]
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def wait_all(pids, seconds):
    """Exit codes (negative: a signal) of processes that end by themselves; kills those that do not
    within the time, and says so by None."""
    codes, until = {}, time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            for pid in pids:
                if pid not in codes:
                    kill_group(pid)
                    os.waitpid(pid, 0)
                    codes[pid] = None
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def kill_group(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def entries(folder, rank):
    """(iteration, samples) that a rank trained on, in all attempts, without torn last lines."""
    file = folder / f"consumed{rank}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return [(e["iter"], e["samples"]) for e in map(json.loads, whole)]


def run_killed(folder, ranks_of_attempt, kills, rng):
    """Attempts, each killed at a random moment, then one to the end.

    Args:
        folder: of the run, with its ``config_file``.
        ranks_of_attempt: called with the number of the attempt.
        kills: at least so many, unless the run is done before.
        rng: of the moments.

    Returns:
        dict of counts.
    """
    counts = {"attempts": 0, "kills": 0, "one_rank": 0, "hung": 0}
    while True:
        ranks = ranks_of_attempt(counts["attempts"])
        counts["attempts"] += 1
        pids = fork_ranks(folder, ranks)
        if counts["kills"] >= kills:
            codes = wait_all(pids, 300)
            if codes != [0] * ranks:
                raise RuntimeError(f"the last attempt ended with {codes}: {_tail(folder)}")
            return counts
        if _killed(folder, pids, rng, counts):
            counts["kills"] += 1
        else:
            return counts


def _killed(folder, pids, rng, counts):
    """Kill one rank or all at a random moment; False if the run has ended, whole."""
    before = len(entries(folder, 0))
    in_startup = rng.random() < 0.15
    steps = rng.randint(1, 7)  # new steps to wait for
    until = time.monotonic() + (rng.uniform(0.05, 2.0) if in_startup else 120)
    while time.monotonic() < until and len(entries(folder, 0)) < before + steps:
        if all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
            if wait_all(pids, 120) != [0] * len(pids):
                raise RuntimeError(f"an attempt failed that was not killed: {_tail(folder)}")
            return False
        time.sleep(0.003)
    time.sleep(rng.uniform(0, 0.05))
    victims = list(pids)
    if len(pids) > 1 and rng.random() < 0.5:
        victims = [rng.choice(pids)]
        counts["one_rank"] += 1
    for pid in victims:
        kill_group(pid)
    codes = wait_all(pids, 90)
    counts["hung"] += codes.count(None)
    return codes != [0] * len(pids)


def _tail(folder):
    return "".join(file.read_text()[-1500:] for file in sorted(folder.glob("output*.txt")))


def compare(whole, cut, ranks):
    """Differences between an undisturbed run and one that was killed, as lines."""
    import torch

    problems = []
    for rank in range(ranks):
        right = dict(entries(whole, rank))
        for iteration, samples in entries(cut, rank):
            if right.get(iteration) != samples:
                problems.append(f"rank {rank}, iteration {iteration}: {samples}, not {right}")
        missing = set(right) - {iteration for iteration, _ in entries(cut, rank)}
        if missing:
            problems.append(f"rank {rank} never trained on iterations {sorted(missing)}")
    first, second = (
        torch.load(Path((folder / "last_checkpoint").read_text()), weights_only=False)
        for folder in (whole, cut)
    )
    if first["meta"]["iter"] != second["meta"]["iter"]:
        problems.append("the runs have unequal lengths")
    for name, weight in first["state_dict"].items():
        if not torch.equal(weight, second["state_dict"][name]):
            problems.append(f"the final {name} differs")
    return problems


def warm_up():
    """Import what every attempt needs."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    from mmengine.runner import Runner  # noqa: F401

    import tests.resume.kill_parts  # noqa: F401
    import xlength.runtime.training  # noqa: F401

    torch.set_num_threads(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", choices=CASES, default=CASES[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warm_up()
    for name in ("whole", "cut"):
        (args.folder / name).mkdir(parents=True)
        text = config(args.case, args.workers, args.seed)
        config_file(args.folder / name).write_text(text)
    rng = random.Random(args.seed)
    run_killed(args.folder / "whole", lambda attempt: args.ranks, 0, rng)
    counts = run_killed(args.folder / "cut", lambda attempt: args.ranks, args.kills, rng)
    problems = compare(args.folder / "whole", args.folder / "cut", args.ranks)
    for output in (args.folder / "cut").glob("output*.txt"):
        for words in ("has no random states", "that were trained on before", "has no position"):
            if words in output.read_text():
                problems.append(f"the log says: {words}")
    steps = len(dict(entries(args.folder / "whole", 0)))
    repeated = sum(len(entries(args.folder / "cut", r)) for r in range(args.ranks))
    print(
        json.dumps({**counts, "steps": steps, "steps_of_all": repeated, "problems": problems[:5]})
    )


if __name__ == "__main__":
    main()
