"""Chooses the knobs of a proposed job from the command's settings. Every typed value becomes a knob's default.

A setting becomes a knob only where a plan can express its value exactly. Any other stays in the command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.service.commands.init.command_settings import (
    IN_FILE,
    IN_TOKENS,
    TYPED,
    Knobs,
    Settings,
    iterate_flags_and_pairs,
    load_preset_knobs,
)
from orchestrator.service.commands.init.meanings import (
    DEVICE_WORDS,
    FOLDERS_OF_ANYTHING,
    IN_ALL,
    PRECISIONS,
    Setting,
    find_precision,
    make_snake_case_word,
)
from orchestrator.service.commands.init.script_flags import Flag, Script
from orchestrator.service.commands.init.typed_command import MODULE_OF, TypedCommand
from orchestrator.service.notes import Notes
from orchestrator.specs.choices import ZeroStage
from orchestrator.specs.command_line import Argv, Env
from orchestrator.specs.deepspeed_file import SIZES, ZERO
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.frameworks import Framework, load_knobs, load_preset
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.replace import replace

SEVERAL_RANKS = (
    "init_process_group",
    "DistributedDataParallel",
    "DDP",
    "Accelerator",
    "FullyShardedDataParallel",
)
# Frameworks whose scripts are one process under plain `python`; the others start a rank on each
# visible device.
STARTED_ALONE = ("accelerate", "diffusers", "deepspeed", "megatron", "torchtitan")
WEIGHTS = (
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".safetensors",
    ".pkl",
    ".h5",
)  # of a file: no folder of checkpoints
LITGPT_RESUMES = ("finetune_full", "pretrain")
STAYS = (  # settings of a plan that are marked where they stay in the command
    *(
        "precision",
        "activation_checkpointing",
        "deepspeed_config",
        "micro_batch_size",
        "gradient_accumulation_steps",
    ),
    "ranks",
)
MENDS = {
    "micro_batch_size": "BATCH",
    "gradient_accumulation_steps": "ACCUMULATE",
}  # setting -> variable to propose


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples per optimizer step of a command, and the knobs (settings that plans may change)
    that split them.
    """

    knobs: Knobs
    controlled: tuple[Setting, ...]  # whose arguments leave the command
    samples: int | None  # of all ranks; None: not known
    origin: str  # of this number, in words
    is_fixed: bool  # on the number of ranks that was typed
    notes: Notes


@frozen
class DeepSpeedFile:
    """A DeepSpeed configuration file of the command, with its ZeRO stage."""

    config: Mapping[str, str]  # as the job file names it
    stage: int
    sizes: JsonObject  # of its buffers, by DeepSpeed's names


@frozen
class BareCommand:
    """A command without the settings that plans control; these are knobs instead, with the typed
    values as defaults.
    """

    command: Argv
    names: frozenset[str]  # of its flags as typed
    knobs: Knobs  # with the typed values as defaults
    notes: Notes
    env: Env
    ranks: int | None
    is_fixed: bool  # whether no plan has another number of ranks
    batch: Batch
    precision: str | None
    config: Mapping[str, str] | None  # the file of which each attempt gets a copy
    deepspeed: DeepSpeedFile | None  # the file that shards it, where its stage can be a knob
    steps: Setting | None
    model: Setting | None
    length: Setting | None


def choose_knobs(
    typed: TypedCommand, script: Script, framework: Framework | None, settings: Settings
) -> BareCommand:
    """Return the command without the settings that plans control, and the knobs by which plans set
    them.
    """
    preset = load_preset_knobs(typed, framework)
    ranks, ranks_place = _find_rank_count_and_setting(typed, settings, script, framework)
    batch = read_global_batch(settings, script, 1 if ranks is None else ranks, preset)
    by_launcher = ranks_place is None or typed.launch in MODULE_OF or framework is not None
    are_ranks = by_launcher or settings.find_all("nodes") or script.calls & set(SEVERAL_RANKS)
    samples = batch.samples
    if ranks is not None and ranks > 1 and samples is not None:
        if not are_ranks and f"on {ranks} devices" in batch.origin:
            batch = _drop_unclear_samples(batch, samples // ranks, ranks)
        elif typed.launch not in MODULE_OF and _is_total_unclear(settings, script):
            batch = _drop_unclear_samples(batch, samples, ranks)
    if any("total" in note and IN_TOKENS in note for note in settings.notes):
        batch = replace(batch, samples=None)  # how often it accumulates follows from that total
    differing = {
        name: knob for name, knob in preset.items() if knob != load_knobs(str(framework)).get(name)
    }
    with_batch = {
        name: {**differing[name], **knob} if knob and name in differing else knob
        for name, knob in batch.knobs.items()
    }
    knobs = {**differing, **with_batch}
    controlled = list(batch.controlled)
    notes = [*settings.notes, *batch.notes]
    if ranks_place is not None and preset.get("ranks"):
        controlled.append(ranks_place)
    knobs |= _make_path_knobs(settings, preset, script)
    output = _find_path_setting(settings, "output_dir", script)
    if output is not None and output.rank == TYPED:
        controlled.append(output)
        notes.append(f"Taken out of the command, since the job sets it: {output.description}")
        if make_snake_case_word(output.name) in FOLDERS_OF_ANYTHING:
            notes.append(
                f"CHECK: if it reads from there too, put {output.name} back, without knobs.output_dir"
            )
    if framework == "litgpt" and typed.command[1] not in LITGPT_RESUMES:
        knobs["resume_from"] = None
    if "zero_stage" in preset and _chooses_sharding_itself(settings, framework):
        knobs["zero_stage"] = None
    knobs |= _make_recomputation_knob(settings, script, framework)
    if framework == "torchtune":  # each of its files says both
        knobs |= {"activation_checkpointing": None, "optimizer_in_backward": None}
    deepspeed = _find_deepspeed_file(settings)
    if deepspeed is not None:
        knobs["zero_stage"] = {"key": f"{ZERO}.stage"}
    precision, knob, place = _find_precision_knob_and_setting(
        typed, settings, script, framework, preset
    )
    knobs |= knob
    controlled += [] if place is None else [place]
    config = _find_copied_config(knobs, batch, settings, framework, script)
    if config is None and deepspeed is not None and framework != "deepspeed":
        config = deepspeed.config
    if config is not None and config.get("flag"):
        controlled.append(Setting("config", config["flag"], "flag"))
    names = {place.name for place in controlled}
    stays = [place for place in settings.places if place.rank == TYPED and place.name not in names]
    stays = [
        place
        for place in stays
        if place.meaning in STAYS and (framework is None or place.meaning != "precision")
    ]
    if stays:
        notes.append(
            f"Stays as typed, the same in every plan: {', '.join(place.description for place in stays)}"
        )
    env = {
        name: value
        for name, value in typed.env.items()
        if name not in {place.name for place in controlled}
    }
    steps, differing_steps = _find_steps_and_disagreeing(settings)
    if differing_steps:
        notes.append(
            f"CHECK: these disagree, none is taken: {'; '.join(place.description for place in differing_steps)}"
        )
    return BareCommand(
        command=(
            *typed.command[: typed.arguments],
            *_drop_controlled_arguments(settings.argv, controlled, script),
        ),
        names=frozenset(name for name, *_ in iterate_flags_and_pairs(settings.argv, {})),
        knobs=knobs,
        notes=tuple(notes),
        env=env,
        ranks=ranks,
        is_fixed=typed.is_fixed
        or batch.is_fixed
        or (ranks_place is not None and not preset.get("ranks")),
        batch=batch,
        precision=precision,
        config=config,
        deepspeed=deepspeed,
        steps=steps,
        model=next((place for place in settings.find_all("model") if place.rank <= IN_FILE), None),
        length=next(
            (place for place in settings.find_all("sequence_length") if place.number), None
        ),
    )


def _find_steps_and_disagreeing(settings: Settings) -> tuple[Setting | None, list[Setting]]:
    """Return (setting of the number of optimizer steps or None, settings that disagree on it).

    If the command has epochs, a default number of steps does not count.
    """
    has_epochs = any(
        "epoch" in make_snake_case_word(name)
        for name, *_ in iterate_flags_and_pairs(settings.argv, {})
    )
    places = [
        place
        for place in settings.find_all("steps")
        if place.number and not (has_epochs and place.rank > TYPED)
    ]
    rank = min((place.rank for place in places), default=TYPED)
    best = {
        place.name: place for place in places if place.rank == rank
    }  # of a repeated flag the last one counts
    if len({place.number for place in best.values()}) > 1:
        return None, list(best.values())
    return next(iter(best.values()), None), []


def _make_path_knobs(settings: Settings, preset: Knobs, script: Script) -> JsonObject:
    """Return the knobs for the output folder and the checkpoint, where they differ from the
    framework's preset.
    """
    knobs = JsonObject()
    for setting in ("output_dir", "resume_from"):
        place = _find_path_setting(settings, setting, script)
        if place is not None and (
            setting not in preset
            or (place.rank == TYPED and not _equals_preset(place, preset[setting]))
        ):
            knobs[setting] = {place.way: place.name}
    return knobs


def _chooses_sharding_itself(settings: Settings, framework: Framework | None) -> bool:
    """Return whether the command itself chooses sharding, by a DeepSpeed file or by FSDP's flags."""
    has_files = framework is not None and bool(settings.files)
    if has_files and any(place.rank == TYPED for place in settings.find_all("deepspeed_config")):
        return True
    return any(
        name in ("--fsdp", "--fsdp_config")
        for name, *_ in iterate_flags_and_pairs(settings.argv, {})
    )


def _find_deepspeed_file(settings: Settings) -> DeepSpeedFile | None:
    """Return the typed DeepSpeed file whose ZeRO stage plans may change; None where it offloads, or
    has no stage.
    """
    flags = {place.name for place in settings.find_all("deepspeed_config") if place.rank == TYPED}
    for file in settings.files:
        content = file.content or {}
        stage = content.get(f"{ZERO}.stage")
        offloads = any(name.startswith(f"{ZERO}.offload_") for name in content)
        is_typed = file.flag in flags and file.can_be_copied
        if not is_typed or offloads or type(stage) is not int or stage not in list(ZeroStage):
            continue
        sizes = JsonObject()
        for name in (*SIZES, "overlap_comm"):
            size = content.get(f"{ZERO}.{name}")
            if isinstance(size, int | float):
                sizes[name] = size
        config = {"file": file.word, "flag": str(file.flag)}
        return DeepSpeedFile(config=config, stage=stage, sizes=sizes)
    return None


def _find_rank_count_and_setting(
    typed: TypedCommand, settings: Settings, script: Script, framework: Framework | None
) -> tuple[int | None, Setting | None]:
    """Return (number of ranks that the command asks for or None, setting that says so if no
    launcher does).

    Devices from Slurm or CUDA_VISIBLE_DEVICES count only where something starts a rank on each of
    them. Without a launcher a script is one process, whatever devices it has.
    """
    place = settings.find_effective("ranks")
    nodes = settings.find_effective("nodes")
    if (
        typed.ranks is None
        and place is not None
        and place.number is not None
        and place.rank <= IN_FILE
    ):
        count = place.number
        # of all nodes together, as accelerate's
        is_total = make_snake_case_word(place.name) == "num_processes"
        if nodes and nodes.number is not None and nodes.rank <= IN_FILE and not is_total:
            count *= nodes.number
        return count, place
    for place in (
        (*settings.find_all("ranks"), *settings.find_all("device_numbers"))
        if typed.ranks is None
        else ()
    ):
        if place.rank == TYPED and re.fullmatch(r"\[?\d+(,\d+)+\]?", str(place.value)):
            return str(place.value).count(",") + 1, place
    if typed.ranks is not None or typed.devices is None:
        return typed.ranks, None
    starts_ranks = framework is not None and framework not in STARTED_ALONE
    uses_several = (
        starts_ranks or typed.launch in MODULE_OF or script.calls & {"spawn", "start_processes"}
    )
    return (typed.devices if uses_several else None), None


def read_global_batch(settings: Settings, script: Script, rank_count: int, preset: Knobs) -> Batch:
    """Return the global batch size on which all settings agree, and the knobs that split it into
    micro-batches.
    """
    total = settings.find_effective("micro_batch_size", "global")
    choices = [
        settings.find_effective("micro_batch_size", "rank"),
        settings.find_effective("micro_batch_size", "plain"),
    ]
    micro = next(
        (place for place in choices if place is not None and place.value is not None), None
    )
    micro = micro or next((place for place in choices if place is not None), None)
    steps = settings.find_effective("gradient_accumulation_steps")
    per_step = total is not None and micro is None and _is_micro_step_total(total)
    if per_step:
        micro = total
        total = None
    disagree = settings.find_all("micro_batch_size", "rank", "plain") if micro is None else []
    disagree += settings.find_all("gradient_accumulation_steps") if steps is None else []
    divisor = script.divided.get(make_snake_case_word(micro.name)) if micro is not None else None
    alone = "DataParallel" in script.calls and not script.calls & set(
        SEVERAL_RANKS
    )  # one process on all devices
    per = (
        "global"
        if per_step or divisor == "global" or alone
        else "node"
        if divisor == "node"
        else "rank"
    )
    accumulates = divisor != "step"  # else it is that of a whole step, which the code divides
    steps_in_all = (
        steps is not None and script.divided.get(make_snake_case_word(steps.name)) == "global"
    )
    derives = preset.get("gradient_accumulation_steps") == "derived"
    derives = derives or (
        total is not None and total.rank < 3 and micro is not None and steps is None
    )
    knobs = JsonObject()
    controlled = list[Setting]()
    number = micro.number if micro is not None else None
    accumulation = steps.number if steps is not None else None
    samples = total.number if total is not None else None
    origin = f"its own, {total.description}; the same in every plan" if total is not None else ""
    if (
        samples is None
        and number is not None
        and (steps is None or accumulation or steps.value is None)
    ):
        several = rank_count if per == "rank" else 1
        turns = accumulation if accumulates and accumulation else 1
        samples = number * turns * (several if not steps_in_all else 1)
        devices = f"{rank_count} devices" if rank_count > 1 else "one device"
        parts = " x ".join(
            place.description
            for place in (micro, steps)
            if place is not None and place.number is not None
        )
        origin = f"{parts}, on {devices}; the same in every plan"
    can_accumulate = (
        steps is None or derives or _can_plan_change(steps, settings) or accumulation == 1
    )
    can_cut = (
        micro is not None
        and accumulates
        and _can_plan_change(micro, settings)
        and not disagree
        and not steps_in_all
        and can_accumulate
    )
    can_cut = can_cut or (
        micro is not None and steps_in_all and rank_count == 1 and _can_plan_change(micro, settings)
    )
    if can_cut and micro is not None:
        knobs["micro_batch_size"] = _make_knob(micro, settings, preset.get("micro_batch_size"), per)
        controlled.append(micro)
        if derives and total is not None:
            knobs["gradient_accumulation_steps"] = "derived"
            knobs["global_batch_size"] = _make_knob(
                total, settings, preset.get("global_batch_size")
            )
            controlled.append(total)
        elif steps is not None and _can_plan_change(steps, settings):
            knobs["gradient_accumulation_steps"] = _make_knob(
                steps, settings, preset.get("gradient_accumulation_steps")
            )
            controlled.append(steps)
            if total is not None and _can_plan_change(total, settings) and total.rank < 3:
                knobs["global_batch_size"] = _make_knob(total, settings, None)
                controlled.append(total)
    else:
        knobs |= {
            name: None
            for name in ("micro_batch_size", "gradient_accumulation_steps")
            if name in preset
        }
        knobs |= {"global_batch_size": None} if "global_batch_size" in preset else {}
    if derives and "gradient_accumulation_steps" in preset and can_cut:  # it says the rest
        knobs = {name: knob for name, knob in knobs.items() if knob != preset.get(name)}
    notes = [
        _describe_repair(place)
        for place in (micro, steps)
        if place is not None and place.way == "constant"
    ]
    if disagree:
        notes.append(
            f"CHECK: these disagree, none is taken: {'; '.join(place.description for place in disagree)}"
        )
    is_fixed = rank_count > 1 and (not can_cut or (steps_in_all and total is None))
    return Batch(knobs, tuple(controlled), samples, origin, is_fixed, tuple(notes))


def _is_total_unclear(settings: Settings, script: Script) -> bool:
    """Return whether the samples of a step are a plain batch size beside a micro-batch size, and
    nothing says whether they are those of one rank or of all: no name, no help text, no division.

    It is asked of ranks that no launcher of ours starts. Beside a launcher, a micro-batch is one
    rank's, and the plain batch size that of all.
    """
    total = settings.find_effective("micro_batch_size", "global")
    micro = settings.find_effective("micro_batch_size", "rank")
    if total is None or micro is None:
        return False
    word = make_snake_case_word(total.name)
    names = {*word.split("_"), *make_snake_case_word(micro.name).split("_")}
    flag = script.flags_by_name.get(total.name)
    is_named = flag is not None and flag.counts == "global"
    return not (names & (IN_ALL | DEVICE_WORDS) or is_named or word in script.divided)


def _drop_unclear_samples(batch: Batch, samples: int, ranks: int) -> Batch:
    """Return the batch without a number of samples, since two are possible. A note names both.

    Nothing tells whether all devices share a batch of `samples`, as those of one process do
    (`nn.DataParallel`), or each has one.
    """
    note = (
        f"CHECK: {samples} samples a step where all {ranks} devices share its batch, "
        f"{samples * ranks} where each has one"
    )
    return replace(batch, knobs={}, controlled=(), samples=None, notes=(*batch.notes, note))


def _is_micro_step_total(setting: Setting) -> bool:
    """Return whether a batch size counts the samples of all ranks in one micro-step, which
    accumulation multiplies.
    """
    return setting.rank != IN_FILE and not IN_ALL & set(
        make_snake_case_word(setting.name).split("_")
    )


def _describe_repair(setting: Setting) -> str:
    """Return a sentence on which change to the file or script would let plans control this setting."""
    if setting.where.partition(":")[0].endswith(".py") and ":" in setting.where:
        variable = MENDS[setting.meaning]
        knob = f"{setting.meaning}: {{env: {variable}, default: {setting.value}}}"
        value = f'int(os.environ.get("{variable}", {setting.value}))'
        return f"{setting.name} = {setting.value} in {setting.where}: make it {value}, and add to knobs: {knob}"
    return f"{setting.description}: no attempt gets a copy of this file, so that it is the same in every plan"


def _can_plan_change(setting: Setting, settings: Settings) -> bool:
    """Return whether a plan can give this setting another value."""
    if setting.way == "key":
        return setting.file is None or any(
            file.word == setting.file and file.can_be_copied for file in settings.files
        )
    return setting.way in ("flag", "override", "env") and (
        setting.value is None or setting.number is not None
    )


def _equals_preset(setting: Setting, knob: Any) -> bool:
    return isinstance(knob, Mapping) and knob.get(setting.way) == setting.name


def _make_knob(
    setting: Setting, settings: Settings, preset: Any, counted_samples: str = "rank"
) -> JsonObject:
    """Return the knob for a setting as JSON; only its default if the framework's preset has the
    rest.

    `counted_samples` is what a batch size counts: samples per rank, or of all ranks.
    """
    is_presets = _equals_preset(setting, preset)
    knob: JsonObject = {} if is_presets else {setting.way: setting.name}
    if counted_samples != "rank":
        knob["per"] = counted_samples
    if setting.number is not None:
        knob["default"] = setting.number
    same_keys = [
        key_place
        for key_place in settings.find_all(setting.meaning)
        if key_place.way == "key"
        and key_place.number == setting.number
        and key_place.number
        and setting.way != "key"
        if (key_place.counts == "global") == (setting.counts == "global")
        and key_place.rank == IN_FILE
    ]
    if same_keys:
        knob["also"] = [
            *(preset.get("also", ()) if is_presets else ()),
            *({"key": key_place.name} for key_place in same_keys),
        ]
    return knob or {setting.way: setting.name}


def _find_path_setting(settings: Settings, quantity: str, script: Script) -> Setting | None:
    """Return the setting that takes the path of the output folder or checkpoint; None without one.

    It is a typed setting, or a flag. A flag that takes true or false is left out. A name that fits
    folders of any kind counts only if the script saves into it.
    """
    saves = " ".join(file.varying for file in script.saves)
    places = settings.find_all(quantity)
    truths = {flag.name for flag in script.flags if isinstance(flag.default, bool)}
    truths |= {flag.name for flag in script.flags if flag.kind == "boolean"}
    truths |= {place.name for place in places if str(place.value).lower() in ("true", "false")}
    for place in places:
        if place.name in truths:
            continue
        word = make_snake_case_word(place.name)
        if word in FOLDERS_OF_ANYTHING and not re.search(rf"\b{re.escape(word)}\b", saves):
            continue
        is_file = str(place.value).endswith(WEIGHTS) and quantity == "output_dir"
        is_choice = str(place.value).lower() == "auto"
        if (
            place.way in ("flag", "override", "key")
            and not is_file
            and (place.rank != TYPED or not is_choice)
        ):
            if place.way == "override" and place.rank != TYPED:
                continue
            if place.way != "key" or quantity == "output_dir":
                return place
    return None


def _make_recomputation_knob(
    settings: Settings, script: Script, framework: Framework | None
) -> JsonObject:
    """Return the knob for activation recomputation as {name: knob}; {} where the command itself
    sets it.
    """
    if any(place.rank <= IN_FILE for place in settings.find_all("activation_checkpointing")):
        return {"activation_checkpointing": None}
    if framework is not None and "activation_checkpointing" in load_knobs(framework):
        return {}
    flags = script.flags_by_name
    for place in settings.find_all("activation_checkpointing"):
        flag = flags.get(place.name)
        if flag is None or flag.default or make_snake_case_word(place.name).startswith("disable"):
            continue
        if flag.kind == "switch":
            return {"activation_checkpointing": {"switch": flag.name}}
        if flag.kind == "boolean" and flag.default is False:
            return {
                "activation_checkpointing": {
                    "flag": flag.name,
                    "values": {"none": False, "full": True},
                }
            }
    return {}


def _find_precision_knob_and_setting(
    typed: TypedCommand,
    settings: Settings,
    script: Script,
    framework: Framework | None,
    preset: Knobs,
) -> tuple[str | None, JsonObject, Setting | None]:
    """Return (the job's precision or None, its knob, setting whose words are removed from the
    command or None).

    A framework's flags are read where the job is parsed (specs/job/frameworks.py).
    """
    places = [
        place
        for place in settings.find_all("precision")
        if place.rank <= IN_FILE and place.value != "false"
    ]
    precision = (
        next(
            (
                candidate
                for place in places
                if (candidate := find_precision(place.name, place.value))
            ),
            None,
        )
        or typed.precision
    )
    if framework is not None:
        knob = preset.get("precision") or {}
        by_label = {
            str(label): candidate for candidate, label in (knob.get("values") or {}).items()
        }
        precision = precision or next(
            (by_label[str(place.value)] for place in places if str(place.value) in by_label), None
        )
        if places and knob.get("override") and precision is not None:
            return precision, {}, places[0]
        as_preset = knob == load_knobs(framework).get("precision", {})
        if not as_preset and precision is None:
            return None, {"precision": None}, None
        values = {place.value for place in places if place.rank == TYPED}
        in_words = values & {"true", precision, *by_label} and as_preset and knob.get("flag")
        if (
            precision is None
            and any(place.rank == IN_FILE for place in settings.find_all("precision"))
            and knob.get("key")
        ):
            precision = "fp32"
        return (None if in_words else precision), {}, None
    flags = script.flags_by_name
    for place in places[:1] or settings.find_all("precision"):
        flag = flags.get(place.name)
        candidate = find_precision(place.name, place.value)
        knob = _make_precision_knob(flag)
        if (
            knob is not None
            and candidate is not None
            and knob["values"].get(candidate) == place.value
            and place.rank != IN_FILE
        ):
            default = candidate if candidate != "fp32" or places else None
            return default, {"precision": knob}, place if places else None
        if (
            not places
            and flag is not None
            and flag.kind == "switch"
            and not flag.default
            and typed.precision is None
        ):
            return None, {"precision": {"switch": flag.name}}, None
    return precision, {}, None


def _make_precision_knob(flag: Flag | None) -> JsonObject | None:
    if flag is None or not flag.choices:
        return None
    labels = {
        candidate.value: next((word for word in spellings if word in flag.choices), None)
        for candidate, spellings in PRECISIONS.items()
    }
    return {
        "flag": flag.name,
        "values": {candidate: word for candidate, word in labels.items() if word},
    }


def _find_copied_config(
    knobs: Knobs,
    batch: Batch,
    settings: Settings,
    framework: Framework | None,
    script: Script,
) -> Mapping[str, str] | None:
    """Return the settings file that each attempt copies, as {"file": path, "flag": flag that names
    it}; None without one.

    A file is copied if plans set some of its keys. "flag" is absent where no flag names the file.
    """
    files = [file for file in settings.files if file.can_be_copied]
    keys = any(
        isinstance(part, Mapping) and "key" in part
        for knob in knobs.values()
        if isinstance(knob, Mapping)
        for part in (knob, *knob.get("also", ()))
    )
    if framework is not None and load_preset(framework).get("config_is_first_file"):
        file = next(
            (file for file in files if file.flag is None and not file.word.endswith(".json")), None
        )
        return None if file is None else {"file": file.word}
    if framework == "deepspeed" or not keys:
        return None
    names = {place.file for place in batch.controlled if place.file} or {
        place.file
        for place in settings.places
        if place.file and place.rank == IN_FILE and place.number
    }
    file = next((file for file in files if file.word in names), None)
    if file is None:
        return None
    by_flag = (
        file.flag is not None and "jsonargparse" not in script.imports and framework != "lightning"
    )
    return {"file": file.word, "flag": str(file.flag)} if by_flag else {"file": file.word}


def _drop_controlled_arguments(
    argv: Sequence[str], controlled_settings: Sequence[Setting], script: Script
) -> Argv:
    """Return the arguments without these settings, which plans control."""
    names = {place.name for place in controlled_settings if place.way in ("flag", "override")}
    flags = script.flags_by_name
    rest = list[str]()
    index = 0
    while index < len(argv):
        pair = (
            next(iter(iterate_flags_and_pairs(argv[index:], flags)), None)
            if _is_key_value_pair(argv[index])
            else None
        )
        length = pair[3] if pair is not None else 1
        if pair is None or pair[0] not in names:
            rest += argv[index : index + length]
        index += length
    return tuple(rest)


def _is_key_value_pair(word: str) -> bool:
    return word.startswith("-") or "=" in word
