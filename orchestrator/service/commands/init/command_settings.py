"""Finds all settings of a command, its files and its script, and turns those that plans control into knobs.

A setting that no knob can express exactly stays in the command: the first attempt trains as the command would.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.service.commands.init.meanings import (
    Count,
    Setting,
    Way,
    find_quantity_and_count,
    make_snake_case_word,
)
from orchestrator.service.commands.init.named_files import (
    REWRITABLE,
    SUFFIXES,
    read_hydra_settings,
    read_settings_file,
)
from orchestrator.service.commands.init.script_flags import Flag, Script
from orchestrator.service.commands.init.typed_command import TypedCommand
from orchestrator.service.notes import Notes
from orchestrator.specs.command_line import Argv
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.frameworks import Framework, load_knobs
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.replace import replace

# Frameworks whose flags win over the file that `--config` names.
FLAGS_WIN = ("hf", "trl", "lightning", "litgpt", "torchtune")
IN_TOKENS = "counts tokens, not samples"
SAMPLES_MAX = 2**15  # of a rank's micro-batch: larger numbers count frames, tokens or pixels
# of a flag, or a key of yacs: the next word is its value
NAME = re.compile(r"-.*|[A-Z][A-Z0-9_]*(?:\.[A-Z][A-Z0-9_]*)+", re.DOTALL)
LITGPT_FILES = {"pretrain": "pretrain.py", "finetune": "finetune/lora.py"}
Knobs = Mapping[str, Any]  # by setting, as a job file has them
TYPED, IN_FILE, OF_PARSER, OF_FRAMEWORK = range(4)  # Setting.rank: a lower one wins


@frozen
class NamedFile:
    """A settings file whose path is among the words of a command."""

    word: str  # as typed
    flag: str | None  # whose value it is; None: positional, or of a launcher
    content: JsonObject | None  # None: it could not be read
    is_launchers: bool = False

    @property
    def can_be_copied(self) -> bool:
        """Whether each attempt can use a copy of the file with other values."""
        path = Path(self.word)
        return self.word.endswith(REWRITABLE) and not path.is_absolute() and ".." not in path.parts


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings (such as the batch size) of a command, in the order of precedence, and the files
    with some of them.
    """

    argv: Argv  # the program's arguments, in the parser's spelling
    places: tuple[Setting, ...]
    files: tuple[NamedFile, ...]
    notes: Notes

    def find_all(self, quantity: str, *counted_samples: Count) -> list[Setting]:
        """Return the settings of a quantity, such as `learning_rate`.

        With `counted_samples`, only batch sizes that count samples in one of these ways (`rank`,
        `global`) are returned.
        """
        return [
            place
            for place in self.places
            if place.meaning == quantity
            and (not counted_samples or place.counts in counted_samples)
        ]

    def find_effective(self, quantity: str, *counted_samples: Count) -> Setting | None:
        """Return the setting of a quantity that takes effect; `counted_samples` selects as in
        `find_all`.

        None without a setting, or where settings of equal precedence disagree.
        """
        return select_effective(self.find_all(quantity, *counted_samples))


def select_effective(settings: Sequence[Setting]) -> Setting | None:
    """Return the setting with a value that takes precedence over the others; None if several of the
    same precedence disagree.
    """
    places_with_value = [place for place in settings if place.value is not None]
    if not places_with_value:
        return settings[0] if settings else None
    rank = min(place.rank for place in places_with_value)
    best = [place for place in places_with_value if place.rank == rank]
    if rank == TYPED:
        return best[-1]  # the last one wins on a command line
    training = [place for place in best if "train" in place.name.lower()] or best
    return training[0] if len({place.value for place in training}) == 1 else None


def load_preset_knobs(typed: TypedCommand, framework: Framework | None) -> JsonObject:
    """Return the framework's preset knobs (settings that plans may change) in the form that this
    command accepts.

    LLaMA-Factory's are flags if the command names no file. Those of transformers and TRL are keys
    if a file is the first argument: HfArgumentParser accepts no flag beside it.
    """
    preset = load_knobs(framework) if framework is not None else {}
    has_file = any(word.endswith(REWRITABLE) for word in typed.command[typed.arguments :][:1])
    if framework == "llamafactory" and not has_file:
        return {name: _convert_knob(knob, "key", "flag") for name, knob in preset.items()}
    if framework in ("hf", "trl") and has_file:
        return {name: _convert_knob(knob, "flag", "key") for name, knob in preset.items()}
    return preset


def _convert_knob(knob: JsonObject, old_way: str, new_way: str) -> JsonObject:
    if old_way not in knob:
        return dict(knob)
    also = (
        {"also": [_convert_knob(part, old_way, new_way) for part in knob["also"]]}
        if "also" in knob
        else {}
    )
    name = knob[old_way].lstrip("-")
    return {
        new_way: f"--{name}" if new_way == "flag" else name,
        **{key: knob[key] for key in knob if key != old_way},
        **also,
    }


def collect_settings(typed: TypedCommand, script: Script, framework: Framework | None) -> Settings:
    """Return the settings of a command: from its words, the files that it names, its parser, its
    framework and its code.
    """
    preset = load_preset_knobs(typed, framework)
    argv = tuple(
        _spell_as_parser(word, script, preset) for word in typed.command[typed.arguments :]
    )
    launcher = [
        replace(place, way="constant", where="the launcher's options")
        for place in _iterate_argument_settings(typed.launcher_words, {}, script, {})
        if place.meaning in ("gradient_accumulation_steps", "deepspeed_config", "precision")
    ]
    files = [
        *_iterate_named_files(argv, typed.folder),
        *_iterate_named_files(typed.launcher_words, typed.folder, are_launcher_arguments=True),
    ]
    nested = [
        str(value) for file in files if file.is_launchers for value in (file.content or {}).values()
    ]
    files += _iterate_named_files(
        nested, typed.folder, are_launcher_arguments=True
    )  # accelerate's deepspeed_config_file
    named = {file.word for file in files}
    for name in dict.fromkeys(script.own_files):
        content = read_settings_file(typed.folder / name) if name not in named else None
        if content is not None:
            files.append(NamedFile(word=name, flag=None, content=content))
    notes = [
        f"CHECK: {file.word} is not here, or has no settings: it stays in the command, unread"
        for file in files
        if file.content is None
        and (file.flag is None or find_quantity_and_count(file.flag) or "config" in file.flag)
    ]
    variables = {place.name: place for place in script.places if place.way == "env"}
    from_env = [
        replace(variables[name], value=value, rank=TYPED, where="")
        for name, value in typed.env.items()
        if name in variables
    ]
    places = [
        *_iterate_argument_settings(argv, script.flags_by_name, script, preset),
        *from_env,
        *launcher,
        *(
            place
            for file in files
            for place in _iterate_file_settings(file, script, framework, preset)
        ),
        *_iterate_hydra_settings(argv, script),
        *_iterate_parser_settings(script, preset),
        *_iterate_framework_settings(typed, script, framework, preset, files),
        *script.places,
    ]
    tokens = {word for word, divisor in script.divided.items() if divisor == "tokens"}
    for place in places:
        is_batch = place.meaning == "micro_batch_size" and place.counts != "global"
        if place.counts == "tokens" or (is_batch and (place.number or 0) > SAMPLES_MAX):
            tokens.add(make_snake_case_word(place.name))
        if make_snake_case_word(place.name) in tokens and place.rank <= OF_PARSER:
            notes.append(f"CHECK: {place.description} {IN_TOKENS}: it stays as it is")
    places = [place for place in places if make_snake_case_word(place.name) not in tokens]
    return Settings(argv, tuple(_correct_counted_samples(places)), tuple(files), tuple(notes))


def _correct_counted_samples(settings: Sequence[Setting]) -> Iterator[Setting]:
    """Yield the settings with what their batch sizes count corrected.

    If one batch size is per rank, a plain one beside it counts the samples of a whole step.
    """
    has_micro = any(
        place.meaning == "micro_batch_size" and place.counts == "rank"
        for place in settings
        if place.rank < 3
    )
    for place in settings:
        is_plain = place.meaning == "micro_batch_size" and place.counts == "plain"
        yield (
            replace(place, counts="global")
            if is_plain and has_micro and place.rank <= OF_PARSER
            else place
        )


def _spell_as_parser(word: str, script: Script, knobs: Knobs) -> str:
    """Return a flag as the script's parser spells it: --batch-size for -b, --output_dir for
    --output-dir.
    """
    name, equals, value = word.partition("=")
    if not name.startswith("-"):
        return word
    by_alias = {alias: flag.name for flag in script.flags for alias in flag.also_called}
    names = {
        knob.get("flag") or knob.get("switch")
        for knob in knobs.values()
        if isinstance(knob, Mapping)
    }
    names |= script.flags_by_name.keys()
    if name in names:
        return word
    alike = {spelling.replace("-", "_"): spelling for spelling in names if spelling}
    return f"{by_alias.get(name) or alike.get(name.replace('-', '_'), name)}{equals}{value}"


def iterate_flags_and_pairs(
    argv: Sequence[str], flags: Mapping[str, Flag]
) -> Iterator[tuple[str, str | None, bool, int]]:
    """Yield (name, value or None, whether joined by =, how many words of `argv` it takes) of each
    flag, and of each argument key=value.

    `--lr 0.1` is ("--lr", "0.1", False, 2).
    """
    index = 0
    while index < len(argv):
        word = argv[index]
        index = index + 1
        name, equals, value = word.partition("=")
        if not NAME.fullmatch(name):
            if equals and re.fullmatch(r"[+~]{0,2}[A-Za-z_][\w./@-]*", name):
                yield name, value, True, 1
            continue
        if equals:
            yield name, value, True, 1
            continue
        flag = flags.get(name)
        following = argv[index] if index < len(argv) else "-"
        is_value = not following.startswith("-") or re.fullmatch(r"-\d+(\.\d+)?", following)
        if is_value and not (flag is not None and flag.kind == "switch"):
            index += 1
            yield name, following, False, 2
        else:
            yield name, None, False, 1


def _iterate_argument_settings(
    argv: Sequence[str], flags: Mapping[str, Flag], script: Script, preset: Knobs
) -> Iterator[Setting]:
    names = {knob.get("flag") for knob in preset.values() if isinstance(knob, Mapping)}
    for name, value, joined, _ in iterate_flags_and_pairs(argv, flags):
        meaning = _find_quantity_and_count(name, preset)
        if meaning is None:
            continue
        is_flag = name.startswith("-")
        recognised = name in flags or name in names
        flag = flags.get(name)
        way = "switch" if value is None else "flag"
        if not is_flag or (joined and (not recognised or script.only_equals)):
            way = "override"
        counts = flag.counts if flag is not None and flag.counts != "plain" else meaning[1]
        yield Setting(meaning[0], name, way, "true" if value is None else value, counts=counts)  # type: ignore[arg-type]


def _find_quantity_and_count(setting_name: str, preset: Knobs) -> tuple[str, Count] | None:
    """Return (quantity, what a batch size counts) for a setting's name; None for an unknown name.

    The framework's preset counts first, then the name alone.
    """
    for setting, knob in preset.items():
        ways = (
            [knob.get(way) for way in ("flag", "override", "key")]
            if isinstance(knob, Mapping)
            else []
        )
        if setting_name in ways or f"--{setting_name}" in ways:
            if setting == "global_batch_size":
                return "micro_batch_size", "global"
            return setting, "rank" if setting == "micro_batch_size" else "plain"
    return find_quantity_and_count(setting_name)


def _iterate_named_files(
    argv: Sequence[str], folder: Path, are_launcher_arguments: bool = False
) -> Iterator[NamedFile]:
    """Yield each settings file that the arguments name."""
    values = {
        value: name
        for name, value, joined, _ in iterate_flags_and_pairs(argv, {})
        if value and name.startswith("-")
    }
    visited = set[str]()
    for word in [*argv, *(value for value in values if value not in argv)]:
        if word in visited or word.startswith("-") or not word.endswith(SUFFIXES) or "://" in word:
            continue
        visited.add(word)
        flag = values.get(word)
        if "=" in word or (word.endswith(".py") and flag is not None and "config" not in flag):
            continue
        content = read_settings_file(folder / word)
        if content is not None or not (folder / word).is_file():
            yield NamedFile(
                word=word,
                flag=None if are_launcher_arguments else flag,
                content=content,
                is_launchers=are_launcher_arguments,
            )


def _iterate_file_settings(
    file: NamedFile, script: Script, framework: Framework | None, preset: Knobs
) -> Iterator[Setting]:
    content = file.content or {}
    is_deepspeed = any(
        key.startswith(("zero_optimization", "train_micro_batch_size_per_gpu")) for key in content
    )
    for key, value in content.items():
        meaning = _find_quantity_and_count(key, preset)
        if (
            meaning is None
            or value is None
            or (str(value) == "auto" and (is_deepspeed or meaning[0] != "precision"))
        ):
            continue
        if file.is_launchers and meaning[0] in ("ranks", "nodes"):
            continue  # typed_command.py has read them
        counts: Count = "global" if is_deepspeed and key == "train_batch_size" else meaning[1]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        key_way: Way = "key" if file.can_be_copied else "constant"
        place = Setting(meaning[0], key, key_way, text, file.word, IN_FILE, counts, file.word)
        knob = preset.get("global_batch_size" if counts == "global" else meaning[0])
        if script.only_equals:
            place = replace(place, way="override", name=f"--{key}", file=None)
        elif framework in FLAGS_WIN and isinstance(knob, Mapping) and not is_deepspeed:
            way = next((way for way in ("flag", "override") if knob.get(way)), None)
            if (
                framework == "lightning"
                and f"--{key}" != knob.get("flag")
                and not file.is_launchers
            ):
                place = replace(
                    place, way="flag", name=f"--{key}", file=None
                )  # data.init_args.batch_size
            elif way is not None and not file.is_launchers:
                place = replace(place, way=way, name=knob[way], file=None)  # type: ignore[arg-type]
        yield place


def _iterate_hydra_settings(argv: Sequence[str], script: Script) -> Iterator[Setting]:
    if script.hydra is None:
        return
    folder, name = script.hydra
    pairs = {
        key.lstrip("+~"): value
        for key, value, _, _ in iterate_flags_and_pairs(argv, {})
        if value is not None
    }
    name = pairs.get("--config-name") or pairs.get("-cn") or name
    for key, value in read_hydra_settings(
        folder, name, {key: str(value) for key, value in pairs.items()}
    ).items():
        meaning = find_quantity_and_count(key)
        if meaning is not None and value is not None and "${" not in str(value):
            where = f"{folder.name}/{name.removesuffix('.yaml')}.yaml"
            yield Setting(meaning[0], key, "override", str(value), where, IN_FILE, meaning[1])


def _iterate_parser_settings(script: Script, preset: Knobs) -> Iterator[Setting]:
    for flag in script.flags:
        meaning = _find_quantity_and_count(flag.name, preset)
        if meaning is None or flag.kind == "positional":
            continue
        value = None if flag.default is None else str(flag.default)
        counts = meaning[1]
        way: Way = "switch" if flag.kind == "switch" else "flag"
        counts = flag.counts if flag.counts != "plain" else counts
        yield Setting(meaning[0], flag.name, way, value, "its parser", OF_PARSER, counts)


def _iterate_framework_settings(
    typed: TypedCommand,
    script: Script,
    framework: Framework | None,
    preset: Knobs,
    files: Sequence[NamedFile],
) -> Iterator[Setting]:
    flags = script.flags_by_name
    unread = framework == "torchtune" and not any(file.content for file in files)
    for name in ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "ranks"):
        knob = preset.get(name)
        if not isinstance(knob, Mapping):
            continue
        way = next((way for way in ("flag", "override", "key") if knob.get(way)), None)
        if way is None or (
            way == "flag" and framework in ("accelerate", "diffusers") and knob[way] not in flags
        ):
            continue
        default = (
            _find_litgpt_global_batch_size(typed)
            if framework == "litgpt" and name == "global_batch_size"
            else None
        )
        default = default or (
            None if unread or knob.get("default") is None else str(knob["default"])
        )
        config = next(
            (file.word for file in files if file.content is not None and file.can_be_copied), None
        )
        counts: Count = (
            "global"
            if name == "global_batch_size"
            else "rank"
            if name == "micro_batch_size"
            else "plain"
        )
        meaning = "micro_batch_size" if counts == "global" else name
        where = f"{framework}'s own default"
        file = config if way == "key" else None
        yield Setting(meaning, knob[way], way, default, where, OF_FRAMEWORK, counts, file)  # type: ignore[arg-type]


def _find_litgpt_global_batch_size(typed: TypedCommand) -> str | None:
    """Return the global batch size in the defaults of the litgpt command's setup(); None where it
    is not found.
    """
    sub = typed.command[1]
    name = LITGPT_FILES.get(sub, f"finetune/{sub.removeprefix('finetune_')}.py")
    root = Path(typed.command[0]).parent.parent
    for file in root.glob(f"lib/python3*/site-packages/litgpt/{name}"):
        try:
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, SyntaxError):
            return None
        for node in nodes:
            value = (
                node.value
                if isinstance(node, ast.keyword) and node.arg == "global_batch_size"
                else None
            )
            if isinstance(value, ast.Constant):
                return str(value.value)
    return None
