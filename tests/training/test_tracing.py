"""Laws of the trace: what it stretches is what it would have seen, and who has gradients is told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.specs.model import Freeze, ModelSpec, TrainingSpec
from orchestrator.specs.plan import ActivationCheckpointing, Precision
from orchestrator.specs.profile import ModelProfile, TracedMoment
from orchestrator.training import tracing
from orchestrator.training.timeline import Place, Timeline, Unlike, deeper
from orchestrator.training.tracing import Arithmetic, Request, profiles

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NONE = ActivationCheckpointing.NONE


def traced(model: ModelSpec, training: TrainingSpec | None = None) -> ModelProfile:
    (found,) = profiles(
        Request(
            model=model,
            training=training or TrainingSpec(),
            family="model",
            sequence_length=32,
            arithmetics=(Arithmetic(precision=Precision.FP32, autocast=False),),
        )
    )
    return found


@pytest.mark.timeout(600)  # 10 s on an idle core: importing transformers
def test_a_few_layers_stretched_are_the_profile_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    stretched = traced(ModelSpec(hf=LLAMA))
    monkeypatch.setattr(tracing, "DEPTHS", (4, 100))
    assert stretched == traced(ModelSpec(hf=LLAMA))
    assert [(segment.name, segment.count) for segment in stretched.segments][1] == ("model.layers", 8)
    assert stretched.attention == "flash"


def test_recipes_in_turn_hold_the_gradients_of_one_at_a_time() -> None:
    config = {"width": 16, "frames": 16, "samples": 8, "discriminator_learning_rate": 1e-3}
    found = traced(ModelSpec(factory=f"{EXAMPLES}/vocoder_gan.py:build", config=config))
    discriminator, generator = found.turns
    assert found.trained_parameters == found.parameters == discriminator + generator
    made = [max(one.own + one.done for one in found.moments if one.turn == turn) for turn in (0, 1)]
    assert all(0 < elements <= of_turn for elements, of_turn in zip(made, found.turns, strict=True)), made


def test_what_is_frozen_has_no_gradients() -> None:
    config = {"width": 8, "depth": 2, "size": 8, "samples": 8}
    model = ModelSpec(factory=f"{EXAMPLES}/conv_classifier.py:build", config=config)
    whole, part = traced(model), traced(model, TrainingSpec(freeze=(Freeze(parameters="blocks.0.*"),)))
    layer = next(segment.parameters for segment in whole.segments if segment.count == 2)
    assert part.parameters == whole.parameters
    assert part.trained_parameters == whole.trained_parameters - layer
    assert max(one.own + one.done for one in part.moments) <= part.trained_parameters


def test_layers_that_do_not_grow_by_equal_steps_are_not_stretched() -> None:
    def at_depth(layers: int, fixed_bytes: int) -> Timeline:
        moment = TracedMoment(NONE, 0, 0, layers - 1, True, True, fixed_bytes, 8, 0, 0, 0, 0)
        return Timeline(segments=((Place(name="layers", is_layer=True), layers),), stretches=((moment,),))

    grown = deeper(at_depth(4, 40), at_depth(6, 60), apart=2, more=3)
    assert grown.segments[0][1] == 9
    assert grown.stretches[0][0] == replace_moment(at_depth(6, 60), position=8, fixed_bytes=90)
    with pytest.raises(Unlike):
        deeper(at_depth(4, 40), at_depth(6, 61), apart=2, more=3)
    with pytest.raises(Unlike):
        deeper(at_depth(4, 40), replace(at_depth(6, 60), stretches=()), apart=2, more=3)


def replace_moment(found: Timeline, **changed: int) -> TracedMoment:
    return found.stretches[0][0]._replace(**changed)  # type: ignore[arg-type]
