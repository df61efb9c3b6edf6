"""Chapter 00: the prediction."""

from course_lib.check import Belief, Prediction

weights_share = Prediction(
    question="Of 100 bytes that a training step holds at its peak, how many are weights?",
    unit="of 100 bytes",
    expected=24.8,
    tolerance=4,
    low=0,
    high=100,
    too_low="Less than that stands beside the weights: for each, a gradient and two numbers of "
    "the optimizer, and at the peak little else.",
    too_high="More than that stands beside the weights: for each, a gradient and two numbers of "
    "the optimizer.",
    beliefs=(
        Belief(
            100,
            "That is a model that only answers. Training keeps a gradient for every weight, and "
            "the optimizer's numbers besides.",
        ),
        Belief(
            50,
            "That counts a weight and its gradient. Adam keeps two more numbers for each weight, "
            "and they stay from step to step.",
        ),
        Belief(
            33,
            "That counts one number of the optimizer for each weight. Adam keeps two: a running "
            "mean of the gradient and one of its square.",
        ),
        Belief(
            12.5,
            "If you counted 2-byte weights among 16 bytes: here every number has 4. If you thought "
            "of activations: with one sequence they are gone when the peak comes.",
        ),
        Belief(
            5,
            "That would be so if activations filled the memory. With one sequence they are gone "
            "when the peak comes: look where in the step it lies.",
        ),
    ),
)
