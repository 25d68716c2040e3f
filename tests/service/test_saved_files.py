"""Laws of what `orc init` takes for checkpoints and results: the file after its last rename; a guess is a comment."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from orchestrator.service.commands.init.proposal import propose_job_file
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guides/own-script.md").read_text()
HEAD = """
import argparse, glob, os, pickle, shutil, tempfile, torch
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--output", default="out")
parser.add_argument("--resume")
parser.add_argument("--best", action="store_true")
"""
TRAINING = """
args = parser.parse_args()
out = args.output
DEFINITIONS
for step in range(9):
    loss.backward()
    SAVE
torch.save(model.state_dict(), f"{args.output}/model.pt")
"""
IDIOMS = {  # saves in a loop, each of a checkpoint that is whole when it has its name
    "direct": 'torch.save(state, f"{out}/checkpoint-{step}.pt")',
    "percent": 'torch.save(state, "%s/checkpoint-%d.pt" % (out, step))',
    "format": 'torch.save(state, "{}/checkpoint-{}.pt".format(out, step))',
    "plus": 'torch.save(state, out + "/checkpoint-" + str(step) + ".pt")',
    "replace": """
        torch.save(state, out + "/part.tmp")
        os.replace(out + "/part.tmp", out + f"/checkpoint-{step}.pt")""",
    "replace of an f-string": """
        torch.save(state, f"{out}/partial.tmp")
        os.replace(f"{out}/partial.tmp", f"{out}/checkpoint-{step}.pt")""",
    "rename": """
        torch.save(state, f"{out}/tmp.pt")
        os.rename(f"{out}/tmp.pt", f"{out}/checkpoint-{step}.pt")""",
    "Path.rename": """
        new = Path(out) / "tmp.pt"
        torch.save(state, new)
        new.rename(Path(out) / f"checkpoint-{step}.pt")""",
    "Path.replace": """
        final = Path(out, f"checkpoint-{step}.pt")
        torch.save(state, final.with_suffix(".part"))
        final.with_suffix(".part").replace(final)""",
    "names": """
        t = out + "/last.tmp"
        torch.save(state, t)
        os.replace(t, os.path.join(out, f"checkpoint-{step}.pt"))""",
    "shutil.move": """
        name = f"checkpoint-{step}.pt"
        torch.save(state, os.path.join(out, f".{name}.incomplete"))
        shutil.move(os.path.join(out, f".{name}.incomplete"), os.path.join(out, name))""",
    "tempfile": """
        with tempfile.NamedTemporaryFile(dir=out, delete=False) as file:
            torch.save(state, file)
        os.replace(file.name, f"{out}/checkpoint-{step}.pt")""",
    "mkstemp": """
        fd, tmp = tempfile.mkstemp(dir=out, suffix=".pt")
        with os.fdopen(fd, "wb") as file:
            torch.save(state, file)
        os.replace(tmp, f"{out}/checkpoint-{step}.pt")""",
    "an open file": """
        path = f"{out}/checkpoint-{step}.pt"
        with open(path + ".tmp", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(path + ".tmp", path)""",
    "a save of an unknown library": """
        mylib.keep(f"{out}/state.tmp", state)
        os.replace(f"{out}/state.tmp", f"{out}/checkpoint-{step}.pt")""",
    "a folder": """
        os.makedirs(f"{out}/tmp")
        torch.save(state, f"{out}/tmp/state.pt")
        os.rename(f"{out}/tmp", f"{out}/checkpoint-{step}.pt")""",
    "twice": """
        torch.save(state, f"{out}/a.pt")
        os.replace(f"{out}/a.pt", f"{out}/b.pt")
        os.replace(f"{out}/b.pt", f"{out}/checkpoint-{step}.pt")""",
    "copy of a temporary file": """
        torch.save(state, "/tmp/state.pt")
        shutil.copy2("/tmp/state.pt", f"{out}/checkpoint-{step}.pt")""",
    "an older one removed": """
        torch.save(state, f"{out}/checkpoint-{step}.pt")
        os.remove(f"{out}/checkpoint-{step - 2}.pt")""",
    "an imported function": """
        from os import path as osp, replace
        torch.save(state, osp.join(out, "c.tmp"))
        replace(osp.join(out, "c.tmp"), osp.join(out, f"checkpoint-{step}.pt"))""",
    "a name of the process": """
        final = Path(args.output) / f"checkpoint-{step:05d}.pt"
        tmp = final.with_name(f".{final.name}.{os.getpid()}")
        torch.save(obj=state, f=tmp)
        tmp.replace(target=final)""",
    "a slice": """
        tmp = f"{out}/checkpoint-{step}.pt.tmp"
        torch.save(state, tmp)
        os.replace(src=tmp, dst=tmp[:-4])""",
    "a dict": """
        paths = {"new": f"{out}/c.tmp", "final": f"{out}/checkpoint-{step}.pt"}
        torch.save(state, paths["new"])
        os.replace(paths["new"], paths["final"])""",
    "a temporary folder": """
        with tempfile.TemporaryDirectory(dir=out) as folder:
            torch.save(state, Path(folder) / "c.pt")
            shutil.move(Path(folder) / "c.pt", Path(out) / f"checkpoint-{step}.pt")""",
    "bytes": """
        buffer = io.BytesIO()
        torch.save(state, buffer)
        (Path(out) / "c.tmp").write_bytes(buffer.getvalue())
        (Path(out) / "c.tmp").rename(Path(out) / f"checkpoint-{step}.pt")""",
    "on the rank that saves": """
        if int(os.environ.get("RANK", 0)) == 0 and step % 5 == 0:
            torch.save(state, f"{out}/new.tmp")
            os.replace(f"{out}/new.tmp", f"{out}/checkpoint-{step}.pt")""",
}
HELPER = """
def keep(state, path):
    new = f"{path}.tmp"
    torch.save(state, new)
    os.replace(new, path)

def path_of(step):
    return os.path.join(out, f"checkpoint-{step}.pt")

class Saver:
    def __init__(self, folder):
        self.folder = Path(folder)

    def save(self, state, step):
        file = self.folder / f"checkpoint-{step}.pt"
        torch.save(state, file.with_name("partial"))
        os.replace(file.with_name("partial"), file)

saver = Saver(out)
"""
HELPED = (
    'keep(state, f"{out}/checkpoint-{step}.pt")',
    "keep(state, path_of(step))",
    "saver.save(state, step)",
)


def propose(folder: Path, source: str) -> tuple[str, JobSpec]:
    (folder / "train.py").write_text(source)
    text = propose_job_file(["python", "train.py"], folder, {})
    return text, parse_job(text, "proposal")


def indented(code: str) -> str:
    return textwrap.indent(textwrap.dedent(code).strip(), "    ").strip()


@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_checkpoint_has_its_name_after_the_last_rename_and_the_save_at_the_end_is_the_result(
    tmp_path: Path, idiom: str
) -> None:
    source = HEAD + TRAINING.replace("DEFINITIONS", "").replace("SAVE", indented(IDIOMS[idiom]))
    text, spec = propose(tmp_path, source)
    names = ("checkpoint-*.pt/state.pt",) if idiom == "a folder" else ("checkpoint-*.pt",)
    assert (spec.resume.checkpoints, spec.success.artifacts) == (names, ("model.pt",)), text
    assert f"\n# A restart: it goes on from the newest checkpoint, {names[0]}.\n" in text


@pytest.mark.parametrize("call", HELPED)
def test_a_save_is_read_through_the_functions_and_classes_of_the_script(
    tmp_path: Path, call: str
) -> None:
    source = HEAD + TRAINING.replace("DEFINITIONS", HELPER).replace("SAVE", call)
    source = source.replace(
        'torch.save(model.state_dict(), f"{args.output}/model.pt")',
        'keep(model, out + "/model.pt")',
    )
    text, spec = propose(tmp_path, source)
    assert (spec.resume.checkpoints, spec.success.artifacts) == (
        ("checkpoint-*.pt",),
        ("model.pt",),
    ), text


def test_a_function_in_a_module_beside_the_script_is_read_too(tmp_path: Path) -> None:
    function = "def keep(state, path):\n    torch.save(state, path + '.tmp')\n    os.replace(path + '.tmp', path)\n"
    (tmp_path / "utils.py").write_text(f"import os, torch\n{function}")
    source = HEAD + TRAINING.replace("DEFINITIONS", "import utils")
    text, spec = propose(
        tmp_path, source.replace("SAVE", 'utils.keep(state, f"{out}/checkpoint-{step}.pt")')
    )
    assert spec.resume.checkpoints == ("checkpoint-*.pt",), text


@pytest.mark.parametrize(
    "start", ['if __name__ == "__main__":\n    main()', "main()", "typer.run(main)"]
)
def test_the_result_is_read_in_a_main_function(tmp_path: Path, start: str) -> None:
    loop = TRAINING.replace("DEFINITIONS", "").replace("SAVE", IDIOMS["direct"])
    text, spec = propose(
        tmp_path, f"{HEAD}\ndef main():\n{textwrap.indent(loop, '    ')}\n{start}\n"
    )
    assert (spec.resume.checkpoints, spec.success.artifacts) == (
        ("checkpoint-*.pt",),
        ("model.pt",),
    ), text


def loop_of_the_docs() -> str:
    """Return the docs' loop as a script's function, without a line changed."""
    block = re.search(r"## Make your script survive.*?```python\n(.*?)```", GUIDE, re.S)
    assert block is not None
    end = '\ntorch.save(model.state_dict(), f"{args.output}/model.pt")\n'
    return f"{HEAD}args = parser.parse_args()\nstep = 0\n{block[1]}{end}"


def test_the_loop_of_the_docs_is_read_as_what_it_does(tmp_path: Path) -> None:
    text, spec = propose(tmp_path, loop_of_the_docs())
    assert (spec.resume.checkpoints, spec.success.artifacts) == (
        ("checkpoint-*.pt",),
        ("model.pt",),
    ), text
    assert "begins anew" not in text


ENDS = {  # end of a script -> the result that may be a guess
    'if args.best:\n    torch.save(model, f"{out}/best.pt")': "best.pt",
    'for number in range(3):\n    torch.save(model, f"{out}/head.pt")': "head.pt",
    'def unused():\n    torch.save(model, f"{out}/unused.pt")': "unused.pt",
    'torch.save(model, f"{out}/model.pt.tmp")': "model.pt",
    'torch.save(model, f"{out}/a.pt")\nif args.best:\n    os.rename(f"{out}/a.pt", f"{out}/best.pt")': "best.pt",
    'torch.save(model, "/tmp/model.pt")\nshutil.move("/tmp/model.pt", out)': "model.pt",
    'torch.save(model, f"{out}/best.pt" if args.best else f"{out}/last.pt")': "best.pt",
    'name = f"{out}/a.pt"\nif args.best:\n    name = f"{out}/best.pt"\ntorch.save(model, name)': "best.pt",
    'try:\n    train()\nexcept KeyboardInterrupt:\n    torch.save(model, f"{out}/broken.pt")': "broken.pt",
    '[torch.save(model, f"{out}/each.pt") for _ in range(2)]': "each.pt",
}


@pytest.mark.parametrize("end", ENDS)
def test_what_some_runs_do_not_leave_is_a_comment_and_no_condition(
    tmp_path: Path, end: str
) -> None:
    loop = (
        TRAINING.replace("DEFINITIONS", "")
        .replace("SAVE", IDIOMS["direct"])
        .rpartition("torch.save")[0]
    )
    text, spec = propose(tmp_path, f"{HEAD}{loop}{end}\n")
    assert spec.success.artifacts == (), text
    assert re.search(
        rf'^# CHECK: guessed, .*success: {{artifacts: \["{re.escape(ENDS[end])}"\]}}$', text, re.M
    ), text


@pytest.mark.parametrize(
    "end",
    [
        'torch.save(model, f"{out}/model.pt")\nos.remove(f"{out}/model.pt")',
        'with tempfile.TemporaryDirectory() as tmp:\n    torch.save(model, f"{tmp}/model.pt")',
        'torch.save(model, f"{out}/tmp.pt")',
        "torch.save(model, args.path)",
    ],
)
def test_what_is_removed_or_never_gets_a_name_is_neither_a_condition_nor_a_guess(
    tmp_path: Path, end: str
) -> None:
    loop = (
        TRAINING.replace("DEFINITIONS", "")
        .replace("SAVE", IDIOMS["direct"])
        .rpartition("torch.save")[0]
    )
    text, spec = propose(tmp_path, f"{HEAD}{loop}{end}\n")
    assert spec.success.artifacts == (), text
    assert "# Not known: the files that it writes on success." in text


@pytest.mark.parametrize(
    ("end", "result"),
    [
        ('torch.save(model, f"{out}/last.pt")', "last.pt"),
        (
            'torch.save(model, f"{out}/tmp.pt")\nos.replace(f"{out}/tmp.pt", f"{out}/final.pt")',
            "final.pt",
        ),
        (
            'torch.save(vocabulary, f"{out}/vocab.pt")\ntorch.save(model, f"{out}/final.pt")',
            "final.pt",
        ),
        ('if rank == 0:\n    torch.save(model, f"{out}/final.pt")', "final.pt"),
        (
            'if not dist.is_initialized() or dist.get_rank() == 0:\n    torch.save(model, f"{out}/f.pt")',
            "f.pt",
        ),
        ('if is_local_main_process:\n    torch.save(model, f"{out}/final.pt")', "final.pt"),
        ('if accelerator.is_main_process:\n    model.save_pretrained(f"{out}/final")', "final/*"),
        ('shutil.copy(f"{out}/state.pt", f"{out}/final.pt")', "final.pt"),
        ('os.replace(f"{out}/state.pt", f"{out}/final.pt")', "final.pt"),
    ],
)
def test_the_last_save_outside_the_loop_is_the_result(
    tmp_path: Path, end: str, result: str
) -> None:
    loop = TRAINING.replace("DEFINITIONS", "").replace(
        "SAVE", 'torch.save(state, f"{out}/state.pt")'
    )
    text, spec = propose(tmp_path, f"{HEAD}{loop.rpartition('torch.save')[0]}{end}\n")
    assert (spec.resume.checkpoints, spec.success.artifacts) == (("state.pt",), (result,)), text


def test_a_checkpoint_that_is_rotated_before_it_is_saved_keeps_its_name(tmp_path: Path) -> None:
    save = """
    if os.path.exists(f"{out}/checkpoint.pt"):
        os.replace(f"{out}/checkpoint.pt", f"{out}/older.pt")
    torch.save(state, f"{out}/checkpoint.pt")"""
    text, spec = propose(
        tmp_path, HEAD + TRAINING.replace("DEFINITIONS", "").replace("SAVE", indented(save))
    )
    assert spec.resume.checkpoints == ("checkpoint.pt",), text


def test_a_checkpoint_whose_rename_is_not_in_sight_is_a_guess(tmp_path: Path) -> None:
    save = 'torch.save(state, f"{out}/epoch_{step}.pth.tmp")'
    text, spec = propose(tmp_path, HEAD + TRAINING.replace("DEFINITIONS", "").replace("SAVE", save))
    assert spec.resume.checkpoints == ("checkpoint*", "step-*")
    assert re.search(r'^# CHECK: guessed, .*resume: {checkpoints: "epoch_\*.pth"}$', text, re.M), (
        text
    )


DOUBLED = "\n".join(f"x{number} = x{number - 1} + x{number - 1}" for number in range(1, 40))


@pytest.mark.parametrize(
    "code",
    [
        "x = " + "+".join(["'a'"] * 700),
        "def f(): f()\nf()",
        "x = x\nx = x + x",
        f"x0 = 'a'\n{DOUBLED}\nx = x39",
    ],
)
def test_a_script_of_any_depth_is_read(tmp_path: Path, code: str) -> None:
    (tmp_path / "train.py").write_text(
        f"import torch\n{code}\ntorch.save(model, x)\ntorch.save(model, 'model.pt')\n"
    )
    assert "\ncommand: " in propose_job_file(["python", "train.py"], tmp_path, {})


def test_a_script_that_python_itself_finds_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = " + "+".join(["'a'"] * 30000))
    with pytest.raises(SpecError, match="cannot be read as Python"):
        propose_job_file(["python", "train.py"], tmp_path, {})
