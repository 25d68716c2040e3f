"""Commands of other tools, and our command with the same meaning.

Any other unknown word gets our commands of similar spelling, if any, and `orc --help`.
"""

from __future__ import annotations

from collections.abc import Sequence

SLURM, SKY, DSTACK, KUBERNETES, SHELL = "Slurm", "SkyPilot", "dstack", "Kubernetes", "a shell"
# Words, up to three -> command of ours, and whose words they are. More words go before fewer; `a=b`
# counts as `a`.
COMMANDS = {
    "sbatch": ("submit FILE", SLURM),
    "srun": ("run FILE", SLURM),
    "salloc": ("run FILE", SLURM),
    "squeue": ("queue", SLURM),
    "scancel": ("cancel JOB", SLURM),
    "sinfo": ("watch", SLURM),
    "sacct": ("report", SLURM),
    "sacct -j": ("show JOB", SLURM),
    "sstat": ("watch", SLURM),
    "sshare": ("teams", SLURM),
    "sprio": ("explain JOB", SLURM),
    "scontrol": ("update JOB priority=high", SLURM),
    "scontrol hold": ("hold JOB", SLURM),
    "scontrol release": ("release JOB", SLURM),
    "scontrol suspend": ("suspend JOB", SLURM),
    "scontrol resume": ("resume JOB", SLURM),
    "scontrol requeue": ("suspend JOB, then `orc resume JOB`", SLURM),
    "scontrol show": ("show JOB", SLURM),
    "scontrol show node": ("watch", SLURM),
    "scontrol update nodename": ("drain NODE", SLURM),
    "scontrol create reservation": ("drain NODE", SLURM),
    "sacctmgr": ("teams", SLURM),
    "sattach": ("logs JOB --follow", SLURM),
    "sdiag": ("watch", SLURM),
    "seff": ("show JOB", SLURM),
    "strigger": ("notify test", SLURM),
    "requeue": ("retry JOB", SLURM),
    "launch": ("run FILE", SKY),
    "exec": ("run FILE", SKY),
    "status": ("queue", SKY),
    "jobs": ("queue", SKY),
    "check": ("doctor", SKY),
    "gpus": ("fit FILE", SKY),
    "show-gpus": ("fit FILE", SKY),
    "serve": ("up", SKY),
    "dashboard": ("open", SKY),
    "apply": ("submit FILE", DSTACK),
    "ps": ("queue", DSTACK),
    "attach": ("logs JOB --follow", DSTACK),
    "metrics": ("watch", DSTACK),
    "offer": ("fit FILE", DSTACK),
    "fleet": ("watch", DSTACK),
    "server": ("up", DSTACK),
    "describe": ("show JOB", KUBERNETES),
    "delete": ("cancel JOB", KUBERNETES),
    "create": ("submit FILE", KUBERNETES),
    "top": ("watch", KUBERNETES),
    "cordon": ("drain NODE", KUBERNETES),
    "uncordon": ("drain NODE --undo", KUBERNETES),
    "events": ("audit", KUBERNETES),
    "nodes": ("watch", KUBERNETES),
    "torchrun": ("init torchrun train.py", "PyTorch"),
    "accelerate": ("init accelerate launch train.py", "accelerate"),
    "deepspeed": ("init deepspeed train.py", "DeepSpeed"),
    "python": ("init python train.py", SHELL),
    "start": ("up", SHELL),
    "stop": ("down", SHELL),
    "restart": ("up", SHELL),
    "list": ("queue", SHELL),
    "ls": ("queue", SHELL),
    "kill": ("cancel JOB", SHELL),
    "rm": ("cancel JOB", SHELL),
    "info": ("show JOB", SHELL),
    "tail": ("logs JOB --follow", SHELL),
    "log": ("logs JOB", SHELL),
    "pause": ("suspend JOB", SHELL),
    "unhold": ("release JOB", SHELL),
    "history": ("report", SHELL),
    "ui": ("open", SHELL),
    "web": ("open", SHELL),
    "pages": ("open", SHELL),
    "browse": ("open", SHELL),
    "nvidia-smi": ("watch", SHELL),
    "why": ("explain JOB", SHELL),
    "clean": ("purge", SHELL),
    "test": ("rehearse FILE --fail oom", SHELL),
    "help": ("--help", SHELL),
    "version": ("--version", SHELL),
}
WORDS_MAX = 3


def instead_of(arguments: Sequence[str]) -> tuple[str, str, str] | None:
    """Return (words of another tool at the start of a command line, our command, the tool); None without any."""
    terms = [argument.partition("=")[0].lower() for argument in arguments[:WORDS_MAX]]
    for count in range(len(terms), 0, -1):
        name = " ".join(terms[:count])
        if name in COMMANDS:
            return name, *COMMANDS[name]
    return None
