"""A training script of a few lines: the same curve for the same seed, checkpoints, and a diary of when it ran where.

python trainer.py --seed 3 --steps 40 --step-s 0.15 --output FOLDER [--resume CHECKPOINT]
"""

import argparse
import json
import os
import pathlib
import random
import re
import socket
import time


def main() -> None:
    """Train to the last step; every line of the diary is one step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--resume", type=pathlib.Path)
    args = parser.parse_args()
    first, weight = json.loads(args.resume.read_text()) if args.resume else (0, 0.0)
    args.output.mkdir(parents=True, exist_ok=True)
    command = pathlib.Path("/proc/self/cmdline").read_text()
    attempt = re.search(r"/attempts/(\d+)", command)
    who = {
        "host": socket.gethostname(),
        "attempt": int(attempt[1]) if attempt else 0,
        "pid": os.getpid(),
    }
    for step in range(first + 1, args.steps + 1):
        target = random.Random(1000 * args.seed + step).random()
        loss = (weight - target) ** 2
        weight -= 0.1 * (weight - target)
        time.sleep(args.step_s)
        with (args.output / "diary.jsonl").open("a") as file:
            file.write(json.dumps({**who, "step": step, "loss": loss, "at_s": time.time()}) + "\n")
        print(f"step {step}/{args.steps} loss {loss:.6f}", flush=True)
        if step % args.save_every == 0:
            draft = args.output / f"draft-{os.getpid()}.json"
            draft.write_text(json.dumps([step, weight]))
            draft.replace(args.output / f"checkpoint-{step:04d}.json")
    (args.output / "model.json").write_text(json.dumps(weight))


if __name__ == "__main__":
    main()
