"""Builds a run's recipe (model, loss and data) and the engine (training loop) of its plan."""

from __future__ import annotations

import os

import torch

from orchestrator.specs import choices
from orchestrator.specs.errors import SpecError, refuse_unknown
from orchestrator.specs.job.model import TrainingSpec
from orchestrator.specs.replace import replace
from orchestrator.specs.run import TrainingRun
from orchestrator.training.checkpoint.checkpoint import SavedCheckpoint
from orchestrator.training.contract.engine import Engine
from orchestrator.training.contract.recipe import Recipe, from_factory
from orchestrator.training.data.dataset import TextDataset
from orchestrator.training.engines.alternating import AlternatingEngine
from orchestrator.training.engines.batch_norm import (
    RunningStatistics,
    list_batch_norms,
    prepare_batch_norms,
)
from orchestrator.training.engines.recompute import (
    apply_checkpointing,
    compile_layers,
    offload_layer_inputs,
)
from orchestrator.training.engines.torch_engine import TorchEngine
from orchestrator.training.models.decoder import make_decoder_recipe


def build_recipe(run: TrainingRun) -> Recipe:
    """Return the recipe of a run: its model, loss and data. Raises SpecError where the job names
    nothing that can be built.
    """
    if run.model.decoder is not None:
        dataset = TextDataset(run.data.text, run.plan.sequence_length or run.data.sequence_length)
        return make_decoder_recipe(run.model.decoder, dataset, run.training.seed)
    if run.model.hf is not None:
        # Only here: importing transformers takes seconds, and it comes with the extra `finetune`.
        try:
            from orchestrator.training.models.hf_model import make_hf_recipe
        except ImportError as error:
            raise SpecError(
                f"not installed here: {error.name}",
                path="model.hf",
                hint="pip install 'orchestrator[finetune]'",
            ) from None
        return make_hf_recipe(run)
    assert run.model.factory is not None, "a job names a decoder, a transformers model or a factory"
    torch.manual_seed(run.training.seed)
    return from_factory(run.model.factory, run.model.config)


def build_engine(
    run: TrainingRun, recipe: Recipe, device: torch.device, resume_from: SavedCheckpoint | None
) -> Engine:
    """Return the plan's engine on this rank, with the state of the checkpoint `resume_from`, if
    any. Collective.

    Its optimizer is the plan's: a restart may use another one than the job's. The engine trains the
    parameters that are unfrozen at that checkpoint's step. Where more unfreeze later, the next
    engine is built then.
    """
    recipes = (recipe, *recipe.then)
    norms = []
    for part in recipes:
        norms.extend(list_batch_norms(part.module))
    prepare_batch_norms(norms, run.plan, run.training)
    plan = run.plan
    for part in recipes:
        stages: tuple[range, ...] = ()
        if part.stages and plan.layout.pp > 1:
            from orchestrator.training.engines.pipeline import (
                list_stage_ranges,
            )  # only here: as in torch_engine

            stages = list_stage_ranges(len(part.layers), plan)
        apply_checkpointing(
            part.layers, plan.activation_checkpointing, plan.full_checkpointing_layers, stages
        )
        if run.plan.compiled:
            compile_layers(part.layers)
        if plan.activation_offload:
            offload_layer_inputs(part.layers)

    def build(part: Recipe, training: TrainingSpec) -> Engine:
        engine = _build_one_engine(part, run, training, device, resume_from)
        own_statistics = norms and run.plan.layout.dp > 1 and not training.sync_batch_norm
        return RunningStatistics(engine, norms) if own_statistics else engine

    training = replace(run.training, optimizer=plan.optimizer)
    return (
        AlternatingEngine(recipe, plan, training, build) if recipe.then else build(recipe, training)
    )


def _build_one_engine(
    recipe: Recipe,
    run: TrainingRun,
    training: TrainingSpec,
    device: torch.device,
    resume_from: SavedCheckpoint | None,
) -> Engine:
    match run.plan.engine:
        case choices.Engine.DEEPSPEED:
            # Only here: importing deepspeed takes seconds, and it chooses its accelerator while it
            # is imported.
            if device.type == "cpu":
                os.environ["DS_ACCELERATOR"] = "cpu"
            from orchestrator.training.engines.deepspeed_engine import DeepSpeedEngine

            return DeepSpeedEngine(recipe, run, training, device, resume_from)
        case choices.Engine.TORCH:
            return TorchEngine(recipe, run.plan, training, device, resume_from)
        case choices.Engine.SCRIPT:
            raise AssertionError("a script builds its own loop")
        case _ as engine:
            refuse_unknown(engine)
