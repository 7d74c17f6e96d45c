"""What flows between the stages: Sample -> Completion -> Episode -> TrainBatch -> ForwardBackwardResult."""

from forge.data_models.batch import ForwardBackwardResult, TextTrainBatch, TrainInputs, TrainTargets
from forge.data_models.completion import Completion, Prompt, Sample
from forge.data_models.episode import Episode

__all__ = [
    "Completion",
    "Episode",
    "ForwardBackwardResult",
    "Prompt",
    "Sample",
    "TextTrainBatch",
    "TrainInputs",
    "TrainTargets",
]
