"""What makes a run the run it is: settings that may not change between attempts, because the weights depend on them.

Cluster, parallel techniques, checkpointing, logging and `train.steps` are not among them.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from regrow.config.schema import Dtype, ModelConfig, PretrainConfig, RopeScaling

DATA_KEYS = ("recipe", "vocab_size", "seq_len", "validation_fraction", "rows_per_group", "window_steps", "mixture")


def identity(config: PretrainConfig) -> dict[str, Any]:
    """The settings that fix the weights, flat: `optim.lr` -> 0.003. JSON types only."""
    model = {key: value for key, value in asdict(config.model).items() if key != "name"}
    data = {key: value for key, value in asdict(config.data).items() if key in DATA_KEYS}
    data["corpora"] = list(config.data.corpora)  # by name: where they lie may change, what they hold is checked apart
    groups = {"model": model, "data": data, "optim": asdict(config.optim)}
    flat = {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
    flat["optim.schedule"] = config.optim.schedule.value
    if flat.pop("optim.moments") is not Dtype.float32:  # as all were before there was a choice
        flat["optim.moments"] = config.optim.moments.value
    return {"run.seed": config.run.seed, **flat}


def model_of(settings: Mapping[str, Any]) -> ModelConfig:
    """The model that an identity describes; what it does not say is the schema's default, the name too."""
    names = [field.name for field in fields(ModelConfig) if f"model.{field.name}" in settings]
    given = {name: settings[f"model.{name}"] for name in names}
    if given.get("rope_scaling") is not None:
        given["rope_scaling"] = RopeScaling(**given["rope_scaling"])
    return ModelConfig(**given)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What changed between two identities, `key: old -> new`, a line each."""
    return [
        f"{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, ...) != new.get(key, ...)
    ]
