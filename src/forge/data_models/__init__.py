"""What flows between the stages: Sample -> Completion -> Episode -> TrainBatch -> ForwardBackwardResult."""

from forge.data_models.batch import ForwardBackwardResult, Progress, TextTrainBatch, TrainInputs, TrainTargets
from forge.data_models.completion import Completion, Prompt, Sample
from forge.data_models.episode import Episode

__all__ = [
    "Completion",
    "Episode",
    "ForwardBackwardResult",
    "Progress",
    "Prompt",
    "Sample",
    "TextTrainBatch",
    "TrainInputs",
    "TrainTargets",
]
