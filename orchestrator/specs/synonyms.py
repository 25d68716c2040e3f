"""Keys of other tools' job files, each with our key for the same thing.

For any other unknown key, the error suggests our key that is closest in spelling, if any.
"""

from __future__ import annotations

_TIME = "`time_limit: 8h`"
_GPUS = "`gpus: 4`, or `gpus: {min: 1, max: 4}`"
_ENV = "`env:` for variables, `secrets:` for names of secret ones"
_COMMAND = "`command:`, and `workdir:` for its folder"
_AFTER = "`depends_on:`"
_OUTSIDE = "its interpreter in `command:`, such as /opt/envs/train/bin/python: the environment is used as it is"
_NODES = "nothing: nodes follow from the plan; `orc drain NODE` keeps one free"
_MAIL = "nothing: the cluster file's `notify` has mail, chat and webhooks for all jobs"

JOB_KEYS = {  # key, in lower case and with underscores -> what to write
    # Slurm (sbatch)
    "time": _TIME,
    "timeout": _TIME,
    "walltime": _TIME,
    "max_time": _TIME,
    "begin": "`start_window:`",
    "dependency": _AFTER,
    "after": _AFTER,
    "needs": _AFTER,
    "gres": _GPUS,
    "gpus_per_node": _GPUS,
    "ntasks": _GPUS,
    "nodes": f"{_GPUS}; the plan chooses the nodes",
    "num_nodes": f"{_GPUS}; the plan chooses the nodes",
    "partition": "nothing: devices are chosen by the memory that plans need",
    "qos": "`priority: high`",
    "account": "nothing: the team follows from the user",
    "array": "`array: {task: [0, 1, 2]}`, and {task} where the value belongs",
    "requeue": "nothing: a job goes on after failures of the machine; `retries:` has the budgets",
    "mem": "nothing: host memory is part of the plan",
    "mem_per_cpu": "nothing: host memory is part of the plan",
    "mem_per_gpu": "nothing: host memory is part of the plan",
    "error": "nothing: `orc logs JOB` has it",
    "output": "nothing: `orc logs JOB` and `orc get JOB` have it",
    "chdir": "`workdir:`",
    "cpus_per_task": "nothing: ranks share the node's processors",
    "cpus_per_gpu": "nothing: ranks share the node's processors",
    "mail_type": _MAIL,
    "mail_user": _MAIL,
    "reservation": "nothing: the cluster file's `maintenance` closes nodes, a team's `quota` keeps devices",
    "constraint": _NODES,
    "nodelist": _NODES,
    "exclude": _NODES,
    "exclusive": "nothing: a device belongs to one job",
    "modules": _OUTSIDE,
    "job_name": "`name:`",
    # SkyPilot, dstack, Kubernetes, Ray
    "resources": _GPUS,
    "accelerators": _GPUS,
    "num_gpus": _GPUS,
    "devices": _GPUS,
    "run": _COMMAND,
    "commands": _COMMAND,
    "entrypoint": _COMMAND,
    "script": _COMMAND,
    "args": _COMMAND,
    "envs": _ENV,
    "environment": _ENV,
    "setup": _OUTSIDE,
    "image": _OUTSIDE,
    "docker": _OUTSIDE,
    "conda": _OUTSIDE,
    "python": _OUTSIDE,
    "runtime_env": _OUTSIDE,
    "working_dir": "`workdir:`",
    "file_mounts": "nothing: `orc submit` uploads what a job file names",
    "max_restarts": "`retries:`",
    "max_retries": "`retries:`",
    "backoff_limit": "`retries:`",
    "max_duration": _TIME,
    "active_deadline_seconds": _TIME,
    "priority_class": "`priority:`",
    # training arguments
    "batch_size": "`global_batch_size:`, the samples of one optimizer step over all devices",
    "train_batch_size": "`global_batch_size:`, the samples of one optimizer step over all devices",
    "epochs": "`training: {max_steps: ...}` of a model, or `steps:` of a script",
    "lr": "`training: {learning_rate: ...}`",
    "nproc_per_node": f"{_GPUS}; orc starts the ranks itself",
}


def instead_of(key: str) -> str | None:
    """Return advice on what to write instead of another tool's key; None where the key is not in the table."""
    return JOB_KEYS.get(key.lower().replace("-", "_"))
